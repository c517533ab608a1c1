"""Suites: which attacks an evaluation runs, in order, with their settings."""

from __future__ import annotations

from typing import Any

from dent.attacks.autoattack import suite as version
from dent.defense.settings import Settings
from dent.evaluation.attacks import attack_named
from dent.evaluation.units import ABOUT, NATURAL, PROTOCOL
from dent.names import lookup

Suite = dict[str, dict[str, Any]]  # the attacks by name, and what differs from their defaults

ADAPTIVE: Suite = {
    "denying updates": {},
    "high confidence": {},
    "fpa": {},
    "gmsa-avg": {},
    "gmsa-min": {},
    "unrolled": {},
    "averaged": {},
    "short": {},
    "lazy": {},
    **{f"mixed ({share} %)": {"share": share / 100} for share in (10, 25, 50, 75, 90)},
    "one among (15)": {"companions": 15, "points": 16},
    "sorted labels": {},
    "poisoning": {"share": 0.1},
}
QUICK: Suite = {
    "apgd-ce": {"steps": 10},
    "denying updates": {"steps": 20, "attacks": ("apgd-ce", "apgd-dlr")},
    "fpa": {"rounds": 3, "steps": 10},
}
SUITE_NOTES = {
    "quick": "few steps of the most telling attacks: minutes on a laptop",
    "standard": "AutoAttack's four; nothing made for adaptation",
    "plus": "AutoAttack Plus",
    "rand": "AutoAttack for models that are random",
    "adaptive": "the attacks made for adaptation, and mixed, sorted and poisoned batches",
    "full": "standard, adaptive, and the reference AutoAttack as the paper used it",
}


def suite_attacks(name: str, norm: str) -> Suite:
    """The attacks of a suite.

    >>> list(suite_attacks("standard", "linf"))
    ['apgd-ce', 'apgd-t', 'fab-t', 'square']
    """
    lookup("suite", name, SUITE_NOTES)
    if name == "quick":
        return QUICK
    if name == "adaptive":
        return ADAPTIVE
    if name == "full":
        return version("standard", norm) | ADAPTIVE
    return dict(version(name, norm))


def attacks_on(
    settings: Settings,
    *,
    suite: str,
    norm: str,
    independent: bool,
    steps: int | None = None,
    queries: int | None = None,
    protocol: bool = False,
) -> Suite:
    """What is done to a cell with these settings of a defence, natural inputs and `ABOUT` first.

    Attacks that need updates are for defences that make some; scenarios for those whose inputs depend
    on one another. `steps` and `queries` replace every attack's own.
    """
    chosen: Suite = {NATURAL: {}, ABOUT: {}}
    if protocol:
        chosen[PROTOCOL] = _budget(PROTOCOL, {}, steps, queries)
    for name, options in suite_attacks(suite, norm).items():
        attack = attack_named(name)
        if attack.updates and not settings.steps:
            continue
        if attack.kind == "scenario" and independent:
            continue
        chosen[name] = _budget(name, options, steps, queries)
    return chosen


def _budget(
    name: str, options: dict[str, Any], steps: int | None, queries: int | None
) -> dict[str, Any]:
    given = {}
    if steps is not None and name != "square":
        given["steps"] = steps
    if queries is not None and name in ("square", PROTOCOL):
        given["queries"] = queries
    return options | given
