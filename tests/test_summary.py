"""From units to numbers: what `summarize` says is what counting by hand says."""

from __future__ import annotations

import random
import weakref
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_up import ATTACKS, MadeUp, cut, made_up, summary, tallies

from dent.evaluation.plan import Unit
from dent.evaluation.results import CellResult, Score
from dent.evaluation.score import summarize
from dent.evaluation.spec import Cell
from dent.evaluation.store import Outcome, UnitResult
from dent.evaluation.suites import NATURAL

DIRECT = [NATURAL, "apgd-ce", "square"]


def by_hand(made: MadeUp, attacks: list[str], counted: list[str]) -> Score:
    """Of the batches in which none of `counted` failed: the points that all of `attacks` leave."""
    points = made.complete(counted)
    return Score(sum(all(made.survives[one][point] for one in attacks) for point in points), len(points))


@given(made_up())
def test_scores_are_what_counting_by_hand_says(made: MadeUp) -> None:
    (found,) = summary(made).cells
    every = list(made.survives)
    direct = [name for name in every if name in DIRECT]
    assert found.natural == by_hand(made, [NATURAL], [NATURAL])
    assert found.worst == by_hand(made, every, every)
    assert found.direct == by_hand(made, direct, direct)
    for name, score in found.attacks.items():
        judged = every[: every.index(name) + 1] if made.cumulative else [name]
        assert score == by_hand(made, judged, judged)
    assert list(found.attacks) == every[1:]
    submitted = 0
    for number, batch in enumerate(made.batches):
        if set(batch) <= set(made.complete(every)):
            left = [np.asarray(made.outcome(name, number).correct).sum() for name in every]
            submitted += int(min(left))
    assert found.submitted == Score(submitted, found.worst.n)
    standing = np.all([made.survives[name] for name in every], axis=0)
    assert found.points == {point: bool(standing[point]) for point in made.complete(every)}
    assert found.verdicts["natural"] == {
        point: bool(made.survives[NATURAL][point]) for point in made.complete([NATURAL])
    }
    assert len(found.missing) == len(made.failed)


@given(made_up())
def test_what_one_attack_alone_breaks(made: MadeUp) -> None:
    (found,) = summary(made).cells
    if made.cumulative:
        assert found.alone is None
        return
    attacks = list(made.survives)[1:]
    alone = dict.fromkeys(attacks, 0)
    for point in made.complete(list(made.survives)):
        breaking = [name for name in attacks if not made.survives[name][point]]
        if made.survives[NATURAL][point] and len(breaking) == 1:
            alone[breaking[0]] += 1
    assert found.alone == alone


@given(made_up(failures=False))
def test_what_must_hold_of_any_run(made: MadeUp) -> None:
    (found,) = summary(made).cells
    assert found.worst.correct <= found.submitted.correct <= found.natural.correct
    assert all(found.submitted.correct <= score.correct for score in found.attacks.values())
    assert found.worst.correct <= found.direct.correct <= found.natural.correct
    assert found.gap is None or found.gap >= 0
    if made.cumulative:
        assert found.submitted == found.worst  # independent inputs: the best of all is one submission


@given(made_up(failures=False))
def test_the_shortcut_changes_neither_the_worst_case_nor_what_is_claimed(made: MadeUp) -> None:
    (short,) = summary(replace(made, cumulative=True)).cells
    (whole,) = summary(replace(made, cumulative=False)).cells
    assert (short.worst, short.direct, short.gap) == (whole.worst, whole.direct, whole.gap)
    assert short.points == whole.points


@given(made_up(), st.randoms(use_true_random=False))
def test_the_order_of_units_does_not_matter(made: MadeUp, order: random.Random) -> None:
    done = made.done()
    failed = [UnitResult(one.unit, error="an earlier attempt") for one in done if one.outcome]
    mixed = done + failed
    order.shuffle(mixed)
    assert summarized(made, iter(mixed)) == summary(made).cells[0]


def summarized(made: MadeUp, done: Iterator[UnitResult]) -> CellResult:
    return summarize(tallies(made, done=done), {}).cells[0]


def test_a_unit_that_failed_in_a_chain_and_was_repeated() -> None:
    """What came after it was done as if it had broken nothing: what was given is no chain any more."""
    rng = np.random.default_rng(0)
    survives = {name: rng.random(60) < 0.7 for name in [NATURAL, *ATTACKS]}
    whole = MadeUp(cut(60, 20), survives, cumulative=True)
    first = replace(whole, failed=frozenset({("square", 1)}))
    repeated = UnitResult(Unit(whole.cell, 1, "square"), whole.outcome("square", 1))
    done = [one for one in first.done() if one.outcome]
    found = summarized(whole, iter([*done, repeated]))
    assert found == summary(whole).cells[0]


