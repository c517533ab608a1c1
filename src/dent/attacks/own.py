"""Attacks of your own: functions `(model, inputs, labels, *, eps, norm, ...)` to adversarial inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dent.attacks.checks import check_points
from dent.attacks.norms import unsqueeze_like
from dent.attacks.search import AttackResult, Model
from dent.names import accepts

OwnAttack = Callable[..., Tensor | AttackResult]


def run_own(
    attack: OwnAttack,
    name: str,
    model: Model,
    inputs: Tensor,
    labels: Tensor,
    *,
    eps: float,
    norm: str,
    mask: Tensor | None = None,
    **optional: Any,
) -> AttackResult:
    """Return the points of your own attack; raise InvalidPointsError if they are not allowed.

    The attack gets `eps`, `norm`, and those of `mask` and `optional` that its signature accepts. Inputs
    outside of the mask stay natural, whatever the attack does. The result has the points and their cost,
    as far as the attack tells it, but no answers: the caller submits the points.

    name: what errors call the attack.

    >>> def brighten(model, inputs, labels, *, eps, norm):
    ...     return (inputs + eps).clamp(0, 1)
    >>> inputs, labels = torch.full((2, 1, 2, 2), 0.5), torch.tensor([0, 1])
    >>> run_own(brighten, "mine", torch.nn.Flatten(), inputs, labels, eps=0.25, norm="linf").inputs.max()
    tensor(0.7500)
    """
    given = {name: value for name, value in {"mask": mask, **optional}.items() if value is not None}
    given = {name: value for name, value in given.items() if accepts(attack, name)}
    # Copies, so that an attack that works in place changes nothing that its result is compared with.
    result = attack(model, inputs.clone(), labels.clone(), eps=eps, norm=norm, **given)
    points, queries, gradients = result, 0, 0
    if isinstance(result, AttackResult):
        points, queries, gradients = result.inputs, result.queries, result.gradients
    points = check_points(points, inputs, eps=eps, norm=norm, of=name)
    if mask is not None:
        points = torch.where(unsqueeze_like(mask, points), points, inputs)
    unknown = torch.zeros_like(labels, dtype=torch.bool)
    return AttackResult(points, unknown, inputs.new_empty(0), queries, gradients)
