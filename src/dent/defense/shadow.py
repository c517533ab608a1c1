"""A private copy of a model's structure that shares its tensors, so that the model is never touched.

Adapting in place would need the model's mode, parameters and hooks put back afterwards, and could not
be done by two threads at once. A shadow has modules of its own (in evaluation mode, normalization
layers replaced) and borrows the tensors of the model for the time of a call, as constants.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dent.defense.checks import check_logits
from dent.defense.normalization import Site, is_normalization
from dent.defense.settings import Settings

_LOG = logging.getLogger("dent")
_HOOKS = [name for name in vars(nn.Module()) if name.endswith("_hooks")]


class Shadow:
    """The structure of `model`, with its normalization layers ready to be given Delta."""

    def __init__(self, model: nn.Module, settings: Settings, *, compile: bool = False) -> None:
        self.net = _copy_structure(model).eval()
        self.sites = [
            Site(name, layer, test_share=settings.test_share)
            for name, layer in self.net.named_modules()
            if is_normalization(layer)
        ]
        self._modules = list(zip(self.net.modules(), model.modules(), strict=True))
        self._compiled = torch.compile(self._forward, dynamic=False) if compile else None
        self.theta = torch.empty(0)  # the model's scales and shifts in one row: what Delta is added to
        self.channels_last = False
        self._checked = False
        self._compiled_for: set[torch.Size] = set()

    @contextmanager
    def bound(self, channels_last: bool) -> Iterator[Shadow]:
        """Hold the model's tensors, as they are now, for the time of a block."""
        self.channels_last, self._checked = channels_last, False
        try:
            for module, original in self._modules:
                cast = channels_last and isinstance(original, nn.Conv2d)
                parameters: dict[str, Any] = {
                    name: _constant(value, channels_last=cast)
                    for name, value in original._parameters.items()
                }
                # Not by setattr, which looks through all that a module has.
                vars(module)["_parameters"] = parameters
                vars(module)["_buffers"] = {
                    name: _constant(value) for name, value in original._buffers.items()
                }
            self.theta = self._flatten_theta()
            for site in self.sites:
                site.bind()
            yield self
        finally:
            for module, _ in self._modules:
                vars(module)["_parameters"] = dict.fromkeys(module._parameters)
                vars(module)["_buffers"] = dict.fromkeys(module._buffers)
            self.theta = torch.empty(0)
            for site in self.sites:
                site.release()

    def _flatten_theta(self) -> Tensor:
        values = [value.flatten() for value in self._own().values()]
        exact = torch.float32  # at least: in half precision small steps would be lost
        for value in values:
            exact = torch.promote_types(exact, value.dtype)
        return torch.cat([value.to(exact) for value in values]) if values else torch.empty(0)

    def split(self, rows: Tensor) -> dict[str, Tensor]:
        """Rows (n, parameters) as one tensor (n, *shape) for each scale and shift, by name."""
        own = self._own()
        pieces = torch.split(rows, [value.numel() for value in own.values()], 1)
        return {
            name: piece.reshape(len(rows), *value.shape)
            for (name, value), piece in zip(own.items(), pieces, strict=True)
        }

    def __call__(self, inputs: Tensor, delta: Tensor | None, *, eager: bool = False) -> Tensor:
        """Logits at theta + Delta, with Delta (1 or N, parameters) or None for the model itself."""
        if eager or self._compiled is None:
            return self._forward(inputs, delta)
        if inputs.shape not in self._compiled_for:
            self._compiled_for.add(inputs.shape)
            _LOG.warning(
                "compiling for inputs of shape %s; this call can take a minute, later ones are fast",
                tuple(inputs.shape),
            )
        return self._compiled(inputs, delta)

    def check_logits(self, logits: Tensor, inputs: Tensor) -> None:
        """Once per binding: that the model returns logits."""
        if not self._checked:
            check_logits(logits, inputs, type(self.net).__name__)
            self._checked = True

    def _forward(self, inputs: Tensor, delta: Tensor | None) -> Tensor:
        values = {} if delta is None else self.split(self.theta + delta)
        for site in self.sites:
            names = {name: _joined(site.name, name) for name in site.affine_names}
            site.adapted = {name: values[full] for name, full in names.items() if full in values}
        return self.net(inputs)  # type: ignore[no-any-return]

    def _own(self) -> dict[str, Tensor]:
        return {
            _joined(site.name, name): getattr(site.layer, name)
            for site in self.sites
            for name in site.affine_names
        }


def _copy_structure(model: nn.Module) -> nn.Module:
    """Copies of all modules and of what they hold, but not of tensors and hooks: those are shared."""
    shared: list[Any] = []
    for module in model.modules():
        shared += [value for value in vars(module).values() if isinstance(value, Tensor)]
        shared += [*module._parameters.values(), *module._buffers.values()]
        for hooks in _HOOKS:
            shared += vars(module).get(hooks, {}).values()
    try:
        return copy.deepcopy(model, {id(value): value for value in shared if value is not None})
    except Exception as error:
        raise TypeError(
            f"the structure of {type(model).__name__} cannot be copied ({error}); keep what is not part "
            "of the network (files, locks, generators) out of its modules"
        ) from error


def _constant(value: Tensor | None, *, channels_last: bool = False) -> Tensor | None:
    if value is None:
        return None
    value = value.detach()
    if value.is_inference() and not torch.is_inference_mode_enabled():
        value = value.clone()  # a tensor made in inference mode cannot take part in a graph
    if channels_last and value.dim() == 4:
        value = value.contiguous(memory_format=torch.channels_last)
    return value


def _joined(module: str, name: str) -> str:
    return f"{module}.{name}" if module else name
