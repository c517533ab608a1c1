"""What an attack returns."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class AttackResult:
    """The inputs of an attack, and how the model answered them when it was last asked."""

    inputs: Tensor  # (N, C, H, W), in the ball and in [0, 1]
    success: Tensor  # (N,) bool: misclassified (or, targeted, classified as the target)
    logits: Tensor  # (N, classes) of `inputs`
    queries: int  # forwards, in inputs
    gradients: int  # backwards, in inputs
