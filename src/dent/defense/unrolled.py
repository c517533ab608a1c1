"""The exact gradient of an update, in memory that does not grow with the number of updates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, autograd
from torch.autograd.function import once_differentiable

Variables = tuple[Tensor, ...]


class Update(Protocol):
    """One update: from what it reads to the variables after it, as constants or with their graph."""

    def __call__(self, tensors: Variables, *, keep_graph: bool) -> Variables: ...


def unroll(update: Update, *tensors: Tensor) -> Variables:
    """Make an update, with its gradient to all tensors; the backward pass computes it again.

    >>> x = torch.tensor(3.0, requires_grad=True)
    >>> (square,) = unroll(lambda tensors, keep_graph: (tensors[0] ** 2,), x)
    >>> autograd.grad(square, x)
    (tensor(6.),)
    """
    return _Unrolled.apply(update, *tensors)  # type: ignore[no-any-return,no-untyped-call]


def as_leaf(tensor: Tensor) -> Tensor:
    """Return a constant of the same value, which requires a gradient if it can have one."""
    tensor = tensor.detach()
    return tensor.requires_grad_() if tensor.is_floating_point() else tensor


class _Unrolled(autograd.Function):
    @staticmethod
    def forward(ctx: Any, update: Update, *tensors: Tensor) -> Variables:
        ctx.save_for_backward(*tensors)
        ctx.update = update
        after = update(tuple(tensor.detach() for tensor in tensors), keep_graph=False)
        ctx.mark_non_differentiable(*(one for one in after if not one.is_floating_point()))
        return after

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        leaves = [as_leaf(tensor) for tensor in ctx.saved_tensors]
        with torch.enable_grad():
            after = ctx.update(tuple(leaves), keep_graph=True)
        # An update may pass a variable on as it is, or make a new one that depends on nothing.
        wanted = [(one, grad) for one, grad in zip(after, grads, strict=True) if one.requires_grad]
        sources = [leaf for leaf in leaves if leaf.requires_grad]
        back: Sequence[Tensor | None] = [None] * len(sources)
        if wanted:
            ends, end_grads = zip(*wanted, strict=True)
            back = autograd.grad(ends, sources, end_grads, allow_unused=True)
        found = iter(back)
        return None, *(next(found) if leaf.requires_grad else None for leaf in leaves)
