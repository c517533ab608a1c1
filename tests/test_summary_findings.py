"""Beside the points: what is claimed, scenarios, cost, the static model, and findings."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from made_up import KINDS, MadeUp, cut, summary, tally_units

from dent.evaluation.plan import WHOLE, Unit
from dent.evaluation.results import MissingUnit, Score
from dent.evaluation.spec import Cell
from dent.evaluation.store import Outcome, UnitResult
from dent.evaluation.suites import ABOUT, BATTLE, NATURAL, PROTOCOL


def test_the_gap_is_what_is_claimed_minus_what_stands() -> None:
    bits = {NATURAL: "1111111100", "apgd-ce": "1111110000", "denying": "1111001100"}
    made = MadeUp(cut(10, 5), {name: np.array([*map(int, row)], bool) for name, row in bits.items()})
    (found,) = summary(made).cells
    assert (found.direct.percent, found.worst.percent, found.gap) == (60.0, 40.0, 20.0)
    protocol = Outcome(tuple(range(10)), (True,) * 7 + (False,) * 3, (True,) * 10)
    (found,) = summary(made, extra=[UnitResult(Unit(made.cell, WHOLE, PROTOCOL), protocol)]).cells
    assert (found.protocol, found.gap) == (Score(7, 10), 30.0)
    assert found.worst == Score(4, 10)  # the protocol is no part of it


def test_the_gap_is_of_the_same_points_where_some_are_missing() -> None:
    survives = {NATURAL: np.ones(4, bool), "apgd-ce": np.array([1, 1, 0, 0], bool)}
    made = MadeUp([[0, 1], [2, 3]], survives, failed=frozenset({("apgd-ce", 1)}))
    protocol = Outcome((0, 1, 2, 3), (True, False, True, True), (True,) * 4)
    (found,) = summary(made, extra=[UnitResult(Unit(made.cell, WHOLE, PROTOCOL), protocol)]).cells
    assert (found.protocol, found.worst) == (Score(3, 4), Score(2, 2))
    assert found.gap == pytest.approx(-50.0)


def test_nothing_is_claimed_without_direct_attacks() -> None:
    made = MadeUp(cut(4, 4), {NATURAL: np.ones(4, bool), "fpa": np.zeros(4, bool)})
    (found,) = summary(made).cells
    assert (found.claimed, found.gap, found.direct) == (None, None, found.natural)


def test_scenarios_are_counted_apart() -> None:
    made = MadeUp(cut(6, 2), {NATURAL: np.ones(6, bool)})
    parts = [Outcome((0,), (False,), (True,)), Outcome((4, 5), (True, False), (True, True))]
    units = [
        UnitResult(Unit(made.cell, batch, "mixed (50 %)"), part) for batch, part in enumerate(parts)
    ]
    (found,) = summary(made, extra=units).cells
    assert found.scenarios == {"mixed (50 %)": Score(1, 3)}
    assert found.worst == Score(6, 6)
    assert "mixed (50 %)" not in found.attacks
    assert [str(one).rpartition(", ")[2] for one in found.missing] == ["batch 2: not done"]


def test_an_attack_need_not_have_units_in_all_batches() -> None:
    made = MadeUp(cut(6, 2), {NATURAL: np.ones(6, bool)})
    done = [
        UnitResult(Unit(made.cell, batch, "sorted"), Outcome((1,), (True,), (True,))) for batch in (0, 2)
    ]
    counted = tally_units(
        {made.cell: [NATURAL, "sorted", ABOUT]},
        made.batches,
        [*made.done(), *done],
        cumulative=bool,
        kind_of=KINDS.__getitem__,
        planned=lambda attack: {"sorted": (0, 2), ABOUT: (1,)}.get(attack, range(3)),
    )
    assert [str(one).rpartition(", ")[2] for one in counted[made.cell].list_missing()] == [
        "batch 1: not done"
    ]


def test_cost_and_findings_come_from_the_unit_about() -> None:
    made = MadeUp(cut(4, 4), {NATURAL: np.ones(4, bool)})
    finding = {"name": "randomized", "message": "m", "figures": {}}
    about = Outcome(figures={"flops": 26.0, "static_flops": 2.0}, findings=(finding,))
    took = {"seconds": 5.0, "forward_seconds": 0.75, "static_seconds": 0.25}
    (found,) = summary(made, extra=[UnitResult(Unit(made.cell, 0, ABOUT), about, took=took)]).cells
    assert found.cost is not None
    assert (found.cost.times_flops, found.cost.times_seconds) == (13.0, 3.0)
    assert found.findings == (finding,)


def test_a_battle_is_kept_as_it_was_recorded_and_judges_nothing() -> None:
    made = MadeUp(cut(4, 2), {NATURAL: np.ones(4, bool)})
    unit = Unit(made.cell, 0, BATTLE)
    failed = UnitResult(unit, error="RuntimeError: no memory")
    (without,), (missing,), (found,) = (
        summary(made, extra=extra).cells
        for extra in ([], [failed], [failed, UnitResult(unit, Outcome(battle={"steps": 10}))])
    )
    assert (without.battle, missing.battle, found.battle) == (None, None, {"steps": 10})
    assert missing.missing == (MissingUnit(str(unit), "RuntimeError: no memory"),)  # and no other
    assert replace(found, battle=None) == replace(missing, missing=()) == without


def test_a_defense_is_compared_with_its_static_model_alone() -> None:
    rng, made = np.random.default_rng(0), []
    for model, defense, eps in [
        ("a", "static", 1.0),
        ("a", "dent", 1.0),
        ("a", "dent", 2.0),
        ("b", "dent", 1.0),
    ]:
        survives = {NATURAL: rng.random(50) < 0.8, "apgd-ce": rng.random(50) < 0.6}
        made.append(MadeUp(cut(50, 10), survives, Cell(model, defense, eps, "l2")))
    static, dent, other_ball, other_model = summary(*made).cells
    assert static.versus_static is other_ball.versus_static is other_model.versus_static is None
    versus = dent.versus_static
    assert versus is not None
    one, other = (np.all([*cell.survives.values()], axis=0) for cell in made[:2])
    assert (versus.n, versus.only_first, versus.only_second) == (
        50,
        (one & ~other).sum(),
        (other & ~one).sum(),
    )
    assert versus.difference == pytest.approx(dent.worst.percent - static.worst.percent)


# Findings


def names(made: MadeUp) -> dict[str, float]:
    (found,) = summary(made).cells
    return {one["name"]: one["figures"]["inputs"] for one in found.findings}


@pytest.mark.parametrize("cumulative", [False, True])
@pytest.mark.parametrize(("alone", "told"), [(1, False), (2, False), (3, True)])
def test_square_is_stronger(cumulative: bool, alone: int, told: bool) -> None:
    """Above 0.2 % of the points: of 1,000, three."""
    natural, apgd, square = np.ones(1000, bool), np.ones(1000, bool), np.ones(1000, bool)
    natural[:100] = apgd[:300] = square[:250] = False
    square[300 : 300 + alone] = False
    survives = {NATURAL: natural, "apgd-ce": apgd, "square": square}
    made = MadeUp(cut(1000, 500), survives, cumulative=cumulative)
    assert names(made) == ({"square is stronger": float(alone)} if told else {})


def test_square_breaks_nothing_that_is_wrong_without_it() -> None:
    """A defense may be right about such a point under one attack, and wrong under another."""
    survives = {NATURAL: np.arange(100) >= 10, "apgd-ce": np.ones(100, bool)}
    assert names(MadeUp(cut(100, 50), survives | {"square": np.arange(100) >= 10})) == {}
    assert names(MadeUp(cut(100, 50), survives | {"square": np.arange(100) >= 11})) == {
        "square is stronger": 1.0
    }


def test_square_before_others_in_a_chain_says_nothing() -> None:
    natural, broken = np.ones(100, bool), np.zeros(100, bool)
    made = MadeUp(cut(100, 50), {NATURAL: natural, "square": broken, "apgd-ce": broken}, cumulative=True)
    assert names(made) == {}
    assert names(MadeUp(cut(100, 50), {NATURAL: natural, "square": broken})) == {}  # nothing beside it


@pytest.mark.parametrize("cumulative", [False, True])
@pytest.mark.parametrize(("more", "told"), [(0, False), (6, False), (7, True), (30, True)])
def test_attacks_made_for_adaptation_are_stronger(cumulative: bool, more: int, told: bool) -> None:
    """By one percentage point at least: of 700 points, seven."""
    natural, apgd, fpa = np.ones(700, bool), np.ones(700, bool), np.ones(700, bool)
    natural[:50] = apgd[:200] = fpa[100 : 200 + more] = False
    made = MadeUp(cut(700, 70), {NATURAL: natural, "apgd-ce": apgd, "fpa": fpa}, cumulative=cumulative)
    assert names(made) == ({"adaptive is stronger": float(more)} if told else {})
    static = replace(made, cell=replace(made.cell, defense="static"))
    assert names(static) == {}  # there is no defense whose gradient could mislead
