"""Which numbers training computes in, and whether this machine computes in them well."""

from __future__ import annotations

import torch


def half_precision(device: torch.device, mixed_precision: bool | None) -> torch.dtype | None:
    """Return the half precision to train in, or None for float32 throughout.

    GPUs use it unless told otherwise. Processors use it only when asked: bfloat16 doubles the speed
    where the processor has instructions for it, and elsewhere is ten times slower or crashes.
    """
    wanted = device.type == "cuda" if mixed_precision is None else mixed_precision
    if not wanted:
        return None
    if device.type == "cuda" and not torch.cuda.is_bf16_supported():
        return torch.float16
    return torch.bfloat16


def has_bfloat16(device: torch.device) -> bool:
    """Return True unless `device` is a processor without bfloat16 instructions."""
    if device.type != "cpu":
        return True
    if hasattr(torch.cpu, "get_capabilities"):
        capabilities = torch.cpu.get_capabilities()
        # ARM processors name it `bf16`.
        return any(capabilities.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))
    return bool(torch.cpu._is_avx512_bf16_supported())  # torch before 2.12


def describe_arithmetic(device: torch.device, half: torch.dtype | None) -> str:
    """Return what decides the last bits of a training: precision, device and instructions.

    >>> describe_arithmetic(torch.device("cpu"), None).startswith("float32 on cpu")
    True
    """
    precision = "float32" if half is None else str(half).removeprefix("torch.")
    if device.type == "cpu":
        return f"{precision} on cpu with {torch.backends.cpu.get_cpu_capability()}"
    return f"{precision} on {torch.cuda.get_device_name(device)}"
