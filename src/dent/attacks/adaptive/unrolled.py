"""The exact gradient of a dynamic defence: through every update that it makes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Generic

from torch import Tensor

from dent.attacks.adaptive.climb import climb
from dent.attacks.adaptive.protocol import DynamicDefence, GradientAttack, State
from dent.attacks.apgd import apgd
from dent.attacks.result import AttackResult


class Unrolled(Generic[State]):
    """The defence with the gradient of its updates, where by default the state is a constant."""

    exact: bool = True

    def __init__(self, defence: DynamicDefence[State]) -> None:
        self.defence = defence

    def __call__(self, points: Tensor) -> Iterator[Tensor]:
        yield self.defence.predict(points, self.defence.adapt(points, gradient="unrolled"))


def unrolled(
    defence: DynamicDefence[State],
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
    """Climb the exact gradient of the defence, by `attack` with its `settings`.

    A stale gradient does not see what a perturbation does to the updates, nor (through shared
    parameters) to the other inputs of the batch; this one does.
    """
    return climb(
        attack, defence, Unrolled(defence), inputs, labels,
        eps=eps, norm=norm, joint=joint, mask=mask, **settings,
    )  # fmt: skip
