"""What the defenses that move the inputs share: the gradient to the inputs, and the bounds of an image.

Their variable is the offset (N, ...) that is added to the inputs. It starts at zero. They need no layer
of any kind, and no input sees another.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dent.defense.defended import Network


def read_gradient(
    network: Network, objective: Callable[[Tensor], Tensor], points: Tensor, *, keep_graph: bool = False
) -> Tensor:
    """Return the gradient to the points of an objective, from logits (N, classes) to values (N,).

    keep_graph: let a later gradient go through it, to what the points depend on.
    """
    points = points if keep_graph else points.detach().requires_grad_()
    values = objective(network(points))
    if not values.requires_grad:
        raise ValueError(
            "expected logits that depend on the inputs with a gradient, got none; the model's forward "
            "switches gradients off"
        )
    return torch.autograd.grad(values.sum(), points, create_graph=keep_graph)[0]


def keep_in_image(inputs: Tensor, offset: Tensor) -> Tensor:
    """Return the offset, shortened where inputs + offset would leave [0, 1].

    >>> keep_in_image(torch.tensor([0.9, 0.5]), torch.tensor([0.3, 0.3]))
    tensor([0.1000, 0.3000])
    """
    return (inputs + offset).clamp(0, 1) - inputs
