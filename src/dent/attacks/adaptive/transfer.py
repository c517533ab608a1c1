"""Attacks that search on the static model, or behind few updates, and submit to the defense."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dent.attacks.adaptive.submission import pick_strongest, submit, transfer
from dent.attacks.adaptive.views import DynamicDefense, State
from dent.attacks.apgd import apgd, apgd_targeted
from dent.attacks.autoattack import ATTACKS, autoattack
from dent.attacks.checks import Eps, Labels, check_attack, check_numbers, read_arguments
from dent.attacks.norms import unsqueeze_like
from dent.attacks.own import OwnAttack, run_own
from dent.attacks.search import AttackResult, Model
from dent.attacks.targets import FEW_TARGETS, select_targets
from dent.names import import_function, is_function_path, lookup


def stop_at_success(
    model: Model,
    inputs: Tensor,
    labels: Tensor,
    *,
    eps: float,
    norm: str,
    steps: int,
    mask: Tensor | None = None,
    seed: int = 0,
    **_: Any,
) -> AttackResult:
    """Return the first point that breaks each input, and the input itself where none does.

    So AutoAttack leaves its points. They transfer worse than points of highest loss: each lies just
    behind the boundary of the model that was attacked.
    """
    result = autoattack(
        model, inputs, labels, eps=eps, norm=norm, attacks=["apgd-ce", "apgd-dlr"], steps=steps,
        joint=False, mask=mask, seed=seed,
    )  # fmt: skip
    points = torch.where(unsqueeze_like(result.broken, inputs), result.inputs, inputs)
    return replace(result, inputs=points)


OFFLINE: dict[str, Callable[..., AttackResult]] = {
    "apgd-ce": ATTACKS["apgd-ce"],
    "apgd-dlr": ATTACKS["apgd-dlr"],
    "apgd-margin": partial(apgd, loss="margin"),
    "apgd-t": apgd_targeted,
    "first-success": stop_at_success,
}


def denying_updates(
    defense: Model,
    static: Model,
    inputs: Tensor,
    labels: Labels,
    *,
    eps: Eps,
    norm: str = "linf",
    attacks: Sequence[str | OwnAttack] = ("apgd-ce", "apgd-margin", "apgd-t"),
    targets: int | None = None,
    steps: int = 100,
    restarts: int = 1,
    mask: Tensor | None = None,
    seed: int = 0,
) -> AttackResult:
    """Run the `offline` attacks and return the strongest batch, whole (the paper's section 4.5).

    The adversary's optimization is complete before the defense makes an update.

    static: the model without updates.
    attacks: names of `OFFLINE`, or attacks of your own: functions, or texts "package.module:function".
    targets: the number of classes that "apgd-t" tries, by the distance to their boundaries; three, or
    all other classes if there are fewer, if it is None.
    """
    results = offline(
        defense, static, inputs, labels, eps=eps, norm=norm, attacks=attacks, targets=targets,
        steps=steps, restarts=restarts, mask=mask, seed=seed,
    )  # fmt: skip
    return pick_strongest(defense, results.values(), mask)


def denying_most_updates(
    defense: DynamicDefense[State], inputs: Tensor, labels: Labels, *, updates: int, **settings: Any
) -> AttackResult:
    """Do what `denying_updates` does, from the defense with only `updates` updates.

    Points of highest loss behind a few updates were found to transfer better than those of the static
    model, and better than the gradient behind all updates allows.
    """
    check_numbers(updates=updates)

    def predict_early(points: Tensor) -> Tensor:
        state = defense.adapt(points.detach(), steps=updates, gradient="stale")
        return defense.predict(points, state)

    return denying_updates(defense, predict_early, inputs, labels, **settings)


def offline(
    defense: Model,
    static: Model,
    inputs: Tensor,
    labels: Labels,
    *,
    eps: Eps,
    norm: str = "linf",
    attacks: Sequence[str | OwnAttack] = ("apgd-ce", "apgd-margin", "apgd-t"),
    targets: int | None = None,
    steps: int = 100,
    restarts: int = 1,
    mask: Tensor | None = None,
    seed: int = 0,
) -> dict[str, AttackResult]:
    """Submit each attack's points of highest loss on the static model to the defense.

    Points of highest loss transfer best (Croce et al., 2022), also those of inputs that the static model
    withstands. So every input stays in the search (`joint`), although the static model may not need it.
    """
    if not attacks:
        raise ValueError(f"expected one attack or more, of: {', '.join(OFFLINE)}; got none")
    chosen: dict[str, Callable[..., AttackResult]] = {}
    for one in attacks:
        name, attack = _find_offline(one)
        if chosen.setdefault(name, attack) is not attack:
            raise ValueError(f"expected attacks with names of their own, got two as {name!r}")
    labels, eps = read_arguments(inputs, labels, eps)
    check_numbers(targets=targets)
    results = {}
    for name, attack in chosen.items():
        own: dict[str, Any] = {}
        if name == "apgd-t":
            own = {"targets": _count_targets(static, inputs, targets), "order": "distance"}
        result = attack(
            static, inputs, labels, eps=eps, norm=norm, steps=steps, restarts=restarts, joint=True,
            mask=mask, seed=seed, **own,
        )  # fmt: skip
        results[name] = transfer(defense, result, labels)
    return results


def _count_targets(model: Model, inputs: Tensor, targets: int | None) -> int:
    """Return the number of targets that was asked for, or three, or all other classes if fewer."""
    if targets is not None:
        return targets
    with torch.no_grad():  # the whole batch: a defense may not take a single input, or warn of it
        return min(FEW_TARGETS, model(inputs).shape[1] - 1)


def _find_offline(attack: str | OwnAttack) -> tuple[str, Callable[..., AttackResult]]:
    """Return the name of an attack and its function, of `OFFLINE` or your own."""
    if isinstance(attack, str) and not is_function_path(attack):
        return attack, lookup("offline attack", attack, OFFLINE)
    name = attack if isinstance(attack, str) else getattr(attack, "__name__", type(attack).__name__)
    function = import_function(attack) if isinstance(attack, str) else attack
    return name, partial(run_own, function, name)


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
    count = min(FEW_TARGETS, natural.logits.shape[1] - 1) if targets is None else targets
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
    results = [transfer(defense, result, labels) for result in found]
    best = pick_strongest(defense, [*results, submit(defense, batch, labels)], mask)
    return replace(best, queries=best.queries + natural.queries)
