"""Scale and shift channels, with a gradient in few passes over large tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def channel_affine(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Return x * scale + shift for x (N, C, ...) and scale, shift (1 or N, C).

    >>> channel_affine(torch.ones(2, 1, 2), torch.tensor([[1.0], [2.0]]), torch.zeros(2, 1))[:, 0, 0]
    tensor([1., 2.])
    """
    if torch.compiler.is_compiling():
        return (x * _as_channels(scale, x) + _as_channels(shift, x)).to(x.dtype)
    return _ChannelAffine.apply(x, scale, shift)  # type: ignore[no-any-return,no-untyped-call]


class _ChannelAffine(torch.autograd.Function):
    """One pass forward and as few as possible backward: half of what dent adds to the convolutions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        ctx.save_for_backward(x, scale)
        exact = x.to(scale.dtype)  # in half precision a small Delta would be lost
        return torch.addcmul(_as_channels(shift, x), exact, _as_channels(scale, x)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, scale = ctx.saved_tensors
        grad, exact = grads[0].to(scale.dtype), x.to(scale.dtype)
        product = grad_x = grad_scale = grad_shift = None
        if ctx.needs_input_grad[1]:
            product = grad * exact
            grad_scale = _sum_channels(product, scale)
        if ctx.needs_input_grad[2]:
            grad_shift = _sum_channels(grad, scale)
        if ctx.needs_input_grad[0]:
            # Large tensors cost more to allocate than to compute: reuse one if no graph is built.
            out = None if torch.is_grad_enabled() else product
            grad_x = torch.mul(grad, _as_channels(scale, x), out=out).to(x.dtype)
        return grad_x, grad_scale, grad_shift


def _as_channels(rows: Tensor, x: Tensor) -> Tensor:
    return rows.reshape(rows.shape + (1,) * (x.dim() - 2))


def _sum_channels(values: Tensor, like: Tensor) -> Tensor:
    rows = values.sum(tuple(range(2, values.dim()))) if values.dim() > 2 else values
    return rows.sum(0, keepdim=True) if len(like) == 1 else rows
