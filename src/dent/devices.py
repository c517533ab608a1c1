"""Find the device that a name stands for, on this machine."""

from __future__ import annotations

import torch

from dent.texts import join_lines


def find_device(name: str) -> torch.device:
    """Return the device of a name such as cpu or cuda:1; raise ValueError if this machine has none.

    >>> find_device("cpu")
    device(type='cpu')
    >>> find_device("gpu")
    Traceback (most recent call last):
    ...
    ValueError: expected a device that this machine has, got 'gpu': Expected one of cpu, cuda, ...
    """
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:  # torch without CUDA asserts
        said = join_lines(error)
        raise ValueError(f"expected a device that this machine has, got {name!r}: {said}") from error
