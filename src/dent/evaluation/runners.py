"""How an evaluation runs each kind of attack: on the model as deployed, its static model or the defense.

Each function is `(subject, inputs, labels, *, eps, norm, seed, mask, **options) -> AttackResult`, the
first ones after the attack that they run.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dent.attacks import AttackResult, adaptive, apgd_targeted
from dent.attacks.autoattack import ATTACKS as DIRECT
from dent.attacks.fused import FusedModel, fuse_batch_norm
from dent.defense.defended import Defended
from dent.evaluation.defenses import NO_STATIC, AnyDefense, Subject


def attack_model(
    attack: Callable[..., AttackResult],
    subject: Subject,
    inputs: Tensor,
    labels: Tensor,
    *,
    mask: Tensor,
    **options: Any,
) -> AttackResult:
    # The search runs on a faster copy; what it made is scored on the model itself, as always.
    model, joint = find_faster_copy(subject, inputs), not subject.independent
    options = _limit_targets(subject, inputs, options)
    return attack(model, inputs, labels, mask=mask, joint=joint, **options)


def find_faster_copy(subject: Subject, inputs: Tensor) -> Any:
    """Return a copy of the model as deployed with the same answers, or the model if there is none.

    Batch norms are fused where nothing adapts them and no input sees another: in a static model, and
    below a defense that works on inputs alone, such as `views` or `hedge`.
    """
    model = subject.model
    if not subject.independent:
        return model
    if isinstance(model, Defended) and model.settings.needs == "nothing":
        fused = fuse_batch_norm(model.model, inputs)
        return Defended(fused.net, model.settings) if isinstance(fused, FusedModel) else model
    is_plain = model is subject.static
    return fuse_batch_norm(subject.model, inputs) if is_plain else model


def attack_static(
    attack: Callable[..., AttackResult], subject: Subject, inputs: Tensor, labels: Tensor, **options: Any
) -> AttackResult:
    """Attack the static model and submit the result to the defended one."""
    if subject.static is None:
        raise ValueError(f"expected a static model to attack, got none: {NO_STATIC}")
    static = fuse_batch_norm(subject.static, inputs)
    model = AnyDefense(subject.model, subject.independent)
    return attack(model, static, inputs, labels, **_limit_targets(subject, inputs, options))


def attack_defense(
    run: Callable[..., AttackResult], subject: Subject, inputs: Tensor, labels: Tensor, **options: Any
) -> AttackResult:
    defense = AnyDefense(subject.defense, subject.independent)
    return run(defense, inputs, labels, **_limit_targets(subject, inputs, options))


def attack_view(
    attack: Callable[..., AttackResult],
    subject: Subject,
    inputs: Tensor,
    labels: Tensor,
    *,
    targets: int = 0,
    **options: Any,
) -> AttackResult:
    """Attack through a view: increase the cross-entropy or, with `targets`, the targeted DLR loss."""
    if targets:
        limited = _limit_targets(subject, inputs, {"targets": targets})
        options["attack"] = partial(apgd_targeted, order="distance", **limited)
    return attack_defense(attack, subject, inputs, labels, **options)


def attack_states(
    attack: Callable[..., AttackResult], subject: Subject, inputs: Tensor, labels: Tensor, **options: Any
) -> AttackResult:
    """Attack all states of the adaptation."""
    return attack_defense(attack, subject, inputs, labels, updates=subject.updates, **options)


def shorten_updates(
    run: Callable[..., AttackResult],
    attack: Callable[..., AttackResult],
    subject: Subject,
    inputs: Tensor,
    labels: Tensor,
    *,
    updates: int | None = None,
    share: float = 0.5,
    **options: Any,
) -> AttackResult:
    """Run an attack on the defense with a share of its updates, or with `updates` of them.

    A defense that does not say its updates gets no such attack: see `needs` in the table of attacks.
    """
    updates = count_share(subject.defense.updates, share) if updates is None else updates
    return run(attack, subject, inputs, labels, updates=updates, **options)


def count_share(updates: int, share: float) -> int:
    """Return a share of the updates, at least one."""
    return max(int(share * updates), 1)


def _limit_targets(subject: Subject, inputs: Tensor, options: dict[str, Any]) -> dict[str, Any]:
    """Return the options with at most as many `targets` as there are other classes."""
    if "targets" not in options:
        return options
    return options | {"targets": min(options["targets"], subject.count_classes(inputs) - 1)}


def mix(
    subject: Subject, inputs: Tensor, labels: Tensor, *, mask: Tensor, share: float, **options: Any
) -> AttackResult:
    """Attack a share of the batch, but at least one input; at least one stays natural."""
    share = min(share, 1 - 1 / len(inputs))
    return adaptive.mixing(subject.model, inputs, labels, share=share, **options)


def attack_one_among(
    subject: Subject,
    inputs: Tensor,
    labels: Tensor,
    *,
    mask: Tensor,
    points: int,
    companions: int = 15,
    **options: Any,
) -> AttackResult:
    """Attack each of the first `points` of the batch, among other inputs of it that are natural."""
    for image in inputs[:points]:  # the same image again is no companion
        others = int((inputs != image).flatten(1).any(1).sum())
        companions = min(companions, others)
    result = adaptive.one_among(
        subject.model, inputs[:points], labels[:points], inputs, companions=companions, **options
    )
    rest = len(inputs) - len(result.success)
    return adaptive.PartResult(
        torch.cat([result.inputs, inputs[points:]]),
        torch.cat([result.success, result.success.new_zeros(rest)]),
        torch.cat([result.logits, result.logits.new_zeros(rest, result.logits.shape[1])]),
        result.queries,
        result.gradients,
        part=torch.arange(len(inputs), device=inputs.device) < points,
    )


def sort_labels(
    subject: Subject, inputs: Tensor, labels: Tensor, *, mask: Tensor, **options: Any
) -> AttackResult:
    """Sort two batches together, cut them again, and attack each."""
    attack = partial(DIRECT["apgd-ce"], joint=True)
    size = (len(inputs) + 1) // 2
    return adaptive.sorted_batches(
        subject.model, inputs, labels, batch_size=size, attack=attack, **options
    )


def poison(
    subject: Subject,
    inputs: Tensor,
    labels: Tensor,
    *,
    mask: Tensor,
    eps: float,
    share: float,
    seed: int,
    **options: Any,
) -> AttackResult:
    """Perturb malicious members, in [0, 1] but in no ball; the natural members, at least one, count."""
    share = min(share, 1 - 1 / len(inputs))
    malicious = adaptive.draw_mask(len(inputs), share, seed=seed).to(inputs.device)
    return adaptive.poisoning(
        AnyDefense(subject.defense, subject.independent),
        inputs,
        labels,
        malicious=malicious,
        seed=seed,
        **options | {"norm": "linf"},
    )
