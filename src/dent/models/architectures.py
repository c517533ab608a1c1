"""The architectures by name, each with its default normalization."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

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
from dent.models.preact import PreActResNet18, WideResNet
from dent.models.resnet import CifarResNet, ResNet50, resnet20
from dent.names import lookup


@dataclass(frozen=True)
class Architecture:
    """A network without weights: what makes it from `classes`, and its defaults."""

    make: Callable[..., nn.Module]
    summary: str
    classes: int = 10
    mean: Sequence[float] = CIFAR_MEAN
    std: Sequence[float] = CIFAR_STD


# Of the paper and of RobustBench; for images of 32 x 32 pixels unless the summary says otherwise.
MODELS: dict[str, Architecture] = {
    "resnet20": Architecture(resnet20, "ResNet-20 for 32 x 32 images (He et al., 2016)"),
    "resnet32": Architecture(
        partial(CifarResNet, 5, projection=False), "ResNet-32 for 32 x 32 images (He et al., 2016)"
    ),
    "resnet56": Architecture(
        partial(CifarResNet, 9, projection=False), "ResNet-56 for 32 x 32 images (He et al., 2016)"
    ),
    "resnet26-4": Architecture(
        partial(CifarResNet, 4, width=4), "ResNet-26-4, the network of the paper's ablations"
    ),
    "resnet32-10": Architecture(
        partial(CifarResNet, 5, width=10), "ResNet-32-10, the paper's larger network"
    ),
    "resnet18": Architecture(
        partial(CifarResNet, 2, stem=64, stages=4), "ResNet-18 for 32 x 32 images, as on RobustBench"
    ),
    "preact-resnet18": Architecture(
        PreActResNet18, "PreActResNet-18, as on RobustBench (Wong et al., 2020)"
    ),
    "preact-resnet18-bn": Architecture(
        partial(PreActResNet18, final_norm=True, normalized_shortcut=True),
        "PreActResNet-18, normalized before the final layer (Rice et al., 2020)",
    ),
    "wrn-28-4": Architecture(partial(WideResNet, 28, 4), "WRN-28-4 (Zagoruyko and Komodakis, 2016)"),
    "wrn-28-10": Architecture(partial(WideResNet, 28, 10), "WRN-28-10 (Zagoruyko and Komodakis, 2016)"),
    "wrn-34-10": Architecture(partial(WideResNet, 34, 10), "WRN-34-10 (Zagoruyko and Komodakis, 2016)"),
    "resnet50": Architecture(
        ResNet50, "ResNet-50 for ImageNet, as in torchvision", 1000, IMAGENET_MEAN, IMAGENET_STD
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
    return Normalized(entry.make(classes=classes), mean, std)


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
