"""Projected gradient descent (Madry et al., 2018; the paper's section 3.1)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from dent.attacks.checks import Eps, Labels, check_start, read_arguments
from dent.attacks.losses import make_loss
from dent.attacks.norms import project, sample_in_ball, steepest_direction, unsqueeze_like
from dent.attacks.search import AttackResult, Model, View, begin
from dent.seeds import make_generator


def pgd(
    model: Model,
    inputs: Tensor,
    labels: Labels,
    *,
    eps: Eps,
    norm: str = "linf",
    steps: int = 40,
    step_size: float | None = None,
    loss: str = "ce",
    start: str | Tensor = "random",
    restarts: int = 1,
    towards: Tensor | None = None,
    draws: int = 1,
    through: View | None = None,
    joint: bool | None = None,
    mask: Tensor | None = None,
    seed: int = 0,
) -> AttackResult:
    """Increase the loss by steps of `step_size`, projected into the ball and [0, 1].

    Each input ends at the first point that broke it, or else at its point of highest loss. FGSM is
    `steps=1, step_size=eps, start="input"`.

    step_size: 2.5 eps / steps if it is None.
    start: "random", a uniform point of the ball; "input"; or points, which are projected into the ball.
    Of several restarts the first begins at these points, and the others at random ones.
    The other settings are those of `apgd`.

    >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 3))
    >>> inputs, labels = torch.full((2, 1, 2, 2), 0.5), model(torch.full((2, 1, 2, 2), 0.5)).argmax(1)
    >>> result = pgd(model, inputs, labels, eps=0.001, steps=5)
    >>> result.queries, bool(((result.inputs - inputs).abs() <= 0.001 + 1e-6).all())
    (16, True)
    """
    labels, eps = read_arguments(inputs, labels, eps)
    if isinstance(start, Tensor):
        check_start(start, inputs)
    elif start not in ("random", "input"):
        raise ValueError(f"expected start 'random', 'input' or points, got {start!r}")
    loss_at = make_loss(loss, labels, towards)
    attacked, best, _ = begin(
        model, inputs, labels, eps=eps, norm=norm, steps=steps, step_size=step_size,
        restarts=restarts, towards=towards, draws=draws, through=through, joint=joint, mask=mask,
    )  # fmt: skip
    inputs = inputs.detach()
    step_size = 2.5 * eps / max(steps, 1) if step_size is None else step_size
    for restart in range(restarts):
        at, points = best.list_open(), inputs
        if isinstance(start, Tensor) and restart == 0:
            points = project(start.detach().to(inputs), inputs, eps=eps, norm=norm)
        elif start != "input":
            noise = sample_in_ball(inputs.shape, norm, make_generator(seed, restart)).to(inputs)
            points = (points + eps * noise).clamp(0, 1)
        points = points[at]
        for step in range(steps + 1):
            if not len(at):
                break
            points = torch.where(unsqueeze_like(best.mask[at], points), points, inputs[at])
            if step == steps:
                best.update(at, points, attacked.evaluate(points, partial(loss_at, at)))
                break
            answer = attacked.differentiate(points, partial(loss_at, at))
            stays = best.update(at, points, answer)
            at, points, gradient = at[stays], points[stays], answer.gradient[stays]
            points = take_step(points, gradient, inputs[at], eps=eps, norm=norm, step_size=step_size)
    return best.submit(attacked)


def ascend(
    objective: Callable[[Tensor], Tensor],
    inputs: Tensor,
    points: Tensor,
    *,
    eps: float,
    norm: str,
    steps: int,
    step_size: float,
) -> Tensor:
    """Increase an objective (a scalar of the points) by `steps` projected steps from `points`."""
    inputs = inputs.detach()
    for _ in range(steps):
        points = points.detach().requires_grad_()
        with torch.enable_grad():
            (gradient,) = torch.autograd.grad(objective(points), points)
        points = take_step(points.detach(), gradient, inputs, eps=eps, norm=norm, step_size=step_size)
    return points.detach()


def take_step(
    points: Tensor, gradient: Tensor, inputs: Tensor, *, eps: float, norm: str, step_size: float
) -> Tensor:
    """Move the points one step up the gradient and project them."""
    return project(points + step_size * steepest_direction(gradient, norm), inputs, eps=eps, norm=norm)
