"""How APGD walks (Croce and Hein, 2020 and 2021): the step, and the rule that sets its size.

One row for each input that is still in the search. `Momentum` is for Linf and L2, `Sparse` for L1.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Self

import torch
from torch import Tensor

from dent.attacks.norms import like, project, steepest

MOMENTUM = 0.75
RHO = 0.75  # the share of the steps since a checkpoint that must have increased the loss


@dataclass
class Walk:
    """Where the search is; without a rule."""

    at: Tensor  # the input's index in the batch
    moves: Tensor  # whether it may be perturbed
    center: Tensor
    points: Tensor
    gradient: Tensor
    best: Tensor  # the point of highest loss, and its gradient and loss
    best_gradient: Tensor
    best_values: Tensor
    step: Tensor

    def keep(self, stays: Tensor) -> Self:
        """The rows that stay."""
        return type(self)(**{row.name: getattr(self, row.name)[stays] for row in fields(self)})

    def move(self, *, eps: float, norm: str, first: bool) -> None:
        """One step along the gradient."""
        raise NotImplementedError

    def learn(self, values: Tensor, *, eps: float, gap: int | None) -> None:
        """Take in the loss after a step; at a checkpoint `gap` steps after the one before, the size."""
        raise NotImplementedError

    def remember(self, values: Tensor) -> None:
        """Keep the best point of each input."""
        better = (values > self.best_values).nonzero().squeeze(1)
        self.best[better] = self.points[better]
        self.best_gradient[better] = self.gradient[better]
        self.best_values[better] = values[better]

    def go_back(self, rows: Tensor) -> None:
        """Go on from the best points."""
        at = rows.nonzero().squeeze(1)
        self.points[at] = self.best[at]
        self.gradient[at] = self.best_gradient[at]


@dataclass
class Momentum(Walk):
    """Steps with momentum, halved where the loss stalls."""

    low: Tensor  # what a point's values can be, in the ball of any norm: for Linf, the ball itself
    high: Tensor
    old: Tensor  # the points before the last step
    values: Tensor  # the loss
    checked_values: Tensor  # the highest loss at the last checkpoint
    halved: Tensor  # whether the step was halved there
    rises: Tensor  # steps since then that increased the loss

    @classmethod
    def start(
        cls, at: Tensor, moves: Tensor, center: Tensor, points: Tensor, gradient: Tensor,
        values: Tensor, *, eps: float,
    ) -> Momentum:  # fmt: skip
        # The reference compares the first loss of a walk with zero, and so do we.
        zero, halved = torch.zeros_like(values), torch.ones_like(values, dtype=torch.bool)
        return cls(
            at, moves, center, points, gradient, points.clone(), gradient.clone(), values.clone(),
            torch.full_like(values, 2 * eps), (center - eps).clamp_(min=0), (center + eps).clamp_(max=1),
            points, zero, values, halved, zero,
        )  # fmt: skip

    @staticmethod
    def checkpoints(steps: int) -> dict[int, int]:
        """After how many steps the step size is looked at, and how many steps after the time before.

        >>> list(Momentum.checkpoints(100))
        [22, 41, 57, 70, 80, 87, 93, 99]
        """
        gap, done, found = max(int(0.22 * steps), 1), 0, {}
        while (done := done + gap) <= steps:
            found[done] = gap
            gap = max(gap - max(int(0.03 * steps), 1), max(int(0.06 * steps), 1))
        return found

    def move(self, *, eps: float, norm: str, first: bool) -> None:
        points = self.points
        ahead = torch.addcmul(points, like(self.step, points), steepest(self.gradient, norm))
        ahead = self._into_ball(ahead, eps=eps, norm=norm)
        if not first:
            ahead.lerp_(points, 1 - MOMENTUM).add_(points - self.old, alpha=1 - MOMENTUM)
            ahead = self._into_ball(ahead, eps=eps, norm=norm)
        self.old, self.points = points, _where(self.moves, ahead, self.center)

    def _into_ball(self, points: Tensor, *, eps: float, norm: str) -> Tensor:
        if norm == "linf":
            return points.clamp_(self.low, self.high)
        return project(points, self.center, eps=eps, norm=norm)

    def learn(self, values: Tensor, *, eps: float, gap: int | None) -> None:
        self.rises = self.rises + (values > self.values)
        self.remember(values)
        self.values = values
        if gap is None:
            return
        stalls = (self.rises <= RHO * gap) | (~self.halved & (self.checked_values >= self.best_values))
        self.step = torch.where(stalls, self.step / 2, self.step)
        self.go_back(stalls)
        self.halved, self.checked_values = stalls, self.best_values.clone()
        self.rises = torch.zeros_like(self.rises)


SPARSER, SHORTER, SHORTEST = 1.5, 1.5, 10  # of Croce and Hein (2021)


@dataclass
class Sparse(Walk):
    """Steps to the largest values of the gradient alone, fewer as the best perturbation gets sparser."""

    share: Tensor  # of the values that a step changes
    support: Tensor  # how many values the best perturbation changed at the last checkpoint

    @classmethod
    def start(
        cls, at: Tensor, moves: Tensor, center: Tensor, points: Tensor, gradient: Tensor,
        values: Tensor, *, eps: float,
    ) -> Sparse:  # fmt: skip
        support = (points != center).flatten(1).sum(1).to(values)
        return cls(
            at, moves, center, points, gradient, points.clone(), gradient.clone(), values.clone(),
            torch.full_like(values, eps), support / points[0].numel() / SPARSER, support,
        )  # fmt: skip

    @staticmethod
    def checkpoints(steps: int) -> dict[int, int]:
        """After how many steps the step size is looked at, and how many steps after the time before."""
        gap = max(int(0.04 * steps), 1)
        return dict.fromkeys(range(gap, steps + 1, gap), gap)

    def move(self, *, eps: float, norm: str, first: bool) -> None:
        size = self.gradient.abs().flatten(1)
        count = size.shape[1]
        rank = ((1 - self.share) * count).clamp(0, count - 1).long()
        least = size.sort(1).values.gather(1, rank[:, None])
        direction = self.gradient.sign() * (size >= least).view_as(self.gradient)
        changed = direction.abs().flatten(1).sum(1) + 1e-10
        ahead = self.points + like(self.step / changed, self.points) * direction
        ahead = project(ahead, self.center, eps=eps, norm=norm)
        self.points = _where(self.moves, ahead, self.center)

    def learn(self, values: Tensor, *, eps: float, gap: int | None) -> None:
        self.remember(values)
        if gap is None:
            return
        support = (self.best != self.center).flatten(1).sum(1).to(values)
        sparser = support / self.support < 0.95
        self.step = torch.where(sparser, eps, self.step / SHORTER).clamp(eps / SHORTEST, eps)
        self.go_back(sparser)
        self.share, self.support = support / self.points[0].numel() / SPARSER, support


def _where(moves: Tensor, points: Tensor, otherwise: Tensor) -> Tensor:
    return points if moves.all() else torch.where(moves, points, otherwise)
