"""Data sets out of arrays: an `.npz` file, or what a function of the user returns."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dent.data.cache import opened_npz
from dent.data.dataset import Dataset
from dent.names import import_function

# The names under which an .npz may hold images and labels.
KEYS = (("images", "labels"), ("inputs", "labels"), ("data", "labels"), ("x", "y"))


def open_npz(path: str | Path) -> Dataset:
    """Images and labels under one of the pairs of `KEYS`; the names of classes, if any, as `classes`."""
    with opened_npz(Path(path)) as file:
        pair = next((pair for pair in KEYS if set(pair) <= set(file)), None)
        if pair is None:
            pairs = " or ".join(" and ".join(pair) for pair in KEYS)
            raise ValueError(f"expected {pairs}, got {', '.join(file) or 'nothing'}")
        images, labels = (file[key] for key in pair)
        classes = tuple(map(str, file["classes"])) if "classes" in file else None
    return from_arrays(images, labels, classes=classes, name=str(path), source=str(path))


def open_function(spec: str, *, split: str = "test") -> Dataset:
    """What `package.module:function` returns: images and labels, or a `Dataset`.

    The function is called with `split` if it takes one, else without arguments.
    """
    function = import_function(spec)
    takes_split = "split" in inspect.signature(function).parameters
    result = function(split=split) if takes_split else function()
    if isinstance(result, Dataset):
        return result
    if not isinstance(result, tuple | list) or len(result) != 2:
        raise ValueError(
            f"expected {spec} to return (images, labels) or a Dataset, got {type(result).__name__}"
        )
    return from_arrays(*result, name=spec, source=spec)


def from_arrays(
    images: Any,
    labels: Any,
    *,
    classes: tuple[str, ...] | None = None,
    name: str = "arrays",
    source: str = "memory",
) -> Dataset:
    """A data set of images in memory, checked.

    `images`: uint8, or float in [0, 1]; (N, C, H, W) or (N, H, W, C) with 1 or 3 channels.
    `labels`: whole numbers from 0, (N,).
    `classes`: their names; without, there are as many as the largest label says.

    >>> dataset = from_arrays(np.full((2, 4, 4, 3), 51, np.uint8), [0, 1])
    >>> dataset.read(torch.tensor([1])).shape, float(dataset.read(torch.tensor([1])).max())
    (torch.Size([1, 3, 4, 4]), 0.20000000298023224)
    """
    pixels = _checked_images(_tensor("images", images, name), name)
    numbers = _checked_labels(_tensor("labels", labels, name), len(pixels), name)
    count = int(numbers.max()) + 1
    if classes is not None and count > len(classes):
        raise ValueError(
            f"{name}: expected labels from 0 to {len(classes) - 1}, as many as classes, got {count - 1}"
        )

    def read(indices: Tensor) -> Tensor:
        chosen = pixels[indices]
        return chosen if chosen.is_floating_point() else chosen.float().div_(255)

    return Dataset(name, numbers, read, classes or tuple(map(str, range(count))), source)


def _tensor(what: str, values: Any, name: str) -> Tensor:
    if isinstance(values, Tensor):
        return values.detach().cpu()
    try:
        return torch.from_numpy(np.array(values))  # a copy: torch warns of arrays that are read-only
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}: expected numbers as {what}: {error}") from error


def _checked_images(images: Tensor, name: str) -> Tensor:
    shape = tuple(images.shape)
    if len(shape) != 4 or 0 in shape:
        raise ValueError(f"{name}: expected images (N, C, H, W) or (N, H, W, C), got {shape}")
    first, last = shape[1] in (1, 3), shape[3] in (1, 3)
    if first and last:
        raise ValueError(f"{name}: expected 1 or 3 channels either first or last, got both in {shape}")
    if not first and not last:
        raise ValueError(f"{name}: expected 1 or 3 channels, first or last, got images {shape}")
    if last:
        images = images.permute(0, 3, 1, 2)
    if images.dtype == torch.uint8:
        return images.contiguous()
    if not images.is_floating_point():
        raise ValueError(
            f"{name}: expected images as uint8, or float in [0, 1], got {images.dtype}; convert them"
        )
    images = images.float().contiguous()
    low, high = images.aminmax()
    if not torch.isfinite(low) or not torch.isfinite(high):
        raise ValueError(f"{name}: expected finite images, got NaN or infinity")
    if low < 0 or high > 1:
        raise ValueError(
            f"{name}: expected images in [0, 1], got {low:g} to {high:g}; normalization is the model's"
        )
    return images


def _checked_labels(labels: Tensor, count: int, name: str) -> Tensor:
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise ValueError(f"{name}: expected whole numbers as labels, got {labels.dtype}")
    if tuple(labels.shape) != (count,):
        raise ValueError(
            f"{name}: expected {count} labels, one for each image, got {tuple(labels.shape)}"
        )
    labels = labels.long()
    if labels.min() < 0:
        raise ValueError(f"{name}: expected labels from 0, got {int(labels.min())}")
    return labels
