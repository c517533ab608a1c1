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

from dent.attacks import AttackResult, adaptive
from dent.attacks.autoattack import ATTACKS as DIRECT
from dent.attacks.fused import fuse_batch_norm
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
    joint = not subject.independent
    # The search runs on a faster copy; what it made is scored on the model itself, as always.
    is_plain = subject.model is subject.static and not joint
    model = fuse_batch_norm(subject.model, inputs) if is_plain else subject.model
    if "targets" in options:
        options["targets"] = min(options["targets"], subject.count_classes(inputs) - 1)
    return attack(model, inputs, labels, mask=mask, joint=joint, **options)


def attack_static(
    attack: Callable[..., AttackResult], subject: Subject, inputs: Tensor, labels: Tensor, **options: Any
) -> AttackResult:
    """Attack the static model and submit the result to the defended one."""
    if subject.static is None:
        raise ValueError(f"expected a static model to attack, got none: {NO_STATIC}")
    static = fuse_batch_norm(subject.static, inputs)
    return attack(subject.model, static, inputs, labels, **options)


def attack_defense(
    attack: Callable[..., AttackResult], subject: Subject, inputs: Tensor, labels: Tensor, **options: Any
) -> AttackResult:
    return attack(AnyDefense(subject.defense), inputs, labels, **options)


def average_states(subject: Subject, inputs: Tensor, labels: Tensor, **options: Any) -> AttackResult:
    defense = AnyDefense(subject.defense)
    return adaptive.averaged(defense, inputs, labels, updates=subject.updates or 0, **options)


def shorten_updates(
    subject: Subject, inputs: Tensor, labels: Tensor, *, updates: int | None = None, **options: Any
) -> AttackResult:
    updates = (subject.updates or 0) // 2 if updates is None else updates
    return adaptive.short(AnyDefense(subject.defense), inputs, labels, updates=updates, **options)


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
    """Perturb malicious members, in [0, 1] but in no ball; the natural members count."""
    malicious = adaptive.draw_mask(len(inputs), share, seed=seed).to(inputs.device)
    return adaptive.poisoning(
        AnyDefense(subject.defense),
        inputs,
        labels,
        malicious=malicious,
        seed=seed,
        **options | {"norm": "linf"},
    )
