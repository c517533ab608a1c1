"""Normalization of the input inside the model, so that attacks and data work in [0, 1]."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

CIFAR_MEAN, CIFAR_STD = (0.4914, 0.4822, 0.4465), (0.2471, 0.2435, 0.2616)
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

Values = float | Sequence[float]
Pair = tuple[Values, Values]  # mean and std


class Normalized(nn.Module):
    """A model that gets (inputs - mean) / std. Both are a number, or one for each channel.

    `mean` and `std` move with the model, but are not in its state dict. That has only what is learned,
    under `model.`, so it fits whether or not a checkpoint stored its normalization.

    `class_names` are the names of the outputs in their order, or None if they are not known.

    A model of timm knows the mean and std of its weights (`pretrained_cfg`). Others are refused.

    >>> Normalized(nn.Flatten(), mean=0.5, std=0.25)(torch.full((1, 1, 1, 1), 1.0))
    tensor([[2.]])
    """

    mean: Tensor
    std: Tensor
    class_names: tuple[str, ...] | None = None

    def __init__(self, model: nn.Module, mean: Values, std: Values) -> None:
        super().__init__()
        self.model = model
        if (own := find_own_normalization(model)) is not None:
            check_normalization((mean, std), own, source=type(model).__name__)
        means, stds = read_channels("mean", mean), read_channels("std", std)
        if len(means) != len(stds) and 1 not in (len(means), len(stds)):
            raise ValueError(
                f"expected as many means as stds, got {len(means)} and {len(stds)};"
                " give one for each channel"
            )
        self.register_buffer("mean", torch.tensor(means)[:, None, None], persistent=False)
        self.register_buffer("std", torch.tensor(stds)[:, None, None], persistent=False)

    @property
    def independent(self) -> bool | None:
        """Return what the model says of itself: True if no answer depends on the rest of the batch."""
        return getattr(self.model, "independent", None)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the model's logits of images (N, C, H, W) in [0, 1]."""
        expected = max(len(self.mean), len(self.std))
        if expected > 1 and inputs.shape[-3] != expected:  # else a gray image would become a color one
            raise ValueError(f"expected {expected} channels, got inputs {tuple(inputs.shape)}")
        return self.model((inputs - self.mean) / self.std)  # type: ignore[no-any-return]

    def extra_repr(self) -> str:
        mean, std = (
            [round(float(value), 4) for value in values.flatten()] for values in (self.mean, self.std)
        )
        return f"mean={mean}, std={std}"


class PerImageNormalized(nn.Module):
    """A model that gets each image minus its own mean, divided by its own standard deviation.

    Both are over all d values of the image. The deviation is at least 1 / sqrt(d), so that a constant
    image becomes zero.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    @property
    def independent(self) -> bool | None:
        """Return what the model says of itself: True if no answer depends on the rest of the batch."""
        return getattr(self.model, "independent", None)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the model's logits of images (N, C, H, W)."""
        variance, mean = torch.var_mean(inputs, (1, 2, 3), keepdim=True)
        # The bound is inside the root, so that the gradient of a constant image is finite.
        std = variance.clamp(min=1 / inputs.shape[1:].numel()).sqrt()
        return self.model((inputs - mean) / std)  # type: ignore[no-any-return]


def read_channels(kind: str, value: Values) -> list[float]:
    """Return `value` as one number for each channel. Raise ValueError if it is not.

    >>> read_channels("std", (0.5, 0.0))
    Traceback (most recent call last):
    ...
    ValueError: expected std as finite numbers above 0, one for each channel, got (0.5, 0.0)
    """
    wrong = ValueError(
        f"expected {kind} as finite numbers{' above 0' if kind == 'std' else ''},"
        f" one for each channel, got {value!r}"
    )
    try:
        values = [float(value)] if isinstance(value, int | float) else [float(item) for item in value]
    except (TypeError, ValueError):
        raise wrong from None
    if not values or not all(map(math.isfinite, values)) or (kind == "std" and min(values) <= 0):
        raise wrong
    return values


def find_own_normalization(model: nn.Module) -> Pair | None:
    """Return the mean and std that a model of timm was trained with (`pretrained_cfg`), or None."""
    known = getattr(model, "pretrained_cfg", None)
    if not isinstance(known, dict) or not known.get("mean") or not known.get("std"):
        return None
    return known["mean"], known["std"]


def describe_weights(model: nn.Module, mean: Values, std: Values) -> None:
    """Write the normalization of the weights that a model of timm has now into its `pretrained_cfg`."""
    if find_own_normalization(model) is not None:
        now = {"mean": read_channels("mean", mean), "std": read_channels("std", std)}
        model.pretrained_cfg = model.pretrained_cfg | now  # type: ignore[operator]


def check_normalization(given: Pair, own: Pair, *, source: str) -> None:
    """Raise ValueError if the given mean and std are not those that the weights were trained with.

    Wrong ones still give predictions, only worse ones, so nobody would notice.

    >>> check_normalization((0.5, 0.5), (0.4, 0.2), source="timm:resnet18")
    Traceback (most recent call last):
    ...
    ValueError: timm:resnet18 was trained with mean=0.4 and std=0.2, got mean=0.5 and std=0.5; leave \
them out, or, for a model of timm with other weights, \
model.pretrained_cfg.update(mean=..., std=...) first
    """
    if not (_is_close("mean", given[0], own[0]) and _is_close("std", given[1], own[1])):
        raise ValueError(
            f"{source} was trained with mean={own[0]} and std={own[1]}, got mean={given[0]} and"
            f" std={given[1]}; leave them out, or, for a model of timm with other weights,"
            " model.pretrained_cfg.update(mean=..., std=...) first"
        )


def _is_close(kind: str, given: Values, expected: Values) -> bool:
    """Return True if both are the same numbers, as people round them. One stands for all channels."""
    both = [read_channels(kind, values) for values in (given, expected)]
    count = max(map(len, both))
    if any(len(values) not in (1, count) for values in both):
        return False
    pairs = zip(*(values * (count // len(values)) for values in both), strict=True)
    return all(abs(one - other) <= 0.002 for one, other in pairs)
