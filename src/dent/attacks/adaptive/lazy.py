"""Many steps of an attack for one adaptation of the defense."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Generic

from torch import Tensor

from dent.attacks.adaptive.climb import climb
from dent.attacks.adaptive.protocol import DynamicDefense, GradientAttack, State
from dent.attacks.apgd import apgd
from dent.attacks.checks import check_numbers
from dent.attacks.result import AttackResult


class Lazy(Generic[State]):
    """The defense, adapted to the points of every `every`-th call, and frozen in between.

    Exact at the calls that adapted. When the number of points changes it adapts at once, for a state
    may have a row for each. (A search only ever loses inputs: the same number are the same inputs.)
    """

    def __init__(self, defense: DynamicDefense[State], every: int = 5) -> None:
        check_numbers(every=every)
        self.defense = defense
        self.every = every
        self.exact = False
        self._state: State  # of the last adaptation, to so many points, so many calls ago
        self._count = -1
        self._age = 0

    def __call__(self, points: Tensor) -> Iterator[Tensor]:
        self.exact = self._age == 0 or self._count != len(points)
        if self.exact:
            self._state = self.defense.adapt(points.detach(), gradient="stale")
            self._count, self._age = len(points), 0
        self._age = (self._age + 1) % self.every
        yield self.defense.predict(points, self._state)


def lazy(
    defense: DynamicDefense[State],
    inputs: Tensor,
    labels: Tensor,
    *,
    every: int = 5,
    eps: float,
    norm: str = "linf",
    attack: GradientAttack = apgd,
    joint: bool = True,
    mask: Tensor | None = None,
    **settings: Any,
) -> AttackResult:
    """Let the defense adapt only at every `every`-th step of `attack` (with its `settings`).

    With `every=1` it is the attack itself. More steps for the same cost, and each of the steps in
    between climbs a model that stands still.
    """
    return climb(
        attack, defense, Lazy(defense, every), inputs, labels,
        eps=eps, norm=norm, joint=joint, mask=mask, **settings,
    )  # fmt: skip
