"""Gradient descent as pure functions of tensors, so that an update can be differentiated through.

An update takes parameters, their gradient, the moments so far and the number of the step (from 1). It
returns new parameters and moments. `torch.optim` changes parameters in place and cuts the graph, and no
maintained library has a functional AdaMod. The tests compare these functions with both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

Moments = tuple[Tensor, ...]


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
    params: Tensor,
    grad: Tensor,
    moments: Moments,
    step: int,
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
) -> Update:
    """Make a step of Adam (Kingma and Ba, 2015), the optimizer of dent.

    >>> moments = (torch.zeros(2), torch.zeros(2))
    >>> adam(torch.zeros(2), torch.tensor([3.0, -0.1]), moments, 1, lr=0.5).params
    tensor([-0.5000,  0.5000])
    """
    mean, square = _averages(grad, moments, betas)
    mean_correction, root_correction = _corrections(step, betas)
    denominator = _sqrt(square) / root_correction + eps
    return Update(params - (lr / mean_correction) * mean / denominator, (mean, square))


def adamod(
    params: Tensor,
    grad: Tensor,
    moments: Moments,
    step: int,
    *,
    lr: float,
    betas: tuple[float, float] = (0.99, 0.999),
    beta3: float = 0.6,
    eps: float = 1e-8,
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
    size = lr * root_correction / mean_correction / (_sqrt(square) + eps)
    mean_size = beta3 * moments[2] + (1 - beta3) * size
    return Update(params - torch.minimum(size, mean_size) * mean, (mean, square, mean_size))


def _averages(grad: Tensor, moments: Moments, betas: tuple[float, float]) -> tuple[Tensor, Tensor]:
    mean, square = moments
    return betas[0] * mean + (1 - betas[0]) * grad, betas[1] * square + (1 - betas[1]) * grad * grad


def _corrections(step: int, betas: tuple[float, float]) -> tuple[float, float]:
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
