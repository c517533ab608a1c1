"""Residual networks for 32 x 32 images (He et al., 2016), narrow and wide, post-activation."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class CifarResNet(nn.Module):
    """A stem and three or four stages of basic blocks; every stage but the first halves the image.

    Where a block changes the shape, its shortcut is a 1x1 convolution with normalization, or
    (`projection=False`, only where the width does not change in the first stage) every second pixel
    with zero channels added on both sides.
    """

    independent = True  # no answer depends on the rest of the batch

    def __init__(
        self,
        blocks: int,
        *,
        width: int = 1,
        stem: int = 16,
        stages: int = 3,
        classes: int = 10,
        projection: bool = True,
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, stem, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(stem)
        channels, layers = stem, []
        for stage in range(stages):
            stage_blocks = []
            for block in range(blocks):
                stride = 2 if stage > 0 and block == 0 else 1
                stage_blocks.append(_Block(channels, stem * width * 2**stage, stride, projection))
                channels = stem * width * 2**stage
            layers.append(nn.Sequential(*stage_blocks))
        self.layer1, self.layer2, self.layer3, *fourth = layers
        self.layer4 = fourth[0] if fourth else nn.Identity()
        self.linear = nn.Linear(channels, classes)
        he(self)

    def forward(self, inputs: Tensor) -> Tensor:
        """Images (N, 3, H, W) to logits (N, classes)."""
        features = F.relu(self.bn1(self.conv1(inputs)))
        features = self.layer4(self.layer3(self.layer2(self.layer1(features))))
        return self.linear(features.mean((2, 3)))  # type: ignore[no-any-return]


class _Block(nn.Module):
    def __init__(self, channels: int, out: int, stride: int, projection: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.shortcut: nn.Module = nn.Identity()
        if channels != out and projection:
            conv = nn.Conv2d(channels, out, 1, stride, bias=False)
            self.shortcut = nn.Sequential(conv, nn.BatchNorm2d(out))
        elif channels != out:
            self.shortcut = _EverySecondPixel((out - channels) // 2)

    def forward(self, features: Tensor) -> Tensor:
        residual = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(features)))))
        return F.relu(residual + self.shortcut(features))


class _EverySecondPixel(nn.Module):
    def __init__(self, padding: int) -> None:
        super().__init__()
        self.padding = padding

    def forward(self, features: Tensor) -> Tensor:
        return F.pad(features[:, :, ::2, ::2], (0, 0, 0, 0, self.padding, self.padding))


def he(net: nn.Module) -> None:
    """Convolutions start as He et al. (2015) have it: the scale of gradients survives the depth."""
    for module in net.modules():
        # On the meta device there is nothing to draw, and torch would load its compiler for it.
        if isinstance(module, nn.Conv2d) and not module.weight.is_meta:
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


def resnet20(classes: int = 10) -> CifarResNet:
    """ResNet-20: 0.27 million parameters.

    >>> sum(p.numel() for p in resnet20().parameters())
    269722
    """
    return CifarResNet(3, classes=classes, projection=False)


def resnet32(classes: int = 10) -> CifarResNet:
    """ResNet-32: 0.46 million parameters.

    >>> sum(p.numel() for p in resnet32().parameters())
    464154
    """
    return CifarResNet(5, classes=classes, projection=False)


def resnet56(classes: int = 10) -> CifarResNet:
    """ResNet-56: 0.85 million parameters.

    >>> sum(p.numel() for p in resnet56().parameters())
    853018
    """
    return CifarResNet(9, classes=classes, projection=False)


def resnet26_4(classes: int = 10) -> CifarResNet:
    """ResNet-26-4, the network of the paper's ablations: 5.8 million parameters.

    >>> sum(p.numel() for p in resnet26_4().parameters())
    5849946
    """
    return CifarResNet(4, width=4, classes=classes)


def resnet32_10(classes: int = 10) -> CifarResNet:
    """ResNet-32-10, the paper's larger network: 46 million parameters."""
    return CifarResNet(5, width=10, classes=classes)


def resnet18(classes: int = 10) -> CifarResNet:
    """ResNet-18 for 32 x 32 images, as on RobustBench: 11.2 million parameters."""
    return CifarResNet(2, stem=64, stages=4, classes=classes)
