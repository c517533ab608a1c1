"""Digests of models and images: what decides an answer, the same in every process."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dent.data import Dataset

# Attributes of every module, which are digested by name or decide nothing.
_OWN_ATTRIBUTES = frozenset(vars(nn.Module())) - {"training"}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


def digest_model(model: nn.Module) -> str:
    """Return the sha256 of all that decides a model's answers.

    That is: parameters, all buffers (also those that no state dict has), and for each module its class,
    its plain attributes (`eps`, `stride`), its hooks and tensors that are neither. What functions do
    is not digested, only their names are.

    >>> two, three = nn.BatchNorm1d(2), nn.BatchNorm1d(3)
    >>> digest_model(two) == digest_model(nn.BatchNorm1d(2)) != digest_model(three)
    True
    """
    digest = hashlib.sha256(_describe_tensors(model))
    for name, module in model.named_modules(remove_duplicate=False):
        digest.update(f"{name} {name_of(type(module))} {module.extra_repr()}".encode())
        own = {key: value for key, value in vars(module).items() if key not in _OWN_ATTRIBUTES}
        own |= {key: list(getattr(module, key).values()) for key in _HOOKS}
        digest.update(describe(own))
    return digest.hexdigest()


def _describe_tensors(model: nn.Module) -> bytes:
    tensors = chain(model.named_parameters(), model.named_buffers())
    return b" ".join(name.encode() + b" " + describe(tensor) for name, tensor in tensors)


def describe(value: Any) -> bytes:
    """Return bytes that are the same in every process, and differ where the value does, if known."""
    if isinstance(value, Tensor):
        plain = value.detach().cpu().contiguous().flatten()
        content = plain.view(torch.uint8).numpy().tobytes()
        return f"{value.dtype} {tuple(value.shape)} ".encode() + content
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {value.shape} ".encode() + value.tobytes()
    if isinstance(value, Mapping):
        return describe(list(value.items()))
    if isinstance(value, list | tuple):
        return b"[%s]" % b", ".join(map(describe, value))
    if isinstance(value, set | frozenset):
        return b"{%s}" % b", ".join(sorted(map(describe, value)))
    if isinstance(value, partial):
        return describe([value.func, value.args, value.keywords])
    if isinstance(value, nn.Module):  # one that is not registered
        return name_of(value).encode() + _describe_tensors(value)
    text = repr(value)
    return (text if " at 0x" not in text else name_of(value)).encode()


def name_of(value: Any) -> str:
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"


def digest_data(dataset: Dataset, progress: Callable[[int, int], None] | None = None) -> str:
    """Return the sha256 of all images and labels; raise ValueError if an image leaves [0, 1]."""
    digest, done = hashlib.sha256(), 0
    for images, labels in dataset.batches(256):
        low, high = (float(bound) for bound in torch.aminmax(images))
        if not (low >= 0 and high <= 1):
            raise ValueError(
                f"{dataset.name}: expected images in [0, 1], got {low:g} to {high:g}; normalization is "
                "the model's"
            )
        for values in (images, labels):
            digest.update(values.contiguous().numpy().tobytes())
        done += len(labels)
        if progress:
            progress(done, len(dataset))
    return digest.hexdigest()
