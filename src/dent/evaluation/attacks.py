"""The attacks of an evaluation by name: what kind each is, how it is run, and about what it costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dent.attacks import AttackResult, adaptive, pgd
from dent.attacks.autoattack import ATTACKS as SUITE_ATTACKS
from dent.attacks.fused import fuse_batch_norm
from dent.defense import Dent
from dent.evaluation import forwards
from dent.evaluation.forwards import Forwards
from dent.names import lookup

# direct: on the defended model itself. adaptive: made for adaptation. scenario: another batch than the
# one that is deployed, or only a part of it counts; with an accuracy of its own, and in no worst case.
Kind = Literal["direct", "adaptive", "scenario"]


@dataclass(frozen=True)
class Subject:
    """What is attacked: the model as deployed, what it is without a defense, and with `adapt`."""

    model: nn.Module
    static: nn.Module
    defense: Dent
    independent: bool


Run = Callable[..., AttackResult]  # (subject, inputs, labels, *, eps, norm, seed, mask, **settings)
Calls = Callable[[Forwards, dict[str, Any]], float]  # (cost, settings), for each input


@dataclass(frozen=True)
class Attack:
    """An attack of the table.

    updates: whether it is only for defenses that make updates; scenarios are for all that depend on
    their batch.
    span: how many batches it takes at a time.
    least: how many inputs these must have; smaller ones are left out.
    free: whether what it perturbs is bound by [0, 1] alone.
    """

    kind: Kind
    run: Run
    calls: Calls
    note: str
    updates: bool = False
    span: int = 1
    least: int = 1
    free: bool = False


def _direct(
    attack: Run, subject: Subject, inputs: Tensor, labels: Tensor, *, mask: Tensor, **settings: Any
) -> AttackResult:
    joint = not subject.independent
    # What is searched on a faster copy is scored on the model itself, as all attacks are.
    alone = subject.model is subject.static and not joint
    model = fuse_batch_norm(subject.model, inputs) if alone else subject.model
    if "targets" in settings:
        with torch.no_grad():
            others = subject.static(inputs).shape[1] - 1
        settings["targets"] = min(settings["targets"], others)
    return attack(model, inputs, labels, mask=mask, joint=joint, **settings)


def _offline(
    attack: Run, subject: Subject, inputs: Tensor, labels: Tensor, **settings: Any
) -> AttackResult:
    static = fuse_batch_norm(subject.static, inputs)
    return attack(subject.model, static, inputs, labels, **settings)


def _on_defense(
    attack: Run, subject: Subject, inputs: Tensor, labels: Tensor, **settings: Any
) -> AttackResult:
    return attack(subject.defense, inputs, labels, **settings)


def _averaged(subject: Subject, inputs: Tensor, labels: Tensor, **settings: Any) -> AttackResult:
    """Over all states that the defense goes through."""
    updates = subject.defense.settings.steps
    return adaptive.averaged(subject.defense, inputs, labels, updates=updates, **settings)


def _short(subject: Subject, inputs: Tensor, labels: Tensor, **settings: Any) -> AttackResult:
    """Half of the updates, unless told."""
    updates = settings.pop("updates", subject.defense.settings.steps // 2)
    return adaptive.short(subject.defense, inputs, labels, updates=updates, **settings)


def _mixed(
    subject: Subject,
    inputs: Tensor,
    labels: Tensor,
    *,
    mask: Tensor,
    share: float,
    **settings: Any,
) -> AttackResult:
    """A share of the batch, but one at least, and one at least stays natural."""
    share = min(share, 1 - 1 / len(inputs))
    return adaptive.mixing(subject.model, inputs, labels, share=share, **settings)


def _one_among(
    subject: Subject,
    inputs: Tensor,
    labels: Tensor,
    *,
    mask: Tensor,
    points: int,
    companions: int = 15,
    **settings: Any,
) -> AttackResult:
    """The first `points` of the batch, each among others of it that are natural."""
    for image in inputs[:points]:  # the same image again is no companion
        others = int((inputs != image).flatten(1).any(1).sum())
        companions = min(companions, others)
    result = adaptive.one_among(
        subject.model, inputs[:points], labels[:points], inputs, companions=companions, **settings
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


def _sorted(
    subject: Subject, inputs: Tensor, labels: Tensor, *, mask: Tensor, **settings: Any
) -> AttackResult:
    """Two batches, sorted together and cut anew; attacked as any batch."""
    attack = partial(SUITE_ATTACKS["apgd-ce"], joint=True)
    size = (len(inputs) + 1) // 2
    return adaptive.sorted_batches(
        subject.model, inputs, labels, batch_size=size, attack=attack, **settings
    )


def _poisoned(
    subject: Subject,
    inputs: Tensor,
    labels: Tensor,
    *,
    mask: Tensor,
    eps: float,
    share: float,
    seed: int,
    **settings: Any,
) -> AttackResult:
    """The malicious members are bound by [0, 1] alone; the benign ones are natural, and count."""
    malicious = adaptive.draw_mask(len(inputs), share, seed=seed).to(inputs.device)
    return adaptive.poisoning(
        subject.defense, inputs, labels, malicious=malicious, seed=seed, **settings | {"norm": "linf"}
    )


# Of the direct ones, what each costs and what it is.
_DIRECT: dict[str, tuple[Run, Calls, str]] = {
    "pgd": (pgd, forwards.climb, "projected gradient ascent"),
    "apgd-ce": (SUITE_ATTACKS["apgd-ce"], forwards.climb, "APGD on the cross-entropy"),
    "apgd-dlr": (SUITE_ATTACKS["apgd-dlr"], forwards.climb, "APGD on the logits' ratio"),
    "apgd-t": (SUITE_ATTACKS["apgd-t"], forwards.targeted, "APGD towards nine classes"),
    "fab": (SUITE_ATTACKS["fab"], forwards.fab, "across the nearest boundary"),
    "fab-t": (SUITE_ATTACKS["fab-t"], forwards.fab_targeted, "across nine boundaries in turn"),
    "square": (SUITE_ATTACKS["square"], forwards.queries, "random squares, no gradient"),
}
ATTACKS: dict[str, Attack] = {
    **{
        name: Attack("direct", partial(_direct, attack), calls, note)
        for name, (attack, calls, note) in _DIRECT.items()
    },
    "denying updates": Attack(
        "adaptive",
        partial(_offline, adaptive.denying_updates),
        forwards.denying,
        "points of highest loss of the static model, submitted to the defense",
    ),
    "high confidence": Attack(
        "adaptive",
        partial(_offline, adaptive.high_confidence),
        forwards.confident,
        "the static model made wrong and sure, submitted to the defense",
    ),
    "fpa": Attack(
        "adaptive",
        partial(_on_defense, adaptive.fpa),
        partial(forwards.rounds, models=0),
        "fixed point: attack the model as adapted to the last attack",
    ),
    "gmsa-avg": Attack(
        "adaptive",
        partial(_on_defense, adaptive.gmsa_avg),
        partial(forwards.rounds, models=0.5),
        "the average loss over all models adapted so far",
        updates=True,
    ),
    "gmsa-min": Attack(
        "adaptive",
        partial(_on_defense, adaptive.gmsa_min),
        partial(forwards.rounds, models=0.5),
        "the lowest loss over all models adapted so far",
        updates=True,
    ),
    "unrolled": Attack(
        "adaptive",
        partial(_on_defense, adaptive.unrolled),
        forwards.unrolled,
        "the exact gradient, through the updates",
        updates=True,
    ),
    "averaged": Attack(
        "adaptive",
        _averaged,
        forwards.averaged,
        "gradients averaged over the states of the defense",
        updates=True,
    ),
    "short": Attack(
        "adaptive",
        _short,
        forwards.halved,
        "against half of the updates, submitted to all",
        updates=True,
    ),
    "lazy": Attack(
        "adaptive",
        partial(_on_defense, adaptive.lazy),
        forwards.lazy,
        "adapts at every fifth step only",
        updates=True,
    ),
    "mixed": Attack(
        "scenario", _mixed, forwards.climb, "a share of the batch is adversarial, and counts", least=2
    ),
    "one among": Attack(
        "scenario", _one_among, forwards.among, "one adversarial among natural inputs", least=2
    ),
    "sorted labels": Attack(
        "scenario", _sorted, forwards.climb, "batches sorted by label, attacked", span=2
    ),
    "poisoning": Attack(
        "scenario",
        _poisoned,
        forwards.unrolled,
        "malicious members; the accuracy of the benign ones",
        least=2,
        free=True,
    ),
}


def attack_named(name: str) -> Attack:
    """The attack of a name; what follows in brackets is a variant of it.

    >>> attack_named("mixed (10 %)").kind
    'scenario'
    """
    return lookup("attack", name.partition(" (")[0], ATTACKS)


def kind_of(name: str) -> Kind:
    return attack_named(name).kind
