"""Suites: which attacks an evaluation runs, in order, with their settings."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from dent.attacks.adaptive.transfer import OFFLINE
from dent.attacks.autoattack import select_attacks
from dent.attacks.losses import LOSSES
from dent.defense.dent.settings import Settings
from dent.evaluation.attacks import attack_named
from dent.evaluation.units import ABOUT, BATTLE, NATURAL, PROTOCOL
from dent.names import check_known, lookup
from dent.texts import format_text, parse_text

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
    "none": "no attack: natural accuracy, and what inference costs",
    "full": "standard, adaptive, and the reference AutoAttack as the paper used it",
}


_CLIMB = ("steps", "restarts")
_ROUNDS = ("rounds", "loss", "targets", *_CLIMB)
# What can be told an attack by its text; all but `share`, `step_size` and names are whole numbers.
OPTIONS: dict[str, tuple[str, ...]] = {
    "pgd": ("step_size", "loss", *_CLIMB),
    "apgd-ce": ("draws", *_CLIMB),
    "apgd-dlr": ("draws", *_CLIMB),
    "apgd-t": ("draws", "targets", *_CLIMB),
    "fab": _CLIMB,
    "fab-t": ("targets", *_CLIMB),
    "square": ("queries", "restarts"),
    "denying updates": ("attacks", "steps"),
    "high confidence": ("targets", *_CLIMB),
    **dict.fromkeys(("fpa", "gmsa-avg", "gmsa-min"), _ROUNDS),
    **dict.fromkeys(("unrolled", "averaged", "sorted labels"), _CLIMB),
    "short": ("updates", *_CLIMB),
    "lazy": ("every", *_CLIMB),
    "mixed": ("share", *_CLIMB),
    "one among": ("companions", "points", *_CLIMB),
    "poisoning": ("share", *_CLIMB),
}
NEEDED = {"mixed": "share", "one among": "points", "poisoning": "share"}  # what has no default


def attack_text(asked: str) -> str:
    """The one way to write an attack with its options; in brackets, a variant has a name of its own.

    >>> attack_text("fpa: steps=10, rounds=3"), attack_text("mixed (20 %):share=0.2")
    ('fpa:rounds=3,steps=10', 'mixed (20 %):share=0.2')
    """
    name, options = _read_attack(asked)
    texts = {
        key: f"({','.join(value)})" if key == "attacks" else str(value) for key, value in options.items()
    }
    return format_text(name, texts)


def chosen_attacks(texts: Iterable[str]) -> Suite:
    """Attacks by their texts, as a suite.

    >>> chosen_attacks(["apgd-ce:steps=10", "fpa"])
    {'apgd-ce': {'steps': 10}, 'fpa': {}}
    """
    chosen: Suite = {}
    files: dict[str, str] = {}
    for text in texts:
        name, options = _read_attack(text)
        file = re.sub(r"[^a-z0-9.+=-]+", "_", name.lower())  # as units are kept, also where case is not
        if file in files:
            raise ValueError(
                f"expected a name of its own for each attack, got {files[file]} and {name}; name a "
                f"variant as {name.partition(' (')[0]} (other)"
            )
        files[file] = name
        chosen[name] = ADAPTIVE.get(name, {}) | options
    return chosen


def _read_attack(asked: str) -> tuple[str, dict[str, Any]]:
    """The name of an attack and its options, after all that can be wrong with them was looked at."""
    if not isinstance(asked, str):
        raise TypeError(f"expected an attack such as apgd-ce or fpa:rounds=3,steps=10, got {asked!r}")
    name, given = parse_text(asked, "apgd-ce or fpa:rounds=3,steps=10")
    attack_named(name)
    kind = name.partition(" (")[0]
    if not re.fullmatch(r"[^()]+( \([^()]+\))?", name):
        raise ValueError(f"expected a variant of {kind} as {kind} (other), got {name!r}")
    check_known(f"options of {name}", given, list(OPTIONS[kind]))
    options = {key: _option(name, key, value) for key, value in given.items()}
    needed = NEEDED.get(kind)
    if needed and needed not in ADAPTIVE.get(name, {}) | options:
        raise ValueError(f"expected {needed} of {name}, got none; write {name}:{needed}=...")
    return name, options


def _option(name: str, key: str, value: Any) -> Any:
    what = f"{key} of {name}"
    if key == "loss":
        lookup(what, value, LOSSES)
        return value
    if key == "attacks":
        names = re.findall(r"[^\s,()]+", value) if isinstance(value, str) else value
        if not isinstance(names, list | tuple) or not names:
            raise ValueError(f"expected {what} as (apgd-ce,apgd-t), got {value!r}")
        for one in names:
            lookup(what, one, OFFLINE)
        return tuple(names)
    is_number = isinstance(value, float | int) and not isinstance(value, bool)
    if key in ("share", "step_size"):
        top = 1 if key == "share" else float("inf")
        if not is_number or not 0 < value < top:
            raise ValueError(f"expected {what} as a number in (0, {top:g}), got {value!r}")
        return float(value)
    zero = ("steps", "updates", "targets" if name.startswith(("fpa", "gmsa")) else "")
    least = 0 if key in zero else 1
    if not is_number or not isinstance(value, int) or value < least:
        raise ValueError(f"expected {what} as an integer >= {least}, got {value!r}")
    return value


def suite_attacks(name: str, norm: str) -> Suite:
    """The attacks of a suite.

    >>> list(suite_attacks("standard", "linf"))
    ['apgd-ce', 'apgd-t', 'fab-t', 'square']
    """
    lookup("suite", name, SUITE_NOTES)
    if name == "none":
        return {}
    if name == "quick":
        return QUICK
    if name == "adaptive":
        return ADAPTIVE
    if name == "full":
        return select_attacks("standard", norm) | ADAPTIVE
    return select_attacks(name, norm)


def attacks_on(
    settings: Settings,
    *,
    suite: Suite,
    independent: bool,
    steps: int | None = None,
    queries: int | None = None,
    protocol: bool = False,
    battle: bool = False,
) -> Suite:
    """What a suite does to a cell with these settings of a defense, natural inputs and `ABOUT` first.

    Attacks that need updates are for defenses that make some; scenarios for those whose inputs depend
    on one another. `steps` and `queries` replace every attack's own.
    """
    chosen: Suite = {NATURAL: {}, ABOUT: {}}
    if protocol:
        chosen[PROTOCOL] = _budget(PROTOCOL, {}, steps, queries)
    if battle:
        chosen[BATTLE] = {}
    for name, options in suite.items():
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
    given, kind = {}, name.partition(" (")[0]
    if steps is not None and kind != "square":
        given["steps"] = steps
    if queries is not None and kind in ("square", PROTOCOL):
        given["queries"] = queries
    return options | given
