"""An untrained network and images of noise, to measure cost, which depends on neither."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dent.models import build
from dent.seeds import make_generator, use_seed

SEED, BATCH = 0, 16  # the batch of the paper's Table 14


def resnet50() -> nn.Module:
    """Return a ResNet-50 for ImageNet with random weights, the same each time.

    >>> first, second = (next(resnet50().parameters()) for _ in range(2))
    >>> torch.equal(first, second)
    True
    """
    with use_seed(SEED):
        return build("resnet50")


def images() -> tuple[Tensor, Tensor]:
    """Return images of the size that the paper's Table 14 uses (appendix B)."""
    return _noise(288)


def small_images() -> tuple[Tensor, Tensor]:
    """Return images of 32 pixels, for machines without a GPU.

    >>> images, labels = small_images()
    >>> images.shape, labels.shape
    (torch.Size([16, 3, 32, 32]), torch.Size([16]))
    """
    return _noise(32)


def _noise(size: int) -> tuple[Tensor, Tensor]:
    random = make_generator(SEED)
    return torch.rand(BATCH, 3, size, size, generator=random), torch.zeros(BATCH, dtype=torch.long)
