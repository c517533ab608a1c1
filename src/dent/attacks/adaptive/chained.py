"""Chained attacks: each stage begins where the strongest one before it ended."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from dent.attacks.adaptive.gmsa import fpa
from dent.attacks.adaptive.submission import pick_strongest, submit, transfer
from dent.attacks.adaptive.views import DynamicDefense, State, lazy
from dent.attacks.apgd import apgd
from dent.attacks.checks import Eps, Labels, check_attack, read_arguments
from dent.attacks.search import AttackResult, Model


def chained(
    defense: DynamicDefense[State],
    static: Model,
    inputs: Tensor,
    labels: Labels,
    *,
    eps: Eps,
    norm: str = "linf",
    loss: str = "margin",
    steps: int = 100,
    every: int = 5,
    rounds: int = 3,
    mask: Tensor | None = None,
    seed: int = 0,
) -> AttackResult:
    """Maximize the loss of the static model, then climb on the defense from there.

    The stages are APGD on the static model; `lazy` APGD on the defense, from the points of highest loss,
    with half the first step; and rounds of `fpa` from the strongest batch so far. The batch that breaks
    most, of all stages, is returned whole.

    steps: of each stage, and of each round of the last one.
    """
    labels, eps = read_arguments(inputs, labels, eps)
    check_attack(inputs, labels, eps=eps, norm=norm, mask=mask, steps=steps, every=every, rounds=rounds)
    threat: dict[str, Any] = {
        "eps": eps,
        "norm": norm,
        "loss": loss,
        "steps": steps,
        "mask": mask,
        "seed": seed,
    }
    natural = submit(defense, inputs.detach(), labels)
    first = apgd(static, inputs, labels, joint=True, **threat)
    moved = transfer(defense, first, labels)
    climbed = lazy(
        defense, inputs, labels, every=every, start=moved.inputs, step_size=eps or None, **threat
    )
    stages = [natural, moved, climbed]
    strongest = pick_strongest(defense, stages, mask)
    last = fpa(defense, inputs, labels, rounds=rounds, start=strongest.inputs, **threat)
    return pick_strongest(defense, [*stages, last], mask)
