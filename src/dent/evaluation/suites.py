"""Suites of attacks, attacks written as text, and which attacks a cell gets."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping
from itertools import chain
from typing import Any

from dent.attacks import Finding
from dent.attacks.autoattack import select_attacks as select_version
from dent.evaluation.attacks import ATTACKS, Attack, find_attack
from dent.names import lookup
from dent.texts import format_text, parse_text

Suite = dict[str, dict[str, Any]]  # attacks by name, each with the options that differ from its defaults

# Version of all suites and of the attacks' defaults. Raise it with every change of either: numbers of
# different versions are not comparable.
SUITE_VERSION = "2026.2"

# Units that are no attacks of a suite.
NATURAL = "natural"  # the batch as it is
PROTOCOL = "autoattack"  # the reference AutoAttack on all points of a cell, as in the paper
ABOUT = "about"  # cost and findings of a cell
BATTLE = "battle"  # an attack on a few images, recorded step by step for the report
SPECIAL = (NATURAL, PROTOCOL, ABOUT, BATTLE)

DRAWS = 10  # answers of a random defense that an attack averages, unless the suite says otherwise

# By what they break at equal cost (benchmarks/yield.py): the strongest first. Left out is what another
# attack always did better: gmsa-avg (fpa), trajectory (averaged) and targeted lazy APGD (chained).
ADAPTIVE: Suite = {
    "denying updates": {},
    "high confidence": {},
    "denying most updates": {},
    "averaged": {},
    "balanced": {},
    "fpa": {},
    "chained": {},
    "short": {},
    "short (quarter)": {"share": 0.25, "targets": 3, "restarts": 2},
    "lazy": {},
    "unrolled": {},
    "gmsa-min": {"rounds": 5, "steps": 50},
    **{f"mixed ({share} %)": {"share": share / 100} for share in (10, 25, 50, 75, 90)},
    "one among (15)": {"companions": 15, "points": 16},
    "sorted labels": {},
    "poisoning": {"share": 0.1},
}
# What `full` does otherwise than `standard`. On defenses these two cost most and broke nothing that
# others left, so it begins with less of them; it doubles the budget of all that gain.
LESS: Suite = {"fab-t": {"targets": 3, "order": "distance"}, "square": {"queries": 1000}}
QUICK: Suite = {
    "apgd-ce": {"steps": 10},
    "denying updates": {"steps": 20, "attacks": ("apgd-ce", "apgd-dlr")},
    "denying most updates": {"steps": 5},
    "fpa": {"rounds": 3, "steps": 10},
}
SUITE_NOTES = {
    "quick": "a few steps of the most telling attacks: minutes on a laptop",
    "standard": "the four attacks of AutoAttack; none is made for adaptation",
    "plus": "AutoAttack Plus",
    "rand": "AutoAttack for random models",
    "adaptive": "attacks made for adaptation; mixed, sorted and poisoned batches",
    "none": "no attack: natural accuracy and the cost of inference",
    "full": "standard with less of FAB and Square, adaptive, the reference AutoAttack as the paper used "
    "it; until it has converged",
}


def find_suite(name: str, norm: str) -> Suite:
    """Return the attacks of a suite.

    >>> list(find_suite("standard", "linf"))
    ['apgd-ce', 'apgd-t', 'fab-t', 'square']
    """
    lookup("suite", name, SUITE_NOTES)
    own: dict[str, Suite] = {"none": {}, "quick": QUICK, "adaptive": ADAPTIVE}
    if name in own:
        return own[name]
    version: Suite = dict(select_version("standard" if name == "full" else name, norm))
    return version | LESS | ADAPTIVE if name == "full" else version


def parse_attack(text: str, own: Container[str] = ()) -> tuple[str, dict[str, Any]]:
    """Return the name and the options of an attack such as `fpa:rounds=3,steps=10`.

    A variant has a name of its own in parentheses, such as `mixed (20 %):share=0.2`. A variant of the
    suite `adaptive` has the options of that suite. The name of a user's own attack is its name in `own`,
    or its import path.

    >>> parse_attack("package.module:function:steps=10")
    ('package.module:function', {'steps': 10})
    """
    if not isinstance(text, str):
        raise TypeError(f"expected an attack such as apgd-ce or fpa:rounds=3,steps=10, got {text!r}")
    if text in own:
        return text, {}
    if is_own_path(text):
        module, function, rest = (*(part.strip() for part in text.split(":", 2)), "")[:3]
        return f"{module}:{function}", parse_text(f":{rest}", "package.module:function:steps=10")[1]
    name, given = parse_text(text, "apgd-ce or fpa:rounds=3,steps=10")
    attack = find_attack(name)
    if not re.fullmatch(r"[^()]+( \([^()]+\))?", name):
        raise ValueError(f"expected a variant of {attack.name} as {attack.name} (other), got {name!r}")
    return name, attack.read_options(ADAPTIVE.get(name, {}) | given)


def is_own_path(text: str) -> bool:
    """Return True for package.module:function, also as a variant and with options.

    >>> [is_own_path(f"mine:attack{rest}") for rest in ("", " (other)", ":steps=10", "=10")]
    [True, True, True, False]
    """
    is_path = re.fullmatch(r"\s*[\w.]+:[\w.]+( \([^()]+\))?\s*(:.*)?", text) is not None
    return is_path and text.partition(":")[0].strip() not in ATTACKS


def format_attack(text: str, own: Container[str] = ()) -> str:
    """Return the one text of an attack: options in alphabetical order.

    >>> format_attack("fpa: steps=10, rounds=3"), format_attack("mixed (20 %):share=0.2")
    ('fpa:rounds=3,steps=10', 'mixed (20 %):share=0.2')
    """
    if isinstance(text, str) and text in SUITE_NOTES:
        return text
    name, options = parse_attack(text, own)
    known = ADAPTIVE.get(name, {})
    texts = {
        key: f"({','.join(value)})" if isinstance(value, tuple) else str(value)
        for key, value in options.items()
        if known.get(key) != value
    }
    return format_text(name, texts)


def parse_attacks(texts: Iterable[str], own: Container[str] = (), norm: str = "linf") -> Suite:
    """Return attacks that were written as texts as a suite. A text may also name a whole suite.

    >>> parse_attacks(["apgd-ce:steps=10", "fpa"])
    {'apgd-ce': {'steps': 10}, 'fpa': {}}
    """
    suite: Suite = {}
    files: dict[str, str] = {}
    chosen = [
        find_suite(text, norm).items() if text in SUITE_NOTES else [parse_attack(text, own)]
        for text in texts
    ]
    for name, options in chain.from_iterable(chosen):
        file = slugify(name.lower())  # some file systems do not tell case
        if file in files:
            raise ValueError(
                f"expected a name of its own for each attack, got {files[file]} and {name}; name a "
                f"variant as {name.partition(' (')[0]} (other)"
            )
        files[file] = name
        suite[name] = options
    return suite


def slugify(name: str) -> str:
    """Return a name for files.

    >>> slugify("mixed (10 %)")
    'mixed_10_'
    """
    return re.sub(r"[^A-Za-z0-9.+=-]+", "_", name)


def explain_missing(attack: Attack, lacks: Mapping[str, str]) -> str | None:
    """Return why an attack cannot be run on a defense that lacks parts of the protocol, or None."""
    return next((lacks[part] for part in attack.needs if part in lacks), None)


def select_attacks(
    suite: Mapping[str, dict[str, Any]],
    *,
    updates: int | None,
    independent: bool,
    steps: int | None = None,
    queries: int | None = None,
    protocol: bool = False,
    battle: bool = False,
    lacks: Mapping[str, str] | None = None,
    randomized: bool = False,
    own: Mapping[str, Attack] | None = None,
) -> tuple[Suite, dict[str, str]]:
    """Return what is run on a cell, and the attacks that its defense does not allow, with the reason.

    What is run is natural inputs and `ABOUT`, then the attacks that suit the defense: not those that
    need updates if it makes none, and no scenarios if its answers are independent. An attack that suits
    it, but needs a part of the protocol that it lacks, is not run. `steps` and `queries` replace the
    budget of every attack. On a random defense, attacks average over draws.

    >>> suite, lacks = {"apgd-ce": {}, "fpa": {}}, {"steps": "no `steps`"}
    >>> select_attacks(suite, updates=1, independent=True, lacks=lacks)
    ({'natural': {}, 'about': {}, 'apgd-ce': {}}, {'fpa': 'no `steps`'})
    """
    chosen: Suite = {NATURAL: {}, ABOUT: {}}
    not_run: dict[str, str] = {}
    limits = {"steps": steps, "queries": queries}
    given = {name: value for name, value in limits.items() if value is not None}
    if protocol:
        chosen[PROTOCOL] = given
    if battle:
        chosen[BATTLE] = {}
    for name, options in suite.items():
        attack = find_attack(name, own)
        if (attack.needs_updates and updates == 0) or (attack.kind == "scenario" and independent):
            continue
        if reason := explain_missing(attack, lacks or {}):
            not_run[name] = reason
            continue
        budget = {option: value for option, value in given.items() if option in attack.options}
        chosen[name] = choose_draws(attack, randomized) | options | budget
    return chosen, not_run


def choose_draws(attack: Attack, randomized: bool) -> dict[str, int]:
    """Return how many draws an attack averages on a random defense, as options; none if it cannot.

    >>> choose_draws(ATTACKS["apgd-ce"], True), choose_draws(ATTACKS["square"], True)
    ({'draws': 10}, {})
    """
    return {"draws": DRAWS} if randomized and "draws" in attack.options else {}


def describe_randomness(attacks: Iterable[str]) -> Finding:
    """Return the finding of a random defense, which names the attacks that do not average over draws.

    Nothing is said of a user's own attacks.

    >>> describe_randomness(["apgd-ce", "square"]).message
    'the same inputs get different answers; square follows one draw at a time and may be weaker'
    """
    found = {name: ATTACKS.get(name.partition(" (")[0]) for name in attacks}
    single = [
        name
        for name, one in found.items()
        if one and "draws" not in one.options and one.needs != ("static",)
    ]
    verb = "follows" if len(single) == 1 else "follow"
    rest = f"; {', '.join(single)} {verb} one draw at a time and may be weaker" if single else ""
    return Finding("randomized", f"the same inputs get different answers{rest}")
