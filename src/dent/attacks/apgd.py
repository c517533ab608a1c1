"""Auto-PGD (Croce and Hein, 2020): projected gradient ascent that sets its own step size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial

import torch
from torch import Tensor

from dent.attacks.calls import Calls, Model
from dent.attacks.checks import check_attack
from dent.attacks.found import Found
from dent.attacks.losses import LOSSES, targeted_dlr
from dent.attacks.norms import lengths, like, project, random_in_ball, steepest
from dent.attacks.result import AttackResult
from dent.names import lookup
from dent.seeds import generator

NORMS = {"linf": "Linf", "l2": "L2"}
MOMENTUM = 0.75
RHO = 0.75  # the share of the steps since a checkpoint that must have increased the loss


def apgd(
    model: Model,
    inputs: Tensor,
    labels: Tensor,
    *,
    eps: float,
    norm: str = "linf",
    loss: str = "ce",
    steps: int = 100,
    restarts: int = 1,
    joint: bool = False,
    mask: Tensor | None = None,
    seed: int = 0,
) -> AttackResult:
    """Ascend the loss from a random point on the surface of the ball; halve the step where it stalls.

    Where an input's output does not depend on the others, a broken input leaves the search at once. For
    models that depend on the batch, `joint=True` keeps the batch together: every step is a submission of
    it, and the result is the best of these, or each input's best point where these do more together.
    `mask` (N,) says which inputs may be perturbed. Inputs that were not broken end at their point of
    highest loss, for transfer.

    >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 3))
    >>> inputs, labels = torch.full((2, 1, 2, 2), 0.5), torch.tensor([0, 1])
    >>> result = apgd(model, inputs, labels, eps=0.1, steps=10)
    >>> bool(((result.inputs - inputs).abs() <= 0.1 + 1e-6).all())
    True
    """
    check_attack(inputs, labels, eps=eps, norm=norm, steps=steps, restarts=restarts, mask=mask)
    lookup("norm of APGD", norm, NORMS)
    value = lookup("loss", loss, LOSSES)
    inputs = inputs.detach()
    calls, found = Calls(model), Found(inputs, joint=joint, mask=mask)
    for restart in range(restarts):
        search(
            calls, found, inputs, labels,
            random_start(inputs, eps=eps, norm=norm, random=generator(seed, restart)),
            lambda logits, at: value(logits, labels[at]),
            eps=eps, norm=norm, steps=steps,
        )  # fmt: skip
    return found.result(calls, labels)


def apgd_targeted(
    model: Model,
    inputs: Tensor,
    labels: Tensor,
    *,
    eps: float,
    norm: str = "linf",
    targets: int = 9,
    steps: int = 100,
    restarts: int = 1,
    joint: bool = False,
    mask: Tensor | None = None,
    seed: int = 0,
) -> AttackResult:
    """APGD on the targeted DLR loss, towards each of the `targets` likeliest other classes in turn.

    With fewer other classes than targets, all of them are targets.
    """
    check_attack(inputs, labels, eps=eps, norm=norm, steps=steps, restarts=restarts, mask=mask)
    lookup("norm of APGD", norm, NORMS)
    if targets < 1:
        raise ValueError(f"expected targets >= 1, got {targets}")
    inputs = inputs.detach()
    calls, found = Calls(model), Found(inputs, joint=joint, mask=mask)
    logits = calls.logits(inputs)
    others = logits.scatter(1, labels[:, None], -torch.inf).argsort(1, descending=True)
    for rank in range(min(targets, logits.shape[1] - 1)):
        for restart in range(restarts):
            search(
                calls, found, inputs, labels,
                random_start(inputs, eps=eps, norm=norm, random=generator(seed, restart, rank)),
                partial(_towards, labels, others[:, rank]),
                eps=eps, norm=norm, steps=steps,
            )  # fmt: skip
    return found.result(calls, labels)


def checkpoints(steps: int) -> dict[int, int]:
    """After how many steps the step size is looked at, and how many steps after the time before.

    >>> list(checkpoints(100))
    [22, 41, 57, 70, 80, 87, 93, 99]
    """
    gap, done, found = max(int(0.22 * steps), 1), 0, {}
    while (done := done + gap) <= steps:
        found[done] = gap
        gap = max(gap - max(int(0.03 * steps), 1), max(int(0.06 * steps), 1))
    return found


def random_start(inputs: Tensor, *, eps: float, norm: str, random: torch.Generator) -> Tensor:
    """A random point on the surface of each input's ball, moved into [0, 1].

    It is drawn for the whole batch, so that it does not depend on which inputs are still searched for.
    """
    noise = random_in_ball(inputs.shape, norm, random).to(inputs)
    return (inputs + eps * noise / lengths(noise, norm).clamp(min=1e-12)).clamp(0, 1)


@dataclass
class Walk:
    """Where the search is: one row for each input that is still in it."""

    at: Tensor  # its index in the batch
    moves: Tensor  # whether it may be perturbed
    centre: Tensor
    points: Tensor
    old: Tensor  # the points before the last step
    gradient: Tensor
    values: Tensor  # the loss
    best: Tensor  # the point of highest loss, and its gradient and loss
    best_gradient: Tensor
    best_values: Tensor
    checked_values: Tensor  # the highest loss at the last checkpoint
    halved: Tensor  # whether the step was halved there
    rises: Tensor  # steps since then that increased the loss
    step: Tensor

    def keep(self, stays: Tensor) -> Walk:
        return Walk(**{row.name: getattr(self, row.name)[stays] for row in fields(self)})


def search(
    calls: Calls,
    found: Found,
    inputs: Tensor,
    labels: Tensor,
    start: Tensor,
    loss: Callable[[Tensor, Tensor], Tensor],
    *,
    eps: float,
    norm: str,
    steps: int,
) -> None:
    """One run from `start` for all inputs that are still open; `found` takes in what it meets.

    `loss` is a function of logits and the indices of the inputs that they belong to.
    """
    at = found.open()
    if not len(at):
        return
    moves = like(found.mask[at], inputs)
    points = torch.where(moves, start[at], inputs[at])
    values, gradient, logits = calls.ascent(points, partial(_given, loss, at))
    stays = found.update(at, points, values, logits.argmax(1) != labels[at])
    # The reference compares the first loss of a walk with zero, and so do we.
    zero, step = torch.zeros_like(values), torch.full_like(values, 2 * eps)
    walk = Walk(
        at, moves, inputs[at], points, points, gradient, zero, points, gradient, values,
        checked_values=values, halved=torch.ones_like(stays), rises=zero, step=step,
    )  # fmt: skip
    gaps = checkpoints(steps)
    for number in range(1, steps + 1):
        if not stays.any():
            return
        if not stays.all():
            walk = walk.keep(stays)
        _move(walk, eps=eps, norm=norm, momentum=MOMENTUM if number > 1 else 1.0)
        values, walk.gradient, logits = calls.ascent(walk.points, partial(_given, loss, walk.at))
        stays = found.update(walk.at, walk.points, values, logits.argmax(1) != labels[walk.at])
        _remember(walk, values)
        if number in gaps:
            _halve(walk, gap=gaps[number])


def _move(walk: Walk, *, eps: float, norm: str, momentum: float) -> None:
    points = walk.points
    ahead = points + like(walk.step, points) * steepest(walk.gradient, norm)
    ahead = project(ahead, walk.centre, eps=eps, norm=norm)
    ahead = points + momentum * (ahead - points) + (1 - momentum) * (points - walk.old)
    ahead = project(ahead, walk.centre, eps=eps, norm=norm)
    walk.old, walk.points = points, torch.where(walk.moves, ahead, walk.centre)


def _remember(walk: Walk, values: Tensor) -> None:
    walk.rises = walk.rises + (values > walk.values)
    better = values > walk.best_values
    walk.best = torch.where(like(better, walk.points), walk.points, walk.best)
    walk.best_gradient = torch.where(like(better, walk.points), walk.gradient, walk.best_gradient)
    walk.best_values = torch.where(better, values, walk.best_values)
    walk.values = values


def _halve(walk: Walk, *, gap: int) -> None:
    """At a checkpoint: where the loss stalls, halve the step and go on from the best point."""
    stalls = (walk.rises <= RHO * gap) | (~walk.halved & (walk.checked_values >= walk.best_values))
    walk.step = torch.where(stalls, walk.step / 2, walk.step)
    walk.points = torch.where(like(stalls, walk.points), walk.best, walk.points)
    walk.gradient = torch.where(like(stalls, walk.points), walk.best_gradient, walk.gradient)
    walk.halved, walk.checked_values = stalls, walk.best_values
    walk.rises = torch.zeros_like(walk.rises)


def _towards(labels: Tensor, targets: Tensor, logits: Tensor, at: Tensor) -> Tensor:
    return targeted_dlr(logits, labels[at], targets[at])


def _given(loss: Callable[[Tensor, Tensor], Tensor], at: Tensor, logits: Tensor) -> Tensor:
    return loss(logits, at)
