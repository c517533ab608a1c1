"""Every attack of every suite as a unit: what counts in it, in batches of any size; and one alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cells import EPS, INDEPENDENT, labeled, outcomes, sources_of, tiny, units_of_kind
from torch import Tensor

import dent
from dent.attacks import AttackResult, autoattack
from dent.attacks.checks import InvalidPointsError
from dent.attacks.norms import lengths
from dent.evaluation import Evaluation, evaluate
from dent.evaluation.attacks import ATTACKS, find_attack
from dent.evaluation.execute import Task, attack_data, execute_task
from dent.evaluation.plan import WHOLE, Unit, make_plan
from dent.evaluation.suites import (
    ABOUT,
    BATTLE,
    NATURAL,
    PROTOCOL,
    SUITE_NOTES,
    find_suite,
    select_attacks,
)

DEFENSES = ("static", "dent:steps=2", "dent+:steps=1", INDEPENDENT)


def expected_count(attack: str, sizes: list[int]) -> int:
    """How many points count in a unit on batches of these sizes."""
    (size, *_), total = sizes, sum(sizes)
    if attack.startswith("mixed"):
        share = float(attack.partition("(")[2].partition(" ")[0]) / 100
        return min(max(round(share * size), 1), size - 1)
    if attack.startswith("one among"):
        return min(16, size)
    if attack == "poisoning":
        return size - max(round(0.1 * size), 1)
    return total if attack == "sorted labels" else size


@pytest.mark.parametrize("defense", DEFENSES)
@pytest.mark.parametrize("norm", list(EPS))
def test_every_attack_of_every_suite_gives_an_outcome(defense: str, norm: str) -> None:
    net = tiny()
    images, labels = labeled(net, 9)
    done: set[str] = set()
    for suite in SUITE_NOTES if norm == "linf" else ("standard", "adaptive"):
        sources = sources_of(
            net, (images, labels), defense, suite=suite, norm=norm, batch_size=4, steps=1, queries=3
        )
        plan = make_plan(sources)
        assert plan.sizes == [4, 4, 1]
        # The first batch and the last, of one; what is the same in two suites need not run twice.
        chosen = [
            unit
            for unit in units_of_kind(plan, "direct", "adaptive", "scenario")
            if unit.batch != 1 and f"{plan.options(unit)} {unit.file}" not in done
        ]
        for unit, outcome in outcomes(plan, sources, chosen).items():
            done.add(f"{plan.options(unit)} {unit.file}")
            span = find_attack(unit.attack).span
            members = torch.cat(plan.points[unit.batch : unit.batch + span]).tolist()
            count = expected_count(unit.attack, plan.sizes[unit.batch : unit.batch + span])
            assert len(outcome.points) == len(outcome.correct) == len(outcome.given) == count
            assert len(set(outcome.points)) == count
            assert set(outcome.points) <= set(members)
            assert all(outcome.given)
            assert outcome.queries > 0
            if find_attack(unit.attack).kind != "scenario":
                assert list(outcome.points) == members
                assert outcome.largest <= EPS[norm] * (1 + 1e-5) + 1e-6
            if find_attack(unit.attack).kind == "direct":
                assert outcome.largest > 0  # what others tried may be no better than the images


def test_the_suites_are_what_the_rules_ask_for() -> None:
    for norm in EPS:
        four = ["apgd-ce", "apgd-t", "fab-t", "square"]
        assert list(find_suite("standard", norm)) == four
        full = find_suite("full", norm)
        assert list(full) == four + list(find_suite("adaptive", norm))
        # Less of the two that cost most, to begin with; standard is AutoAttack itself.
        assert (full["fab-t"]["targets"], full["square"]["queries"]) == (3, 1000)
        assert not {"targets", "queries"} & (find_suite("standard", norm)["fab-t"].keys())
        assert find_suite("standard", norm)["square"] == {}
    assert Evaluation(suite="full").has_protocol
    assert not Evaluation(suite="quick").has_protocol
    asked: dict[str, Any] = {"suite": find_suite("full", "linf"), "protocol": True, "battle": True}
    steps = {name: dent.PRESETS[name].steps for name in ("static", "norm", "dent", "dent+")}
    whole, not_run = select_attacks(updates=steps["dent"], independent=False, **asked)
    assert list(whole)[:4] == [NATURAL, ABOUT, PROTOCOL, BATTLE]
    assert not_run == {}
    assert set(whole) == set(select_attacks(updates=steps["dent+"], independent=False, **asked)[0])
    assert set(find_suite("full", "linf")) < set(whole)
    still = set(select_attacks(updates=steps["norm"], independent=False, **asked)[0])  # without updates
    assert set(whole) - still == {
        name for name in find_suite("full", "linf") if find_attack(name).needs_updates
    }
    assert {"gmsa-min", "unrolled", "short (quarter)", "chained"} <= set(whole) - still
    alone = set(select_attacks(updates=steps["static"], independent=True, **asked)[0])
    assert still - alone == {
        name for name in find_suite("full", "linf") if find_attack(name).kind == "scenario"
    }
    quick = find_suite("quick", "linf")
    assert list(select_attacks(updates=steps["dent"], independent=False, suite=quick)[0]) == [
        NATURAL,
        ABOUT,
        *quick,
    ]
    budget, _ = select_attacks(updates=steps["dent"], independent=False, steps=7, queries=8, **asked)
    for name, given in budget.items():
        expected = {} if name in (NATURAL, ABOUT, BATTLE) else {"steps": 7}
        expected = {"queries": 8} if name == "square" else expected
        expected = {"steps": 7, "queries": 8} if name == PROTOCOL else expected
        assert {key: given.get(key) for key in ("steps", "queries") if key in given} == expected


@pytest.mark.parametrize(("n", "size"), [(1, 4), (2, 4), (3, 1), (5, 3), (6, 4), (9, 4), (12, 4)])
def test_batches_that_are_too_small_for_a_scenario_have_no_unit(n: int, size: int) -> None:
    net = tiny()
    sources = sources_of(
        net, labeled(net, n), "dent:steps=1", suite="adaptive", batch_size=size, steps=0
    )
    plan = make_plan(sources)
    scenarios = {
        name: [unit.batch for unit in plan.units() if unit.attack == name]
        for name in find_suite("adaptive", "linf")
    }
    for name, batches in scenarios.items():
        if find_attack(name).kind != "scenario":
            assert batches == list(range(len(plan.sizes)))
        elif name == "sorted labels":
            assert batches == list(range(0, len(plan.sizes), 2))
        else:
            assert batches == [batch for batch, count in enumerate(plan.sizes) if count > 1]
    counted = [
        outcome.points for outcome in outcomes(plan, sources, units_of_kind(plan, "scenario")).values()
    ]
    assert all(counted)  # nobody is asked about nothing
    ordered = outcomes(plan, sources, [unit for unit in plan.units() if unit.attack == "sorted labels"])
    assert sorted(point for one in ordered.values() for point in one.points) == list(range(n))


@pytest.mark.parametrize("n", [9, 12])
def test_a_run_with_scenarios_is_complete(n: int) -> None:
    net = tiny()
    results = evaluate(
        {"net": net}, "dent:steps=1", data=labeled(net, n), suite="adaptive", batch_size=4, steps=0
    )
    (cell,) = results.cells
    assert cell.missing == ()
    assert results.complete
    assert cell.scenarios["sorted labels"].n == n
    assert cell.scenarios["mixed (50 %)"].n == n // 4 * 2
    assert not set(cell.scenarios) & set(cell.attacks)


def test_images_that_are_there_twice_are_no_companions() -> None:
    net = tiny()
    images, labels = labeled(net, 4)
    images, labels = images[[0, 0, 0, 1]], labels[[0, 0, 0, 1]]
    sources = sources_of(net, (images, labels), "dent:steps=1", suite="adaptive", steps=1)
    plan = make_plan(sources)
    units = [unit for unit in plan.units() if unit.attack.startswith("one among")]
    (outcome,) = outcomes(plan, sources, units).values()
    assert len(outcome.points) == 4


@pytest.mark.parametrize("defense", DEFENSES)
def test_without_a_radius_every_attack_leaves_natural_accuracy(defense: str) -> None:
    net = tiny()
    data, asked = labeled(net, 6, wrong=2), {"steps": 1, "queries": 2, "batch_size": 6}
    for norm in ("linf", "l2"):
        sources = sources_of(net, data, defense, suite="full", norm=norm, eps=0, **asked)
        plan = make_plan(sources)
        natural = outcomes(plan, sources, [unit for unit in plan.units() if unit.attack == NATURAL])
        assert 0 < sum(sum(one.correct) for one in natural.values()) < 6
        for unit, outcome in outcomes(plan, sources, units_of_kind(plan, "direct", "adaptive")).items():
            assert outcome.correct == natural[replace(unit, attack=NATURAL)].correct
            assert outcome.largest < 1e-6  # FAB's walk may end a rounding error away


@pytest.mark.parametrize("defense", ["static", "dent:steps=1"])
def test_the_protocol_is_the_reference_called_by_hand(defense: str) -> None:
    net = tiny(classes=10)
    images, labels = labeled(net, 6)
    sources = sources_of(net, (images, labels), defense, protocol=True, eps=0.12, suite="quick")
    plan = make_plan(sources)
    (unit,) = [unit for unit in plan.units() if unit.attack == PROTOCOL]
    assert unit.batch == WHOLE
    outcome = outcomes(plan, sources, [unit])[unit]
    order = torch.cat(plan.points)
    by_hand = autoattack(
        net if defense == "static" else dent.defend(net, "dent", steps=1), images[order], labels[order],
        eps=0.12, engine="reference", batch_size=4, joint=False, seed=unit.seed(0), steps=2, queries=4,
    )  # fmt: skip
    assert outcome.points == tuple(order.tolist())
    assert outcome.correct == tuple((~by_hand.broken).tolist())
    assert (outcome.queries, outcome.gradients) == (by_hand.queries, by_hand.gradients)
    assert {True, False} == set(outcome.correct)


def test_the_protocol_runs_with_few_classes() -> None:
    net = tiny(classes=4)
    sources = sources_of(net, labeled(net, 4), "static", protocol=True, suite="quick")
    plan = make_plan(sources)
    outcomes(plan, sources, [unit for unit in plan.units() if unit.attack == PROTOCOL])


@pytest.mark.parametrize(
    ("name", "change"), [("mixed (50 %)", 0.5), ("sorted labels", 0.5), ("poisoning", 1.5)]
)
def test_a_scenario_that_leaves_the_ball_or_the_range_stops_the_run(
    name: str, change: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(subject: Any, inputs: Tensor, labels: Tensor, **_: Any) -> AttackResult:
        nobody = torch.zeros_like(labels, dtype=torch.bool)
        points = inputs + change if change > 1 else (inputs + change) % 1
        return AttackResult(points, nobody, torch.zeros(len(inputs), 4), 1, 1)

    short = name.partition(" (")[0]
    monkeypatch.setitem(ATTACKS, short, replace(ATTACKS[short], run=run))
    net = tiny()
    sources = sources_of(net, labeled(net, 8), "dent:steps=1", suite="adaptive")
    plan = make_plan(sources)
    (unit, *_) = [unit for unit in plan.units() if unit.attack == name]
    with pytest.raises(InvalidPointsError):
        execute_task(Task(unit, plan.options(unit)), sources)


@pytest.mark.parametrize("defense", ["static", "dent:steps=1"])
@pytest.mark.parametrize(("attack", "norm"), [("apgd-ce", "linf"), ("denying updates", "l2")])
def test_one_attack_keeps_its_images_in_the_order_of_the_data(
    defense: str, attack: str, norm: str, tmp_path: Path
) -> None:
    net = tiny()
    images, labels = labeled(net, 10, wrong=2)
    sources = sources_of(net, (images, labels), defense, norm=norm, suite="adaptive")
    made = attack_data(sources, attack, {"steps": 3})
    assert torch.equal(made.labels, labels)
    distances = lengths(made.images - images, norm).flatten()  # each beside its own
    assert 0 < float(distances.max()) <= EPS[norm] + 1e-6
    assert float(distances.median()) > EPS[norm] / 4
    deployed = net if defense == "static" else dent.defend(net, "dent", steps=1)
    for batch in sources.batches():
        for submitted, verdicts in ((images, made.natural), (made.images, made.correct)):
            with torch.no_grad():
                right = deployed(submitted[batch]).argmax(1) == labels[batch]
            assert torch.equal(verdicts[batch], right)
    scores = made.scores()
    assert scores["natural"].correct == int(made.natural.sum())
    assert scores["attacked"].correct == int(made.correct.sum()) < scores["natural"].correct
    # What an evaluation says of the same attack on its own.
    for number in range(len(sources.batches())):
        done = execute_task(Task(Unit(made.cell, number, attack), {"steps": 3}), sources)
        assert done.outcome is not None
        assert done.outcome.correct == tuple(made.correct[list(done.outcome.points)].tolist())
    made.save(tmp_path / "made.npz")
    again, same = dent.load_data(str(tmp_path / "made.npz"))
    assert torch.equal(again, made.images)
    assert torch.equal(same, labels)


def test_one_attack_refuses_what_is_not_one_attack_on_one_cell() -> None:
    net = tiny()
    data = labeled(net, 4)
    one = sources_of(net, data, "static")
    for name in ("mixed", "one among", "sorted labels", "poisoning", "mixed (10 %)"):
        with pytest.raises(ValueError, match="unknown attack '"):
            attack_data(one, name)
    with pytest.raises(ValueError, match="unknown attack 'apgd'; did you mean 'pgd' or 'apgd-t'"):
        attack_data(one, "apgd")
    with pytest.raises(
        ValueError, match="lazy is for defenses that make updates, and static makes none"
    ):
        attack_data(one, "lazy")
    with pytest.raises(ValueError, match="expected one model and one defense, got 2: net, static, linf"):
        attack_data(sources_of(net, data, "static", "dent"), "pgd")
    watched: list[tuple[float, float | None, str]] = []
    attack_data(one, "pgd", {"steps": 1}, progress=lambda *at: watched.append(at))
    assert watched == [(0, 1, "batch 1 of 1"), (1, 1, "batch 1 of 1")]  # begun, and done


def test_one_attack_on_a_random_model_depends_on_the_seed_alone() -> None:
    class Noisy(torch.nn.Module):
        net = tiny()

        def forward(self, inputs: Tensor) -> Tensor:
            logits: Tensor = self.net(inputs)
            return logits + 2 * torch.rand_like(logits)

    data = labeled(tiny(), 8)
    made = []
    for number in range(2):
        torch.manual_seed(number)
        made.append(attack_data(sources_of(Noisy(), data, "static"), "apgd-ce", {"steps": 2}))
    assert torch.equal(made[0].images, made[1].images)
    assert torch.equal(made[0].natural, made[1].natural)
    assert torch.equal(made[0].correct, made[1].correct)