def test_what_was_not_given_in_a_chain_is_not_correct() -> None:
    made = MadeUp([[0, 1, 2]], {NATURAL: np.ones(3, bool), "fpa": np.ones(3, bool)}, cumulative=True)
    natural, _ = made.done()
    fpa = UnitResult(
        Unit(made.cell, 0, "fpa"), Outcome((0, 1, 2), (True, True, False), (True, False, True))
    )
    assert summarized(made, iter([natural, fpa])).worst == Score(1, 3)


def test_what_an_adaptive_attack_took_from_direct_ones_is_not_their_doing() -> None:
    survives = {NATURAL: "11110", "fpa": "10110", "apgd-ce": "11100"}
    bits = {name: np.array([*map(int, row)], bool) for name, row in survives.items()}
    found = summarized(made := MadeUp([[0, 1, 2, 3, 4]], bits, cumulative=True), iter(made.done()))
    assert (found.worst, found.direct, found.attacks["apgd-ce"]) == (
        Score(2, 5),
        Score(3, 5),
        Score(2, 5),
    )


def test_outcomes_are_not_kept() -> None:
    rng = np.random.default_rng(0)
    made = MadeUp(cut(200, 4), {name: rng.random(200) < 0.7 for name in [NATURAL, *ATTACKS]})
    made_so_far: list[weakref.ref[Outcome]] = []
    most = 0

    def stream() -> Iterator[UnitResult]:
        nonlocal most
        for name in made.survives:
            for batch in range(len(made.batches)):
                outcome = made.outcome(name, batch)
                made_so_far.append(weakref.ref(outcome))
                most = max(most, sum(one() is not None for one in made_so_far))
                yield UnitResult(Unit(made.cell, batch, name), outcome)

    assert summarized(made, stream()).worst.n == 200
    assert most <= 2  # the one that is read, and the one before it


def test_what_is_missing_is_named_with_its_error() -> None:
    made = MadeUp(cut(6, 3), {NATURAL: np.ones(6, bool), "apgd-ce": np.ones(6, bool)})
    done = [one for one in made.done() if (one.unit.attack, one.unit.batch) != ("apgd-ce", 0)]
    done[-1] = UnitResult(done[-1].unit, error="RuntimeError: nan")
    found = summarized(made, iter(done))
    assert [str(one).split(", ", 3)[3] for one in found.missing] == [
        "apgd-ce, batch 0: not done",
        "apgd-ce, batch 1: RuntimeError: nan",
    ]
    assert found.natural == Score(6, 6)
    assert found.worst == found.submitted == found.attacks["apgd-ce"] == Score(0, 0)
    assert found.gap is None


def test_nothing_done_and_nothing_asked() -> None:
    made = MadeUp(cut(6, 3), {NATURAL: np.ones(6, bool), "apgd-ce": np.ones(6, bool)})
    found = summarized(made, iter([]))
    assert found.worst == found.natural == found.direct == Score(0, 0)
    assert (len(found.missing), found.points, found.cost, found.findings) == (4, {}, None, ())
    empty = summarize({}, {})
    assert empty.cells == ()
    assert empty.complete


def test_units_of_other_runs() -> None:
    made = MadeUp([[0, 1], [2, 3]], {NATURAL: np.ones(4, bool)})
    elsewhere = Cell("other", "static", 0.1, "l2")
    foreign = [UnitResult(replace(one.unit, cell=elsewhere), one.outcome) for one in made.done()]
    unasked = UnitResult(Unit(made.cell, 0, "fpa"), Outcome((0, 1), (False, False), (True, True)))
    found = summarized(made, iter([*made.done(), *foreign, unasked]))
    assert found == summary(made).cells[0]
    for points, batch in (((0, 2), 0), ((0,), 0), ((0, 0), 0), ((0, 1), 7)):
        wrong = UnitResult(Unit(made.cell, batch, NATURAL), Outcome(points, (True,) * len(points), ()))
        with pytest.raises(ValueError, match="natural, batch .* this outcome is of another run"):
            summarized(made, iter([wrong]))


def test_points_may_come_in_another_order_than_their_batch() -> None:
    made = MadeUp([[5, 0, 3], [1, 4, 2]], {NATURAL: np.array([1, 0, 0, 1, 1, 0], bool)})
    turned = []
    for one in made.done():
        assert one.outcome
        reverse = (one.outcome.points[::-1], one.outcome.correct[::-1], one.outcome.given[::-1])
        turned.append(UnitResult(one.unit, Outcome(*reverse)))
    assert summarized(made, iter(turned)) == summary(made).cells[0]
