"""Wrong and sure of it: what a defense that minimizes entropy can only confirm."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from dent.attacks.adaptive.submission import strongest, submitted, transferred
from dent.attacks.apgd import apgd, likeliest
from dent.attacks.calls import Model
from dent.attacks.checks import check_attack, check_numbers
from dent.attacks.result import AttackResult

TARGETS = 3


def high_confidence(
    defense: Model,
    static: Model,
    inputs: Tensor,
    labels: Tensor,
    *,
    eps: float,
    norm: str = "linf",
    targets: int | None = None,
    steps: int = 100,
    restarts: int = 1,
    mask: Tensor | None = None,
    seed: int = 0,
) -> AttackResult:
    """Drive each input towards a wrong class, to the highest probability of that, then submit.

    The static model is attacked, on the cross-entropy to each of the likeliest other classes in turn. A
    batch for each, and one in which every input goes where it is surest, are submitted to the defense,
    and the one that breaks most is kept whole. Any wrong class is a success.

    static: the model without updates, or the defense itself, to attack that.
    targets: how many classes; three, or all that there are, if not given.
    """
    check_numbers(targets=targets)
    check_attack(inputs, labels, eps=eps, norm=norm, mask=mask, steps=steps, restarts=restarts)
    natural = submitted(static, inputs, labels)
    found, sure = [], []
    count = min(TARGETS, natural.logits.shape[1] - 1) if targets is None else targets
    for classes in likeliest(natural.logits, labels.long(), count):
        result = apgd(
            static, inputs, labels, eps=eps, norm=norm, loss="ce", steps=steps, restarts=restarts,
            towards=classes, joint=True, mask=mask, seed=seed,
        )  # fmt: skip
        found.append(result)
        sure.append(result.logits.log_softmax(1).gather(1, classes[:, None]).squeeze(1))
    surest = torch.stack(sure).argmax(0)
    everyone = torch.arange(len(inputs), device=inputs.device)
    batch = torch.stack([result.inputs for result in found])[surest, everyone]
    results = [transferred(defense, result, labels) for result in found]
    best = strongest([*results, submitted(defense, batch, labels)], mask)
    return replace(best, queries=best.queries + natural.queries)
