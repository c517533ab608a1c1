"""The candidates of `winning.py`: defenses that average or adapt. Those that fail stay out of dent.

A view is written as text: steps joined by "+", which act one after the other. `shift4,-4` moves the
image down by 4 pixels and left by 4, `mirror` flips it, `scale0.8` shrinks it about its center,
`rotate10` turns it by degrees, `dim0.8` multiplies it, `frame2` blackens its outermost 2 pixels (`gray2`
and `white2` color them, `edge2` repeats what is inside), and `pad2` adds 2 black pixels around it. What
comes in from outside of the image is zero.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from dent.declared import Number
from dent.defense.defended import Method, Network, Variables
from dent.defense.energy import Energy
from dent.defense.memo import measure_mean_entropy
from dent.defense.views import Crops, Views
from dent.names import lookup
from dent.seeds import make_generator

MIRROR = ("shift0,0", "mirror")


def shift(images: Tensor, down: int, right: int) -> Tensor:
    """Return the images moved by so many pixels; zeros come in."""
    height, width = images.shape[2:]
    size = max(abs(down), abs(right))
    top, left = size - down, size - right
    return F.pad(images, (size,) * 4)[:, :, top : top + height, left : left + width]


def turn(images: Tensor, *, angle: float = 0.0, scale: float = 1.0) -> Tensor:
    """Return the images turned by degrees and scaled about their centers; zeros come in."""
    cos, sin = (one(math.radians(angle)) / scale for one in (math.cos, math.sin))
    rows = torch.tensor([[cos, -sin, 0.0], [sin, cos, 0.0]]).to(images).expand(len(images), 2, 3)
    grid = F.affine_grid(rows, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, align_corners=False)


def add_frame(images: Tensor, size: int, color: float = 0.0) -> Tensor:
    """Return the images with one color in their outermost pixels."""
    return F.pad(images[:, :, size:-size, size:-size], (size,) * 4, value=color)


def repeat_inside(images: Tensor, size: int) -> Tensor:
    """Return the images with the pixels inside of a frame repeated in it."""
    return F.pad(images[:, :, size:-size, size:-size], (size,) * 4, mode="replicate")


STEPS: dict[str, Callable[..., Tensor]] = {
    "shift": lambda images, down, right: shift(images, int(down), int(right)),
    "mirror": lambda images: images.flip(3),
    "scale": lambda images, scale: turn(images, scale=scale),
    "rotate": lambda images, angle: turn(images, angle=angle),
    "dim": lambda images, factor: images * factor,
    "frame": lambda images, size: add_frame(images, int(size)),
    "gray": lambda images, size: add_frame(images, int(size), 0.47),  # the mean of CIFAR-10
    "white": lambda images, size: add_frame(images, int(size), 1.0),
    "edge": lambda images, size: repeat_inside(images, int(size)),
    "pad": lambda images, size: F.pad(images, (int(size),) * 4),
}


def make_view(images: Tensor, view: str) -> Tensor:
    """Return the view of the images that the text describes."""
    for step in view.split("+"):
        found = re.fullmatch(r"([a-z]+)([\d.,-]*)", step)
        kind, numbers = (found[1], found[2]) if found else (step, "")
        values = [float(one) for one in numbers.split(",") if one]
        images = lookup("step of a view", kind, STEPS)(images, *values)
    return images


def add_mirrors(*views: str) -> tuple[str, ...]:
    """Return the views and the mirror image of each."""
    return tuple(text for view in views for text in (view, f"{view}+mirror"))


class MeanOfViews(Method):
    """Join the predictions over views that are listed one by one."""

    name = "mean of views"
    independent = True
    per_input = False

    views: tuple[str, ...] = Field(MIRROR, description="The views, as text.")
    join: Literal["logits", "probabilities", "median", "sure"] = Field(
        "logits", description="What is averaged, and how."
    )

    @property
    def forwards(self) -> int:
        return len(self.views)

    def predict(self, network: Network, inputs: Tensor, variables: Variables) -> Tensor:
        logits = torch.stack([network(make_view(inputs, view)) for view in self.views])
        if self.join == "logits":
            return logits.mean(0)
        # Compare classes within a view, so that a constant in the logits of a view changes nothing.
        logits = logits.log_softmax(2)
        if self.join == "probabilities":
            return logits.logsumexp(0)
        if self.join == "median":
            return logits.quantile(0.5, 0)
        weights = (logits.exp() * logits).sum(2).softmax(0)  # by the negative entropy of each view
        return (weights[..., None] * logits).sum(0)


class AdaptedViews(Method):
    """Adapt one Delta per input, which its views share, and average the logits over the views."""

    name = "adapted views"
    independent = True
    needs = "normalization"

    steps: int = Field(1, description="Number of updates.", ge=0)
    lr: Number = Field(0.01, description="Learning rate.", gt=0)
    views: tuple[str, ...] = Field(MIRROR, description="The views, as text.")
    objective: Literal["entropy", "agreement"] = Field(
        "entropy", description="Entropy of the mean prediction, or divergence between the views."
    )

    @property
    def forwards(self) -> int:
        return (2 * self.steps + 1) * len(self.views)

    def ask(self, network: Network, inputs: Tensor, delta: Tensor) -> Tensor:
        return torch.stack([network(make_view(inputs, view), delta) for view in self.views])

    def start(self, network: Network, inputs: Tensor) -> Variables:
        return (network.make_delta(len(inputs)),)

    def update(
        self, network: Network, observed: Variables, step: int, variables: Variables, keep_graph: bool
    ) -> Variables:
        (inputs,), (delta,) = observed, variables
        logits = self.ask(network, inputs, delta)
        value = measure_mean_entropy(logits)
        if self.objective == "agreement":  # Jensen-Shannon: what the mean is less sure of than the views
            log_p = logits.log_softmax(2)
            value = value + (log_p.exp() * log_p).sum(2).mean(0)
        (gradient,) = torch.autograd.grad(value.sum(), delta, create_graph=keep_graph)
        return (delta - self.lr * gradient,)

    def predict(self, network: Network, inputs: Tensor, variables: Variables) -> Tensor:
        return self.ask(network, inputs, variables[0]).mean(0)


class DrawnDeltas(Method):
    """Average the logits over models whose scales and shifts are moved at random, by a fixed seed."""

    name = "drawn deltas"
    independent = True
    per_input = False
    needs = "normalization"

    spread: Number = Field(0.05, description="Standard deviation of Delta.", gt=0)
    views: tuple[str, ...] = Field((*MIRROR, *MIRROR), description="Each view gets a Delta of its own.")

    @property
    def forwards(self) -> int:
        return len(self.views)

    def predict(self, network: Network, inputs: Tensor, variables: Variables) -> Tensor:
        zero, logits = network.make_delta(1), []
        for number, view in enumerate(self.views):
            noise = torch.randn(zero.shape, generator=make_generator(0, number)).to(zero)
            logits.append(network(make_view(inputs, view), self.spread * noise))
        return torch.stack(logits).mean(0)


class MeanOfStates(Method):
    """Average the logits over the states after 0, 1, ... updates of Delta down the entropy."""

    name = "mean of states"
    independent = True
    needs = "normalization"

    steps: int = Field(3, description="Number of updates.", ge=0)
    lr: Number = Field(0.006, description="Size of an update, by signs as the first of dent+.", gt=0)

    @property
    def forwards(self) -> int:
        return 3 * self.steps + 1

    def start(self, network: Network, inputs: Tensor) -> Variables:
        return (network.make_delta(len(inputs))[:, None].repeat(1, self.steps + 1, 1),)

    def update(
        self, network: Network, observed: Variables, step: int, variables: Variables, keep_graph: bool
    ) -> Variables:
        (inputs,), (states,) = observed, variables
        log_p = network(inputs, states[:, step - 1]).log_softmax(1)
        entropy = -(log_p.exp() * log_p).sum()
        (gradient,) = torch.autograd.grad(entropy, states, create_graph=keep_graph)
        moved = states[:, step - 1] - self.lr * gradient[:, step - 1].tanh()
        later = torch.arange(states.shape[1]) >= step
        return (torch.where(later[None, :, None], moved[:, None], states),)

    def predict(self, network: Network, inputs: Tensor, variables: Variables) -> Tensor:
        return torch.stack([network(inputs, state) for state in variables[0].unbind(1)]).mean(0)


class EnergyOfViews(Energy):
    """Move each input down the energy, and average the logits over the views of the moved input."""

    name = "energy of views"

    @property
    def forwards(self) -> int:
        return 2 * self.steps + len(MIRROR)

    def predict(self, network: Network, inputs: Tensor, variables: Variables) -> Tensor:
        return torch.stack([network(make_view(inputs + variables[0], view)) for view in MIRROR]).mean(0)


class BalancedClasses(Method):
    """Shift the logits so that the mean prediction of the batch is uniform. It depends on the batch."""

    name = "balanced classes"
    independent = False
    per_input = False

    def predict(self, network: Network, inputs: Tensor, variables: Variables) -> Tensor:
        log_p = network(inputs).log_softmax(1)
        for _ in range(10):
            log_p = (log_p - log_p.logsumexp(0)).log_softmax(1)
        return log_p


def make_square(size: int) -> tuple[str, ...]:
    """Return shifts by so many pixels to the four corners, every second one mirrored."""
    corners = [(size, size), (-size, -size), (size, -size), (-size, size)]
    return tuple(
        f"shift{down},{right}" + "+mirror" * (place % 2) for place, (down, right) in enumerate(corners)
    )


def make_corners(size: int, then: str = "") -> tuple[str, ...]:
    """Return shifts by so many pixels to the four corners, each followed by the step `then`."""
    return tuple(f"shift{down},{right}{then}" for down in (size, -size) for right in (size, -size))


CANDIDATES: dict[str, Method] = {
    "static": MeanOfViews(views=("shift0,0",)),
    "views": MeanOfViews(),
    # Which view, at one forward.
    "frame 1": MeanOfViews(views=("frame1",)),
    "frame 2": MeanOfViews(views=("frame2",)),
    "frame 3": MeanOfViews(views=("frame3",)),
    "shift 4": MeanOfViews(views=("shift4,4",)),
    "dim 0.8": MeanOfViews(views=("dim0.8",)),
    # Which views, at the cost of `views`.
    "framed views 1": Views(frame=1),
    "framed views 2": MeanOfViews(views=add_mirrors("frame2")),
    "framed views 3": MeanOfViews(views=add_mirrors("frame3")),
    "pair 3": MeanOfViews(views=make_square(3)[:2]),
    "pair 4": MeanOfViews(views=make_square(4)[:2]),
    "dim views 0.8": MeanOfViews(views=add_mirrors("dim0.8")),
    # Which views, at four to ten forwards.
    "square 3": MeanOfViews(views=make_square(3)),
    "frame 1, square 2": MeanOfViews(views=(*add_mirrors("frame1"), *make_square(2))),
    "frame 1, square 3": Crops(),
    "frames 1 and 2, square 3": MeanOfViews(views=(*add_mirrors("frame1", "frame2"), *make_square(3))),
    "six crops": MeanOfViews(
        views=(*add_mirrors("frame1"), *(f"{one}+frame1" for one in make_square(2)))
    ),
    "frame 2, square 3": MeanOfViews(views=(*add_mirrors("frame2"), *make_square(3))),
    "five crops": MeanOfViews(views=("frame2", *(f"{one}+frame2" for one in make_square(2)))),
    "ten crops": MeanOfViews(views=add_mirrors("frame2", *make_corners(2, "+frame2"))),
    "ten crops, frame 3": MeanOfViews(views=add_mirrors("frame3", *make_corners(3, "+frame3"))),
    "ten crops, frame 1": MeanOfViews(views=add_mirrors("frame1", *make_corners(1, "+frame1"))),
    "frame 2, corners 3": MeanOfViews(views=add_mirrors("frame2", *make_corners(3))),
    "frame 2, scales": MeanOfViews(views=add_mirrors("frame2", "scale0.8", "scale1.2")),
    "frame 2, square 3, scales": MeanOfViews(
        views=(*add_mirrors("frame2"), *make_square(3), *add_mirrors("scale0.8", "scale1.2"))
    ),
    "straight 1": MeanOfViews(
        views=add_mirrors("shift0,0", "shift0,1", "shift1,0", "shift0,-1", "shift-1,0")
    ),
    "scales": MeanOfViews(views=add_mirrors("shift0,0", "scale0.8", "scale1.2")),
    "rotations": MeanOfViews(views=add_mirrors("shift0,0", "rotate10", "rotate-10")),
    # How they are joined. The mean of log-probabilities decides as the mean of logits does.
    "square 3, probabilities": MeanOfViews(views=make_square(3), join="probabilities"),
    "square 3, median": MeanOfViews(views=make_square(3), join="median"),
    "square 3, sure": MeanOfViews(views=make_square(3), join="sure"),
    # Adaptation on views.
    "views, entropy 1": AdaptedViews(),
    "views, entropy 3": AdaptedViews(steps=3),
    "views, agreement 1": AdaptedViews(objective="agreement", lr=0.1),
    "views, agreement 3": AdaptedViews(objective="agreement", lr=0.1, steps=3),
    # Views of the model.
    "drawn deltas": DrawnDeltas(),
    # Energy, judged by its exact gradient.
    "energy 1": Energy(steps=1),
    "views, energy 1": EnergyOfViews(steps=1),
    # The mean over the states of an adaptation, and the class balance of the batch.
    "mean of states": MeanOfStates(),
    "balanced classes": BalancedClasses(),
}  # fmt: skip


def find_control(candidate: str) -> str:
    """Return the control of a candidate: `static` at one forward, `views` at more."""
    return "static" if CANDIDATES[candidate].forwards == 1 else "views"
