"""The battle: an attack recorded step by step, on the static and on the defended model.

What is recorded is what the attacker really asked and what came back, so that a report can show, for a
few images of a batch, the perturbation, the answer and the adaptation at every step.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dent.attacks import apgd
from dent.attacks.checks import check_model
from dent.attacks.norms import lengths
from dent.defense import Dent
from dent.defense.dent.objectives import entropy
from dent.evaluation.attacks import Subject
from dent.evaluation.sources import preserve_rng

LARGEST = 64  # pixels of the longer side; larger images are shown smaller
DIGITS = 4
# Whether the static and the defended model stand, each under the attack on itself; most telling first.
KINDS = ((False, True), (False, False), (True, True), (True, False))


def record_battle(
    subject: Subject,
    inputs: Tensor,
    labels: Tensor,
    *,
    eps: float,
    norm: str,
    seed: int,
    steps: int = 10,
    images: int = 4,
    points: Sequence[int] | None = None,
    classes: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Attack a batch by APGD, on the static model and on the defended one; plain values, for JSON.

    The batch stays whole. Frame 0 is natural, frame t what was asked at step t; the random point where
    APGD starts is left out. (In L1, APGD asks twice more when it moves to a smaller ball; those are
    frames too, and `steps` counts them. There only the last of its three balls is that of `eps`.)
    Entropies, moves (the size of Delta) and sigma (of the smoothing, the mean of y and x, in pixels)
    are those after 0, 1, ... updates.

    inputs: (N, C, H, W) in [0, 1], the batch as deployed.
    images: how many of it are shown, at most; see `choose_telling`.
    points: where in the data set the inputs come from, if not from its beginning.
    classes: names of the classes.
    """
    points = range(len(inputs)) if points is None else points
    _check_images(inputs, images, points)
    check_model(subject.static)
    static = Recorder(inputs, norm, lambda some: (subject.static(some), None))
    defended = Recorder(inputs, norm, lambda some: adapted_answer(subject.defense, some))
    with preserve_rng(str(inputs.device)):
        for side in (static, defended):
            torch.manual_seed(seed)  # for models that draw
            apgd(side, inputs, labels, eps=eps, norm=norm, steps=steps, joint=True, seed=seed)
            _check_classes(classes, side.frames[0].logits.shape[1])
        with torch.no_grad():
            crossed = {
                "static": subject.static(defended.last),
                "defended": subject.defense(static.last),
            }
    answers = {
        "static": {"static": static.frames[-1].logits, "defended": crossed["defended"].cpu()},
        "defended": {"static": crossed["static"].cpu(), "defended": defended.frames[-1].logits},
    }
    first, last = (
        [_right(side.frames[number].logits, labels) for side in (static, defended)] for number in (0, -1)
    )
    natural = [all(both) for both in zip(*first, strict=True)]
    shown = choose_telling(last[0], last[1], natural, images)
    small = pooled(inputs)
    return {
        "attack": "apgd-ce",
        "steps": len(static.frames) - 1,
        "eps": float(eps),
        "norm": norm,
        "batch": len(inputs),
        "classes": None if classes is None else list(classes),
        "size": list(small.shape[2:]),
        "channels": small.shape[1],
        "images": [
            {
                "point": int(points[place]),
                "label": int(labels[place]),
                "natural": _text((small[place] * 255).round().to(torch.uint8)),
            }
            | {
                name: {
                    "frames": [frame.to_json(place) for frame in side.frames],
                    "answers": {
                        of: _probabilities(logits[place]) for of, logits in answers[name].items()
                    },
                }
                for name, side in (("static", static), ("defended", defended))
            }
            for place in shown
        ],
    }


def choose_telling(
    static: Sequence[bool], defended: Sequence[bool], natural: Sequence[bool], count: int
) -> list[int]:
    """Places of images worth a look, by whether each model stands; of each of the `KINDS` in turn.

    Those that are naturally right come before those that an attack has nothing to do with.

    >>> choose_telling([False, False, True, False], [False, True, True, True], [True] * 4, 3)
    [1, 0, 2]
    """
    chosen: list[int] = []
    stands = list(zip(static, defended, strict=True))
    for right in (True, False):
        places = [place for place, one in enumerate(natural) if one is right]
        rows = [[place for place in places if stands[place] == kind] for kind in KINDS]
        chosen += [place for turn in zip_longest(*rows) for place in turn if place is not None]
    return chosen[:count]


def pooled(images: Tensor) -> Tensor:
    """Images (N, C, H, W) with squares of pixels averaged, so that no side is longer than `LARGEST`.

    >>> pooled(torch.rand(2, 3, 224, 200)).shape
    torch.Size([2, 3, 56, 50])
    """
    images = images.detach().cpu().to(torch.promote_types(images.dtype, torch.float32))
    side = math.ceil(max(images.shape[2:]) / LARGEST)
    return F.avg_pool2d(images, side, ceil_mode=True) if side > 1 else images


