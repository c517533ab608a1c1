"""Attacks that search on the static model and submit to the defense."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from dent.attacks.adaptive.submission import pick_strongest, submit
from dent.attacks.apgd import apgd, select_targets
from dent.attacks.autoattack import ATTACKS
from dent.attacks.checks import Eps, Labels, check_attack, check_numbers, read_arguments
from dent.attacks.search import AttackResult, Model
from dent.names import lookup

OFFLINE = {name: ATTACKS[name] for name in ("apgd-ce", "apgd-dlr", "apgd-t")}
MOST_TARGETS = 3  # of `high_confidence`, unless told


def denying_updates(
    defense: Model,
    static: Model,
    inputs: Tensor,
    labels: Labels,
    *,
    eps: Eps,
    norm: str = "linf",
    attacks: Sequence[str] = ("apgd-ce", "apgd-t"),
    steps: int = 100,
    mask: Tensor | None = None,
    seed: int = 0,
) -> AttackResult:
    """Run the `offline` attacks and return the strongest batch, whole (the paper's section 4.4).

    The adversary's optimization is complete before the defense makes an update.

    static: the model without updates.
    attacks: names of `OFFLINE`.
    """
    results = offline(
        defense, static, inputs, labels,
        eps=eps, norm=norm, attacks=attacks, steps=steps, mask=mask, seed=seed,
    )  # fmt: skip
    return pick_strongest(results.values(), mask)


def offline(
    defense: Model,
    static: Model,
    inputs: Tensor,
    labels: Labels,
    *,
    eps: Eps,
    norm: str = "linf",
    attacks: Sequence[str] = ("apgd-ce", "apgd-t"),
    steps: int = 100,
    mask: Tensor | None = None,
    seed: int = 0,
) -> dict[str, AttackResult]:
    """Submit each attack's points of highest loss on the static model to the defense.

    Points of highest loss transfer best (Croce et al., 2022), also those of inputs that the static model
    withstands. So every input stays in the search (`joint`), although the static model may not need it.
    """
    if not attacks:
        raise ValueError(f"expected one attack or more, of: {', '.join(OFFLINE)}; got none")
    chosen = {name: lookup("offline attack", name, OFFLINE) for name in attacks}
    labels, eps = read_arguments(inputs, labels, eps)
    results = {}
    for name, attack in chosen.items():
        result = attack(
            static, inputs, labels, eps=eps, norm=norm, steps=steps, joint=True, mask=mask, seed=seed
        )
        results[name] = _transfer(defense, result, labels)
    return results


def high_confidence(
    defense: Model,
    static: Model,
    inputs: Tensor,
    labels: Labels,
    *,
    eps: Eps,
    norm: str = "linf",
    targets: int | None = None,
    steps: int = 100,
    restarts: int = 1,
    mask: Tensor | None = None,
    seed: int = 0,
) -> AttackResult:
    """Make the static model confident of a wrong class: minimizing entropy can only confirm that.

    APGD maximizes the probability of each of the likeliest other classes in turn. One batch per class,
    and one in which every input goes to its most confident class, are submitted to the defense. The
    batch that breaks most is returned, whole. Any wrong class is a success.

    static: the model without updates, or the defense itself, to search on that.
    targets: the number of classes; three, or all other classes if there are fewer, if it is None.
    """
    check_numbers(targets=targets)
    labels, eps = read_arguments(inputs, labels, eps)
    check_attack(inputs, labels, eps=eps, norm=norm, mask=mask, steps=steps, restarts=restarts)
    natural = submit(static, inputs, labels)
    found, confidences = [], []
    count = min(MOST_TARGETS, natural.logits.shape[1] - 1) if targets is None else targets
    for classes in select_targets(natural.logits, labels.long(), count):
        result = apgd(
            static, inputs, labels, eps=eps, norm=norm, loss="ce", steps=steps, restarts=restarts,
            towards=classes, joint=True, mask=mask, seed=seed,
        )  # fmt: skip
        found.append(result)
        confidences.append(result.logits.log_softmax(1).gather(1, classes[:, None]).squeeze(1))
    most_confident = torch.stack(confidences).argmax(0)
    everyone = torch.arange(len(inputs), device=inputs.device)
    batch = torch.stack([result.inputs for result in found])[most_confident, everyone]
    results = [_transfer(defense, result, labels) for result in found]
    best = pick_strongest([*results, submit(defense, batch, labels)], mask)
    return replace(best, queries=best.queries + natural.queries)


def _transfer(defense: Model, result: AttackResult, labels: Tensor) -> AttackResult:
    """Submit the result of an attack on another model to the defense, and add up the costs of both."""
    own = submit(defense, result.inputs, labels)
    return replace(own, queries=own.queries + result.queries, gradients=result.gradients)
