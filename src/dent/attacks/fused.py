"""A faster copy of a static model: batch norms are fused into the convolutions before them.

In evaluation mode a batch norm scales and shifts each channel, and the weights of the convolution can do
that instead. The copy also uses channels last, and without a gradient its ReLUs work in place. Attacks
search on the copy. Its answers are compared with the model's first, and results are scored by the model.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_weights
from torch.overrides import TorchFunctionMode

from dent.attacks.search import Model

TOLERANCE = 1e-4  # of the largest logit


def fuse_batch_norm(model: Model, inputs: Tensor) -> Model:
    """Return a faster copy with the same answers to the inputs, or the model itself if there is none."""
    if not isinstance(model, nn.Module) or any(part.training for part in model.modules()):
        return model
    with torch.no_grad(), torch.autocast(inputs.device.type, enabled=False):
        for layout in (torch.channels_last, torch.contiguous_format):
            try:
                faster = FusedModel(model, inputs[:2], layout)
                if _are_close(faster(inputs), model(inputs)):
                    return faster
            except Exception:  # the copy cannot do what the model does, for whatever reason
                continue
    return model


class FusedModel:
    """A copy of a model with fused batch norms, in a memory layout."""

    def __init__(self, model: nn.Module, inputs: Tensor, layout: torch.memory_format) -> None:
        self.net = copy.deepcopy(model).requires_grad_(False)
        self.layout = layout
        expected = self.net(inputs)
        for convolution, norm in list(_find_pairs(self.net, inputs)):
            before = convolution.weight, convolution.bias
            assert norm.running_mean is not None
            assert norm.running_var is not None
            convolution.weight, convolution.bias = fuse_conv_bn_weights(
                *before, norm.running_mean, norm.running_var, norm.eps, norm.weight, norm.bias
            )
            identity = nn.Identity()
            _replace(self.net, norm, identity)
            # Undo it if the convolution's output is used elsewhere too.
            if not _are_close(self.net(inputs), expected):
                convolution.weight, convolution.bias = before
                _replace(self.net, identity, norm)
        self.net.requires_grad_(False)
        self.net.to(memory_format=layout)  # type: ignore[call-overload]
        self.protected = {tensor.data_ptr() for tensor in (*self.net.parameters(), *self.net.buffers())}
        # ReLUs work in place unless their input is used elsewhere too.
        self.overwrites = True
        self.overwrites = _are_close(self(inputs), expected)

    def __call__(self, points: Tensor) -> Tensor:
        points = points.contiguous(memory_format=self.layout)
        if self.overwrites and not torch.is_grad_enabled():
            with _InPlaceReLU(self.protected | {points.data_ptr()}):
                return self.net(points)  # type: ignore[no-any-return]
        return self.net(points)  # type: ignore[no-any-return]


class _InPlaceReLU(TorchFunctionMode):
    """Run ReLUs in place, which saves memory traffic, except on protected tensors."""

    def __init__(self, protected: set[int]) -> None:
        super().__init__()
        self.protected = protected

    def __torch_function__(
        self, function: Any, types: Any, arguments: Any = (), settings: Any = None
    ) -> Any:
        if function is F.relu and arguments[0].data_ptr() not in self.protected:
            return arguments[0].relu_()
        return function(*arguments, **(settings or {}))


def _are_close(answers: Tensor, expected: Tensor) -> bool:
    return torch.allclose(answers, expected, rtol=0, atol=TOLERANCE * float(expected.abs().max()))


def _replace(net: nn.Module, old: nn.Module, new: nn.Module) -> None:
    for parent in list(net.modules()):
        for name, child in list(parent.named_children()):
            if child is old:
                setattr(parent, name, new)


def _find_pairs(net: nn.Module, inputs: Tensor) -> Iterator[tuple[nn.Conv2d, nn.BatchNorm2d]]:
    """Yield each convolution whose output goes into a batch norm with statistics, both called once."""
    calls: list[tuple[nn.Module, Tensor, Tensor]] = []  # holds the tensors, so that their ids are unique

    def note_call(module: nn.Module, given: tuple[Tensor, ...], output: Tensor) -> None:
        calls.append((module, given[0], output))

    parts = [part for part in net.modules() if type(part) in (nn.Conv2d, nn.BatchNorm2d)]
    handles = [part.register_forward_hook(note_call) for part in parts]
    net(inputs)
    for handle in handles:
        handle.remove()
    modules = [module for module, _, _ in calls]
    sources = {id(output): module for module, _, output in calls}
    for module, given, _ in calls:
        source = sources.get(id(given))
        if not isinstance(source, nn.Conv2d) or not isinstance(module, nn.BatchNorm2d):
            continue
        if module.running_mean is not None and modules.count(source) == modules.count(module) == 1:
            yield source, module