@dataclass(frozen=True)
class Adaptation:
    """What a defense did to answer a batch, after 0, 1, ... updates: (updates + 1, N) each."""

    entropies: Tensor
    moves: Tensor  # of Delta: the batch's, or each input's own
    sigma: Tensor | None


@dataclass(frozen=True)
class Frame:
    """A batch that was asked, and the answer."""

    delta: Tensor  # (N, C, h, w), the perturbations as shown
    sizes: Tensor  # (N,), of the perturbations as they are
    logits: Tensor  # (N, classes)
    entropy: Tensor  # (N,)
    adaptation: Adaptation | None

    def to_json(self, place: int) -> dict[str, Any]:
        """What there is of one image."""
        delta = self.delta[place]
        scale = _short(delta.abs().max())
        steps = (delta / scale * 127).round().clamp(-127, 127) if scale else delta
        content: dict[str, Any] = {
            "delta": _text(steps.to(torch.int8)),
            "scale": scale,
            "size": _short(self.sizes[place]),
            "probabilities": _probabilities(self.logits[place]),
            "entropy": _short(self.entropy[place]),
        }
        if (done := self.adaptation) is not None:
            content["entropies"] = [_short(value) for value in done.entropies[:, place]]
            content["moves"] = [_short(value) for value in done.moves[:, place]]
            content["sigma"] = (
                None if done.sigma is None else [_short(value) for value in done.sigma[:, place]]
            )
        return content


class Recorder:
    """A model that notes what an attack asks: the natural batch, and where it climbs, but for the start.

    The last submission of an attack, for its score, has no gradient and is not noted.
    """

    def __init__(
        self, inputs: Tensor, norm: str, answer: Callable[[Tensor], tuple[Tensor, Adaptation | None]]
    ) -> None:
        self.answer = answer
        self.frames: list[Frame] = []
        self.last = inputs  # the batch of the last frame
        self._inputs = inputs.detach()
        self._norm = norm
        self._started = False

    def __call__(self, points: Tensor) -> Tensor:
        logits, adaptation = self.answer(points)
        climbs = points.requires_grad
        if not self.frames or (climbs and self._started):
            self.last = points.detach().clone()
            delta = self.last - self._inputs
            sizes = lengths(delta, self._norm).flatten().cpu()
            seen = logits.detach()
            self.frames.append(Frame(pooled(delta), sizes, seen.cpu(), entropy(seen).cpu(), adaptation))
        self._started = self._started or climbs
        return logits


def adapted_answer(defense: Dent, inputs: Tensor) -> tuple[Tensor, Adaptation]:
    """`defense(inputs)`, the same to the bit and in its gradient, and how it came about."""
    state = defense.adapt(inputs)
    logits = defense.predict(inputs, state)
    trace, n = state.trace, len(inputs)
    # The last update is followed by the prediction, which no update sees.
    entropies = torch.cat([trace.entropy, entropy(logits.detach())[None]]).cpu()
    moves = trace.delta.expand(-1, n).cpu()
    blurs = defense.settings.blur != "off"
    sigma = trace.sigma.mean(2).expand(-1, n).cpu() if blurs else None
    return logits, Adaptation(entropies, moves, sigma)


def _right(logits: Tensor, labels: Tensor) -> list[bool]:
    right: list[bool] = logits.argmax(1).eq(labels.cpu()).tolist()
    return right


def _probabilities(logits: Tensor) -> list[float]:
    exact = torch.promote_types(logits.dtype, torch.float32)
    return [round(value, DIGITS) for value in logits.to(exact).softmax(0).tolist()]


def _short(value: Tensor) -> float:
    """A number in a few significant digits; zero has no sign."""
    return float(f"{value.item():.{DIGITS}g}") + 0.0


def _text(image: Tensor) -> str:
    """Bytes (C, H, W) in the order of rows, pixels, channels."""
    return base64.b64encode(image.permute(1, 2, 0).contiguous().numpy().tobytes()).decode("ascii")


def _check_images(inputs: Tensor, images: int, points: Sequence[int]) -> None:
    if inputs.dim() != 4 or not len(inputs):
        raise ValueError(f"expected a batch of images (N, C, H, W), got {tuple(inputs.shape)}")
    if images < 1:
        raise ValueError(f"expected images >= 1, got {images}; leave the battle out to show none")
    if len(points) != len(inputs):
        raise ValueError(f"expected a point for each of {len(inputs)} inputs, got {len(points)}")


def _check_classes(names: Sequence[str] | None, count: int) -> None:
    if names is not None and len(names) != count:
        raise ValueError(
            f"expected a name for each of {count} classes, got {len(names)}; leave them out to have none"
        )
