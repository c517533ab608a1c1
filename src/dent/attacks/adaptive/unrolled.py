"""The exact gradient of a dynamic defense: through every update that it makes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Generic

from torch import Tensor

from dent.attacks.adaptive.climb import climb
from dent.attacks.adaptive.protocol import DynamicDefense, GradientAttack, State
from dent.attacks.apgd import apgd
from dent.attacks.result import AttackResult


class Unrolled(Generic[State]):
    """The defense with the gradient of its updates, where by default the state is a constant."""

    exact: bool = True

    def __init__(self, defense: DynamicDefense[State]) -> None:
        self.defense = defense

    def __call__(self, points: Tensor) -> Iterator[Tensor]:
        yield self.defense.predict(points, self.defense.adapt(points, gradient="unrolled"))


def unrolled(
    defense: DynamicDefense[State],
    inputs: Tensor,
    labels: Tensor,
    *,
    eps: float,
    norm: str = "linf",
    attack: GradientAttack = apgd,
    joint: bool = True,
    mask: Tensor | None = None,
    **settings: Any,
) -> AttackResult:
    """Climb the exact gradient of the defense, by `attack` with its `settings`.

    A stale gradient does not see what a perturbation does to the updates, nor (through shared
    parameters) to the other inputs of the batch; this one does.
    """
    return climb(
        attack, defense, Unrolled(defense), inputs, labels,
        eps=eps, norm=norm, joint=joint, mask=mask, **settings,
    )  # fmt: skip
