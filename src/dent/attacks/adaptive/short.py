"""A shortened defence is attacked, the full one is tested (Croce et al., 2022)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Generic

from torch import Tensor

from dent.attacks.adaptive.climb import climb
from dent.attacks.adaptive.protocol import DynamicDefence, Gradient, GradientAttack, State
from dent.attacks.adaptive.updates import answers_so
from dent.attacks.apgd import apgd
from dent.attacks.checks import check_numbers
from dent.attacks.result import AttackResult


class Short(Generic[State]):
    """The defence with fewer updates; exact only if it makes no more, which is seen at the first call.

    gradient: through the updates or not; if not given, as the defence has it.
    """

    def __init__(
        self, defence: DynamicDefence[State], updates: int, *, gradient: Gradient | None = None
    ) -> None:
        check_numbers(updates=updates)
        self.defence = defence
        self.updates = updates
        self.gradient = gradient
        self.exact = False
        self._seen = False

    def __call__(self, points: Tensor) -> Iterator[Tensor]:
        state = self.defence.adapt(points, steps=self.updates, gradient=self.gradient)
        logits = self.defence.predict(points, state)
        yield logits
        if not self._seen:
            self.exact, self._seen = answers_so(self.defence, points, logits), True


def short(
    defence: DynamicDefence[State],
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
    """Climb the defence with only `updates` updates, by `attack` with its `settings`.

    That is cheaper, and its gradient may be better than the one behind all updates.
    """
    return climb(
        attack, defence, Short(defence, updates, gradient=gradient), inputs, labels,
        eps=eps, norm=norm, joint=joint, mask=mask, **settings,
    )  # fmt: skip
