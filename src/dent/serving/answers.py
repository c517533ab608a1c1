"""What a defense answers to each input, before and after adaptation, beside the static model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from dent.defense import PRESETS, Dent
from dent.defense.objectives import entropy


@dataclass(frozen=True)
class Prediction:
    """What a model says of one input.

    label, name: the most probable class, as a number and as a word.
    probabilities: of all classes, in order.
    entropy: how unsure that is, in nats.
    """

    label: int
    name: str
    probabilities: tuple[float, ...]
    entropy: float

    def to_json(self) -> dict[str, Any]:
        return {
            "class": self.label,
            "name": self.name,
            "probabilities": list(self.probabilities),
            "entropy": self.entropy,
        }


@dataclass(frozen=True)
class Answer:
    """What the defended model says of one input, and how it came to that.

    defended, static: the predictions of the model with its defense, and without.
    entropy_before: that of the defended model before its first update, smoothing and statistics
    included; after the last one it is `defended.entropy`.
    steps: how many updates there were.
    seconds: how long its batch took to compute; waiting is no part of it.
    """

    defended: Prediction
    static: Prediction
    entropy_before: float
    steps: int
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """The defended model's answer, with that of the static one inside."""
        said = self.defended
        return {
            "class": said.label,
            "name": said.name,
            "probabilities": list(said.probabilities),
            "entropy_before": self.entropy_before,
            "entropy_after": said.entropy,
            "steps": self.steps,
            "static": self.static.to_json(),
            "seconds": self.seconds,
        }


class Failed(Exception):  # noqa: N818 - beside Refused
    """The model could not answer a batch, which is no fault of a client."""


def answer_batch(
    defense: Dent, inputs: Tensor, steps: int | None = None, *, classes: Sequence[str] = ()
) -> list[Answer]:
    """Answer every input of a batch: adapt to it, predict it, forget.

    Where the defense is independent, an input is answered as it would be alone, to the last digits of
    float: in another batch, sums are made in another order. Of other defenses, every answer depends on
    all inputs of the batch. Logits that are not finite, of any input, are `Failed` for the batch.

    steps: how many updates, if not the defense's own; no more than these.
    classes: names of the classes; numbers if there are none.

    >>> from torch import nn
    >>> from dent.defense import defend
    >>> model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 2))
    >>> defense = defend(model, "dent", steps=3)
    >>> answer, _ = answer_batch(defense, torch.rand(2, 3, 8, 8), classes=("a", "b"))
    >>> answer.defended.name in "ab", len(answer.static.probabilities), answer.steps
    (True, 2, 3)
    """
    own = defense.settings.steps
    count = own if steps is None else steps
    if not 0 <= count <= own:
        raise ValueError(f"steps: expected 0 to {own}, the defense's own, got {steps}")
    start = perf_counter()
    try:
        before, after, static = _logits(defense, inputs, count)
    except (ValueError, RuntimeError) as error:
        raise Failed(f"the model cannot answer: {error}") from error
    seconds = perf_counter() - start
    return [
        Answer(said, plain, unsure, count, seconds)
        for said, plain, unsure in zip(
            _predictions(after, classes),
            _predictions(static, classes),
            entropy(before.double()).tolist(),
            strict=True,
        )
    ]


def _logits(defense: Dent, inputs: Tensor, steps: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of the defended model before and after its updates, and of the static one."""
    with torch.no_grad():
        state = defense.adapt(inputs, steps=steps, gradient="stale")
        after = defense.predict(inputs, state)
        before = state.trace.logits[0] if steps else after
        changed = defense.settings.blur != "off" or defense.settings.test_share > 0
        # Where neither inputs nor statistics are changed, the first update has seen the static model.
        return before, after, _static(defense)(inputs) if changed else before


_STATIC: WeakKeyDictionary[Dent, Dent] = WeakKeyDictionary()  # made once for each defense


def _static(defense: Dent) -> Dent:
    if defense not in _STATIC:
        _STATIC[defense] = Dent(defense.model, PRESETS["static"], name="static")
    return _STATIC[defense]


def _predictions(logits: Tensor, classes: Sequence[str]) -> list[Prediction]:
    logits = logits.double()
    if classes and len(classes) != logits.shape[1]:
        raise ValueError(
            f"expected names for the {logits.shape[1]} classes of the model, got {len(classes)}"
        )
    rows = zip(
        logits.argmax(1).tolist(), logits.softmax(1).tolist(), entropy(logits).tolist(), strict=True
    )
    return [
        Prediction(label, classes[label] if classes else str(label), tuple(shares), unsure)
        for label, shares, unsure in rows
    ]
