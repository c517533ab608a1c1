"""The method itself: minimize the entropy of the predictions over Delta and Sigma (paper, section 3.2).

Everything here is a function of tensors: a `Shadow` gives the logits for any Delta, and an update takes
variables to new variables, so that it can be run, or run again and differentiated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dent.defense import blur as gaussian
from dent.defense.objectives import OBJECTIVES
from dent.defense.optimizers import OPTIMIZERS, Moments
from dent.defense.settings import Settings
from dent.defense.shadow import Shadow
from dent.defense.state import State

# For delta and for blur, where they are adapted: the value, then the optimizer's moments.
Variables = tuple[Tensor, ...]


class Method:
    """Settings, ready to be applied: the start, the logits and the update."""

    def __init__(self, settings: Settings, *, chunk: int | None = None) -> None:
        self.settings = settings
        self.chunk = chunk
        self.optimizer = OPTIMIZERS[settings.optimizer]
        self.learning_rates: dict[str, float] = {}
        if settings.adapts_affine:
            self.learning_rates["delta"] = settings.lr
        if settings.adapts_blur:
            self.learning_rates["blur"] = settings.blur_lr

    def initial(self, net: Shadow, inputs: Tensor, start: State | None) -> Variables:
        """Where adaptation begins: Delta = 0 and the initial Sigma, or where another one ended."""
        if start is not None:
            values = {"delta": start.delta, "blur": start.blur}
            groups = [(values[name], *start.moments.get(name, ())) for name in self.learning_rates]
            return tuple(tensor for group in groups for tensor in group if tensor is not None)
        variables: list[Tensor] = []
        for name in self.learning_rates:
            if name == "delta":
                rows = len(inputs) if self.settings.affine == "sample" else 1
                value = torch.zeros_like(net.theta).repeat(rows, 1)
            else:
                value = self._blur(inputs, len(inputs) if self.settings.blur_per == "sample" else 1)
            variables += [value, *(torch.zeros_like(value) for _ in range(self.optimizer.moments))]
        return tuple(variables)

    def logits(
        self,
        net: Shadow,
        inputs: Tensor,
        delta: Tensor | None,
        blur: Tensor | None,
        *,
        eager: bool = False,
    ) -> Tensor:
        """f(g(x; Sigma); theta + Delta)."""
        if blur is not None:
            inputs = gaussian.smooth(inputs, blur)
        if net.channels_last:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        return net(inputs, delta, eager=eager)

    def update(
        self,
        net: Shadow,
        inputs: Tensor,
        variables: Variables,
        step: int,
        *,
        differentiable: bool = False,
    ) -> tuple[Tensor, Variables]:
        """One step: the logits that it saw, and the variables after it."""
        values, moments = self.unpack(variables)
        with torch.enable_grad():
            if not differentiable:
                values = {name: value.detach().requires_grad_() for name, value in values.items()}
            logits, grads = self._gradient(net, inputs, values, differentiable)
        after: list[Tensor] = []
        with torch.set_grad_enabled(differentiable):
            for (name, value), grad in zip(values.items(), grads, strict=True):
                lr, options = self.learning_rates[name], self.settings.optimizer_options()
                new, new_moments = self.optimizer.update(
                    value, grad, moments[name], step, lr=lr, **options
                )
                if name == "blur":
                    new = gaussian.bounded(new, inputs.shape[2:])
                after += [new, *new_moments]
        return logits, tuple(after)

    def _gradient(
        self, net: Shadow, inputs: Tensor, values: dict[str, Tensor], differentiable: bool
    ) -> tuple[Tensor, list[Tensor]]:
        """The logits and the gradient of the objective, summed over chunks of the batch."""
        pieces = math.ceil(len(inputs) / self.chunk) if self.chunk else 1
        rows = {name: _pieces(value, pieces) for name, value in values.items()}
        seen: list[Tensor] = []
        grads: list[Tensor] = []
        for i, piece in enumerate(inputs.chunk(pieces)):
            blur = rows["blur"][i] if "blur" in rows else self.static_blur(inputs)
            delta = rows["delta"][i] if "delta" in rows else None
            logits = self.logits(net, piece, delta, blur, eager=differentiable)
            net.check_logits(logits, piece)
            loss = OBJECTIVES[self.settings.objective](logits) * len(piece)
            if self.settings.reduction == "mean":
                loss = loss / len(inputs)
            if not loss.requires_grad:
                raise ValueError(
                    "the logits do not depend on what is adapted: the model's normalization layers are "
                    "not called, or its forward switches gradients off"
                )
            new = torch.autograd.grad(
                loss, list(values.values()), create_graph=differentiable, materialize_grads=True
            )
            seen.append(logits.detach())
            grads = [a + b for a, b in zip(grads, new, strict=True)] if grads else list(new)
        return torch.cat(seen), grads

    def unpack(self, variables: Variables) -> tuple[dict[str, Tensor], dict[str, Moments]]:
        """Values and moments by name."""
        size = 1 + self.optimizer.moments
        groups = [variables[i : i + size] for i in range(0, len(variables), size)]
        named = dict(zip(self.learning_rates, groups, strict=True))
        return {k: group[0] for k, group in named.items()}, {k: group[1:] for k, group in named.items()}

    def sizes(self, variables: Variables, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """The norm of Delta and the standard deviations of Sigma, for the trace."""
        values, _ = self.unpack(tuple(variable.detach() for variable in variables))
        blur = values.get("blur", self.static_blur(inputs))
        delta = values["delta"].norm(dim=1) if "delta" in values else inputs.new_zeros(1)
        return delta, inputs.new_zeros(1, 2) if blur is None else gaussian.deviations(blur)

    def static_blur(self, inputs: Tensor) -> Tensor | None:
        """The initial Sigma, or None where nothing is smoothed."""
        return None if self.settings.blur == "off" else self._blur(inputs, 1)

    def _blur(self, inputs: Tensor, rows: int) -> Tensor:
        exact = torch.promote_types(inputs.dtype, torch.float32)
        params = gaussian.initial(self.settings.sigma, self.settings.covariance, rows)
        return gaussian.bounded(params.to(inputs.device, exact), inputs.shape[2:])


def _pieces(value: Tensor, pieces: int) -> Sequence[Tensor]:
    """The rows that belong to each chunk of the batch: its own, or the one for all."""
    return value.chunk(pieces) if len(value) > 1 else [value] * pieces


def unrolled_update(
    method: Method,
    net: Shadow,
    borrow: Callable[[], AbstractContextManager[Shadow]],
    inputs: Tensor,
    variables: Variables,
    step: int,
) -> tuple[Tensor, Variables]:
    """`method.update` with a gradient to inputs and variables; backward computes it again.

    By then `net` serves another call, so backward borrows a shadow of its own.
    """
    logits, *after = _UnrolledUpdate.apply(method, net, borrow, step, inputs, *variables)  # type: ignore[no-untyped-call]
    return logits, tuple(after)


class _UnrolledUpdate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, method: Method, net: Shadow, borrow: Any, step: int, inputs: Tensor, *variables: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(inputs, *variables)
        ctx.method, ctx.borrow, ctx.step = method, borrow, step
        logits, after = method.update(net, inputs.detach(), variables, step)
        ctx.mark_non_differentiable(logits)
        return logits, *after

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        leaves = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
        with torch.enable_grad(), ctx.borrow() as net:
            inputs, *variables = leaves
            _, after = ctx.method.update(net, inputs, tuple(variables), ctx.step, differentiable=True)
            back = torch.autograd.grad(after, leaves, grads[1:], allow_unused=True)
        return None, None, None, None, *back
