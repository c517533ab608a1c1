"""What a dry run says against what a run does: units, and forwards of the static model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cells import labeled, outcomes, sources_of, tiny, units_of_kind
from own_defenses import Inside, UndeclaredCoin
from torch import Tensor, nn

import dent
from dent.evaluation import evaluate
from dent.evaluation.attacks import Forwards, find_attack
from dent.evaluation.cost import time_calls
from dent.evaluation.estimate import estimate_run
from dent.evaluation.plan import BATTLE_STEPS, FEW, SUBMISSIONS, Plan, make_plan
from dent.evaluation.sources import Sources
from dent.evaluation.store import UnitResult
from dent.evaluation.suites import ABOUT, BATTLE, NATURAL, PROTOCOL, SUITE_NOTES
from dent.report.terminal import estimate_rows, total_line

ANSWERS = {"static": 1, "dent:steps=3": 7, "dent+:steps=1": 3}  # 2k + 1 forwards with k updates


@pytest.mark.parametrize("defense", list(ANSWERS))
@pytest.mark.parametrize("suite", ["standard", "plus", "rand"])
def test_forwards_are_about_what_attacks_take_where_nothing_breaks(defense: str, suite: str) -> None:
    net = tiny(classes=10)
    sources = sources_of(
        net, labeled(net, 4), defense, suite=suite, eps=1e-5, steps=2, queries=9, exhaustive=True
    )
    plan = make_plan(sources)
    expected = {row.attack: row for row in estimate_run(plan, sources)}
    taken = dict.fromkeys(expected, 0)
    units = units_of_kind(plan, "direct")
    for unit, outcome in outcomes(plan, sources, units).items():
        assert all(outcome.correct)
        taken[unit.attack] += outcome.queries * ANSWERS[defense] + outcome.gradients
    for name in {unit.attack for unit in units}:
        assert 1 / 2 <= expected[name].forwards / taken[name] <= 3, name


def test_the_protocol_and_scenarios_are_counted_with_the_budget_that_is_asked_for() -> None:
    net = tiny(classes=10)
    asked: dict[str, Any] = {"suite": "full", "eps": 1e-5, "steps": 3, "queries": 12, "batch_size": 6}
    sources = sources_of(net, labeled(net, 9), "dent:steps=1", **asked)
    plan = make_plan(sources)
    expected = {row.attack: row.forwards for row in estimate_run(plan, sources)}
    names = [PROTOCOL, "mixed (50 %)", "one among (15)", "sorted labels"]
    units = [unit for unit in plan.units() if unit.attack in names]
    taken = dict.fromkeys(names, 0)
    for unit, outcome in outcomes(plan, sources, units).items():
        taken[unit.attack] += outcome.queries * 3 + outcome.gradients
    for name in names:
        assert 1 / 2 <= expected[name] / taken[name] <= 3, name


class Counting(nn.Module):
    """A static model that counts the images that it is asked for."""

    total = 0  # with those that copies are asked for: a defense has one

    def __init__(self) -> None:
        super().__init__()
        self.net = tiny(classes=10)
        self.count = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.count += len(inputs)
        Counting.total += len(inputs)
        logits: Tensor = self.net(inputs)
        return logits


@pytest.mark.parametrize("defense", ["norm", "dent:steps=3"])
def test_a_battle_is_counted_as_three_attacks_on_few_images(defense: str) -> None:
    net = Counting()
    sources = sources_of(net, labeled(net.net, 40), defense, battle=True, batch_size=40)
    plan = make_plan(sources)
    (unit,) = [unit for unit in plan.units() if unit.attack == BATTLE]
    Counting.total = 0
    outcomes(plan, sources, [unit])
    assert Counting.total % FEW == 0
    # A backward counts as a forward: of each update, and of each step of all attacks.
    taken = Counting.total * (2 if defense.startswith("dent") else 1) + FEW * 3 * BATTLE_STEPS
    assert 1 / 2 <= plan.forwards(unit) / taken <= 3


@pytest.mark.parametrize("defense", ["static", "dent:steps=3"])
def test_what_is_measured_of_a_cell_is_counted_and_its_time_is_that_of_a_whole_batch(
    defense: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed: list[set[int]] = []

    def watch(calls: dict[str, Any], *, rounds: int) -> dict[str, float]:
        timed.append({len(inputs) for call in calls.values() for inputs in call.args})
        return time_calls(calls, rounds=rounds)

    monkeypatch.setattr("dent.evaluation.cost.time_calls", watch)
    net = Counting()
    sources = sources_of(net, labeled(net.net, 50), defense, suite="none", batch_size=40)
    plan = make_plan(sources)
    (unit,) = [unit for unit in plan.units() if unit.attack == ABOUT]
    sources.subject(unit.cell)
    Counting.total = 0
    outcomes(plan, sources, [unit])
    assert timed == [{40}]
    taken = Counting.total * (2 if defense.startswith("dent") else 1)  # with backwards
    assert 1 / 2 <= plan.forwards(unit) / taken <= 3


@pytest.mark.parametrize("defenses", [("static",), ("dent:steps=2", "static")])
def test_units_are_those_of_the_plan_and_of_the_run(defenses: tuple[str, ...]) -> None:
    net = tiny(classes=10)
    data = labeled(net, 10)
    done: list[UnitResult] = []
    asked: dict[str, Any] = {"suite": "quick", "steps": 1, "batch_size": 4, "battle": True}
    sources = sources_of(net, data, *defenses, **asked)
    plan = make_plan(sources)
    rows = estimate_run(plan, sources)
    evaluate(
        {"net": net}, list(defenses), data=data, eps=sources.evaluation.eps, queries=4,
        on_unit=done.append, **asked,
    )  # fmt: skip
    assert sorted(one.unit.file for one in done) == sorted(unit.file for unit in plan.units())
    counted = {
        (row.cell, row.attack): sum(
            (one.unit.cell, one.unit.attack) == (row.cell, row.attack) for one in done
        )
        for row in rows
    }
    assert counted == {(row.cell, row.attack): row.units for row in rows}
    assert sum(row.units for row in rows) == len(done)
    assert sum(row.attack == BATTLE for row in rows) == len(defenses) - 1  # not of a static cell


def test_asking_for_an_estimate_attacks_nothing() -> None:
    net = Counting()
    data = labeled(net.net, 12)
    sources = sources_of(net, data, "static", suite="full", steps=None, queries=None)
    rows = estimate_run(make_plan(sources), sources)
    # Two inputs with three seeds; twice together and once alone; once for the plan; then four forwards
    # of the first batch.
    assert net.count == 6 + 6 + 2 + 4 * 4
    assert all(row.seconds > 0 for row in rows)
    speeds = [row.seconds / row.forwards for row in rows]
    assert max(speeds) == pytest.approx(min(speeds))  # seconds are forwards times one speed


class Smoothed(nn.Module):
    """A defense of 50 forwards that does not tell what it costs."""

    independent = True

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = torch.stack([self.model(inputs) for _ in range(50)]).mean(0)
        return logits


def with_own(make: Any, *defenses: str, **asked: Any) -> Sources:
    net = tiny(classes=10)
    sources = sources_of(net, labeled(net, 8), *defenses, own=("mine",), attacks=["apgd-ce"], **asked)
    return Sources(sources.evaluation, sources.given, sources.images, {"mine": make})


def test_the_cost_of_a_defense_of_the_user_is_unknown_and_not_in_the_total() -> None:
    sources = with_own(Smoothed, "static", "mine")
    rows = estimate_run(make_plan(sources), sources)
    assert {row.cell.defense: row.is_known for row in rows} == {"static": True, "mine": False}
    assert all(
        (one["minutes"] == "unknown") != row.is_known
        for one, row in zip(estimate_rows(rows), rows, strict=True)
    )
    static, mine = ([row for row in rows if row.cell.defense == name] for name in ("static", "mine"))
    units = sum(row.units for row in mine)
    end = f"; the cost of {units} units of your own attacks or defenses is unknown"
    total = (
        f"{units + sum(row.units for row in static)} units, {total_line(static).partition(', ')[2]}{end}"
    )
    assert total_line(rows) == total
    assert total_line(mine) == f"{units} units{end}"


def test_the_cost_of_a_defense_of_the_list_is_known_in_memory_too() -> None:
    sources = with_own(lambda model: dent.defend(model, "hedge", steps=2), "mine")
    assert all(row.is_known for row in estimate_run(make_plan(sources), sources))


def test_a_model_that_adapts_by_itself_is_timed_itself() -> None:
    net = tiny(classes=10)
    sources = sources_of(net, labeled(net, 8), "static", attacks=["apgd-ce"])
    sources = Sources(sources.evaluation, {"net": Inside(net).eval()}, sources.images)
    rows = estimate_run(make_plan(sources), sources)
    assert {row.cell.defense for row in rows} == {"dynamic"}
    assert all(row.is_known for row in rows)


def test_all_submissions_of_a_random_defense_are_counted() -> None:
    random = make_plan(with_own(UndeclaredCoin, "mine"))
    fixed = make_plan(with_own(Smoothed, "mine"))
    (cell,) = random.cells
    for unit in random.units():
        if unit.attack == NATURAL:
            assert (random.forwards(unit), fixed.forwards(unit)) == (4 * SUBMISSIONS, 4)
    options = random.cells[cell].attacks["apgd-ce"]
    attack = find_attack("apgd-ce")
    searched = attack.count_forwards(Forwards(0, 4, 1.0), options)
    assert random.cost(cell, "apgd-ce") == searched + SUBMISSIONS - 1


@pytest.mark.parametrize("suite", list(SUITE_NOTES))
def test_more_updates_steps_and_images_never_cost_less(suite: str) -> None:
    net = tiny(classes=10)

    def plan_of(defense: str = "dent:steps=2", n: int = 8, **asked: Any) -> Plan:
        settings: dict[str, Any] = {"suite": suite, "steps": 5, "queries": 5} | asked
        return make_plan(sources_of(net, labeled(net, n), defense, **settings))

    def forwards(plan: Plan) -> dict[str, float]:
        totals: dict[str, float] = {}
        for unit in plan.units():
            totals[unit.attack] = totals.get(unit.attack, 0) + plan.forwards(unit)
        return totals

    small = forwards(plan_of())
    for larger in (plan_of("dent:steps=4"), plan_of(n=16), plan_of(steps=9, queries=9)):
        found = forwards(larger)
        assert found.keys() == small.keys()
        assert all(found[name] >= small[name] for name in small)
        attacks = small.keys() - {NATURAL, ABOUT}
        assert not attacks or any(found[name] > small[name] for name in attacks)


def test_an_answer_is_two_forwards_for_each_update_and_one() -> None:
    assert [Forwards(updates).answer for updates in (0, 1, 30)] == [1, 3, 61]
    assert Forwards(0).gradient == 2
