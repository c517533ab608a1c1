"""What no attack can start from is refused, before it starts."""

from __future__ import annotations

import torch
from torch import Tensor

from dent.attacks.norms import NORMS
from dent.names import lookup


def check_attack(
    inputs: Tensor,
    labels: Tensor,
    *,
    eps: float,
    norm: str,
    steps: int,
    step_size: float | None = None,
    restarts: int = 1,
    mask: Tensor | None = None,
) -> None:
    """Refuse inputs, labels and settings that have no meaning."""
    lookup("norm", norm, NORMS)
    if not 0 <= eps < float("inf"):
        raise ValueError(f"expected eps >= 0, got {eps}")
    if steps < 0:
        raise ValueError(f"expected steps >= 0, got {steps}")
    if step_size is not None and step_size <= 0:
        raise ValueError(f"expected step_size > 0, got {step_size}")
    if restarts < 1:
        raise ValueError(f"expected restarts >= 1, got {restarts}")
    if not inputs.is_floating_point():
        raise ValueError(f"expected float inputs, got {inputs.dtype}; divide images by 255")
    if labels.dim() != 1 or len(labels) != len(inputs):
        raise ValueError(
            f"expected a label for each of {len(inputs)} inputs, got labels {tuple(labels.shape)}"
        )
    if labels.is_floating_point() or labels.dtype == torch.bool:
        raise ValueError(f"expected whole numbers as labels, got {labels.dtype}")
    if mask is not None and (mask.dtype != torch.bool or mask.shape != labels.shape):
        raise ValueError(f"expected mask as {len(inputs)} bools, got {mask.dtype} {tuple(mask.shape)}")
    low, high = (float(bound) for bound in torch.aminmax(inputs)) if inputs.numel() else (0.0, 1.0)
    if not (low >= 0 and high <= 1):
        raise ValueError(
            f"expected inputs in [0, 1], got values from {low:g} to {high:g}; "
            "put normalization into the model"
        )
