"""Pre-activation networks for 32 x 32 images, with RobustBench's keys: PreActResNet-18 and WRNs."""

from __future__ import annotations

from collections import OrderedDict

import torch.nn.functional as F
from torch import Tensor, nn

from dent.models.resnet import init_he


class PreActResNet18(nn.Module):
    """A stem and four stages of two blocks that normalize before each convolution (He et al., 2016).

    Published checkpoints differ in two ways that change the answers. `final_norm`: a normalization
    before the final layer. `normalized_shortcut`: the convolution of a shortcut gets the normalized
    input of the block, not the input itself. The keys of a checkpoint do not show the second one.
    """

    independent = True  # no answer depends on the rest of the batch

    def __init__(
        self, *, classes: int = 10, final_norm: bool = False, normalized_shortcut: bool = False
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
        self.layer1 = _stack_blocks(64, 64, 1, normalized_shortcut)
        self.layer2 = _stack_blocks(64, 128, 2, normalized_shortcut)
        self.layer3 = _stack_blocks(128, 256, 2, normalized_shortcut)
        self.layer4 = _stack_blocks(256, 512, 2, normalized_shortcut)
        self.bn = nn.BatchNorm2d(512) if final_norm else None
        self.linear = nn.Linear(512, classes)
        init_he(self)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the logits (N, classes) of images (N, 3, H, W)."""
        features = self.layer4(self.layer3(self.layer2(self.layer1(self.conv1(inputs)))))
        if self.bn is not None:
            features = F.relu(self.bn(features))
        return self.linear(features.mean((2, 3)))  # type: ignore[no-any-return]


class _PreActBlock(nn.Module):
    def __init__(self, channels: int, out: int, stride: int, normalized_shortcut: bool) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv1 = nn.Conv2d(channels, out, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.normalized_shortcut = normalized_shortcut
        self.shortcut: nn.Module | None = None
        if channels != out:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False))

    def forward(self, features: Tensor) -> Tensor:
        activated = F.relu(self.bn1(features))
        if self.shortcut is not None:
            features = self.shortcut(activated if self.normalized_shortcut else features)
        residual = self.conv2(F.relu(self.bn2(self.conv1(activated))))
        return features + residual  # type: ignore[no-any-return]


def _stack_blocks(channels: int, out: int, stride: int, normalized_shortcut: bool) -> nn.Sequential:
    first = _PreActBlock(channels, out, stride, normalized_shortcut)
    return nn.Sequential(first, _PreActBlock(out, out, 1, normalized_shortcut))


class WideResNet(nn.Module):
    """WRN-depth-width (Zagoruyko and Komodakis, 2016): a stem and three stages of blocks.

    `duplicate` adds a second first stage that is never called. Some published checkpoints have one,
    by a slip of their code, and a model that loads them key for key needs it too.
    """

    independent = True  # no answer depends on the rest of the batch

    def __init__(self, depth: int, width: int, *, classes: int = 10, duplicate: bool = False) -> None:
        super().__init__()
        if depth < 10 or (depth - 4) % 6:
            raise ValueError(f"expected a depth of 6k + 4 (10, 16, 22, 28, 34, ...), got {depth}")
        blocks = (depth - 4) // 6
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.block1 = _stack_wide_blocks(16, 16 * width, 1, blocks)
        if duplicate:
            self.sub_block1 = _stack_wide_blocks(16, 16 * width, 1, blocks)
        self.block2 = _stack_wide_blocks(16 * width, 32 * width, 2, blocks)
        self.block3 = _stack_wide_blocks(32 * width, 64 * width, 2, blocks)
        self.bn1 = nn.BatchNorm2d(64 * width)
        self.fc = nn.Linear(64 * width, classes)
        init_he(self)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the logits (N, classes) of images (N, 3, H, W)."""
        features = self.block3(self.block2(self.block1(self.conv1(inputs))))
        return self.fc(F.relu(self.bn1(features)).mean((2, 3)))  # type: ignore[no-any-return]


class _WideBlock(nn.Module):
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


def _stack_wide_blocks(channels: int, out: int, stride: int, blocks: int) -> nn.Sequential:
    first = _WideBlock(channels, out, stride)
    layer = nn.Sequential(first, *(_WideBlock(out, out, 1) for _ in range(blocks - 1)))
    return nn.Sequential(OrderedDict(layer=layer))  # keys: block1.layer.0.conv1.weight
