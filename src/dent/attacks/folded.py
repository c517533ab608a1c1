"""The same static model, faster to search on: normalization folded into the convolutions before it.

In evaluation mode a batch normalization is a scale and a shift of each channel, which the convolution's
weights can take over. Convolutions on a CPU are faster in channels last, and small networks with the
batch in parts. Where no gradient is asked for, activations are written over what they were made from.
What comes out is compared with the model, and what is found is scored by the model itself.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_weights
from torch.overrides import TorchFunctionMode

from dent.attacks.calls import Model
from dent.attacks.parts import in_parts

CLOSE = 1e-4  # of the largest logit


def folded(model: Model, inputs: Tensor) -> Model:
    """A copy with the same answers to the inputs, or the model itself where none is found."""
    if not isinstance(model, nn.Module) or any(part.training for part in model.modules()):
        return model
    with torch.no_grad():
        for layout in (torch.channels_last, torch.contiguous_format):
            try:
                faster = _Folded(model, inputs[:2], layout)
                if _same(faster(inputs), model(inputs)):
                    return faster
            except Exception:  # whatever the model does that a copy cannot
                continue
    return model


class _Folded:
    def __init__(self, model: nn.Module, inputs: Tensor, layout: torch.memory_format) -> None:
        self.net = copy.deepcopy(model).requires_grad_(False)
        self.layout = layout
        expected = self.net(inputs)
        for convolution, norm in list(_pairs(self.net, inputs)):
            before = convolution.weight, convolution.bias
            assert norm.running_mean is not None
            assert norm.running_var is not None
            convolution.weight, convolution.bias = fuse_conv_bn_weights(
                *before, norm.running_mean, norm.running_var, norm.eps, norm.weight, norm.bias
            )
            identity = nn.Identity()
            _replace(self.net, norm, identity)
            # Not so where the convolution's output goes elsewhere too.
            if not _same(self.net(inputs), expected):
                convolution.weight, convolution.bias = before
                _replace(self.net, identity, norm)
        self.net.requires_grad_(False)
        self.net.to(memory_format=layout)  # type: ignore[call-overload]
        self.kept = {tensor.data_ptr() for tensor in (*self.net.parameters(), *self.net.buffers())}
        self.overwrites = True
        # Not so where what is activated is needed elsewhere too.
        self.overwrites = _same(self(inputs), expected)

    def __call__(self, points: Tensor) -> Tensor:
        return in_parts(self._answer, points.contiguous(memory_format=self.layout))

    def _answer(self, points: Tensor) -> Tensor:
        if self.overwrites and not torch.is_grad_enabled():
            with _Overwriting(self.kept | {points.data_ptr()}):
                return self.net(points)  # type: ignore[no-any-return]
        return self.net(points)  # type: ignore[no-any-return]


class _Overwriting(TorchFunctionMode):
    """Activations in place, but not of what is kept: memory that was just written is read faster."""

    def __init__(self, kept: set[int]) -> None:
        super().__init__()
        self.kept = kept

    def __torch_function__(
        self, function: Any, types: Any, arguments: Any = (), settings: Any = None
    ) -> Any:
        if function is F.relu and arguments[0].data_ptr() not in self.kept:
            return arguments[0].relu_()
        return function(*arguments, **(settings or {}))


def _same(answers: Tensor, expected: Tensor) -> bool:
    return torch.allclose(answers, expected, rtol=0, atol=CLOSE * float(expected.abs().max()))


def _replace(net: nn.Module, old: nn.Module, new: nn.Module) -> None:
    for parent in list(net.modules()):
        for name, child in list(parent.named_children()):
            if child is old:
                setattr(parent, name, new)


def _pairs(net: nn.Module, inputs: Tensor) -> Iterator[tuple[nn.Conv2d, nn.BatchNorm2d]]:
    """Convolutions whose output goes into a normalization: both called once, with known statistics."""
    made: dict[int, tuple[nn.Conv2d, Tensor]] = {}  # the tensor is kept, so that its id stays its own
    taken: list[tuple[nn.Module, Tensor]] = []

    def convolved(module: nn.Conv2d, _: tuple[Tensor, ...], output: Tensor) -> None:
        made[id(output)] = (module, output)
        taken.append((module, output))

    def normalized(module: nn.BatchNorm2d, given: tuple[Tensor, ...]) -> None:
        taken.append((module, given[0]))

    with _hooked(net, convolved, normalized):
        net(inputs)
    modules = [module for module, _ in taken]
    for module, given in taken:
        if isinstance(module, nn.BatchNorm2d) and module.running_mean is not None and id(given) in made:
            convolution = made[id(given)][0]
            if modules.count(convolution) == modules.count(module) == 1:
                yield convolution, module


@contextmanager
def _hooked(net: nn.Module, convolved: object, normalized: object) -> Iterator[None]:
    handles = []
    for module in net.modules():
        if type(module) is nn.Conv2d:
            handles.append(module.register_forward_hook(convolved))  # type: ignore[arg-type]
        elif type(module) is nn.BatchNorm2d:
            handles.append(module.register_forward_pre_hook(normalized))  # type: ignore[arg-type]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
