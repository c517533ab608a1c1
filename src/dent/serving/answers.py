"""Answer a batch: the predictions of the defended and of the static model, and the entropies."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from weakref import WeakKeyDictionary

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from dent.defense import PRESETS, Dent
from dent.defense.dent.descent import entropy


class Prediction(BaseModel):
    """The prediction of the static model for one image."""

    model_config = ConfigDict(frozen=True)

    label: int = Field(serialization_alias="class", description="Number of the most probable class")
    name: str = Field(description="Name of that class")
    probabilities: tuple[float, ...] = Field(description="Probabilities of all classes, in order")
    entropy: float = Field(description="Entropy of the probabilities, in nats")


class Answer(BaseModel):
    """The prediction of the defended model for one image, with that of the static model."""

    model_config = ConfigDict(frozen=True)

    label: int = Field(serialization_alias="class", description="Number of the most probable class")
    name: str = Field(description="Name of that class")
    probabilities: tuple[float, ...] = Field(description="Probabilities of all classes, in order")
    entropy_before: float = Field(
        description="Entropy of the defended model before its first update, in nats; smoothing and"
        " statistics of the batch are in effect"
    )
    entropy_after: float = Field(description="Entropy of the probabilities, in nats")
    steps: int = Field(description="Number of updates")
    static: Prediction
    seconds: float = Field(description="Time to compute the batch, without waiting")


class ModelError(Exception):
    """The model failed on a batch, which is no fault of a client."""


def answer_batch(
    defense: Dent, inputs: Tensor, steps: int | None = None, *, classes: Sequence[str] = ()
) -> list[Answer]:
    """Adapt to a batch, predict it, and return an answer for every input.

    If the defense is independent, an input is answered as it would be alone, up to rounding: another
    batch sums in another order. Otherwise every answer depends on all inputs of the batch. Raise
    `ModelError` if the model fails, or if any of its logits is not finite.

    steps: number of updates, at most the defense's own (default: the defense's own).
    classes: names of the classes (default: their numbers).

    >>> from torch import nn
    >>> from dent.defense import defend
    >>> model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 2))
    >>> defense = defend(model, "dent", steps=3)
    >>> answer, _ = answer_batch(defense, torch.rand(2, 3, 8, 8), classes=("a", "b"))
    >>> answer.name in "ab", len(answer.static.probabilities), answer.steps
    (True, 2, 3)
    """
    own = defense.settings.steps
    count = own if steps is None else steps
    if not 0 <= count <= own:
        raise ValueError(f"steps: expected 0 to {own}, the defense's own, got {steps}")
    start = perf_counter()
    try:
        before, after, static = _compute_logits(defense, inputs, count)
    except (ValueError, RuntimeError) as error:
        raise ModelError(f"the model cannot answer: {error}") from error
    seconds = perf_counter() - start
    return [
        Answer(
            label=defended.label,
            name=defended.name,
            probabilities=defended.probabilities,
            entropy_before=unsure,
            entropy_after=defended.entropy,
            steps=count,
            static=plain,
            seconds=seconds,
        )
        for defended, plain, unsure in zip(
            _list_predictions(after, classes),
            _list_predictions(static, classes),
            entropy(before.double()).tolist(),
            strict=True,
        )
    ]


def _compute_logits(defense: Dent, inputs: Tensor, steps: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the logits of the defended model before and after its updates, and of the static one."""
    with torch.no_grad():
        state = defense.adapt(inputs, steps=steps, gradient="stale")
        after = defense.predict(inputs, state)
        before = state.trace.logits[0] if steps else after
        changed = defense.settings.blur != "off" or defense.settings.test_share > 0
        # If the defense changes neither inputs nor statistics, the first update saw the static model.
        return before, after, _get_static(defense)(inputs) if changed else before


_STATIC: WeakKeyDictionary[Dent, Dent] = WeakKeyDictionary()  # one for each defense


def _get_static(defense: Dent) -> Dent:
    if defense not in _STATIC:
        _STATIC[defense] = Dent(defense.model, PRESETS["static"], name="static")
    return _STATIC[defense]


def _list_predictions(logits: Tensor, classes: Sequence[str]) -> list[Prediction]:
    logits = logits.double()
    if classes and len(classes) != logits.shape[1]:
        raise ValueError(
            f"expected names for the {logits.shape[1]} classes of the model, got {len(classes)}"
        )
    rows = zip(
        logits.argmax(1).tolist(), logits.softmax(1).tolist(), entropy(logits).tolist(), strict=True
    )
    return [
        Prediction(
            label=label,
            name=classes[label] if classes else str(label),
            probabilities=tuple(shares),
            entropy=unsure,
        )
        for label, shares, unsure in rows
    ]
