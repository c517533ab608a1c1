"""Delta: normalization layers whose scale, shift and statistics are given from outside (section 3.2).

A `Site` is one normalization layer of a shadow (a private copy of the model's structure). Its forward
is replaced by one that takes scale and shift from the site, with one row for the batch or a row for
each sample, and the statistics that the settings ask for.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

_AFFINE_ONLY = (nn.GroupNorm, nn.LayerNorm, nn.RMSNorm, _InstanceNorm)
_STOCK_FORWARDS = (nn.BatchNorm2d.forward, nn.SyncBatchNorm.forward)


def is_batch_norm(layer: nn.Module) -> bool:
    return isinstance(layer, _BatchNorm)


def is_normalization(layer: nn.Module) -> bool:
    return isinstance(layer, (_BatchNorm, *_AFFINE_ONLY))


def affine_names(layer: nn.Module) -> list[str]:
    """Which of scale (`weight`) and shift (`bias`) a layer has."""
    return [name for name in ("weight", "bias") if layer._parameters.get(name) is not None]


def needs_batch_statistics(layer: nn.Module) -> bool:
    """Whether a layer kept no statistics in training, and takes its batch's even when evaluated."""
    return isinstance(layer, _BatchNorm) and layer.running_mean is None


class Site:
    """One normalization layer of a shadow, with what the defense gives it for the next forward."""

    def __init__(self, name: str, layer: nn.Module, *, test_share: float) -> None:
        self.name = name
        self.layer = layer
        self.affine_names = affine_names(layer)
        self.test_share = 1.0 if needs_batch_statistics(layer) else test_share
        self.adapted: dict[str, Tensor] = {}  # weight and bias, (1 or N, *shape); {}: the model's own
        self.trained: tuple[Tensor, Tensor] | None = None  # mean and 1 / deviation, where they hold
        self.frozen: tuple[Tensor, Tensor] | None = None  # mean and variance to use for any batch
        self.recording = False
        self.recorded: tuple[Tensor, Tensor] | None = None  # mean and variance of the last forward
        if not is_batch_norm(layer):
            layer.forward = self._other_norm
            # nn.TransformerEncoderLayer reads the weights of its norms past their forward, unless
            # one of its modules has a hook.
            layer.register_forward_pre_hook(_no_fast_path)
        elif type(layer).forward in _STOCK_FORWARDS:
            layer.forward = self._batch_norm
        else:
            layer.forward = self._batch_norm_subclass

    def bind(self) -> None:
        """Take what the layer holds now: mean and inverse standard deviation of training."""
        layer: Any = self.layer
        if is_batch_norm(layer) and self.test_share == 0:
            exact = torch.promote_types(layer.running_mean.dtype, torch.float32)
            mean, var = layer.running_mean.to(exact), layer.running_var.to(exact)
            self.trained = mean, (var + layer.eps).rsqrt()

    def release(self) -> None:
        self.adapted, self.trained, self.frozen, self.recorded = {}, None, None, None
        self.recording = False

    def _batch_norm(self, x: Tensor) -> Tensor:
        layer: Any = self.layer
        if self._is_untouched():  # to the bit what the model computes
            return _native(layer, x, layer.running_mean, layer.running_var, layer.weight, layer.bias)
        self._check_batch(x)
        weight = self.adapted.get("weight", _row(layer.weight))
        bias = self.adapted.get("bias", _row(layer.bias))
        shared = weight is None or len(weight) == 1
        plain = self.frozen is None and not self.recording
        if plain and shared and self.test_share == 1:
            return _native(layer, x, None, None, _only(weight), _only(bias))
        if plain and self.trained is not None:
            mean, inverse = self.trained
        else:
            mean, var = self._statistics(x)
            inverse = (var + layer.eps).rsqrt()
        scale = inverse[None] if weight is None else weight * inverse
        shift = -mean * scale if bias is None else bias - mean * scale
        return channel_affine(x, scale, shift)

    def _batch_norm_subclass(self, x: Tensor) -> Tensor:
        """A subclass may do more than normalize, so its own forward follows, normalizing nothing."""
        layer: Any = self.layer
        forward = type(layer).forward
        if self._is_untouched():
            return forward(layer, x)  # type: ignore[no-any-return]
        y = self._batch_norm(x)
        own = layer._parameters, layer._buffers
        one = torch.ones(layer.num_features, dtype=y.dtype, device=y.device)
        zero = torch.zeros_like(one)
        layer._parameters = own[0] | {"weight": one, "bias": zero}
        layer._buffers = own[1] | {"running_mean": zero, "running_var": one - layer.eps}
        try:
            return forward(layer, y)  # type: ignore[no-any-return]
        finally:
            layer._parameters, layer._buffers = own

    def _other_norm(self, x: Tensor) -> Tensor:
        """GroupNorm, LayerNorm, InstanceNorm: one input never sees another, so only Delta matters."""
        layer: Any = self.layer
        forward = type(layer).forward
        if not self.adapted:
            return forward(layer, x)  # type: ignore[no-any-return]
        if isinstance(layer, nn.GroupNorm) and not x.requires_grad:
            x = x.contiguous()  # torch 2.13 crashes in the backward of channels last without one for x
        own = dict(layer._parameters)

        def with_affine(x: Tensor, adapted: dict[str, Tensor]) -> Tensor:
            layer._parameters = own | {name: value.to(x.dtype) for name, value in adapted.items()}
            try:
                return forward(layer, x)  # type: ignore[no-any-return]
            finally:
                layer._parameters = own

        if all(len(rows) == 1 for rows in self.adapted.values()):
            return with_affine(x, {name: rows[0] for name, rows in self.adapted.items()})
        self._check_batch(x)
        # vmap, because a subclass may move the channels before it normalizes, as ConvNeXts do.
        alone = torch.vmap(lambda x, adapted: with_affine(x[None], adapted)[0])
        return alone(x, self.adapted)

    def _is_untouched(self) -> bool:
        """Whether the layer is, for now, as in the static model."""
        return not self.adapted and self.test_share == 0 and self.frozen is None and not self.recording

    def _statistics(self, x: Tensor) -> tuple[Tensor, Tensor]:
        layer: Any = self.layer
        if self.frozen is not None:
            return self.frozen
        exact = torch.promote_types(x.dtype, torch.float32)
        if self.test_share == 0:
            mean, var = layer.running_mean.to(exact), layer.running_var.to(exact)
        else:
            dims = [dim for dim in range(x.dim()) if dim != 1]
            var, mean = torch.var_mean(x.to(exact), dims, correction=0)
            if self.test_share < 1:
                mean = torch.lerp(layer.running_mean.to(exact), mean, self.test_share)
                var = torch.lerp(layer.running_var.to(exact), var, self.test_share)
        if self.recording:
            self.recorded = mean.detach(), var.detach()
        return mean, var

    def _check_batch(self, x: Tensor) -> None:
        """Refuse what would silently mean something else."""
        for rows in self.adapted.values():
            if len(rows) not in (1, len(x)):
                raise ValueError(
                    f"sample-wise adaptation needs the {len(rows)} inputs in the first dimension, got "
                    f"{tuple(x.shape)} at layer {self.name!r}; use affine='batch'"
                )
        from_batch = is_batch_norm(self.layer) and self.test_share > 0 and self.frozen is None
        if from_batch and math.prod(x.shape) == x.shape[1]:
            raise ValueError(
                f"statistics of the test batch need more than one value per channel, got "
                f"{tuple(x.shape)} at layer {self.name!r}; use larger batches or statistics='train'"
            )


