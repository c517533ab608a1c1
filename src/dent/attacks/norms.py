"""The balls that attacks live in: a step, a random point and the projection, for each norm."""

from __future__ import annotations

import torch
from torch import Tensor

# What is called an Lp norm, and its p.
NORMS: dict[str, float] = {"linf": float("inf"), "l2": 2.0, "l1": 1.0}


def like(values: Tensor, points: Tensor) -> Tensor:
    """One value for each point, in a shape that goes with the points."""
    return values.view(-1, *[1] * (points.dim() - 1))


def lengths(differences: Tensor, norm: str) -> Tensor:
    """The norm of each difference, (N, 1, 1, 1) for (N, C, H, W).

    >>> lengths(torch.tensor([[[[3.0, -4.0]]]]), "l2").item()
    5.0
    """
    axes = list(range(1, differences.dim()))
    if norm == "linf":
        return differences.abs().amax(axes, keepdim=True)  # vector_norm is ten times slower at that
    length: Tensor = torch.linalg.vector_norm(differences, NORMS[norm], dim=axes, keepdim=True)
    return length


def project(points: Tensor, inputs: Tensor, *, eps: float, norm: str) -> Tensor:
    """The points moved into the ball of `eps` around the inputs, and into [0, 1].

    For Linf the result is the nearest point of both sets, and for L1 too (`_shrink`). For L2 it is the
    ball's nearest point moved into [0, 1], which brings it nearer to an input that is there.
    """
    differences = points - inputs
    if norm == "l1":
        return inputs + _shrink(differences, inputs, eps)
    if norm == "linf":
        differences.clamp_(-eps, eps)
    else:
        differences.mul_((eps / lengths(differences, norm).clamp(min=1e-12)).clamp(max=1))
    return differences.add_(inputs).clamp_(0, 1)


def _shrink(differences: Tensor, inputs: Tensor, eps: float) -> Tensor:
    """The nearest differences of L1 length `eps` at most that lead to points in [0, 1].

    Each value of size a becomes clip(a - cut, 0, room), where room is what its direction has left to the
    border. The cut, one for each input, is where their sum is eps: the sum falls piecewise linearly
    with it, so the cut is found between two of its corners.
    """
    size = differences.abs().flatten(1)
    room = torch.where(differences > 0, 1 - inputs, inputs).flatten(1)
    excess = torch.minimum(size, room).sum(1, keepdim=True) - eps
    corners, order = torch.cat([(size - room).clamp(min=0), size], 1).sort(1)
    slope = torch.where(order < size.shape[1], 1.0, -1.0).to(size).cumsum(1)
    fall = (slope[:, :-1] * corners.diff(dim=1)).cumsum(1)
    fall = torch.cat([torch.zeros_like(excess), fall], 1)  # how far the sum has fallen at each corner
    corner = (torch.searchsorted(fall, excess) - 1).clamp(0, fall.shape[1] - 1)
    beyond = (excess - fall.gather(1, corner)) / slope.gather(1, corner).clamp(min=1)
    cut = torch.where(excess > 0, corners.gather(1, corner) + beyond, 0)
    kept = torch.minimum((size - cut).clamp(min=0), room)
    return differences.sign() * kept.view_as(differences)


def steepest(gradient: Tensor, norm: str) -> Tensor:
    """The direction of length one in which a linear function with this gradient grows most.

    For L1 that is one pixel alone, with which an ascent would take for ever; so the step goes to the
    largest hundredth of the values alike (as Tramèr and Boneh, 2019, do).
    """
    if norm == "linf":
        return gradient.sign()
    if norm == "l2":
        return gradient / lengths(gradient, norm).clamp(min=1e-12)
    flat = gradient.flatten(1)
    count = max(flat.shape[1] // 100, 1)
    largest = torch.zeros_like(flat).scatter(1, flat.abs().topk(count).indices, 1.0 / count)
    return (flat.sign() * largest).view_as(gradient)


def random_in_ball(shape: torch.Size, norm: str, generator: torch.Generator) -> Tensor:
    """A point of the ball of radius one for each of shape[0] inputs, uniform in its volume.

    It is drawn on the CPU, so that every device starts from the same point.
    """
    if norm == "linf":
        return torch.rand(shape, generator=generator) * 2 - 1
    directions = torch.randn(shape, generator=generator)
    if norm == "l1":  # on its surface, exponentially distributed sizes are uniform
        sizes = -torch.rand(shape, generator=generator).clamp(min=1e-30).log()
        directions = directions.sign() * sizes
    directions = directions / lengths(directions, norm)
    radius = torch.rand(shape[0], generator=generator) ** (1 / shape[1:].numel())
    return directions * like(radius, directions)
