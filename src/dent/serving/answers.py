"""Answer a batch: the predictions of the defended and of the static model, and the entropies."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn

from dent.defense import Dent
from dent.defense.dent.checks import check_logits, check_shape
from dent.defense.dent.descent import entropy
from dent.names import accepts
from dent.testing import count_updates


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
        " statistics of the batch are in effect. That of the static model if the defense cannot tell"
    )
    entropy_after: float = Field(description="Entropy of the probabilities, in nats")
    steps: int | None = Field(description="Number of updates; null if the defense does not say")
    static: Prediction
    seconds: float = Field(description="Time to compute the batch, without waiting")


class ModelError(Exception):
    """The model failed on a batch, which is no fault of a client."""


def answer_batch(
    defense: Any,
    inputs: Tensor,
    steps: int | None = None,
    *,
    classes: Sequence[str] = (),
    static: nn.Module | None = None,
) -> list[Answer]:
    """Adapt to a batch, predict it, and return an answer for every input.

    If the defense is independent, an input is answered as it would be alone, up to rounding: another
    batch sums in another order. Otherwise every answer depends on all inputs of the batch. Raise
    `ModelError` if the model fails, or if any of its logits is not finite.

    defense: see `dent.Defense`; one that only has the call answers too.
    steps: number of updates, at most the defense's own (default: the defense's own).
    classes: names of the classes (default: their numbers).
    static: the model without a defense (default: what the defense has as `model`).

    >>> from torch import nn
    >>> from dent.defense import defend
    >>> model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 2))
    >>> defense = defend(model, "dent", steps=3)
    >>> answer, _ = answer_batch(defense, torch.rand(2, 3, 8, 8), classes=("a", "b"))
    >>> answer.name in "ab", len(answer.static.probabilities), answer.steps
    (True, 2, 3)
    """
    own = count_steps(defense)
    count = own if steps is None else steps
    known = getattr(defense, "model", None) if static is None else static
    if steps is not None and not (own is not None and 0 <= steps <= own):
        expected = "none, because this defense does not take them" if own is None else f"0 to {own}"
        raise ValueError(f"steps: expected {expected}, the defense's own, got {steps}")
    start = perf_counter()
    try:
        if known is None:
            raise ValueError(
                "expected a defense with its static model as `model`, or `static`, got neither"
            )
        with torch.no_grad():
            if isinstance(defense, Dent):
                logits = _ask_dent(defense, known, inputs, count or 0)
            else:
                logits = _ask_any(defense, known, inputs, steps)
        for one in logits:
            check_shape(one, inputs, type(defense).__name__)
            check_logits(one, type(defense).__name__)
    except Exception as error:  # of whatever kind: the defense may be a user's own
        raise ModelError(f"the model cannot answer: {error}") from error
    seconds = perf_counter() - start
    before, after, plain_logits = logits
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
            _list_predictions(plain_logits, classes),
            entropy(before.double()).tolist(),
            strict=True,
        )
    ]


def _ask_dent(
    defense: Dent, static: nn.Module, inputs: Tensor, steps: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the logits of the defended model before and after its updates, and of the static one."""
    state = defense.adapt(inputs, steps=steps, gradient="stale")
    after = defense.predict(inputs, state)
    before = state.trace.logits[0] if steps else after
    # If the defense changes neither inputs nor statistics, the first update saw the static model.
    changed = defense.settings.blur != "off" or defense.settings.test_share > 0
    return before, after, static(inputs) if changed or static is not defense.model else before


def count_steps(defense: Any) -> int | None:
    """Return the number of updates that a call makes and `adapt` can make fewer of; None if unknown."""
    updates, adapt = count_updates(defense), getattr(defense, "adapt", None)
    return updates if adapt and accepts(adapt, "steps") else None


def _ask_any(
    defense: Any, static: nn.Module, inputs: Tensor, steps: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the three logits of `_ask_dent`, of a defense that is not dent."""

    def answer(steps: int) -> Tensor:
        logits: Tensor = defense.predict(inputs, defense.adapt(inputs, steps=steps))
        return logits

    own, plain = count_steps(defense), static(inputs)
    after = defense(inputs) if steps is None else answer(steps)
    before = answer(0) if own else plain if own is None else after
    return before, after, plain


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
