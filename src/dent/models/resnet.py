"""Residual networks (He et al., 2016): for 32 x 32 images, narrow and wide, and ResNet-50."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class CifarResNet(nn.Module):
    """A stem and three or four stages of basic blocks. Every stage but the first halves the image.

    Where a block changes the shape, its shortcut is a 1x1 convolution with normalization. With
    `projection=False` (only for networks whose first stage does not change the width) it is every
    second pixel, with zero channels added on both sides.
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
        init_he(self)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the logits (N, classes) of images (N, 3, H, W)."""
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
        # The gradient of pooling keeps channels last. That of a slice does not, which makes ReLUs slow.
        every_second = F.avg_pool2d(features, 1, stride=2)
        return F.pad(every_second, (0, 0, 0, 0, self.padding, self.padding))


def init_he(net: nn.Module) -> None:
    """Draw the weights of convolutions as He et al. (2015), so that gradients keep their scale."""
    for module in net.modules():
        # On the meta device there is nothing to draw, and torch would load its compiler to do so.
        if isinstance(module, nn.Conv2d) and not module.weight.is_meta:
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


def resnet20(classes: int = 10) -> CifarResNet:
    """ResNet-20: 0.27 million parameters.

    >>> sum(p.numel() for p in resnet20().parameters())
    269722
    """
    return CifarResNet(3, classes=classes, projection=False)


class ResNet50(nn.Module):
    """A 7x7 stem with pooling and four stages of 3, 4, 6 and 3 bottlenecks, with torchvision's keys.

    The stride is in the 3x3 convolution of a bottleneck ("v1.5"), as in torchvision's checkpoints.
    """

    independent = True  # no answer depends on the rest of the batch

    def __init__(self, *, classes: int = 1000) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.layer1 = _stack_bottlenecks(64, 64, 1, 3)
        self.layer2 = _stack_bottlenecks(256, 128, 2, 4)
        self.layer3 = _stack_bottlenecks(512, 256, 2, 6)
        self.layer4 = _stack_bottlenecks(1024, 512, 2, 3)
        self.fc = nn.Linear(2048, classes)
        init_he(self)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the logits (N, classes) of images (N, 3, H, W)."""
        features = F.max_pool2d(F.relu(self.bn1(self.conv1(inputs))), 3, 2, padding=1)
        features = self.layer4(self.layer3(self.layer2(self.layer1(features))))
        return self.fc(features.mean((2, 3)))  # type: ignore[no-any-return]


class _Bottleneck(nn.Module):
    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * width)
        self.downsample: nn.Module | None = None
        if channels != 4 * width:
            conv = nn.Conv2d(channels, 4 * width, 1, stride, bias=False)
            self.downsample = nn.Sequential(conv, nn.BatchNorm2d(4 * width))

    def forward(self, features: Tensor) -> Tensor:
        residual = F.relu(self.bn1(self.conv1(features)))
        residual = self.bn3(self.conv3(F.relu(self.bn2(self.conv2(residual)))))
        if self.downsample is not None:
            features = self.downsample(features)
        return F.relu(residual + features)


def _stack_bottlenecks(channels: int, width: int, stride: int, blocks: int) -> nn.Sequential:
    first = _Bottleneck(channels, width, stride)
    return nn.Sequential(first, *(_Bottleneck(4 * width, width, 1) for _ in range(blocks - 1)))