def channel_affine(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """x * scale + shift for x (N, C, ...) and scale, shift (1 or N, C).

    >>> channel_affine(torch.ones(2, 1, 2), torch.tensor([[1.0], [2.0]]), torch.zeros(2, 1))[:, 0, 0]
    tensor([1., 2.])
    """
    if torch.compiler.is_compiling():
        return (x * _channels(scale, x) + _channels(shift, x)).to(x.dtype)
    return _ChannelAffine.apply(x, scale, shift)  # type: ignore[no-any-return,no-untyped-call]


class _ChannelAffine(torch.autograd.Function):
    """One pass forward and as few as possible backward: half of what dent adds to the convolutions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        ctx.save_for_backward(x, scale)
        exact = x.to(scale.dtype)  # in half precision a small Delta would be lost
        return torch.addcmul(_channels(shift, x), exact, _channels(scale, x)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, scale = ctx.saved_tensors
        (grad,) = grads
        grad, exact = grad.to(scale.dtype), x.to(scale.dtype)
        product = grad_x = grad_scale = grad_shift = None
        if ctx.needs_input_grad[1]:
            product = grad * exact
            grad_scale = _sum_channels(product, scale)
        if ctx.needs_input_grad[2]:
            grad_shift = _sum_channels(grad, scale)
        if ctx.needs_input_grad[0]:
            # Large tensors cost more to allocate than to compute: reuse one where no graph is built.
            out = None if torch.is_grad_enabled() else product
            grad_x = torch.mul(grad, _channels(scale, x), out=out).to(x.dtype)
        return grad_x, grad_scale, grad_shift


def _channels(rows: Tensor, x: Tensor) -> Tensor:
    return rows.reshape(rows.shape + (1,) * (x.dim() - 2))


def _sum_channels(values: Tensor, like: Tensor) -> Tensor:
    rows = values.sum(tuple(range(2, values.dim()))) if values.dim() > 2 else values
    return rows.sum(0, keepdim=True) if len(like) == 1 else rows


def _native(
    layer: Any,
    x: Tensor,
    mean: Tensor | None,
    var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
) -> Tensor:
    return F.batch_norm(x, mean, var, weight, bias, mean is None, 0.0, layer.eps)


def _row(value: Tensor | None) -> Tensor | None:
    return None if value is None else value[None]


def _only(rows: Tensor | None) -> Tensor | None:
    return None if rows is None else rows[0]


def _no_fast_path(layer: nn.Module, args: Any) -> None:
    return None
