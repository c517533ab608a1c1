"""The battle: attacks recorded step by step, with the answers of the static and of the defended model.

A recording has what the attacker really asked and what came back, so that a report can show the
perturbation, the answer and the adaptation at every step, for a few images of a batch.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dent.attacks import adaptive, apgd
from dent.attacks.checks import check_model
from dent.attacks.norms import lengths
from dent.defense import Dent
from dent.defense.dent.descent import entropy
from dent.evaluation.defenses import AnyDefense, Subject
from dent.seeds import use_seed

LARGEST = 64  # pixels of the longer side; larger images are shrunk
DIGITS = 4
# Of attacks that are equally strong, the first is shown first.
TRANSFER, FIXED_POINT, DIRECT = RECORDED = ("denying updates", "fpa", "apgd-ce")
SIDES = ("static", "defended")
ROUNDS = 2  # of the fixed point attack, which has all the steps together
# Whether the static and the defended model are right after an attack; most telling first.
KINDS = ((False, True), (False, False), (True, True), (True, False))


def record_battle(
    subject: Subject,
    inputs: Tensor,
    labels: Tensor,
    *,
    eps: float,
    norm: str,
    seed: int,
    attacks: Sequence[str] = RECORDED,
    steps: int = 10,
    images: int = 4,
    points: Sequence[int] | None = None,
    classes: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Attack a batch in each of several ways; return plain values, the strongest attack first.

    "apgd-ce": APGD on each model itself, so that each is asked its own images.
    "denying updates": the images of APGD on the static model; both models are asked them.
    "fpa": the fixed point attack on the defense; both models are asked its images.

    The strongest attack is the one that leaves the defended model right on the fewest images. The shown
    images are chosen by it, and are the same for all.

    The batch stays whole. Frame 0 is natural, frame t is what the attack asked at step t; random starts
    are left out. (In L1, APGD asks twice more when it moves to a smaller ball. These are frames too, and
    `steps` counts them. There, only the last of the three balls has the radius `eps`.) Entropies, moves
    (the size of Delta) and sigma (the mean over y and x, in pixels) are given after 0, 1, ... updates.

    inputs: (N, C, H, W) in [0, 1], the batch as deployed.
    attacks: names of `RECORDED`; see `list_recordable`.
    steps: number of steps of each attack; the rounds of the fixed point attack share them.
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

    def watch_static() -> Recorder:
        return Recorder(inputs, norm, lambda some: (plain(some), None))

    def watch_defended() -> Recorder:
        return Recorder(inputs, norm, lambda some: adapt_and_predict(subject.model, some))

    budget: dict[str, Any] = {"eps": eps, "norm": norm, "seed": seed}
    made = []
    with use_seed(seed, str(inputs.device)):  # for models that draw
        static = watch_static()
        apgd(static, inputs, labels, steps=steps, joint=True, **budget)
        _check_classes(classes, static.frames[0].logits.shape[1])
        for name in attacks:
            torch.manual_seed(seed)
            defended = watch_defended()
            if name == DIRECT:
                apgd(defended, inputs, labels, steps=steps, joint=True, **budget)
                made.append(Recording(name, static, defended, is_shared=False))
                continue
            asked = static.batches
            if name == FIXED_POINT:
                watched = WatchedDefense(subject, inputs)
                rounds = min(ROUNDS, max(steps, 1))
                adaptive.fpa(
                    watched, inputs, labels, rounds=rounds, steps=steps // rounds, loss="ce", **budget
                )
                asked = watched.batches
            other = static if name == TRANSFER else watch_static().replay(asked)
            made.append(Recording(name, other, defended.replay(asked), is_shared=True))
        crossed = {one.name: one.ask_others(plain, subject.model) for one in made}
    made.sort(key=lambda one: sum(one.find_right(labels, -1)[1]))
    natural = [all(both) for both in zip(*made[0].find_right(labels, 0), strict=True)]
    shown = choose_telling(*made[0].find_right(labels, -1), natural, images)
    small = pool_images(inputs)
    about = {
        "eps": float(eps),
        "norm": norm,
        "batch": len(inputs),
        "classes": None if classes is None else list(classes),
        "size": list(small.shape[2:]),
        "channels": small.shape[1],
    }
    pictures = {
        place: {
            "point": int(points[place]),
            "label": int(labels[place]),
            "natural": _encode((small[place] * 255).round().to(torch.uint8)),
        }
        for place in shown
    }
    return {
        "recordings": [
            {
                "attack": one.name,
                "shared": one.is_shared,
                "steps": len(one.defended.frames) - 1,
                "right": dict(zip(SIDES, map(sum, one.find_right(labels, -1)), strict=True)),
                **about,
                "images": [
                    picture | one.to_json(place, crossed[one.name])
                    for place, picture in pictures.items()
                ],
            }
            for one in made
        ]
    }


def list_recordable(subject: Subject, lacks: Iterable[str]) -> list[str]:
    """Return the attacks that can be recorded on a defense that lacks parts of the protocol.

    A defense that makes no updates has no fixed point to look for.
    """
    left_out = {FIXED_POINT} if subject.updates == 0 or "steps" in lacks else set()
    return [name for name in RECORDED if name not in left_out]


def list_recordings(battle: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """Return the recordings that show images, the strongest attack first."""
    return [one for one in (battle or {}).get("recordings", []) if one["images"]]


def choose_telling(
    static: Sequence[bool], defended: Sequence[bool], natural: Sequence[bool], count: int
) -> list[int]:
    """Return the places of images that are worth a look: one of each of the `KINDS` in turn.

    Images that are naturally right come first: on the others, an attack has nothing to do.

    static, defended: whether each model is right after the attack.

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

    def to_json(self, place: int, *, with_image: bool = True) -> dict[str, Any]:
        """Return plain values of one image. with_image: its perturbation too."""
        content: dict[str, Any] = self._encode_delta(place) if with_image else {}
        content |= {
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

    def _encode_delta(self, place: int) -> dict[str, Any]:
        delta = self.delta[place]
        scale = _round(delta.abs().max())
        steps = (delta / scale * 127).round().clamp(-127, 127) if scale else delta
        size = _round(self.sizes[place])
        return {"delta": _encode(steps.to(torch.int8)), "scale": scale, "size": size}


class Recorder:
    """A model that records what an attack asks: the natural batch, and every step but the start.

    The last call of an attack, for its score, needs no gradient and is not recorded.
    """

    def __init__(
        self, inputs: Tensor, norm: str, answer: Callable[[Tensor], tuple[Tensor, UpdateTrace | None]]
    ) -> None:
        self.answer = answer
        self.frames: list[Frame] = []
        self.batches: list[Tensor] = []  # that of each frame
        self._inputs = inputs.detach()
        self._norm = norm
        self._started = False

    def __call__(self, points: Tensor) -> Tensor:
        logits, adaptation = self.answer(points)
        climbs = points.requires_grad
        if not self.frames or (climbs and self._started):
            self._record(points.detach().clone(), logits.detach(), adaptation)
        self._started = self._started or climbs
        return logits

    def replay(self, batches: Iterable[Tensor]) -> Recorder:
        """Ask the model batches that another one was asked, and record each; return the recorder."""
        with torch.no_grad():
            for points in batches:
                self._record(points, *self.answer(points))
        return self

    def _record(self, points: Tensor, logits: Tensor, adaptation: UpdateTrace | None) -> None:
        delta = points - self._inputs
        sizes = lengths(delta, self._norm).flatten().cpu()
        self.batches.append(points)
        self.frames.append(
            Frame(pool_images(delta), sizes, logits.cpu(), entropy(logits).cpu(), adaptation)
        )


class WatchedDefense(AnyDefense):
    """A defense that remembers the batches that the fixed point attack asks of its adapted models.

    Each round begins with an adaptation, and with a start that is random and left out.
    """

    def __init__(self, subject: Subject, inputs: Tensor) -> None:
        super().__init__(subject.defense, subject.independent)
        self.batches = [inputs.detach()]
        self._starts = False

    def adapt(self, inputs: Tensor, **options: Any) -> Any:
        self._starts = True
        return super().adapt(inputs, **options)

    def predict(self, inputs: Tensor, state: Any) -> Tensor:
        if inputs.requires_grad:
            if not self._starts:
                self.batches.append(inputs.detach().clone())
            self._starts = False
        return super().predict(inputs, state)


@dataclass(frozen=True)
class Recording:
    """What an attack asked of both models, and their answers. is_shared: both were asked the same."""

    name: str
    static: Recorder
    defended: Recorder
    is_shared: bool

    def find_right(self, labels: Tensor, number: int) -> tuple[list[bool], list[bool]]:
        """Return which images the static and the defended model get right at a frame."""
        static, defended = (
            one.frames[number].logits.argmax(1).eq(labels.cpu()).tolist()
            for one in (self.static, self.defended)
        )
        return static, defended

    def ask_others(self, static: Any, defended: Any) -> dict[str, dict[str, Tensor]]:
        """Return for the last batch of each side the answers of both models."""
        own = {side: getattr(self, side).frames[-1].logits for side in SIDES}
        if self.is_shared:
            return dict.fromkeys(SIDES, own)
        with torch.no_grad():
            crossed = {
                "static": defended(self.static.batches[-1]).cpu(),
                "defended": static(self.defended.batches[-1]).cpu(),
            }
        return {
            "static": {"static": own["static"], "defended": crossed["static"]},
            "defended": {"static": crossed["defended"], "defended": own["defended"]},
        }

    def to_json(self, place: int, answers: dict[str, dict[str, Tensor]]) -> dict[str, Any]:
        """Return plain values of one image; what both sides were asked stands at the static one."""
        return {
            side: {
                "frames": [
                    frame.to_json(place, with_image=side == "static" or not self.is_shared)
                    for frame in getattr(self, side).frames
                ],
                "answers": {of: _probabilities(logits[place]) for of, logits in answers[side].items()},
            }
            for side in SIDES
        }


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
