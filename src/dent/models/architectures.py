"""The architectures by name, each with its default normalization."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from dent.models.normalization import (
    CIFAR_MEAN,
    CIFAR_STD,
    IMAGENET_MEAN,
    IMAGENET_STD,
    Normalized,
    Pair,
    Values,
)
from dent.models.preact import preact_resnet18, preact_resnet18_bn, wrn_28_4, wrn_28_10, wrn_34_10
from dent.models.resnet import (
    resnet18,
    resnet20,
    resnet26_4,
    resnet32,
    resnet32_10,
    resnet50,
    resnet56,
)  # fmt: skip
from dent.names import lookup


@dataclass(frozen=True)
class Architecture:
    """A network without weights: the function that makes it, and its defaults."""

    make: Callable[[int], nn.Module]
    summary: str
    classes: int = 10
    mean: Sequence[float] = CIFAR_MEAN
    std: Sequence[float] = CIFAR_STD


MODELS: dict[str, Architecture] = {
    "resnet20": Architecture(resnet20, "ResNet-20 for 32 x 32 images (He et al., 2016)"),
    "resnet32": Architecture(resnet32, "ResNet-32 for 32 x 32 images (He et al., 2016)"),
    "resnet56": Architecture(resnet56, "ResNet-56 for 32 x 32 images (He et al., 2016)"),
    "resnet26-4": Architecture(resnet26_4, "ResNet-26-4, the network of the paper's ablations"),
    "resnet32-10": Architecture(resnet32_10, "ResNet-32-10, the paper's larger network"),
    "resnet18": Architecture(resnet18, "ResNet-18 for 32 x 32 images, as on RobustBench"),
    "preact-resnet18": Architecture(
        preact_resnet18, "PreActResNet-18, as on RobustBench (Wong et al., 2020)"
    ),
    "preact-resnet18-bn": Architecture(
        preact_resnet18_bn, "PreActResNet-18, normalized before the final layer (Rice et al., 2020)"
    ),
    "wrn-28-4": Architecture(wrn_28_4, "WRN-28-4 (Zagoruyko and Komodakis, 2016)"),
    "wrn-28-10": Architecture(wrn_28_10, "WRN-28-10 (Zagoruyko and Komodakis, 2016)"),
    "wrn-34-10": Architecture(wrn_34_10, "WRN-34-10 (Zagoruyko and Komodakis, 2016)"),
    "resnet50": Architecture(
        resnet50, "ResNet-50 for ImageNet, as in torchvision", 1000, IMAGENET_MEAN, IMAGENET_STD
    ),
}


def build(
    architecture: str,
    *,
    classes: int | None = None,
    mean: Values | None = None,
    std: Values | None = None,
) -> Normalized:
    """Return a network with random weights, drawn by torch's current seed, and its normalization.

    classes: number of classes (default: 10, or 1000 for ImageNet).
    mean, std: normalization (default: that of CIFAR-10 or ImageNet).

    >>> model = build("resnet20", classes=4)
    >>> model(torch.rand(2, 3, 32, 32)).shape
    torch.Size([2, 4])
    """
    entry = lookup("architecture", architecture, MODELS)
    mean, std = check_pair(mean, std) or (entry.mean, entry.std)
    classes = entry.classes if classes is None else classes
    check_classes(classes)
    return Normalized(entry.make(classes), mean, std)


def check_classes(classes: int) -> None:
    """Raise ValueError if `classes` is no number of classes."""
    if not isinstance(classes, int) or isinstance(classes, bool) or classes < 1:
        raise ValueError(f"expected classes as a whole number of at least 1, got {classes!r}")


def check_pair(mean: Values | None, std: Values | None) -> Pair | None:
    """Return both, or None if neither was given. Raise ValueError if only one was given."""
    if mean is None and std is None:
        return None
    if mean is None or std is None:
        raise ValueError(f"expected both mean and std, or neither, got mean={mean!r}, std={std!r}")
    return mean, std


def count_parameters(make: Callable[[], nn.Module]) -> int:
    """Return the number of parameters of a network, without allocating them.

    >>> count_parameters(resnet20)
    269722
    """
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in make().parameters())
