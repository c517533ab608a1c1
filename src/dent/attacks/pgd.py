"""Projected gradient descent (Madry et al., 2018; the paper's section 3.1)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dent.attacks.checks import check_attack
from dent.attacks.losses import LOSSES
from dent.attacks.norms import like, project, random_in_ball, steepest
from dent.attacks.result import AttackResult
from dent.names import lookup
from dent.seeds import generator


def pgd(
    model: Callable[[Tensor], Tensor],
    inputs: Tensor,
    labels: Tensor,
    *,
    eps: float,
    norm: str = "linf",
    steps: int = 40,
    step_size: float | None = None,
    loss: str = "ce",
    start: str = "random",
    restarts: int = 1,
    targeted: bool = False,
    seed: int = 0,
) -> AttackResult:
    """Ascend the loss by steps of `step_size` (2.5 eps / steps), projected into the ball and [0, 1].

    FGSM is `steps=1, step_size=eps, start="input"`. With `targeted`, the labels are the classes to be
    reached. Of several restarts each input keeps the first that succeeded, or the one of highest loss.
    The success is that of `inputs`, re-scored as one batch.

    >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 3))
    >>> inputs, labels = torch.full((2, 1, 2, 2), 0.5), torch.tensor([0, 1])
    >>> result = pgd(model, inputs, labels, eps=0.1, steps=5)
    >>> result.queries, bool(((result.inputs - inputs).abs() <= 0.1 + 1e-6).all())
    (12, True)
    """
    check_attack(inputs, labels, eps=eps, norm=norm, steps=steps, step_size=step_size, restarts=restarts)
    if start not in ("random", "input"):
        raise ValueError(f"expected start 'random' or 'input', got {start!r}")
    value = lookup("loss", loss, LOSSES)
    sign = -1 if targeted else 1
    step_size = 2.5 * eps / max(steps, 1) if step_size is None else step_size

    best = inputs.detach()
    best_value = torch.full((len(inputs),), -torch.inf, device=inputs.device)
    for restart in range(restarts):
        points = inputs.detach()
        if start == "random":
            noise = random_in_ball(inputs.shape, norm, generator(seed, restart)).to(inputs)
            points = (points + eps * noise).clamp(0, 1)
        points = ascend(
            lambda points: sign * value(model(points), labels).sum(),
            inputs, points, eps=eps, norm=norm, steps=steps, step_size=step_size,
        )  # fmt: skip
        with torch.no_grad():
            logits = model(points)
            values = (sign * value(logits, labels)).float()
        # A success is kept whatever the loss of a later restart.
        values = values.masked_fill(_success(logits, labels, targeted), torch.inf)
        better = values > best_value
        best_value = torch.where(better, values, best_value)
        best = torch.where(like(better, points), points, best)
    if restarts > 1:
        with torch.no_grad():
            logits = model(best)
    return AttackResult(
        inputs=best,
        success=_success(logits, labels, targeted),
        logits=logits,
        queries=len(inputs) * (restarts * (steps + 1) + (restarts > 1)),
        gradients=len(inputs) * restarts * steps,
    )


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
    """`steps` projected steps up the objective (points to a scalar), from `points`, around `inputs`."""
    inputs = inputs.detach()
    for _ in range(steps):
        points = points.detach().requires_grad_()
        with torch.enable_grad():
            (gradient,) = torch.autograd.grad(objective(points), points)
        points = points.detach() + step_size * steepest(gradient, norm)
        points = project(points, inputs, eps=eps, norm=norm)
    return points.detach()


def _success(logits: Tensor, labels: Tensor, targeted: bool) -> Tensor:
    predictions = logits.argmax(1)
    return predictions == labels if targeted else predictions != labels
