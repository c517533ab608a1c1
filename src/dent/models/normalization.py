"""Normalization of the input as a part of the model, so that attacks and data work in [0, 1]."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

CIFAR_MEAN, CIFAR_STD = (0.4914, 0.4822, 0.4465), (0.2471, 0.2435, 0.2616)
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class Normalized(nn.Module):
    """`model` on (inputs - mean) / std; a number, or one for each channel.

    `mean` and `std` move with the model, and are not part of its state dict: that one holds what is
    learned, under `model.`, and fits whether or not a checkpoint stored its normalization.

    >>> Normalized(nn.Flatten(), mean=0.5, std=0.25)(torch.full((1, 1, 1, 1), 1.0))
    tensor([[2.]])
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self, model: nn.Module, mean: float | Sequence[float], std: float | Sequence[float]
    ) -> None:
        super().__init__()
        self.model = model
        means, stds = channels("mean", mean), channels("std", std)
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
        """Images (N, C, H, W) in [0, 1] to what the model makes of them."""
        expected = max(len(self.mean), len(self.std))
        if expected > 1 and inputs.shape[-3] != expected:  # else a gray image would become a color one
            raise ValueError(f"expected {expected} channels, got inputs {tuple(inputs.shape)}")
        return self.model((inputs - self.mean) / self.std)  # type: ignore[no-any-return]

    def extra_repr(self) -> str:
        mean, std = (list(map(_short, values.flatten())) for values in (self.mean, self.std))
        return f"mean={mean}, std={std}"


class PerImageNormalized(nn.Module):
    """`model` on each image less its own mean, over its own standard deviation (of all d values).

    The deviation is taken to be at least 1 / sqrt(d), so that a constant image becomes zero.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    @property
    def independent(self) -> bool | None:
        """Return what the model says of itself: True if no answer depends on the rest of the batch."""
        return getattr(self.model, "independent", None)

    def forward(self, inputs: Tensor) -> Tensor:
        """Images (N, C, H, W) to what the model makes of them."""
        variance, mean = torch.var_mean(inputs, (1, 2, 3), keepdim=True)
        # The floor under the root, so that the gradient at a constant image is finite.
        std = variance.clamp(min=1 / inputs.shape[1:].numel()).sqrt()
        return self.model((inputs - mean) / std)  # type: ignore[no-any-return]


def channels(kind: str, value: float | Sequence[float]) -> list[float]:
    """`value` as one number for each channel, checked.

    >>> channels("std", (0.5, 0.0))
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


def _short(value: Tensor) -> float:
    return round(float(value), 4)
