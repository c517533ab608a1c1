"""Digests of models, images and code: what decides an answer, the same in every process."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import chain
from typing import Any
from uuid import uuid4

import numpy as np
import torch
from torch import Tensor, nn

from dent.data import Dataset

# Attributes of every module, which are digested by name or decide nothing.
_OWN_ATTRIBUTES = frozenset(vars(nn.Module())) - {"training"}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_THIS_PROCESS = uuid4().hex  # in digests of code that no other process can see


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
    return f"{getattr(named, '__module__', None)}.{named.__qualname__}"


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


def digest_object(value: Any) -> str:
    """Return the sha256 of an object or function: names and code, and all values that it holds.

    A function is told by its code, its defaults, and what that uses of its own module: constants, and
    other functions and classes. Code that has no file, such as that of an interactive session, is known
    in this process alone, and so is its digest.
    """
    digest = hashlib.sha256()
    for part in _describe_parts(value, {}):
        digest.update(part)
    return digest.hexdigest()


def _describe_parts(value: Any, seen: dict[int, Any]) -> Iterator[bytes]:
    """Yield bytes for a value and all that it holds. Objects are told by their class and attributes."""
    if id(value) in seen:
        return
    if _is_plain(value):
        yield describe(value)
        return
    seen[id(value)] = value  # kept, so that no other value gets its id
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield describe(str(key))
            yield from _describe_parts(item, seen)
    elif isinstance(value, list | tuple):
        yield f"{len(value)}".encode()
        for item in value:
            yield from _describe_parts(item, seen)
    elif isinstance(value, partial):
        yield from _describe_parts([value.func, value.args, value.keywords], seen)
    elif inspect.isclass(value):
        yield _describe_code(value)
    elif inspect.isroutine(value):
        function = inspect.unwrap(value)
        yield _describe_code(function)
        yield from _describe_parts(_list_captured(function), seen)
    else:
        yield _describe_code(type(value))
        if hasattr(value, "__dict__"):
            yield from _describe_parts({key: vars(value)[key] for key in sorted(vars(value))}, seen)
        else:
            yield describe(value)


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, str | bytes | bool | int | float | complex | Tensor)


def _list_captured(function: Any) -> list[Any]:
    """Return what a function holds beside its code: its object, defaults, and variables around it."""
    if _is_versioned(function):
        return []
    if inspect.ismethod(function):
        return [function.__self__, *_list_captured(function.__func__)]
    if not inspect.isfunction(function):
        return []
    around, module = inspect.getclosurevars(function), function.__module__
    own = {
        name: value
        for name, value in around.globals.items()
        if _is_plain(value) or (module and getattr(value, "__module__", None) == module)
    }
    return [function.__defaults__, function.__kwdefaults__, dict(around.nonlocals), own]


def _is_versioned(value: Any) -> bool:
    """Return True for code of a package whose version a run records, or that never changes."""
    module = getattr(value, "__module__", None) or ""
    return module.partition(".")[0] in ("dent", "torch", "numpy", "builtins")


def _describe_code(value: Any) -> bytes:
    """Return the name of a class or function, with its code if that is not of a versioned package."""
    code = []
    for one in getattr(value, "__mro__", (value,)):
        if _is_versioned(one):
            continue
        try:
            code.append(inspect.getsource(one))
        except (OSError, TypeError):  # TypeError: it is no Python code, and has no source
            is_python = inspect.isclass(one) or inspect.isfunction(one)
            code.append(_THIS_PROCESS if is_python else name_of(one))
    return "\n".join([name_of(value), *code]).encode()
