"""Balls of the norms Linf, L2 and L1: lengths, projection, steepest direction and random points."""

from __future__ import annotations

import torch
from torch import Tensor

# Each norm and its p.
NORMS: dict[str, float] = {"linf": float("inf"), "l2": 2.0, "l1": 1.0}
# The norm of a gradient that bounds how much a step of length one can change the function.
DUALS = {"linf": "l1", "l2": "l2", "l1": "linf"}


def unsqueeze_like(values: Tensor, points: Tensor) -> Tensor:
    """Return one value per point, (N,), in a shape that broadcasts with the points."""
    return values.view(-1, *[1] * (points.dim() - 1))


def lengths(differences: Tensor, norm: str) -> Tensor:
    """Return the norm of each difference, (N, 1, 1, 1) for (N, C, H, W).

    >>> lengths(torch.tensor([[[[3.0, -4.0]]]]), "l2").item()
    5.0
    """
    axes = list(range(1, differences.dim()))
    if norm == "linf":
        return differences.abs().amax(axes, keepdim=True)  # ten times as fast as vector_norm
    length: Tensor = torch.linalg.vector_norm(differences, NORMS[norm], dim=axes, keepdim=True)
    return length


def find_largest(points: Tensor, inputs: Tensor, norm: str) -> float:
    """Return the largest distance of a point from its input; 0 if there are none."""
    return float(lengths(points - inputs, norm).max()) if len(inputs) else 0.0


def project(points: Tensor, inputs: Tensor, *, eps: float, norm: str) -> Tensor:
    """Move the points into the ball of radius `eps` around the inputs, and into [0, 1].

    For Linf and L1 (`_shrink`) the result is the nearest point of both sets. For L2 it is the ball's
    nearest point clamped to [0, 1], which moves it closer to an input in [0, 1].
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
    """Return the nearest differences of L1 length at most `eps` that lead to points in [0, 1].

    Each value of size a becomes clip(a - cut, 0, room), where room is its distance to the border of
    [0, 1]. There is one cut per input, the one for which the sum of these values is eps. The sum is
    piecewise linear in the cut, so the cut lies between two of its corners.
    """
    size = differences.abs().flatten(1)
    room = torch.where(differences > 0, 1 - inputs, inputs).flatten(1)
    excess = torch.minimum(size, room).sum(1, keepdim=True) - eps
    corners, order = torch.cat([(size - room).clamp(min=0), size], 1).sort(1)
    slope = torch.where(order < size.shape[1], 1.0, -1.0).to(size).cumsum(1)
    fall = (slope[:, :-1] * corners.diff(dim=1)).cumsum(1)
    fall = torch.cat([torch.zeros_like(excess), fall], 1)  # the decrease of the sum at each corner
    corner = (torch.searchsorted(fall, excess) - 1).clamp(0, fall.shape[1] - 1)
    beyond = (excess - fall.gather(1, corner)) / slope.gather(1, corner).clamp(min=1)
    cut = torch.where(excess > 0, corners.gather(1, corner) + beyond, 0)
    kept = torch.minimum((size - cut).clamp(min=0), room)
    return differences.sign() * kept.view_as(differences)


def steepest_direction(gradient: Tensor, norm: str) -> Tensor:
    """Return the direction of length one in which a linear function with this gradient grows most.

    For L1 that is a single value, and an ascent that changes one value per step takes too long. So the
    step is shared by the largest hundredth of the values (as in Tramèr and Boneh, 2019).
    """
    if norm == "linf":
        return gradient.sign()
    if norm == "l2":
        return gradient / lengths(gradient, norm).clamp(min=1e-12)
    flat = gradient.flatten(1)
    count = max(flat.shape[1] // 100, 1)
    largest = torch.zeros_like(flat).scatter(1, flat.abs().topk(count).indices, 1.0 / count)
    return (flat.sign() * largest).view_as(gradient)


def sample_in_ball(shape: torch.Size, norm: str, generator: torch.Generator) -> Tensor:
    """Draw a uniform point of the unit ball for each of shape[0] inputs.

    Points are drawn on the CPU, so that every device gets the same ones.
    """
    if norm == "linf":
        return torch.rand(shape, generator=generator) * 2 - 1
    directions = torch.randn(shape, generator=generator)
    if norm == "l1":  # exponentially distributed sizes are uniform on the surface
        sizes = -torch.rand(shape, generator=generator).clamp(min=1e-30).log()
        directions = directions.sign() * sizes
    directions = directions / lengths(directions, norm)
    radius = torch.rand(shape[0], generator=generator) ** (1 / shape[1:].numel())
    return directions * unsqueeze_like(radius, directions)
