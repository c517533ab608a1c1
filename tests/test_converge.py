"""Budgets are doubled until the worst case stands; whoever resumes comes to the same rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from made_up import MadeUp, cut, tallies
from torch import Tensor, nn

from dent.evaluation import Evaluation, Results, evaluate, load_results
from dent.evaluation.attacks import ATTACKS, Forwards
from dent.evaluation.converge import choose_attacks, judge_convergence
from dent.evaluation.estimate import DOUBLINGS, estimate_run
from dent.evaluation.plan import make_plan
from dent.evaluation.sources import Sources
from dent.evaluation.store import UnitResult
from dent.evaluation.suites import NATURAL, SPECIAL
from dent.report.evaluation import results_text, write_headlines
from dent.report.evaluation_tables import result_tables
from dent.report.figures import draw_evaluation

STEP, EPS = 0.01, 0.08
# The mean of an image moves by about this much in so many steps: pixels start anywhere in the ball, and
# stop at its border.
REACH = {steps: STEP * steps - (STEP * steps) ** 2 / (4 * EPS) for steps in (1, 2, 4, 8)}
# Distances to the boundary that are first reached in 1, 2, 4 and 8 steps, and one outside of the ball.
FIRST_AT = {1: 0.005, 2: 0.0145, 4: 0.027, 8: 0.048}
OUTSIDE = 0.09


class Mean(nn.Module):
    """Two classes: the mean of an image is below or above one half."""

    independent = True

    def forward(self, inputs: Tensor) -> Tensor:
        score = 100 * (inputs.flatten(1).mean(1) - 0.5)
        return torch.stack([-score, score], 1)


class Joint(Mean):
    """The same answers, but it does not promise that they are independent of the batch."""

    independent = False


def images_at(distances: Sequence[float], each: int = 4) -> tuple[Tensor, Tensor]:
    """Gray images of the second class, so far from the boundary."""
    far = torch.tensor(distances).repeat(each)
    return (0.5 + far).view(-1, 1, 1, 1).expand(-1, 3, 32, 32).clone(), torch.ones(len(far)).long()


def converge(
    distances: Sequence[float], defense: str = "static", out: Path | None = None, **asked: Any
) -> Results:
    settings: dict[str, Any] = {"converge": True, "doublings": 2, "eps": EPS, "threads": 1}
    settings |= {"batch_size": 8}
    settings |= {"attacks": f"pgd:step_size={STEP},steps=1", "battle": False} | asked
    own: Any = {"static": "static", "joint": Joint().eval()}[defense]
    images = images_at(distances)
    return evaluate({"mean": Mean().eval()}, {defense: own}, data=images, out=out, **settings)


def test_the_toy_is_as_far_as_it_says() -> None:
    steps = list(REACH)
    for before, here in zip([0, *steps], steps, strict=False):
        assert REACH.get(before, 0) + 0.004 < FIRST_AT[here] < REACH[here] - 0.004
    assert OUTSIDE > EPS


CELLS = ["static", "joint"]  # in one, broken points leave; in the other, every attack gets all


@pytest.mark.parametrize("defense", CELLS)
def test_a_worst_case_that_stands_has_converged_after_one_doubling(defense: str) -> None:
    (cell,) = converge([FIRST_AT[1], OUTSIDE], defense).cells
    found = cell.convergence
    assert found is not None
    assert (found.converged, found.doublings, found.change, found.n) == (True, 1, 0, 8)
    assert list(cell.attacks) == ["pgd", "pgd (x2)"]
    assert cell.worst.percent == 50


@pytest.mark.parametrize("defense", CELLS)
@pytest.mark.parametrize("doublings", [1, 2, 3])
def test_it_goes_on_until_the_budget_ends(defense: str, doublings: int) -> None:
    (cell,) = converge([*FIRST_AT.values(), OUTSIDE], defense, doublings=doublings).cells
    found = cell.convergence
    assert found is not None
    assert (found.converged, found.doublings, found.change) == (False, doublings, 4)
    assert found.change_percent == 20
    assert cell.worst.correct == 20 - 4 * (1 + doublings)
    assert list(cell.attacks) == ["pgd", *(f"pgd (x{2**k})" for k in range(1, doublings + 1))]
    assert cell.kinds["pgd (x2)"] == "direct"
    assert cell.claimed == cell.worst  # the doublings of a direct attack are direct


@pytest.mark.parametrize("defense", CELLS)
def test_a_doubling_that_breaks_more_is_followed_by_another(defense: str) -> None:
    (cell,) = converge([FIRST_AT[1], FIRST_AT[2], OUTSIDE], defense, doublings=4).cells
    found = cell.convergence
    assert found is not None
    assert (found.converged, found.doublings, found.change) == (True, 2, 0)
    assert [one.attack for one in found.trace] == [NATURAL, "pgd", "pgd (x2)", "pgd (x4)"]
    assert [one.correct for one in found.trace] == [12, 8, 4, 4]
    costs = np.diff([one.cost for one in found.trace])
    if defense == "joint":  # (steps + 1) gradients and three answers, for every input
        assert costs.tolist() == [2 * 2 + 3, 3 * 2 + 3, 5 * 2 + 3]
    else:  # broken points leave
        assert np.allclose(costs, [2 * 2 + 3, (3 * 2 + 3) * 8 / 12, (5 * 2 + 3) * 4 / 12])


def test_where_nothing_stands_nothing_is_doubled() -> None:
    (cell,) = converge([FIRST_AT[1]]).cells
    assert cell.convergence is not None
    assert (cell.convergence.converged, cell.convergence.doublings) == (True, 0)
    assert list(cell.attacks) == ["pgd"]


def test_an_attack_that_gains_nothing_is_not_doubled() -> None:
    weak = f"pgd (weak):step_size={STEP / 20},steps=1"
    asked: dict[str, Any] = {"attacks": [weak, f"pgd:step_size={STEP},steps=1"], "doublings": 3}
    for defense in CELLS:
        (cell,) = converge([FIRST_AT[1], FIRST_AT[2], OUTSIDE], defense, **asked).cells
        assert list(cell.attacks) == ["pgd (weak)", "pgd", "pgd (x2)", "pgd (x4)"]
    assert cell.convergence is not None
    assert (cell.convergence.alone_by, cell.convergence.alone) == ("pgd", 8)  # with all of its budgets


def test_without_doublings_a_worst_case_is_an_upper_bound() -> None:
    (cell,) = converge([FIRST_AT[1], FIRST_AT[2]], "joint", converge=False).cells
    found = cell.convergence
    assert found is not None
    assert (found.converged, found.doublings, found.change) == (False, 0, None)
    assert (found.alone, found.alone_by, found.alone_percent) == (4, "pgd", 50)
    assert list(cell.attacks) == ["pgd"]


@pytest.mark.parametrize(
    ("settings", "most"),
    [
        ({}, 0),
        ({"converge": True}, 3),
        ({"suite": "full"}, 3),
        ({"suite": "full", "doublings": 5}, 5),
        ({"suite": "full", "converge": False}, 0),
        ({"suite": "full", "attacks": "apgd-ce"}, 0),
        ({"attacks": "apgd-ce", "converge": True}, 3),
    ],
)
def test_full_converges_by_default(settings: dict[str, Any], most: int) -> None:
    assert Evaluation(**settings).most_doublings == most


@pytest.mark.parametrize("idle", [{"doublings": 2}, {"doubling_cost": 1}])
def test_doublings_that_would_not_happen_are_refused(idle: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(idle))}: expected converge too"):
        Evaluation(**idle)
    assert Evaluation(**idle, converge=False).most_doublings == 0  # switched off, for instance by a flag


# Every attack of the table can be doubled


@pytest.mark.parametrize("name", [name for name, one in ATTACKS.items() if one.kind != "scenario"])
def test_twice_the_budget_costs_more_and_at_most_twice_as_much(name: str) -> None:
    attack = ATTACKS[name]
    forwards = Forwards(updates=6)
    once, twice, four = (
        attack.count_forwards(forwards, attack.multiply_budget({}, times)) for times in (1, 2, 4)
    )
    assert once == attack.count_forwards(forwards, {})
    assert 1.5 * once < twice <= 2 * once
    assert 1.5 * twice < four <= 2 * twice
    assert attack.read_options(attack.multiply_budget({}, 2))


def test_a_budget_of_nothing_becomes_something() -> None:
    assert ATTACKS["pgd"].multiply_budget({"steps": 0}, 2) == {"steps": 2}


# Which attacks are doubled


def expect(made: MadeUp, rounds: Sequence[Mapping[str, str]]) -> list[str]:
    """The rule, in sets."""
    natural = {point for batch in made.batches for point in batch if made.survives[NATURAL][point]}
    broken = {
        name: {point for point in natural if not made.survives[name][point]}
        for attacks in rounds
        for name in attacks
    }
    *before, last = rounds
    stood = natural - {point for attacks in before for name in attacks for point in broken[name]}
    left = stood - {point for name in last for point in broken[name]}
    n = sum(map(len, made.batches))
    if not left or (before and 200 * (len(stood) - len(left)) < n):
        return []
    if before:
        return [base for name, base in last.items() if broken[name] & stood]
    found = []
    for name in last:
        others = {point for other in last if other != name for point in broken[other]}
        is_most = len(broken[name]) == max(map(len, (broken[other] for other in last)))
        if broken[name] - others or is_most:
            found.append(name)
    return found


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("doubled", [False, True])
def test_the_rule_is_what_it_says(seed: int, doubled: bool) -> None:
    rng = np.random.default_rng(seed)
    n, first = 250, ["apgd-ce", "square", "fpa"]
    hard = rng.random((4, n)) > rng.choice([0.0, 0.002, 0.02, 0.5], size=(4, 1))
    survives = dict(zip([NATURAL, *first], hard, strict=True))
    made = MadeUp(cut(n, 60), survives)
    ((_, tally),) = tallies(made).items()
    if doubled:
        again = {"square (x2)": "square", "fpa (x2)": "fpa"}
        more = rng.random((2, n)) > rng.choice([0.0, 0.002, 0.02], size=(2, 1))
        made.survives = survives | dict(zip(again, more, strict=True))
        tally.add_round(again)
        assert choose_attacks(tally, first) == []  # nothing is decided before all of it is done
        for one in made.done():
            tally.add(one)
    assert choose_attacks(tally, first) == expect(made, tally.rounds)


def test_an_unfinished_round_decides_nothing_and_lowers_no_n() -> None:
    rng = np.random.default_rng(0)
    survives = {name: rng.random(40) < 0.7 for name in (NATURAL, "apgd-ce", "fpa", "fpa (x2)")}
    made = MadeUp(cut(40, 10), survives)
    suite = MadeUp(made.batches, {name: survives[name] for name in (NATURAL, "apgd-ce", "fpa")})
    ((_, tally),) = tallies(suite).items()
    tally.add_round({"fpa (x2)": "fpa"})
    for one in made.done():
        if one.unit.batch != 3:
            tally.add(one)
    found = judge_convergence(tally)
    assert found is not None
    assert (found.converged, found.doublings, found.change, found.n) == (False, 0, None, 40)
    assert choose_attacks(tally, ["apgd-ce", "fpa"]) == []


# Resumed runs


class EnoughError(Exception):
    pass


def summarized(results: Results) -> list[Any]:
    cells = [cell.to_json(points=True) for cell in results.cells]
    for cell in cells:
        cell.pop("cost")  # has seconds
    return cells


@pytest.mark.parametrize("defense", CELLS)
def test_stopped_anywhere_and_resumed_is_unbroken(tmp_path: Path, defense: str) -> None:
    distances = [FIRST_AT[1], FIRST_AT[2], FIRST_AT[4], OUTSIDE]
    seen: list[UnitResult] = []
    unbroken = converge(distances, defense, tmp_path / "unbroken", on_unit=seen.append)
    rounds = [one.unit.attack for one in seen]
    assert [rounds.count(name) for name in ("pgd", "pgd (x2)", "pgd (x4)")] == [2, 2, 2]
    for number in range(1, len(seen)):
        folder, count = tmp_path / str(number), 0

        def stop(done: UnitResult, after: int = number) -> None:
            nonlocal count
            count += 1
            if count == after:
                raise EnoughError

        with pytest.raises(EnoughError):
            converge(distances, defense, folder, on_unit=stop)
        assert not load_results(folder).complete
        again: list[UnitResult] = []
        resumed = converge(distances, defense, folder, on_unit=again.append)
        assert summarized(resumed) == summarized(unbroken) == summarized(load_results(folder))
        assert len(again) == len(seen) - number
        assert files(folder) == files(tmp_path / "unbroken")


def files(folder: Path) -> set[str]:
    return {path.name for path in (folder / "units").rglob("*.json")}


def test_files_of_another_doubling_are_foreign(tmp_path: Path) -> None:
    distances = [FIRST_AT[1], OUTSIDE]
    converge(distances, out=tmp_path)
    (path,) = (tmp_path / "units").rglob("00000_pgd_x2_.json")
    path.rename(path.with_name("00000_pgd_x8_.json"))  # no run of two doublings has it
    with pytest.raises(ValueError, match=r"00000_pgd_x8_.json is no part of this run"):
        load_results(tmp_path)


@pytest.mark.parametrize("defense", CELLS)
def test_a_doubling_has_verdicts_where_it_is_done(defense: str, tmp_path: Path) -> None:
    distances = [*FIRST_AT.values(), OUTSIDE]
    whole = converge(distances, defense, out=tmp_path).cells[0].verdicts
    (path,) = (tmp_path / "units").rglob("00001_pgd_x2_.json")
    path.unlink()
    rest = load_results(tmp_path).cells[0].verdicts
    assert rest["pgd"] == whole["pgd"]
    assert rest["pgd (x2)"].items() < whole["pgd (x2)"].items()
    assert len(rest["pgd (x2)"]) == len(whole["pgd"]) - 8


def test_a_name_that_a_doubling_needs_is_refused(tmp_path: Path) -> None:
    asked: dict[str, Any] = {"attacks": ["pgd:steps=1", "pgd (X2):steps=1"]}
    with pytest.raises(ValueError, match=r"expected another name than pgd \(x2\)"):
        converge([0.1], out=tmp_path / "run", **asked)
    assert not (tmp_path / "run" / "units").exists()
    assert converge([0.1], converge=False, **asked).complete


# What doublings may cost


@pytest.mark.parametrize("defense", CELLS)
def test_doublings_end_when_they_cost_too_much(defense: str) -> None:
    distances = [*FIRST_AT.values(), OUTSIDE]
    asked: dict[str, Any] = {
        "doublings": 3,
        "doubling_cost": 3.5,
    }  # of 7: 9, 13, then 21
    (cell,) = converge(distances, defense, **asked).cells
    found = cell.convergence
    assert found is not None
    assert (found.converged, found.doublings, found.skipped) == (False, 2, ("pgd (x8)",))
    assert list(cell.attacks) == ["pgd", "pgd (x2)", "pgd (x4)"]
    results = converge(distances, defense, **asked | {"doubling_cost": 1})
    assert row_of(results, defense)["too costly"] == "pgd (x2)"
    assert row_of(results, defense)["verdict"] == "upper bound, not converged"


def test_a_table_holds_rows_with_and_without_skipped_attacks() -> None:
    results = converge([*FIRST_AT.values(), OUTSIDE], doublings=3, doubling_cost=1)
    (cell,) = results.cells
    assert cell.convergence is not None
    other = replace(cell, cell=replace(cell.cell, defense="other"))
    other = replace(other, convergence=replace(cell.convergence, skipped=()))
    for cells in ((cell, other), (other, cell)):
        both = replace(results, cells=cells)
        shown = {one.cell.defense: row_of(both, one.cell.defense)["too costly"] for one in cells}
        assert shown == {cell.cell.defense: "pgd (x2)", "other": "-"}


def test_the_cheapest_attacks_of_a_round_are_run_and_it_is_the_last() -> None:
    cheap, dear = f"pgd:step_size={STEP},steps=1", f"pgd (often):restarts=9,step_size={STEP},steps=1"
    asked: dict[str, Any] = {"attacks": [dear, cheap], "doublings": 3, "doubling_cost": 1}
    (cell,) = converge([*FIRST_AT.values(), OUTSIDE], "joint", **asked).cells
    assert cell.convergence is not None
    assert cell.convergence.skipped == ("pgd (often, x2)",)
    assert list(cell.attacks) == ["pgd (often)", "pgd", "pgd (x2)"]
    assert not cell.convergence.converged


@pytest.mark.parametrize(
    ("settings", "most"),
    [
        ({"converge": True}, None),
        ({"suite": "full"}, 1),
        ({"suite": "full", "doubling_cost": "5/2"}, 2.5),
    ],
)
def test_doublings_of_full_cost_at_most_as_much_as_the_suite(
    settings: dict[str, Any], most: float | None
) -> None:
    assert Evaluation(**settings).most_doubling_cost == most


# Estimates


def test_an_estimate_has_what_doublings_cost_at_most() -> None:
    asked = {"models": "resnet20-at", "defenses": "dent+", "n": 8, "batch_size": 4, "battle": False}
    rows = {}
    for doublings in (0, 1, 2):
        more = {"converge": True, "doublings": doublings} if doublings else {}
        sources = Sources(Evaluation(**asked, **more))
        rows[doublings] = {one.attack: one for one in estimate_run(make_plan(sources), sources)}
    plain = {name: one for name, one in rows[0].items() if name not in SPECIAL}
    suite = sum(one.forwards for one in plain.values())
    assert DOUBLINGS not in rows[0]
    for doublings, times in ((1, 2), (2, 2 + 4)):
        found = rows[doublings][DOUBLINGS]
        assert found.units == 2 * doublings * len(plain)
        assert 0.75 * times * suite < found.forwards <= times * suite
        assert rows[doublings].keys() == rows[0].keys() | {DOUBLINGS}
    sources = Sources(Evaluation(**asked, converge=True, doubling_cost=0.5))
    limited = {one.attack: one.forwards for one in estimate_run(make_plan(sources), sources)}
    assert limited[DOUBLINGS] == pytest.approx(0.5 * suite)


# Tables and plots


def row_of(results: Results, defense: str) -> dict[str, str]:
    (table,) = [one for one in result_tables(results) if one.title == "Convergence of the worst case"]
    (row,) = [row for group in table.groups for row in group.rows if row[0].text == defense]
    shown = (" ".join([cell.text, *cell.details]) for cell in row)
    return dict(zip(table.columns, shown, strict=True))


def test_tables_say_what_is_an_upper_bound() -> None:
    distances = [*FIRST_AT.values(), OUTSIDE]
    ended = converge(distances, "joint", doublings=1)
    row = row_of(ended, "joint")
    assert row["verdict"] == "upper bound, not converged"
    assert (row["doublings"], row["last one broke"], row["one attack alone"]) == (
        "1", "4 20.0 %", "40.0 pgd",
    )  # fmt: skip
    assert "\N{LESS-THAN OR EQUAL TO} 60.0" in results_text(ended, 200)
    assert "at most 60.0 % stands" in write_headlines(ended)[0]
    stands = converge(distances, "static", doublings=4)
    row = row_of(stands, "static")
    assert (row["verdict"], row["doublings"], row["one attack alone"]) == ("converged", "4", "-")
    assert row["last one broke"] == "0 0.0 %"
    assert "\N{LESS-THAN OR EQUAL TO}" not in results_text(stands, 200)
    assert "20.0 % stands" in write_headlines(stands)[0]


def test_the_plot_has_a_line_for_each_defense_and_its_numbers_beside_it() -> None:
    results = converge([*FIRST_AT.values(), OUTSIDE])
    (plot,) = [
        one for one in draw_evaluation(results) if one.title.startswith("Worst case against cost")
    ]
    assert plot.title == "Worst case against cost of attacks, mean, linf 0.08"
    drawn = plot.spec["data"]["values"]
    assert [row["attack"] for row in drawn] == [NATURAL, "pgd", "pgd (x2)", "pgd (x4)"]
    assert [row["percent"] for row in drawn] == [100, 80, 60, 40]
    assert all(before["cost"] < after["cost"] for before, after in pairwise(drawn))
    (group,) = plot.numbers.groups
    assert {len(row) for row in group.rows} == {len(plot.numbers.columns)}
    assert {(row["n"], row["batches"]) for row in drawn} == {
        (results.cells[0].worst.n, results.cells[0].batches)
    }
    assert [row[2].number for row in group.rows] == [row["cost"] for row in drawn]
    assert [row[3].number for row in group.rows] == [row["percent"] for row in drawn]


def test_doubled_attacks_are_the_last_columns() -> None:
    weak = "denying updates:attacks=apgd-ce,steps=1"
    strong = f"pgd:step_size={STEP},steps=1"
    results = converge([FIRST_AT[1], FIRST_AT[2], OUTSIDE], attacks=[strong, weak], doublings=3)
    (table,) = [one for one in result_tables(results) if one.title.endswith("under each attack")]
    doubled = results.cells[0].convergence.doubled if results.cells[0].convergence else ()
    kinds = results.cells[0].kinds
    assert {kinds[name] for name in doubled} == {"direct", "adaptive"}
    shown = [name for name in doubled if kinds[name] == "direct"]  # a static model does not adapt
    assert list(table.columns[-len(shown) :]) == shown
    assert "pgd" in table.columns
