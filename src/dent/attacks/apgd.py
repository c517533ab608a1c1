"""Auto-PGD (Croce and Hein, 2020): projected gradient ascent that sets its own step size."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from dent.attacks.calls import Calls, Model, View
from dent.attacks.checks import check_numbers
from dent.attacks.found import Found, begin
from dent.attacks.losses import LossAt, loss_of, targeted_dlr
from dent.attacks.norms import lengths, like, project, random_in_ball
from dent.attacks.result import AttackResult
from dent.attacks.walk import Momentum, Sparse
from dent.seeds import generator

TARGETS = 9
# L1 begins in a larger ball, which shrinks: multiples of eps, and the share of the steps in each.
SHRINKING = ((3.0, 0.3), (2.0, 0.3), (1.0, 0.4))


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
    towards: Tensor | None = None,
    draws: int = 1,
    through: View | None = None,
    joint: bool | None = None,
    mask: Tensor | None = None,
    seed: int = 0,
) -> AttackResult:
    """Ascend the loss from a random point on the surface of the ball; halve the step where it stalls.

    Where an input's output does not depend on the others, a broken input leaves the search at once. For
    models that depend on the batch, `joint=True` keeps the batch together: every step is a submission of
    it, and the result is the best of these, or each input's best point where these do more together. If
    not given, the model's `independent` decides. Inputs that were not broken end at their point of
    highest loss, for transfer.

    towards: (N,) classes to be reached, instead of any that is wrong.
    draws: how many answers of a random model are averaged for one step.
    through: climb this view of the model (`dent.attacks.adaptive`); the result is the model's own.
    mask: (N,) which inputs may be perturbed.

    >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 3))
    >>> inputs, labels = torch.full((2, 1, 2, 2), 0.5), torch.tensor([0, 1])
    >>> result = apgd(model, inputs, labels, eps=0.1, steps=10)
    >>> bool(((result.inputs - inputs).abs() <= 0.1 + 1e-6).all())
    True
    """
    value = loss_of(loss, labels, towards)
    calls, found, _ = begin(
        model, inputs, labels, eps=eps, norm=norm, steps=steps, restarts=restarts, towards=towards,
        draws=draws, through=through, joint=joint, mask=mask,
    )  # fmt: skip
    for restart in range(restarts):
        random = generator(seed, restart)
        search(calls, found, inputs.detach(), value, eps=eps, norm=norm, steps=steps, random=random)
    return found.result(calls)


def apgd_targeted(
    model: Model,
    inputs: Tensor,
    labels: Tensor,
    *,
    eps: float,
    norm: str = "linf",
    targets: int | None = None,
    steps: int = 100,
    restarts: int = 1,
    draws: int = 1,
    through: View | None = None,
    joint: bool | None = None,
    mask: Tensor | None = None,
    seed: int = 0,
) -> AttackResult:
    """APGD on the targeted DLR loss, towards each of the `targets` likeliest other classes in turn.

    Any wrong class is a success. If not given, the targets are nine, or all that there are.
    """
    check_numbers(targets=targets)
    calls, found, logits = begin(
        model, inputs, labels, eps=eps, norm=norm, steps=steps, restarts=restarts,
        draws=draws, through=through, joint=joint, mask=mask,
    )  # fmt: skip
    for rank, classes in enumerate(likeliest(logits, found.labels, targets)):
        for restart in range(restarts):
            value, random = partial(_towards, found.labels, classes), generator(seed, restart, rank)
            search(calls, found, inputs.detach(), value, eps=eps, norm=norm, steps=steps, random=random)
    return found.result(calls)


def likeliest(logits: Tensor, labels: Tensor, count: int | None = None) -> list[Tensor]:
    """The `count` likeliest classes of each input other than its label; if not given, at most nine."""
    others = logits.shape[1] - 1
    if count is not None and count > others:
        raise ValueError(f"expected at most {others} targets, one for each other class, got {count}")
    ranked = logits.scatter(1, labels[:, None], -torch.inf).argsort(1, descending=True)
    return list(ranked[:, : min(TARGETS, others) if count is None else count].T)


def random_start(inputs: Tensor, *, eps: float, norm: str, random: torch.Generator) -> Tensor:
    """A random point on the surface of each input's ball, moved into [0, 1].

    It is drawn for the whole batch, so that it does not depend on which inputs are still searched for.
    """
    if norm == "l1":
        noise = torch.randn(inputs.shape, generator=random).to(inputs)
        return project(inputs + noise, inputs, eps=eps, norm=norm)
    noise = random_in_ball(inputs.shape, norm, random).to(inputs)
    return (inputs + eps * noise / lengths(noise, norm).clamp(min=1e-12)).clamp(0, 1)


def search(
    calls: Calls,
    found: Found,
    inputs: Tensor,
    loss: LossAt,
    *,
    eps: float,
    norm: str,
    steps: int,
    random: torch.Generator,
) -> None:
    """One run for all inputs that are still open; `found` takes in what it meets."""
    if not len(found.open()):
        return
    if norm != "l1":
        start = random_start(inputs, eps=eps, norm=norm, random=random)
        walk(calls, found, inputs, start, loss, eps=eps, norm=norm, steps=steps)
        return
    points, left = random_start(inputs, eps=SHRINKING[0][0] * eps, norm=norm, random=random), steps
    for factor, share in SHRINKING:
        last = factor == 1
        count = left if last else min(math.ceil(share * steps), left)
        left -= count
        points = project(points, inputs, eps=factor * eps, norm=norm)
        points = walk(
            calls, found, inputs, points, loss, eps=factor * eps, norm=norm, steps=count, counts=last
        )


def walk(
    calls: Calls,
    found: Found,
    inputs: Tensor,
    start: Tensor,
    loss: LossAt,
    *,
    eps: float,
    norm: str,
    steps: int,
    counts: bool = True,
) -> Tensor:
    """`steps` steps from `start`, and where each input's loss was highest.

    Unless it `counts`, nothing is found on the way, and nobody leaves: the ball is larger than allowed.
    """
    at, kind = found.open(), Sparse if norm == "l1" else Momentum
    best, gaps = start.clone(), kind.checkpoints(steps)
    moves = like(found.mask[at], inputs)
    points = torch.where(moves, start[at], inputs[at])
    answer = calls.ascent(points, partial(loss, at))
    rows = kind.start(at, moves, inputs[at], points, answer.gradient, answer.values, eps=eps)
    everyone = torch.ones_like(at, dtype=torch.bool)
    stays = found.update(at, points, answer) if counts else everyone
    for number in range(1, steps + 1):
        if not stays.any():
            break
        if not stays.all():
            rows = rows.keep(stays)
        rows.move(eps=eps, norm=norm, first=number == 1)
        answer = calls.ascent(rows.points, partial(loss, rows.at))
        rows.gradient = answer.gradient
        stays = found.update(rows.at, rows.points, answer) if counts else everyone
        rows.learn(answer.values, eps=eps, gap=gaps.get(number))
    best[rows.at] = rows.best
    return best


def _towards(labels: Tensor, classes: Tensor, at: Tensor, logits: Tensor) -> Tensor:
    return targeted_dlr(logits, labels[at], classes[at])
