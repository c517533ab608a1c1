"""Wide residual networks (Zagoruyko and Komodakis, 2016), with the key names of RobustBench."""

from __future__ import annotations

from collections import OrderedDict

import torch.nn.functional as F
from torch import Tensor, nn

from dent.models.resnet import he


class WideResNet(nn.Module):
    """WRN-depth-width: a stem and three stages of pre-activation blocks.

    `duplicate` adds a second first stage that is never called: some published checkpoints hold one
    (trained by code with that slip), and a model that loads them key for key has it as well.
    """

    independent = True  # no answer depends on the rest of the batch

    def __init__(self, depth: int, width: int, *, classes: int = 10, duplicate: bool = False) -> None:
        super().__init__()
        if depth < 10 or (depth - 4) % 6:
            raise ValueError(f"expected a depth of 6k + 4 (10, 16, 22, 28, 34, ...), got {depth}")
        blocks = (depth - 4) // 6
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.block1 = _stage(16, 16 * width, 1, blocks)
        if duplicate:
            self.sub_block1 = _stage(16, 16 * width, 1, blocks)
        self.block2 = _stage(16 * width, 32 * width, 2, blocks)
        self.block3 = _stage(32 * width, 64 * width, 2, blocks)
        self.bn1 = nn.BatchNorm2d(64 * width)
        self.fc = nn.Linear(64 * width, classes)
        he(self)

    def forward(self, inputs: Tensor) -> Tensor:
        """Images (N, 3, H, W) to logits (N, classes)."""
        features = self.block3(self.block2(self.block1(self.conv1(inputs))))
        return self.fc(F.relu(self.bn1(features)).mean((2, 3)))  # type: ignore[no-any-return]


class _Block(nn.Module):
    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv1 = nn.Conv2d(channels, out, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.convShortcut: nn.Module | None = None  # named so in every published checkpoint
        if channels != out:
            self.convShortcut = nn.Conv2d(channels, out, 1, stride, bias=False)

    def forward(self, features: Tensor) -> Tensor:
        activated = F.relu(self.bn1(features))
        if self.convShortcut is not None:
            features = self.convShortcut(activated)
        residual = self.conv2(F.relu(self.bn2(self.conv1(activated))))
        return features + residual  # type: ignore[no-any-return]


def _stage(channels: int, out: int, stride: int, blocks: int) -> nn.Sequential:
    first = _Block(channels, out, stride)
    layer = nn.Sequential(first, *(_Block(out, out, 1) for _ in range(blocks - 1)))
    return nn.Sequential(OrderedDict(layer=layer))  # keys: block1.layer.0.conv1.weight


def wrn_28_4(classes: int = 10) -> WideResNet:
    """WRN-28-4: 5.8 million parameters."""
    return WideResNet(28, 4, classes=classes)


def wrn_28_10(classes: int = 10) -> WideResNet:
    """WRN-28-10: 36.5 million parameters."""
    return WideResNet(28, 10, classes=classes)


def wrn_34_10(classes: int = 10) -> WideResNet:
    """WRN-34-10: 46.2 million parameters."""
    return WideResNet(34, 10, classes=classes)
