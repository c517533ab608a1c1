"""A shortened defense is attacked, the full one is tested (Croce et al., 2022)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Generic

from torch import Tensor

from dent.attacks.adaptive.climb import climb
from dent.attacks.adaptive.protocol import DynamicDefense, Gradient, GradientAttack, State
from dent.attacks.adaptive.updates import answers_so
from dent.attacks.apgd import apgd
from dent.attacks.checks import check_numbers
from dent.attacks.result import AttackResult


class Short(Generic[State]):
    """The defense with fewer updates; exact only if it makes no more, which is seen at the first call.

    gradient: through the updates or not; if not given, as the defense has it.
    """

    def __init__(
        self, defense: DynamicDefense[State], updates: int, *, gradient: Gradient | None = None
    ) -> None:
        check_numbers(updates=updates)
        self.defense = defense
        self.updates = updates
        self.gradient = gradient
        self.exact = False
        self._seen = False

    def __call__(self, points: Tensor) -> Iterator[Tensor]:
        state = self.defense.adapt(points, steps=self.updates, gradient=self.gradient)
        logits = self.defense.predict(points, state)
        yield logits
        if not self._seen:
            self.exact, self._seen = answers_so(self.defense, points, logits), True


def short(
    defense: DynamicDefense[State],
    inputs: Tensor,
    labels: Tensor,
    *,
    updates: int,
    eps: float,
    norm: str = "linf",
    gradient: Gradient | None = None,
    attack: GradientAttack = apgd,
    joint: bool = True,
    mask: Tensor | None = None,
    **settings: Any,
) -> AttackResult:
    """Climb the defense with only `updates` updates, by `attack` with its `settings`.

    That is cheaper, and its gradient may be better than the one behind all updates.
    """
    return climb(
        attack, defense, Short(defense, updates, gradient=gradient), inputs, labels,
        eps=eps, norm=norm, joint=joint, mask=mask, **settings,
    )  # fmt: skip
