"""ResNet-50 for ImageNet (He et al., 2016), with the key names of torchvision."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from dent.models.resnet import he


class ResNet50(nn.Module):
    """A 7x7 stem with pooling and four stages of 3, 4, 6 and 3 bottlenecks.

    The stride is in the 3x3 convolution of a bottleneck ("v1.5"), as in torchvision's checkpoints.
    """

    independent = True  # no answer depends on the rest of the batch

    def __init__(self, *, classes: int = 1000) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.layer1 = _stage(64, 64, 1, 3)
        self.layer2 = _stage(256, 128, 2, 4)
        self.layer3 = _stage(512, 256, 2, 6)
        self.layer4 = _stage(1024, 512, 2, 3)
        self.fc = nn.Linear(2048, classes)
        he(self)

    def forward(self, inputs: Tensor) -> Tensor:
        """Images (N, 3, H, W) to logits (N, classes)."""
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


def _stage(channels: int, width: int, stride: int, blocks: int) -> nn.Sequential:
    first = _Bottleneck(channels, width, stride)
    return nn.Sequential(first, *(_Bottleneck(4 * width, width, 1) for _ in range(blocks - 1)))


def resnet50(classes: int = 1000) -> ResNet50:
    """ResNet-50 for ImageNet: 25.6 million parameters."""
    return ResNet50(classes=classes)
