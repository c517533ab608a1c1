"""Where the linearised model passes from a class to another, and the shortest way there.

As in the fast adaptive boundary attack (Croce and Hein, 2020), within [0, 1] and in each norm.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial, reduce
from typing import NamedTuple

import torch
from torch import Tensor

from dent.attacks.calls import Calls, gradient_of
from dent.attacks.checks import check_answer
from dent.attacks.norms import lengths, like

DUAL = {"linf": "l1", "l2": "l2", "l1": "linf"}

NEWTON = 25  # steps at most; three or four are usual
LARGEST = 256  # normals that are tried first in L1, where few pixels go a long way


class Plane(NamedTuple):
    """Where the linearised model passes from a class to another, as seen from each point."""

    gaps: Tensor  # the logit of the class beyond, less the label's
    normals: Tensor  # the gradient of that


@dataclass
class Look:
    """The logits of points, with the graph that leads to them."""

    calls: Calls
    points: Tensor
    logits: Tensor
    rows: Tensor  # of the points, that the logits are of

    @classmethod
    def at(cls, points: Tensor, calls: Calls) -> Look:
        points = points.detach().requires_grad_()
        with torch.enable_grad():
            logits = calls.model(points)
        calls.queries += len(points)
        check_answer(logits, points, first=False)
        return cls(calls, points, logits, torch.arange(len(points), device=points.device))

    def keep(self, rows: Tensor) -> Look:
        with torch.enable_grad():
            return Look(self.calls, self.points, self.logits[rows], self.rows[rows])

    def plane(self, labels: Tensor, rivals: Tensor, norm: str) -> Plane:
        """The nearest of the boundaries between each label and its rivals."""
        with torch.enable_grad():
            gaps = self.logits.gather(1, rivals) - self.logits.gather(1, labels[:, None])
            return reduce(partial(_nearer, norm), self._planes(gaps))

    def _planes(self, gaps: Tensor) -> Iterator[Plane]:
        """One after the other, as the gradients of all at once may not fit."""
        for number, gap in enumerate(gaps.unbind(1), 1):
            total = (gap if self.calls.mask is None else gap[self.calls.mask]).sum()
            yield Plane(gap.detach().clone(), self.gradient(total, last=number == gaps.shape[1]))

    def gradient(self, total: Tensor, *, last: bool) -> Tensor:
        self.calls.gradients += len(self.points)
        gradient = gradient_of(total, self.points, keep_graph=not last)
        return gradient if len(self.rows) == len(gradient) else gradient[self.rows]


def _nearer(norm: str, one: Plane, other: Plane) -> Plane:
    distance, further = (
        plane.gaps.abs() / lengths(plane.normals, DUAL[norm]).flatten().clamp(min=1e-12)
        for plane in (other, one)
    )
    nearer = distance < further
    return Plane(
        torch.where(nearer, other.gaps, one.gaps),
        torch.where(like(nearer, one.normals), other.normals, one.normals),
    )


def to_hyperplane(points: Tensor, normals: Tensor, excess: Tensor, norm: str) -> Tensor:
    """The shortest move of each point within [0, 1] that lowers `normals . point` by its `excess`.

    Where even all of the room does not suffice, all of it is used. A value whose normal is zero stays.

    points: (K, N, d), K for each of the normals (N, d). excess: (K, N), on which side the point is and
    how far: `normals . point - b`.

    >>> points, normals = torch.tensor([[[0.5, 0.5]]]), torch.tensor([[1.0, -2.0]])
    >>> to_hyperplane(points, normals, torch.tensor([[0.3]]), "linf")
    tensor([[[-0.1000,  0.1000]]])
    """
    sizes = normals.abs()
    # Without units, a gradient of any size is as good as any other.
    scale = sizes.amax(-1, keepdim=True).clamp(min=torch.finfo(sizes.dtype).tiny)
    sizes, need = sizes / scale, excess[..., None].abs() / scale
    direction = normals.sign() * -excess[..., None].sign()
    room = torch.addcmul(direction.relu(), direction, points, value=-1)
    if norm == "l1":
        return direction * _greedy(sizes, room, need)
    if norm == "linf":
        return direction * _level(sizes, room, need)
    limits = room / sizes.clamp(min=torch.finfo(sizes.dtype).tiny)
    return direction * sizes * _level(sizes.square(), limits, need)


def _level(weights: Tensor, limits: Tensor, need: Tensor) -> Tensor:
    """min(level, limits), at the level where the sum of this times the weights is the need.

    That sum is concave and piecewise linear in the level. So Newton's method comes from below, and
    ends when it is on the right piece.
    """
    tolerance = 8 * torch.finfo(need.dtype).eps * need
    level = need / weights.sum(-1, keepdim=True).clamp(min=torch.finfo(need.dtype).tiny)
    moves, work = torch.empty_like(limits), torch.empty_like(limits)
    for _ in range(NEWTON):
        torch.minimum(limits, level, out=moves)
        missing = need - torch.mul(moves, weights, out=work).sum(-1, keepdim=True)
        short = missing > tolerance
        if not short.any():
            return moves
        slope = torch.gt(limits, level, out=work).mul_(weights).sum(-1, keepdim=True)
        # With no slope left, the level is infinite: all of the room.
        higher = torch.where(short, level + missing / slope, level)
        if torch.equal(higher, level):
            return moves
        level = higher
    return torch.minimum(limits, level, out=moves)


def _greedy(weights: Tensor, room: Tensor, need: Tensor) -> Tensor:
    """The room of the largest weights, as much as is needed."""
    d = room.shape[-1]
    count, within_reach = min(LARGEST, d), (weights * room).sum(-1, keepdim=True) > need
    while True:
        largest, order = weights.topk(count)
        order = order.expand(*room.shape[:-1], count)
        space = room.gather(-1, order)
        used = (largest * space).cumsum(-1)
        if count == d or not (within_reach & (used[..., -1:] < need)).any():
            break
        count = min(8 * count, d)
    left = (need - used + largest * space).clamp(min=0)
    moves = torch.minimum(left / largest.clamp(min=torch.finfo(left.dtype).tiny), space)
    return torch.where(within_reach, torch.zeros_like(room).scatter(-1, order, moves), room)
