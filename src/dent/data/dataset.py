"""A data set: its labels, and a way to read any of its images."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class Dataset:
    """Labels in memory, images read as they are asked for.

    `read` takes indices (M,) and returns images as float32 in [0, 1], (M, C, H, W), so that memory
    need not grow with the data set.

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

    def batches(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Images and labels in order, `size` at a time."""
        for indices in torch.arange(len(self)).split(size):
            yield self.read(indices), self.labels[indices]

    def subset(self, indices: Tensor) -> Dataset:
        """The images at `indices`, in that order."""
        read = self.read
        return Dataset(
            self.name, self.labels[indices], lambda at: read(indices[at]), self.classes, self.source
        )

    def tensors(self) -> tuple[Tensor, Tensor]:
        """All images and labels at once."""
        return self.read(torch.arange(len(self))), self.labels
