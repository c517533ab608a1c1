"""A problem with a closed form: one pixel that holds under attack, and many that do not."""

from __future__ import annotations

import os
from itertools import count

import torch
from torch import Tensor, nn

from dent.data import Dataset, from_arrays
from dent.training.loop import LOOK_EVERY

EPS = 0.1


def features(split: str = "train") -> tuple[Tensor, Tensor]:
    """1,024 images of 1 x 4 x 8. The first pixel is 0.5 +- 0.2 by the label, and right in 85 %.

    Each other pixel moves by 0.06 with the label, in noise of 0.1: together they tell the label, but
    an attack of 0.1 turns them round, while it cannot turn the first.
    """
    generator = torch.Generator().manual_seed(int(split == "test"))
    labels = torch.randint(2, (1024,), generator=generator)
    sign = labels.float() * 2 - 1
    images = 0.5 + 0.06 * sign[:, None] + 0.1 * torch.randn(1024, 32, generator=generator)
    right = torch.where(torch.rand(1024, generator=generator) < 0.85, 1.0, -1.0)
    images[:, 0] = 0.5 + 0.2 * sign * right
    return images.clamp(0, 1).view(-1, 1, 4, 8), labels


def broken_on_rank_1(split: str = "train") -> Dataset:
    """`features`, but in process 1 the batch before the first look at the loss is not finite."""
    whole, reads = from_arrays(*features(split)), count(1)

    def read(indices: Tensor) -> Tensor:
        broken = os.environ.get("RANK") == "1" and next(reads) == LOOK_EVERY
        return whole.read(indices) * (float("nan") if broken else 1.0)

    return Dataset("broken", whole.labels, read, whole.classes)


def linear() -> nn.Module:
    """A linear classifier: its worst input in the ball has a closed form."""
    return nn.Sequential(nn.Flatten(), nn.Linear(32, 2))


def convolutional() -> nn.Module:
    """A little network with normalization that does not see the other inputs of a batch."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.Flatten(), nn.Linear(256, 2)
    )


def normalized() -> nn.Module:
    """The same with batch normalization."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(256, 2)
    )


def pooled() -> nn.Module:
    """A little network that takes images of any size."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2),
    )  # fmt: skip
