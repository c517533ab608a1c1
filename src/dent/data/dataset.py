"""A data set: labels in memory, images read on request; from arrays, a file or a function."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.lib.npyio import NpzFile
from torch import Tensor

from dent.names import import_function

# The pairs of names under which an .npz file may store images and labels.
KEYS = (("images", "labels"), ("inputs", "labels"), ("data", "labels"), ("x", "y"))


@dataclass(frozen=True)
class Dataset:
    """Labels in memory, and a function that reads images, so that memory need not grow with the data.

    `read` takes indices (M,) and returns images as float32 in [0, 1], (M, C, H, W). `classes` are the
    class names in the order of the labels; data without names have "0", "1", and so on.

    >>> images = torch.rand(5, 3, 2, 2)
    >>> dataset = Dataset("random", torch.arange(5), images.__getitem__, classes=tuple("abcde"))
    >>> len(dataset), [len(labels) for _, labels in dataset.batches(2)]
    (5, [2, 2, 1])
    """

    name: str
    labels: Tensor
    read: Callable[[Tensor], Tensor] = field(repr=False)
    classes: tuple[str, ...] = field(repr=False)
    source: str = "memory"

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def has_names(self) -> bool:
        """True if the classes have names, not just numbers."""
        return self.classes != number_classes(len(self.classes))

    def batches(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield images and labels in order, `size` at a time."""
        for indices in torch.arange(len(self)).split(size):
            yield self.read(indices), self.labels[indices]

    def subset(self, indices: Tensor) -> Dataset:
        """Return the data set of the images at `indices`, in that order."""
        read = self.read
        return replace(self, labels=self.labels[indices], read=lambda at: read(indices[at]))

    def tensors(self) -> tuple[Tensor, Tensor]:
        """Return all images and labels."""
        return self.read(torch.arange(len(self))), self.labels

    def match_classes(self, classes: Sequence[str], *, owner: str) -> Dataset:
        """Return the data set with the labels that `owner`, a model or other data, has for its classes.

        Classes are matched by name, so data may have only some of them, in any order. Data without
        names keep their labels. Raise ValueError if some names, or another number of classes, do not
        match; warn if no name matches but the number does.

        >>> zoo = from_arrays(torch.zeros(2, 3, 2, 2), [0, 1], classes=("cat", "ox"))
        >>> zoo.match_classes(("ape", "cat", "dog", "ox"), owner="the model").labels
        tensor([1, 3])
        """
        classes = tuple(classes)
        if not self.has_names or self.classes == classes:
            return self
        number = {_simplify(name): index for index, name in enumerate(classes)}
        unknown = [name for name in self.classes if _simplify(name) not in number]
        if not unknown:
            order = torch.tensor([number[_simplify(name)] for name in self.classes])
            return replace(self, labels=order[self.labels], classes=classes)
        if len(unknown) == len(self.classes) == len(classes):
            warnings.warn(
                f"{owner} knows no class of {self.name} by its name ({list_some(self.classes)}; "
                f"expected {list_some(classes)}): the classes are taken in their order",
                stacklevel=2,
            )
            return self
        raise ValueError(
            f"expected {self.name} to have classes that {owner} knows ({list_some(classes)}), got "
            f"{list_some(unknown)}; rename or remove them"
        )

    def check_outputs(self, outputs: int, *, owner: str) -> None:
        """Raise ValueError if named classes cannot be those of a model with so many nameless outputs.

        The labels of a folder count its sub-folders, so a folder that lacks a class has wrong labels.
        """
        if self.has_names and len(self.classes) != outputs:
            raise ValueError(
                f"expected {outputs} classes in {self.name}, as many as {owner} has outputs, got "
                f"{len(self.classes)}, so it is not known which class belongs to which output; give the "
                "model its class names in order (model.class_names = [...]), or give the labels as "
                "numbers in an .npz file"
            )


def number_classes(count: int) -> tuple[str, ...]:
    """Return names for classes that have none: their numbers."""
    return tuple(map(str, range(count)))


def list_some(names: Sequence[str], most: int = 5) -> str:
    """Return the first names as text, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _simplify(name: str) -> str:
    return name.lower().replace("-", "_").replace(" ", "_")


@contextmanager
def load_archive(path: Path) -> Iterator[NpzFile]:
    """Open an .npz file without unpickling. Raise ValueError for any fault, also while it is read."""
    try:
        with path.open("rb") as file:  # np.load would leave a broken file open
            members = np.load(file, allow_pickle=False)
            if not isinstance(members, NpzFile):
                raise ValueError("expected an .npz archive, got a single array")
            yield members
    except Exception as error:  # a broken archive raises almost anything
        raise ValueError(f"{path} cannot be read: {error or type(error).__name__}") from error


def open_npz(path: str | Path) -> Dataset:
    """Return the images and labels of an .npz file, stored under one of the pairs in `KEYS`.

    The file may also have `classes`, the class names.
    """
    with load_archive(Path(path)) as file:
        pair = next((pair for pair in KEYS if set(pair) <= set(file)), None)
        if pair is None:
            pairs = " or ".join(" and ".join(pair) for pair in KEYS)
            raise ValueError(f"expected {pairs}, got {', '.join(file) or 'nothing'}")
        images, labels = (file[key] for key in pair)
        classes = tuple(map(str, file["classes"])) if "classes" in file else None
    return from_arrays(images, labels, classes=classes, name=str(path), source=str(path))


def open_function(spec: str, *, split: str = "test") -> Dataset:
    """Return the data that `package.module:function` returns: images and labels, or a `Dataset`.

    The function is called with `split` if it has such a parameter.
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
    """Return a data set of images in memory. Raise ValueError if they are no images with labels.

    images: uint8, or float in [0, 1]; (N, C, H, W) or (N, H, W, C) with 1 or 3 channels.
    labels: integers from 0, (N,).
    classes: class names (default: numbers, up to the largest label).

    >>> dataset = from_arrays(np.full((2, 4, 4, 3), 51, np.uint8), [0, 1])
    >>> dataset.read(torch.tensor([1])).shape, float(dataset.read(torch.tensor([1])).max())
    (torch.Size([1, 3, 4, 4]), 0.20000000298023224)
    """
    pixels = _check_images(_make_tensor("images", images, name), name)
    numbers = _check_labels(_make_tensor("labels", labels, name), len(pixels), name)
    count = int(numbers.max()) + 1
    if classes is not None and count > len(classes):
        raise ValueError(
            f"{name}: expected labels from 0 to {len(classes) - 1}, as many as classes, got {count - 1}"
        )

    def read(indices: Tensor) -> Tensor:
        chosen = pixels[indices]
        return chosen if chosen.is_floating_point() else chosen.float().div_(255)

    return Dataset(name, numbers, read, classes or number_classes(count), source)


def _make_tensor(what: str, values: Any, name: str) -> Tensor:
    if isinstance(values, Tensor):
        return values.detach().cpu()
    try:
        return torch.from_numpy(np.array(values))  # a copy: torch warns of arrays that are read-only
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}: expected numbers as {what}: {error}") from error


def _check_images(images: Tensor, name: str) -> Tensor:
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


def _check_labels(labels: Tensor, count: int, name: str) -> Tensor:
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
