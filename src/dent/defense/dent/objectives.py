"""What the defense minimizes: functions of a batch of logits (paper, section 3.2 and appendix C)."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor


def entropy(logits: Tensor) -> Tensor:
    """Shannon entropy of each prediction, from logits (N, C) to (N,), in nats.

    >>> round(entropy(torch.zeros(1, 4)).item() / math.log(4), 6)
    1.0
    """
    log_p = _log_softmax(logits)
    return -(log_p.exp() * log_p).sum(1)


def mean_entropy(logits: Tensor) -> Tensor:
    """Dent's objective: how unsure the predictions are, on average."""
    return entropy(logits).mean()


def information_maximization(logits: Tensor) -> Tensor:
    """Dent+'s objective: each prediction sure, the predictions of the batch diverse.

    Mean entropy minus the entropy of the mean prediction. The latter is taken through logsumexp, so
    that for a batch of one the two terms cancel to the bit, and so do their gradients: optimizers
    that divide by the gradient's size would make a full step out of rounding errors.

    >>> information_maximization(torch.randn(1, 10)).item()
    0.0
    """
    log_p = _log_softmax(logits)
    log_mean_p = log_p.logsumexp(0) - math.log(len(log_p))
    return -(log_p.exp() * log_p).sum(1).mean() + (log_mean_p.exp() * log_mean_p).sum()


def _log_softmax(logits: Tensor) -> Tensor:
    # Half precision has too few digits for a sum of small p log p.
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(1)


OBJECTIVES: dict[str, Callable[[Tensor], Tensor]] = {
    "entropy": mean_entropy,
    "information-maximization": information_maximization,
}
