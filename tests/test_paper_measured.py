"""The numbers that are made of what was found, by hand; and why there is none."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from reproductions import JUDGED

from dent.evaluation.results import Cost
from dent.intervals import wilson
from dent.paper.cells import JudgedCell
from dent.paper.results import measure
from dent.paper.scales import Work
from dent.paper.tables import Ask, PublishedNumber

ASKED = {"defenses": ("static",)}
ASK = Ask("madry-26-4", "dent", "linf", 8 / 255, "autoattack")
WORK = Work("net", "cifar10", "dent", "linf", 8 / 255, ("apgd-ce", "square"), 4, 4, False)


def number(published: float | None = 50.0, **ask: Any) -> PublishedNumber:
    return PublishedNumber("row", "column", published, replace(ASK, **ask))


@pytest.mark.parametrize(
    ("measured", "correct", "worst"),
    [
        ("natural", 3, None),
        ("adversarial", 1, 0),
        ("apgd-ce", 2, 0),
        ("square", 1, 0),  # of what APGD left, as AutoAttack counts
        ("denying updates", 3, 0),  # by itself
    ],
)
def test_accuracies_by_hand(measured: str, correct: int, worst: int | None) -> None:
    found = measure(number(measure=measured), WORK, JudgedCell(ASKED, JUDGED), None)
    assert found.score is not None
    assert (found.score.correct, found.n) == (correct, 4)
    assert found.ours == 25.0 * correct
    assert found.difference == 25.0 * correct - 50
    assert found.value is None
    assert found.missing is None
    assert (found.worst.correct if found.worst else None) == worst
    worst_points = found.worst_judged.points if found.worst_judged else None
    assert worst_points == (None if worst is None else JUDGED["worst"])
    low, high = wilson(correct, 4)
    assert found.to_json()["interval"] == [100 * low, 100 * high]


def test_a_scenario_has_its_own_points_and_no_worst_case() -> None:
    found = measure(number(measure="mixed (50 %)"), WORK, JudgedCell(ASKED, JUDGED), None)
    assert (found.ours, found.n, found.worst) == (100.0, 2, None)


def test_the_protocol_is_what_is_claimed() -> None:
    protocol = dict.fromkeys(range(4), True)
    found = measure(number(), WORK, JudgedCell(ASKED, JUDGED | {"protocol": protocol}), None)
    assert found.ours == 100
    assert found.judged is not None
    assert found.judged.points == protocol
    assert found.worst is not None
    assert found.worst.correct == 0


@pytest.mark.parametrize(
    ("measured", "value"), [("seconds", 0.6), ("times seconds", 3.0), ("times flops", 21.0)]
)
def test_costs_by_hand(measured: str, value: float) -> None:
    cost = Cost(flops=42e6, static_flops=2e6, seconds=0.6, static_seconds=0.2)
    found = measure(number(2.0, measure=measured), WORK, JudgedCell(ASKED, JUDGED, cost), None)
    assert found.value == found.ours == pytest.approx(value)
    assert found.difference == pytest.approx(value - 2)
    assert (found.score, found.worst, found.missing, found.n) == (None, None, None, 0)


def test_a_difference_is_on_the_points_of_both() -> None:
    before = JudgedCell(ASKED, {"natural": {0: True, 1: True, 2: False}, "direct": {1: False, 3: False}})
    natural = measure(
        number(20.0, measure="natural", minus="static"), WORK, JudgedCell(ASKED, JUDGED), before
    )
    assert natural.value == pytest.approx(0.0)  # 0 is lost, 2 is gained, of three in common
    robust = measure(number(20.0, minus="static"), WORK, JudgedCell(ASKED, JUDGED), before)
    assert robust.value == pytest.approx(50.0)  # 3 is gained, of two in common
    assert robust.difference == pytest.approx(30.0)
    assert robust.interval is not None
    assert robust.interval[0] < 50 < robust.interval[1]
    assert robust.to_json()["interval"] == [*robust.interval]
    assert (robust.score, robust.worst) == (None, None)


NOTHING = JudgedCell(ASKED, {}, missing=("unit 3: no memory", "unit 4: no memory"))
WHOLE = JudgedCell(ASKED, JUDGED, Cost(flops=3.0))
GAIN = {"minus": "static"}


@pytest.mark.parametrize(
    ("ask", "work", "found", "other", "why"),
    [
        ({}, WORK, None, None, "not run"),
        ({}, WORK, NOTHING, None, "unit 3: no memory"),
        ({"measure": "seconds"}, WORK, NOTHING, None, "unit 3: no memory"),
        ({"measure": "fab-t"}, WORK, WHOLE, None, "not measured"),
        ({"measure": "seconds"}, WORK, WHOLE, None, "not measured"),
        ({"measure": "times flops"}, WORK, WHOLE, None, "not measured"),
        (GAIN, WORK, WHOLE, None, "not run"),
        (GAIN, WORK, WHOLE, NOTHING, "unit 3: no memory"),
        (
            GAIN,
            WORK,
            WHOLE,
            JudgedCell(ASKED, {"direct": {99: True}}),
            "no images in common with static",
        ),
    ],
)
def test_why_a_number_is_missing(
    ask: dict[str, Any], work: Work, found: JudgedCell | None, other: JudgedCell | None, why: str
) -> None:
    measured = measure(number(**ask), work, found, other)
    assert measured.missing == why
    assert (measured.ours, measured.difference, measured.worst) == (None, None, None)
    content = json.loads(json.dumps(measured.to_json(), allow_nan=False))
    assert content["missing"] == why
    assert content["interval"] is None


def test_a_number_as_json_says_what_it_is_of() -> None:
    work = replace(WORK, stands_in=True)
    content = measure(number(), work, JudgedCell(ASKED, JUDGED), None).to_json()
    assert content["model"] == "net"
    assert content["stands_in_for"] == "madry-26-4"
    assert content["attacks"] == ["apgd-ce", "square"]
    assert (content["published"], content["ours"], content["difference"]) == (50.0, 25.0, -25.0)
    assert content["worst"]["percent"] == 0
    assert measure(number(), WORK, None, None).to_json()["stands_in_for"] is None
