"""The battle: an attack recorded step by step, on the static and on the defended model.

The record has what the attacker really asked and what came back, so that a report can show the
perturbation, the answer and the adaptation at every step, for a few images of a batch.
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
from dent.defense.dent.descent import entropy
from dent.evaluation.behavior import preserve_rng
from dent.evaluation.defenses import Subject

LARGEST = 64  # pixels of the longer side; larger images are shrunk
DIGITS = 4
# Whether the static and the defended model are right, each under the attack on itself; most telling
# first.
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
    """Attack a batch by APGD, on the static model and on the defended one; return plain values.

    The batch stays whole. Frame 0 is natural, frame t is what APGD asked at step t; its random start
    is left out. (In L1, APGD asks twice more when it moves to a smaller ball. These are frames too, and
    `steps` counts them. There, only the last of the three balls has the radius `eps`.) Entropies, moves
    (the size of Delta) and sigma (the mean over y and x, in pixels) are given after 0, 1, ... updates.

    inputs: (N, C, H, W) in [0, 1], the batch as deployed.
    images: number of images that are shown, at most; see `choose_telling`.
    points: indices of the inputs in the data set (default: the first).
    classes: names of the classes.
    """
    points = range(len(inputs)) if points is None else points
    _check_images(inputs, images, points)
    plain = subject.static
    if plain is None:
        raise ValueError("expected a static model beside the defense, got none")
    check_model(plain)
    static = Recorder(inputs, norm, lambda some: (plain(some), None))
    defended = Recorder(inputs, norm, lambda some: adapt_and_predict(subject.model, some))
    with preserve_rng(str(inputs.device)):
        for side in (static, defended):
            torch.manual_seed(seed)  # for models that draw
            apgd(side, inputs, labels, eps=eps, norm=norm, steps=steps, joint=True, seed=seed)
            _check_classes(classes, side.frames[0].logits.shape[1])
        with torch.no_grad():
            crossed = {
                "static": plain(defended.last),
                "defended": subject.model(static.last),
            }
    answers = {
        "static": {"static": static.frames[-1].logits, "defended": crossed["defended"].cpu()},
        "defended": {"static": crossed["static"].cpu(), "defended": defended.frames[-1].logits},
    }
    first, last = (
        [_find_right(side.frames[number].logits, labels) for side in (static, defended)]
        for number in (0, -1)
    )
    natural = [all(both) for both in zip(*first, strict=True)]
    shown = choose_telling(last[0], last[1], natural, images)
    small = pool_images(inputs)
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
                "natural": _encode((small[place] * 255).round().to(torch.uint8)),
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
    """Return the places of images that are worth a look: one of each of the `KINDS` in turn.

    Images that are naturally right come first: on the others, an attack has nothing to do.

    static, defended: whether each model is right under the attack on itself.

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


def pool_images(images: Tensor) -> Tensor:
    """Return images (N, C, H, W) with squares of pixels averaged: no side is longer than `LARGEST`.

    >>> pool_images(torch.rand(2, 3, 224, 200)).shape
    torch.Size([2, 3, 56, 50])
    """
    images = images.detach().cpu().to(torch.promote_types(images.dtype, torch.float32))
    side = math.ceil(max(images.shape[2:]) / LARGEST)
    return F.avg_pool2d(images, side, ceil_mode=True) if side > 1 else images


@dataclass(frozen=True)
class UpdateTrace:
    """The state of a defense after 0, 1, ... updates on a batch; each is (updates + 1, N)."""

    entropies: Tensor
    moves: Tensor  # size of Delta: of the batch, or of each input
    sigma: Tensor | None


@dataclass(frozen=True)
class Frame:
    """A batch that an attack asked, and the answer."""

    delta: Tensor  # (N, C, h, w), perturbations as shown
    sizes: Tensor  # (N,), norms of the perturbations
    logits: Tensor  # (N, classes)
    entropy: Tensor  # (N,)
    adaptation: UpdateTrace | None

    def to_json(self, place: int) -> dict[str, Any]:
        """Return plain values of one image."""
        delta = self.delta[place]
        scale = _round(delta.abs().max())
        steps = (delta / scale * 127).round().clamp(-127, 127) if scale else delta
        content: dict[str, Any] = {
            "delta": _encode(steps.to(torch.int8)),
            "scale": scale,
            "size": _round(self.sizes[place]),
            "probabilities": _probabilities(self.logits[place]),
            "entropy": _round(self.entropy[place]),
        }
        if (done := self.adaptation) is not None:
            content["entropies"] = [_round(value) for value in done.entropies[:, place]]
            content["moves"] = [_round(value) for value in done.moves[:, place]]
            content["sigma"] = (
                None if done.sigma is None else [_round(value) for value in done.sigma[:, place]]
            )
        return content


class Recorder:
    """A model that records what an attack asks: the natural batch, and every step but the start.

    The last call of an attack, for its score, needs no gradient and is not recorded.
    """

    def __init__(
        self, inputs: Tensor, norm: str, answer: Callable[[Tensor], tuple[Tensor, UpdateTrace | None]]
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
            self.frames.append(
                Frame(pool_images(delta), sizes, seen.cpu(), entropy(seen).cpu(), adaptation)
            )
        self._started = self._started or climbs
        return logits


def adapt_and_predict(defense: Any, inputs: Tensor) -> tuple[Tensor, UpdateTrace | None]:
    """Return `defense(inputs)`, the same to the bit and in its gradient, and its updates.

    Only a state of dent has a trace of Delta and Sigma; with other defenses there is none.
    """
    if not isinstance(defense, Dent):
        return defense(inputs), None
    state = defense.adapt(inputs)
    logits = defense.predict(inputs, state)
    trace, n = state.trace, len(inputs)
    # The trace has the entropy before each update; the prediction has the one after the last.
    entropies = torch.cat([trace.entropy, entropy(logits.detach())[None]]).cpu()
    moves = trace.delta.expand(-1, n).cpu()
    blurs = defense.settings.blur != "off"
    sigma = trace.sigma.mean(2).expand(-1, n).cpu() if blurs else None
    return logits, UpdateTrace(entropies, moves, sigma)


def _find_right(logits: Tensor, labels: Tensor) -> list[bool]:
    right: list[bool] = logits.argmax(1).eq(labels.cpu()).tolist()
    return right


def _probabilities(logits: Tensor) -> list[float]:
    exact = torch.promote_types(logits.dtype, torch.float32)
    return [round(value, DIGITS) for value in logits.to(exact).softmax(0).tolist()]


def _round(value: Tensor) -> float:
    """Return a number in a few significant digits; zero has no sign."""
    return float(f"{value.item():.{DIGITS}g}") + 0.0


def _encode(image: Tensor) -> str:
    """Return bytes (C, H, W) as text, in the order of rows, pixels, channels."""
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
