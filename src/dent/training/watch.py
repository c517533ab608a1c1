"""When training has gone wrong, and what to tell."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Epoch:
    """What is known of one epoch: of its batches, and of the images that are watched after it."""

    epoch: int  # 1 for the first
    lr: float  # of its last update
    loss: float  # mean over its updates
    accuracy: float  # on what it trained on: natural or attacked images, as the recipe says
    natural: float  # accuracy on the watched images
    robust: float | None  # the same under PGD-10, of the recipe's radius
    fgsm: float | None  # the same under one step, as fast AT makes it
    seconds: float
    average_natural: float | None = None  # natural and robust accuracy of the averaged weights
    average_robust: float | None = None


class TrainingError(ValueError):
    """Training was stopped: it diverged or collapsed."""


# So many epochs in a row at chance are a fault, once the learning rate has risen to a tenth of its peak.
PATIENCE = 3


def fault(history: Sequence[Epoch], *, classes: int, watched: int, lr: float, fast: bool) -> str | None:
    """Why training should not go on after the last epoch of the history, or None.

    `watched` is the number of images that the accuracies come from, `lr` the recipe's highest learning
    rate, `fast` whether the attack in training has a single step, which a model can learn to answer
    without being robust.
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
