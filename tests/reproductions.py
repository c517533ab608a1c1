"""Reproductions of the paper that were never run: what each evaluation would find is known."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
from battles import battle

from dent.defense.text import parse_settings
from dent.evaluation.attacks import find_attack
from dent.evaluation.results import Cost
from dent.evaluation.suites import NATURAL, parse_attacks
from dent.paper.cells import JudgedCell, Points
from dent.paper.results import (
    Reproduction,
    list_works,
    make_work_evaluation,
    name_folder,
)
from dent.paper.scales import Scale, Work, find_scale
from dent.paper.tables import PaperTable, find_table, tables

OTHERS = ("empty", "partial", "failed", "one table")

# Four points, as a run judges them; one is wrong naturally, and each attack breaks another.
JUDGED = {
    "natural": {3: True, 1: True, 2: True, 0: False},
    "apgd-ce": {3: True, 1: False, 2: True, 0: True},
    "square": {3: True, 1: True, 2: False, 0: True},
    "denying updates": {3: False, 1: True, 2: True, 0: True},
    "mixed (50 %)": {2: True, 0: True},
    "direct": {3: True, 1: False, 2: False, 0: False},
    "worst": {3: False, 1: False, 2: False, 0: False},
}


def reproduction(
    scale: str | Scale = "cpu",
    *,
    chosen: Iterable[PaperTable] | None = None,
    keep: Callable[[Work], bool] = lambda work: True,
    troubles: dict[str, str] | None = None,
) -> Reproduction:
    """All that the tables need at a scale. keep: which work is done."""
    scale = find_scale(scale) if isinstance(scale, str) else scale
    found = {}
    for number, work in enumerate(list_works(tables().values() if chosen is None else chosen, scale)):
        if keep(work):
            found[key_of(work)] = made_up(work, seed=number)
    return Reproduction(scale, found, troubles or {})


def failed() -> Reproduction:
    """Of table-12, units of a cell failed and two cells could not be loaded; nothing else was begun."""
    found = reproduction("smoke", chosen=[find_table("table-12")])
    first, *troubled = found.cells
    judged = {"natural": found.cells[first].judged["natural"]}
    errors = ("batch 0, apgd-ce: RuntimeError: no memory", "batch 0, about: RuntimeError: no memory")
    pieces = {first: replace(found.cells[first], judged=judged, cost=None, missing=errors)}
    return replace(found, cells=pieces, troubles=dict.fromkeys(troubled[:2], "weights are not there"))


def other(name: str) -> Reproduction:
    """One that is not full, by a name of `OTHERS`."""
    if name == "empty":
        return reproduction("cpu", chosen=[])
    if name == "partial":
        return reproduction("cpu", keep=lambda work: work.defense == "static")
    return failed() if name == "failed" else reproduction("smoke", chosen=[find_table("table-9")])


def key_of(work: Work) -> str:
    return name_folder(make_work_evaluation(work, seed=0, device="cpu"))


def made_up(work: Work, seed: int = 0, **others: Any) -> JudgedCell:
    """As a run would judge: more updates help against direct attacks, less against adaptive ones."""
    random, n = np.random.default_rng(seed), work.n or 200
    updates = 0 if work.defense == "static" else parse_settings(work.defense).steps
    strength = 255 * work.eps / 8 if work.norm == "linf" else 2 * work.eps
    points = random.permutation(n).tolist()
    judged: dict[str, Points] = {NATURAL: _some(random, points, 0.85)}
    for name in parse_attacks(work.attacks):
        if find_attack(name).kind == "scenario":
            judged[name] = _some(random, points[: max(1, n // 2)], 0.5)
            continue
        gain = min(updates, 40) / (40 if find_attack(name).kind == "direct" else 400)
        left = _some(random, points, min(1, 0.35 + 0.4 * gain + 0.3 * (1 - min(1, strength))))
        judged[name] = both(judged[NATURAL], left)
    direct = [judged[name] for name in judged if name == NATURAL or find_attack(name).kind == "direct"]
    every = [judged[name] for name in judged if name == NATURAL or find_attack(name).kind != "scenario"]
    if work.protocol:
        judged["protocol"] = both(*direct, _some(random, points, 0.95))
    judged |= {"direct": both(*direct), "worst": both(*every)}
    if work.protocol:
        judged["worst"] = both(*every, judged["protocol"])
    cost = Cost(1e6 * (2 * updates + 1), 1e6, 0.03 + 0.05 * updates, 0.03)
    evaluation = make_work_evaluation(work, seed=0, device="cpu")
    shown = battle(seed=seed) if work.battle and updates else None
    given = {"cost": cost, "battle": shown, "versions": {"dent": "0.1.0"}} | others
    return JudgedCell(evaluation.to_json(), judged, **given)


def both(*judgments: Points) -> Points:
    """Correct in all of them."""
    return {point: all(one[point] for one in judgments) for point in judgments[0]}


def _some(random: np.random.Generator, points: list[int], share: float) -> Points:
    return {point: bool(random.random() < share) for point in points}


def broken() -> Any:
    """A model that cannot be loaded, and not for a reason that dent knows."""
    raise RuntimeError("no driver")
