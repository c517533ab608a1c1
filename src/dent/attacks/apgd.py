"""Auto-PGD (Croce and Hein, 2020; for L1, 2021): projected gradient ascent that sets its step size."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from functools import partial
from typing import ClassVar, Self

import torch
from torch import Tensor

from dent.attacks.checks import Eps, Labels, check_numbers, check_start, read_arguments
from dent.attacks.losses import IndexedLoss, make_loss
from dent.attacks.norms import lengths, project, sample_in_ball, steepest_direction, unsqueeze_like
from dent.attacks.search import AttackedModel, AttackResult, BestPoints, Model, View, begin
from dent.attacks.targets import rank_targets
from dent.seeds import make_generator

MOMENTUM = 0.75
RHO = 0.75  # the share of steps since a checkpoint that must increase the loss
# L1 starts in a larger ball, which shrinks: multiples of eps, and the share of the steps in each ball.
SHRINKING = ((3.0, 0.3), (2.0, 0.3), (1.0, 0.4))
SPARSER, SHORTER, SHORTEST = 1.5, 1.5, 10  # of L1: see `Sparse`


def apgd(
    model: Model,
    inputs: Tensor,
    labels: Labels,
    *,
    eps: Eps,
    norm: str = "linf",
    loss: str = "ce",
    steps: int = 100,
    step_size: float | None = None,
    start: Tensor | None = None,
    restarts: int = 1,
    towards: Tensor | None = None,
    draws: int = 1,
    through: View | None = None,
    joint: bool | None = None,
    mask: Tensor | None = None,
    seed: int = 0,
) -> AttackResult:
    """Increase the loss from a random point on the surface of the ball; halve the step when it stalls.

    A broken input leaves the search at once. Inputs that were not broken end at their point of highest
    loss, for transfer.

    step_size: of the first step; 2 eps, or eps for L1, if it is None.
    start: points to begin from, which are projected into the ball. Of several restarts the first begins
    there, and the others at random points.
    towards: (N,) the class that each input shall be classified as, instead of any wrong class.
    draws: the number of calls of a random model that are averaged in one step.
    through: a view of the model to take gradients of (`dent.attacks.adaptive`). Success is still the
    model's own.
    joint: True for a model that depends on the batch. Then every step submits the whole batch, and the
    result is the best of these submissions, or every input's best point if those break more together.
    If it is None, the model's attribute `independent` decides.
    mask: (N,) bool, the inputs that may be perturbed.

    >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 3))
    >>> inputs, labels = torch.full((2, 1, 2, 2), 0.5), torch.tensor([0, 1])
    >>> result = apgd(model, inputs, labels, eps=0.1, steps=10)
    >>> bool(((result.inputs - inputs).abs() <= 0.1 + 1e-6).all())
    True
    """
    labels, eps = read_arguments(inputs, labels, eps)
    loss_at = make_loss(loss, labels, towards)
    attacked, best, _ = begin(
        model, inputs, labels, eps=eps, norm=norm, steps=steps, restarts=restarts, towards=towards,
        draws=draws, through=through, joint=joint, mask=mask, step_size=step_size,
    )  # fmt: skip
    for restart in range(restarts):
        run_apgd(
            attacked, best, inputs.detach(), loss_at, eps=eps, norm=norm, steps=steps,
            step_size=step_size, start=start if restart == 0 else None,
            random=make_generator(seed, restart),
        )  # fmt: skip
    return best.submit(attacked)


def apgd_targeted(
    model: Model,
    inputs: Tensor,
    labels: Labels,
    *,
    eps: Eps,
    norm: str = "linf",
    targets: int | None = None,
    order: str = "logits",
    steps: int = 100,
    step_size: float | None = None,
    start: Tensor | None = None,
    restarts: int = 1,
    draws: int = 1,
    through: View | None = None,
    joint: bool | None = None,
    mask: Tensor | None = None,
    seed: int = 0,
) -> AttackResult:
    """Increase the targeted DLR loss towards each of the likeliest other classes in turn.

    Any wrong class is a success.

    targets: the number of classes; nine, or all other classes if there are fewer, if it is None.
    order: "logits", the likeliest classes; or "distance", those whose boundaries are nearest.
    The other settings are those of `apgd`.
    """
    check_numbers(targets=targets)
    labels, eps = read_arguments(inputs, labels, eps)
    attacked, best, logits = begin(
        model, inputs, labels, eps=eps, norm=norm, steps=steps, restarts=restarts,
        draws=draws, through=through, joint=joint, mask=mask, step_size=step_size,
    )  # fmt: skip
    inputs = inputs.detach()
    ranked = rank_targets(attacked, inputs, best.labels, logits, norm=norm, count=targets, order=order)
    for rank, classes in enumerate(ranked):
        loss_at = make_loss("dlr", best.labels, classes)
        for restart in range(restarts):
            run_apgd(
                attacked, best, inputs, loss_at, eps=eps, norm=norm, steps=steps, step_size=step_size,
                start=start if restart == 0 else None, random=make_generator(seed, restart, rank),
            )  # fmt: skip
    return best.submit(attacked)


def run_apgd(
    attacked: AttackedModel,
    best: BestPoints,
    inputs: Tensor,
    loss: IndexedLoss,
    *,
    eps: float,
    norm: str,
    steps: int,
    random: torch.Generator,
    step_size: float | None = None,
    start: Tensor | None = None,
) -> None:
    """Run APGD once for all inputs that are still open, and record what it finds in `best`."""
    if start is not None:
        check_start(start, inputs)
    if not len(best.list_open()):
        return
    if norm != "l1" or start is not None:  # a given point lies in the ball, which need not shrink
        if start is None:
            start = draw_start(inputs, eps=eps, norm=norm, random=random)
        else:
            start = project(start.detach().to(inputs), inputs, eps=eps, norm=norm)
        walk(attacked, best, inputs, start, loss, eps=eps, norm=norm, steps=steps, step_size=step_size)
        return
    points, left = draw_start(inputs, eps=SHRINKING[0][0] * eps, norm=norm, random=random), steps
    for factor, share in SHRINKING:
        last = factor == 1
        count = left if last else min(math.ceil(share * steps), left)
        left -= count
        points = project(points, inputs, eps=factor * eps, norm=norm)
        points = walk(
            attacked, best, inputs, points, loss, eps=factor * eps, norm=norm, steps=count,
            step_size=None if step_size is None else factor * step_size, counts=last,
        )  # fmt: skip


def draw_start(inputs: Tensor, *, eps: float, norm: str, random: torch.Generator) -> Tensor:
    """Draw a point on the surface of each input's ball, moved into [0, 1].

    Points are drawn for the whole batch, so that they do not depend on which inputs are still open.
    """
    if norm == "l1":
        noise = torch.randn(inputs.shape, generator=random).to(inputs)
        return project(inputs + noise, inputs, eps=eps, norm=norm)
    noise = sample_in_ball(inputs.shape, norm, random).to(inputs)
    return (inputs + eps * noise / lengths(noise, norm).clamp(min=1e-12)).clamp(0, 1)


def walk(
    attacked: AttackedModel,
    best: BestPoints,
    inputs: Tensor,
    start: Tensor,
    loss: IndexedLoss,
    *,
    eps: float,
    norm: str,
    steps: int,
    step_size: float | None = None,
    counts: bool = True,
) -> Tensor:
    """Take `steps` steps from `start`. Return each input's point of highest loss.

    counts: False while the ball is larger than allowed. Then nothing is recorded and no input leaves.
    """
    at, kind = best.list_open(), Sparse if norm == "l1" else Momentum
    ends, gaps = start.clone(), kind.checkpoints(steps)
    moves = unsqueeze_like(best.mask[at], inputs)
    points = torch.where(moves, start[at], inputs[at])
    answer = attacked.differentiate(points, partial(loss, at))
    step_size = kind.FIRST * eps if step_size is None else step_size
    rows = kind.start(
        at, moves, inputs[at], points, answer.gradient, answer.values, eps=eps, step_size=step_size
    )
    everyone = torch.ones_like(at, dtype=torch.bool)
    stays = best.update(at, points, answer) if counts else everyone
    for number in range(1, steps + 1):
        if not stays.any():
            break
        if not stays.all():
            rows = rows.select(stays)
        rows.move(eps=eps, norm=norm, first=number == 1)
        answer = attacked.differentiate(rows.points, partial(loss, rows.at))
        rows.gradient = answer.gradient
        stays = best.update(rows.at, rows.points, answer) if counts else everyone
        rows.update(answer.values, eps=eps, gap=gaps.get(number))
    ends[rows.at] = rows.best
    return ends


@dataclass
class Walk:
    """The state of the walk, one row for each input that is still open."""

    at: Tensor  # the input's index in the batch
    moves: Tensor  # True if the input may be perturbed
    center: Tensor
    points: Tensor
    gradient: Tensor
    best: Tensor  # the point of highest loss, with its gradient and loss
    best_gradient: Tensor
    best_values: Tensor
    step: Tensor

    def select(self, rows: Tensor) -> Self:
        """Return the walk with these rows only."""
        return type(self)(**{one.name: getattr(self, one.name)[rows] for one in fields(self)})

    def move(self, *, eps: float, norm: str, first: bool) -> None:
        """Take one step along the gradient."""
        raise NotImplementedError

    def update(self, values: Tensor, *, eps: float, gap: int | None) -> None:
        """Take in the loss after a step. At a checkpoint, `gap` steps after the last, set the step."""
        raise NotImplementedError

    def remember_best(self, values: Tensor) -> None:
        """Update the best points by the loss at the present points."""
        better = (values > self.best_values).nonzero().squeeze(1)
        self.best[better] = self.points[better]
        self.best_gradient[better] = self.gradient[better]
        self.best_values[better] = values[better]

    def return_to_best(self, rows: Tensor) -> None:
        """Continue these rows from their best points."""
        at = rows.nonzero().squeeze(1)
        self.points[at] = self.best[at]
        self.gradient[at] = self.best_gradient[at]


@dataclass
class Momentum(Walk):
    """For Linf and L2: steps with momentum, halved when the loss stalls."""

    FIRST: ClassVar[float] = 2.0  # the first step, as a multiple of eps

    low: Tensor  # bounds of each value: the whole ball for Linf, a box around it for L2
    high: Tensor
    old: Tensor  # the points before the last step
    values: Tensor  # the loss
    checked_values: Tensor  # the highest loss at the last checkpoint
    halved: Tensor  # True if the step was halved there
    rises: Tensor  # the number of steps since then that increased the loss

    @classmethod
    def start(
        cls, at: Tensor, moves: Tensor, center: Tensor, points: Tensor, gradient: Tensor,
        values: Tensor, *, eps: float, step_size: float,
    ) -> Momentum:  # fmt: skip
        # The reference compares the first loss of a walk with zero, and so do we.
        zero, halved = torch.zeros_like(values), torch.ones_like(values, dtype=torch.bool)
        return cls(
            at, moves, center, points, gradient, points.clone(), gradient.clone(), values.clone(),
            torch.full_like(values, step_size),
            (center - eps).clamp_(min=0), (center + eps).clamp_(max=1),
            points, zero, values, halved, zero,
        )  # fmt: skip

    @staticmethod
    def checkpoints(steps: int) -> dict[int, int]:
        """Return the steps after which the step size is checked, each with the steps since the last.

        >>> list(Momentum.checkpoints(100))
        [22, 41, 57, 70, 80, 87, 93, 99]
        """
        gap, done, gaps = max(int(0.22 * steps), 1), 0, {}
        while (done := done + gap) <= steps:
            gaps[done] = gap
            gap = max(gap - max(int(0.03 * steps), 1), max(int(0.06 * steps), 1))
        return gaps

    def move(self, *, eps: float, norm: str, first: bool) -> None:
        points = self.points
        direction = steepest_direction(self.gradient, norm)
        ahead = torch.addcmul(points, unsqueeze_like(self.step, points), direction)
        ahead = self._project(ahead, eps=eps, norm=norm)
        if not first:
            ahead.lerp_(points, 1 - MOMENTUM).add_(points - self.old, alpha=1 - MOMENTUM)
            ahead = self._project(ahead, eps=eps, norm=norm)
        self.old, self.points = points, _where(self.moves, ahead, self.center)

    def _project(self, points: Tensor, *, eps: float, norm: str) -> Tensor:
        if norm == "linf":
            return points.clamp_(self.low, self.high)
        return project(points, self.center, eps=eps, norm=norm)

    def update(self, values: Tensor, *, eps: float, gap: int | None) -> None:
        self.rises = self.rises + (values > self.values)
        self.remember_best(values)
        self.values = values
        if gap is None:
            return
        stalls = (self.rises <= RHO * gap) | (~self.halved & (self.checked_values >= self.best_values))
        self.step = torch.where(stalls, self.step / 2, self.step)
        self.return_to_best(stalls)
        self.halved, self.checked_values = stalls, self.best_values.clone()
        self.rises = torch.zeros_like(self.rises)


@dataclass
class Sparse(Walk):
    """For L1: steps along the largest values of the gradient, fewer as the best point gets sparser."""

    FIRST: ClassVar[float] = 1.0

    share: Tensor  # the share of the values that a step changes
    support: Tensor  # the number of values that the best perturbation changed at the last checkpoint

    @classmethod
    def start(
        cls, at: Tensor, moves: Tensor, center: Tensor, points: Tensor, gradient: Tensor,
        values: Tensor, *, eps: float, step_size: float,
    ) -> Sparse:  # fmt: skip
        support = (points != center).flatten(1).sum(1).to(values)
        return cls(
            at, moves, center, points, gradient, points.clone(), gradient.clone(), values.clone(),
            torch.full_like(values, step_size), support / points[0].numel() / SPARSER, support,
        )  # fmt: skip

    @staticmethod
    def checkpoints(steps: int) -> dict[int, int]:
        """Return the steps after which the step size is checked, each with the steps since the last."""
        gap = max(int(0.04 * steps), 1)
        return dict.fromkeys(range(gap, steps + 1, gap), gap)

    def move(self, *, eps: float, norm: str, first: bool) -> None:
        size = self.gradient.abs().flatten(1)
        count = size.shape[1]
        rank = ((1 - self.share) * count).clamp(0, count - 1).long()
        least = size.sort(1).values.gather(1, rank[:, None])
        direction = self.gradient.sign() * (size >= least).view_as(self.gradient)
        changed = direction.abs().flatten(1).sum(1) + 1e-10
        ahead = self.points + unsqueeze_like(self.step / changed, self.points) * direction
        ahead = project(ahead, self.center, eps=eps, norm=norm)
        self.points = _where(self.moves, ahead, self.center)

    def update(self, values: Tensor, *, eps: float, gap: int | None) -> None:
        self.remember_best(values)
        if gap is None:
            return
        support = (self.best != self.center).flatten(1).sum(1).to(values)
        sparser = support / self.support < 0.95
        self.step = torch.where(sparser, eps, self.step / SHORTER).clamp(eps / SHORTEST, eps)
        self.return_to_best(sparser)
        self.share, self.support = support / self.points[0].numel() / SPARSER, support


def _where(moves: Tensor, points: Tensor, otherwise: Tensor) -> Tensor:
    return points if moves.all() else torch.where(moves, points, otherwise)
