"""Gradients averaged over the states that a defense goes through (Croce et al., 2022)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Generic

from torch import Tensor

from dent.attacks.adaptive.climb import climb
from dent.attacks.adaptive.protocol import DynamicDefense, GradientAttack, State
from dent.attacks.adaptive.updates import answers_so
from dent.attacks.apgd import apgd
from dent.attacks.checks import check_numbers
from dent.attacks.result import AttackResult


class Averaged(Generic[State]):
    """The defense after 0, 1, ... and `updates` updates, each state a constant.

    It is exact if these are all updates that the defense makes, which is seen at the first call.
    """

    def __init__(self, defense: DynamicDefense[State], updates: int) -> None:
        check_numbers(updates=updates)
        self.defense = defense
        self.updates = updates
        self.exact = False
        self._seen = False

    def __call__(self, points: Tensor) -> Iterator[Tensor]:
        still = points.detach()
        state = self.defense.adapt(still, steps=0, gradient="stale")
        logits = self.defense.predict(points, state)
        yield logits
        for _ in range(self.updates):
            state = self.defense.adapt(still, start=state, steps=1, gradient="stale")
            logits = self.defense.predict(points, state)
            yield logits
        if not self._seen:
            self.exact, self._seen = answers_so(self.defense, points, logits), True


def averaged(
    defense: DynamicDefense[State],
    inputs: Tensor,
    labels: Tensor,
    *,
    updates: int,
    eps: float,
    norm: str = "linf",
    attack: GradientAttack = apgd,
    joint: bool = True,
    mask: Tensor | None = None,
    **settings: Any,
) -> AttackResult:
    """Climb the mean gradient over all states of the adaptation, by `attack` with its `settings`.

    The last state alone may give no useful gradient; all of them together smooth it.

    updates: how many the defense makes (`defended.settings.steps` of dent).
    """
    return climb(
        attack, defense, Averaged(defense, updates), inputs, labels,
        eps=eps, norm=norm, joint=joint, mask=mask, **settings,
    )  # fmt: skip
