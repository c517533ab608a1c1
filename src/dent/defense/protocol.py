"""What a defense is: a model that adapts to each batch, with the adaptation as a value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol, TypeVar

import torch
from torch import Tensor, nn

from dent.defense.dent.checks import needs_batch_statistics

State = TypeVar("State")


class Defense(Protocol[State]):
    """A defense that adapts at test time. `dent.Dent` is one; yours needs no base class.

    `defense(inputs)` equals `defense.predict(inputs, defense.adapt(inputs))`. No call changes the model
    or what a later call returns. An optional attribute `updates` says how many updates a call makes, and
    `randomized = True` that answers are random, drawn from torch's own generator.
    """

    @property
    def independent(self) -> bool | None:
        """True if no answer depends on the rest of its batch, False if one may, None if unknown."""
        ...

    def __call__(self, inputs: Tensor, /) -> Tensor:
        """Return logits (N, classes)."""
        ...

    def adapt(
        self,
        inputs: Tensor,
        *,
        start: State | None = None,
        steps: int | None = None,
        gradient: Literal["stale", "unrolled"] | None = None,
    ) -> State:
        """Return the state after `steps` updates on the inputs, from the model itself or from `start`.

        steps: None makes as many as the defense makes in a call; 0 is the model as it is.
        gradient: `stale` returns a constant; `unrolled` a state with its gradient to the inputs.
        """
        ...

    def predict(self, inputs: Tensor, state: State) -> Tensor:
        """Return the logits of the model as adapted in `state`."""
        ...


def read_independence(model: nn.Module) -> bool | None:
    """Return what the model's attribute `independent` declares, or None if it has none.

    Return False if a BatchNorm layer kept no statistics in training: it uses those of its batch.
    """
    if any(needs_batch_statistics(layer) for layer in model.modules()):
        return False
    declared = getattr(model, "independent", None)
    return None if declared is None else bool(declared)


def is_independent(model: Callable[[Tensor], Tensor], inputs: Tensor) -> bool:
    """Return True if the model answers a batch as it answers its inputs one by one.

    Return False also if that cannot be compared: if two equal calls differ, or return no tensors.

    >>> is_independent(lambda x: 2 * x, torch.rand(3, 4))
    True
    >>> is_independent(lambda x: x - x.mean(0), torch.rand(3, 4))
    False
    """
    with torch.no_grad():
        together, again, *rows = [model(some) for some in (inputs, inputs, *inputs.split(1))]
    if not all(isinstance(one, Tensor) and one.dim() > 0 for one in (together, again, *rows)):
        return False
    alone = torch.cat(rows)
    if together.shape != alone.shape or not torch.equal(together, again):
        return False
    return torch.allclose(together, alone, rtol=1e-3, atol=1e-4)
