"""What is minimized and how: objectives of a batch of logits, and optimizers (section 3.2, appendix C).

An optimizer takes parameters, their gradient, the moments so far and the number of the step (from 1). It
returns new parameters and moments: a pure function of tensors, which can be differentiated through.
`torch.optim` changes parameters in place and cuts the graph, and no maintained library has a functional
AdaMod. The tests compare these functions with both.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

Moments = tuple[Tensor, ...]
Betas = tuple[float, float]

EPS = 1e-8  # of Adam and AdaMod


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


class Update(NamedTuple):
    params: Tensor
    moments: Moments


class Optimizer(NamedTuple):
    """The number of moments that an optimizer keeps, each zero at first, and its update."""

    moments: int
    update: Callable[..., Update]


def sgd(
    params: Tensor, grad: Tensor, moments: Moments, step: int, *, lr: float, momentum: float = 0.9
) -> Update:
    """Make a step of stochastic gradient descent with momentum.

    >>> sgd(torch.ones(1), torch.ones(1), (torch.zeros(1),), 1, lr=0.5).params
    tensor([0.5000])
    """
    velocity = momentum * moments[0] + grad
    return Update(params - lr * velocity, (velocity,))


def adam(
    params: Tensor, grad: Tensor, moments: Moments, step: int, *, lr: float, betas: Betas = (0.9, 0.999)
) -> Update:
    """Make a step of Adam (Kingma and Ba, 2015), the optimizer of dent.

    >>> moments = (torch.zeros(2), torch.zeros(2))
    >>> adam(torch.zeros(2), torch.tensor([3.0, -0.1]), moments, 1, lr=0.5).params
    tensor([-0.5000,  0.5000])
    """
    mean, square = _averages(grad, moments, betas)
    mean_correction, root_correction = _corrections(step, betas)
    denominator = _sqrt(square) / root_correction + EPS
    return Update(params - (lr / mean_correction) * mean / denominator, (mean, square))


def adamod(
    params: Tensor,
    grad: Tensor,
    moments: Moments,
    step: int,
    *,
    lr: float,
    betas: Betas = (0.99, 0.999),
    beta3: float = 0.6,
) -> Update:
    """Make a step of AdaMod (Ding et al., 2019), the optimizer of dent+.

    AdaMod is Adam with step sizes bounded by their running mean. That mean starts at zero without
    correction, so the first step moves by (1 - beta3) lr.

    >>> moments = (torch.zeros(1), torch.zeros(1), torch.zeros(1))
    >>> round(adamod(torch.zeros(1), torch.ones(1), moments, 1, lr=0.5).params.item(), 6)
    -0.2
    """
    mean, square = _averages(grad, moments[:2], betas)
    mean_correction, root_correction = _corrections(step, betas)
    size = lr * root_correction / mean_correction / (_sqrt(square) + EPS)
    mean_size = beta3 * moments[2] + (1 - beta3) * size
    return Update(params - torch.minimum(size, mean_size) * mean, (mean, square, mean_size))


def _averages(grad: Tensor, moments: Moments, betas: Betas) -> tuple[Tensor, Tensor]:
    mean, square = moments
    return betas[0] * mean + (1 - betas[0]) * grad, betas[1] * square + (1 - betas[1]) * grad * grad


def _corrections(step: int, betas: Betas) -> tuple[float, float]:
    return 1 - float(betas[0]) ** step, (1 - float(betas[1]) ** step) ** 0.5


def _sqrt(square: Tensor) -> Tensor:
    # A parameter that no prediction depends on (a layer that is never called) has square 0, where the
    # slope of the root is infinite. No gradient flows through its update.
    positive = square > 0
    return torch.where(positive, torch.where(positive, square, 1.0).sqrt(), 0.0)


OPTIMIZERS: dict[str, Optimizer] = {
    "adam": Optimizer(2, adam),
    "adamod": Optimizer(3, adamod),
    "sgd": Optimizer(1, sgd),
}
