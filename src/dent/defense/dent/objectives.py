"""Objectives to minimize: functions of a batch of logits (section 3.2 and appendix C)."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor


def entropy(logits: Tensor) -> Tensor:
    """Return the Shannon entropy of each prediction, from logits (N, C) to (N,), in nats.

    >>> round(entropy(torch.zeros(1, 4)).item() / math.log(4), 6)
    1.0
    """
    log_p = _log_softmax(logits)
    return -(log_p.exp() * log_p).sum(1)


def mean_entropy(logits: Tensor) -> Tensor:
    """Return the mean entropy of the predictions, the objective of dent."""
    return entropy(logits).mean()


def information_maximization(logits: Tensor) -> Tensor:
    """Return mean entropy minus the entropy of the mean prediction, the objective of dent+.

    It wants each prediction sure and the predictions of a batch diverse. For a batch of one the terms
    cancel, and so must their gradients, to the bit: optimizers that divide by the size of the gradient
    would make a full step out of rounding errors. Hence logsumexp.

    Logarithms are exact. The authors add 1e-5 inside theirs, which changes the value by at most 1e-5 per
    class.

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
