"""Half precision: whether a device has it, and a search that uses it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


def has_bfloat16(device: torch.device) -> bool:
    """Return True unless `device` is a processor without bfloat16 instructions."""
    if device.type != "cpu":
        return True
    if hasattr(torch.cpu, "get_capabilities"):
        capabilities = torch.cpu.get_capabilities()
        # ARM processors name it `bf16`.
        return any(capabilities.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))
    return bool(torch.cpu._is_avx512_bf16_supported())  # torch before 2.12


def refuse_slow_bfloat16(device: torch.device) -> None:
    """Raise ValueError if bfloat16 would be slower than float32, or crash."""
    if not has_bfloat16(device):
        raise ValueError(
            "expected a processor with bfloat16 instructions for mixed precision; this one has "
            "none, and would be many times slower or crash; leave --mixed-precision out"
        )


@contextmanager
def search_in_bfloat16(network: Any, device: torch.device, *, enabled: bool = True) -> Iterator[None]:
    """Compute in bfloat16 within, where torch holds this to be safe; logits of the network are float32.

    enabled: False computes in the precision of the inputs.

    >>> network = nn.Linear(2, 2)
    >>> with search_in_bfloat16(network, torch.device("cpu")):
    ...     network(torch.rand(1, 2)).dtype, (torch.rand(1, 2) @ network.weight).dtype
    (torch.float32, torch.bfloat16)
    """
    is_widened = enabled and isinstance(network, nn.Module)
    hooks = [network.register_forward_hook(_widen)] if is_widened else []
    try:
        with torch.autocast(device.type, torch.bfloat16, enabled=enabled):
            yield
    finally:
        for hook in hooks:
            hook.remove()


def _widen(network: nn.Module, arguments: Any, logits: Any) -> Any:
    """Return logits as float32: losses take differences of them, which bfloat16 would round away."""
    return logits.float() if isinstance(logits, Tensor) else logits
