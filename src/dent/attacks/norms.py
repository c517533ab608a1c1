"""The balls that attacks live in: a step, a random point and the projection, for each norm."""

from __future__ import annotations

import torch
from torch import Tensor

from dent.names import lookup

# What is called an Lp norm, and its p.
NORMS: dict[str, float] = {"linf": float("inf"), "l2": 2.0}


def check_norm(norm: str) -> None:
    """Refuse a norm that is not known."""
    lookup("norm", norm, NORMS)


def lengths(differences: Tensor, norm: str) -> Tensor:
    """The norm of each difference, (N, 1, 1, 1) for (N, C, H, W).

    >>> lengths(torch.tensor([[[[3.0, -4.0]]]]), "l2").item()
    5.0
    """
    axes = list(range(1, differences.dim()))
    length: Tensor = torch.linalg.vector_norm(differences, NORMS[norm], dim=axes, keepdim=True)
    return length


def project(points: Tensor, inputs: Tensor, *, eps: float, norm: str) -> Tensor:
    """The points moved into the ball of `eps` around the inputs, and into [0, 1].

    Moving into [0, 1] brings a point nearer to an input that is there, so it stays in the ball.
    """
    differences = points - inputs
    if norm == "linf":
        differences = differences.clamp(-eps, eps)
    else:
        differences = differences * (eps / lengths(differences, norm).clamp(min=1e-12)).clamp(max=1)
    return (inputs + differences).clamp(0, 1)


def steepest(gradient: Tensor, norm: str) -> Tensor:
    """The direction of length one in which a linear function with this gradient grows most."""
    if norm == "linf":
        return gradient.sign()
    return gradient / lengths(gradient, norm).clamp(min=1e-12)


def random_in_ball(shape: torch.Size, norm: str, generator: torch.Generator) -> Tensor:
    """A point of the ball of radius one for each of shape[0] inputs, uniform in its volume.

    It is drawn on the CPU, so that every device starts from the same point.
    """
    if norm == "linf":
        return torch.rand(shape, generator=generator) * 2 - 1
    directions = steepest(torch.randn(shape, generator=generator), norm)
    radius = torch.rand(shape[0], generator=generator) ** (1 / shape[1:].numel())
    return directions * radius.view(-1, *[1] * (len(shape) - 1))
