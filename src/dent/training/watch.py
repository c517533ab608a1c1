"""What is measured after an epoch, and when training has gone wrong."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Epoch:
    """One epoch: means over its batches, and accuracies on the watched images after it."""

    epoch: int  # counted from 1
    lr: float  # of its last update
    loss: float  # mean over its updates
    accuracy: float  # on the batches as they were trained on, natural or attacked
    natural: float  # accuracy on the watched images
    robust: float | None  # the same under PGD-10 at the recipe's radius
    fgsm: float | None  # the same under one step, as in fast AT
    seconds: float
    average_natural: float | None = None  # natural and robust accuracy of the averaged weights
    average_robust: float | None = None


class TrainingError(ValueError):
    """Training was stopped because it diverged or collapsed."""


# Epochs in a row at chance that are a fault, once the learning rate has reached a tenth of its peak.
PATIENCE = 3


def find_fault(
    history: Sequence[Epoch], *, classes: int, watched: int, lr: float, fast: bool
) -> str | None:
    """Return why training should stop after the last epoch of `history`, or None.

    watched: number of images that the accuracies come from.
    lr: the recipe's highest learning rate.
    fast: True if the attack in training has one step, which a model can learn to answer without
    being robust.
    """
    last = history[-1]
    if not math.isfinite(last.loss):
        return f"the loss is {last.loss} after epoch {last.epoch}; lower lr or give it a warmup"
    chance = 1 / classes
    noise = 3 * math.sqrt(chance * (1 - chance) / watched)
    stuck = [epoch.natural <= chance + noise and epoch.lr >= lr / 10 for epoch in history[-PATIENCE:]]
    if len(stuck) == PATIENCE and all(stuck):
        return (
            f"natural accuracy is {last.natural:.1%} after epoch {last.epoch}, no better than chance "
            f"({chance:.1%}; {watched} images) for {PATIENCE} epochs; lower lr, or check labels and "
            "normalization"
        )
    if fast and last.robust is not None and last.fgsm is not None:
        best = max(epoch.robust or 0.0 for epoch in history)
        if best > chance and last.robust < best / 2 and last.fgsm > 2 * last.robust + noise:
            return (
                f"catastrophic overfitting: accuracy under PGD-10 fell from {best:.1%} to "
                f"{last.robust:.1%} in epoch {last.epoch} while it is {last.fgsm:.1%} under the single "
                "step of training; use more attack steps, a smaller step, a lower lr, or fewer epochs"
            )
    return None
