"""What attacks made for adaptation need of a defense: to adapt it, and to ask it as adapted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Protocol, TypeVar

from torch import Tensor

from dent.attacks.calls import View
from dent.attacks.result import AttackResult

State = TypeVar("State")
Gradient = Literal["stale", "unrolled"]

# `pgd`, `apgd` or `apgd_targeted`, or what is called like them.
GradientAttack = Callable[..., AttackResult]
# From a model to a view of it: `Unrolled`, or `partial(Lazy, every=3)`.
MakeView = Callable[[Any], View]


class DynamicDefense(Protocol[State]):
    """A model that adapts to every batch, with the adaptation as a value; `dent.Dent` is one.

    `defense(inputs)` is `defense.predict(inputs, defense.adapt(inputs))`.
    """

    def __call__(self, inputs: Tensor) -> Tensor: ...

    def adapt(
        self,
        inputs: Tensor,
        *,
        start: State | None = None,
        steps: int | None = None,
        gradient: Gradient | None = None,
    ) -> State:
        """The state after `steps` updates on the inputs, from the model as it is or from `start`.

        steps: all that the defense makes, if not given; none is the model as it is.
        gradient: `stale`, the state is a constant; `unrolled`, it has its gradient to the inputs.
        """
        ...

    def predict(self, inputs: Tensor, state: State) -> Tensor:
        """Logits of the model as adapted in `state`."""
        ...
