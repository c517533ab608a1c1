"""PreActResNet-18 for 32 x 32 images (He et al., 2016), in the two forms that RobustBench has."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from dent.models.resnet import he


class PreActResNet18(nn.Module):
    """A stem and four stages of two blocks that normalize before each convolution.

    Published checkpoints differ in two ways that matter: whether a normalization stands before the
    final layer (`final_norm`), and whether a shortcut's convolution takes a block's input as it
    comes or normalized (`normalized_shortcut`; this one is not seen in a checkpoint's keys).
    """

    independent = True  # no answer depends on the rest of the batch

    def __init__(
        self, *, classes: int = 10, final_norm: bool = False, normalized_shortcut: bool = False
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
        self.layer1 = _stage(64, 64, 1, normalized_shortcut)
        self.layer2 = _stage(64, 128, 2, normalized_shortcut)
        self.layer3 = _stage(128, 256, 2, normalized_shortcut)
        self.layer4 = _stage(256, 512, 2, normalized_shortcut)
        self.bn = nn.BatchNorm2d(512) if final_norm else None
        self.linear = nn.Linear(512, classes)
        he(self)

    def forward(self, inputs: Tensor) -> Tensor:
        """Images (N, 3, H, W) to logits (N, classes)."""
        features = self.layer4(self.layer3(self.layer2(self.layer1(self.conv1(inputs)))))
        if self.bn is not None:
            features = F.relu(self.bn(features))
        return self.linear(features.mean((2, 3)))  # type: ignore[no-any-return]


class _Block(nn.Module):
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


def _stage(channels: int, out: int, stride: int, normalized_shortcut: bool) -> nn.Sequential:
    first = _Block(channels, out, stride, normalized_shortcut)
    return nn.Sequential(first, _Block(out, out, 1, normalized_shortcut))


def preact_resnet18(classes: int = 10) -> PreActResNet18:
    """PreActResNet-18 of Wong et al. (2020): 11.2 million parameters."""
    return PreActResNet18(classes=classes)


def preact_resnet18_bn(classes: int = 10) -> PreActResNet18:
    """PreActResNet-18 of Rice et al. (2020), with a normalization before the final layer."""
    return PreActResNet18(classes=classes, final_norm=True, normalized_shortcut=True)
