"""Intervals and p over batches: against scipy, by simulation, and where there is nothing to estimate."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_up import MadeUp, cut, summary
from numpy.typing import NDArray
from scipy import stats

from dent.evaluation.compare import compare_runs
from dent.evaluation.paired import JudgedPoints, Paired, correct_pairs, flip_signs, pair_points
from dent.evaluation.results import Score, score_points
from dent.evaluation.spec import Cell
from dent.evaluation.suites import NATURAL
from dent.intervals import Z, count_effective, student_quantile, wilson
from dent.report.evaluation import results_text

Ints = NDArray[np.int_]


def score(correct: list[int], sizes: list[int]) -> Score:
    by_batch = tuple(zip(correct, sizes, strict=True))
    return Score(sum(correct), sum(sizes), independent=False, by_batch=by_batch)


def paired(first: list[int], second: list[int], size: int = 8) -> Paired:
    """So many points of each batch are correct in the first alone, and in the second alone."""
    by_batch = tuple((size, one, other, 0) for one, other in zip(first, second, strict=True))
    return Paired(size * len(first), sum(first), sum(second), 0, independent=False, by_batch=by_batch)


# The procedures


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 7, 15, 100, 999])
def test_student_quantile_is_scipys(freedom: int) -> None:
    assert student_quantile(freedom) == pytest.approx(stats.t.ppf(0.975, freedom), rel=1e-10)


@given(st.lists(st.integers(-9, 9), min_size=2, max_size=9))
def test_flipped_signs_are_scipys_permutation_test(differences: list[int]) -> None:
    expected = stats.permutation_test(
        (np.array(differences), np.zeros(len(differences), int)),
        lambda first, second, axis: np.sum(first - second, axis=axis),
        permutation_type="samples",
        vectorized=True,
        n_resamples=2 ** len(differences),  # all of them: exact
    ).pvalue
    assert flip_signs(differences) == pytest.approx(expected, abs=1e-12)


def test_flipped_signs_of_many_batches_are_what_random_signs_say() -> None:
    rng = np.random.default_rng(0)
    differences = rng.integers(-4, 7, 60)
    sums = rng.choice([-1, 1], (100_000, 60)) @ differences
    expected = np.mean(abs(sums) >= abs(differences.sum()))
    assert flip_signs(differences.tolist()) == pytest.approx(expected, abs=0.004)


@given(st.integers(0, 40), st.integers(0, 40))
def test_batches_of_one_point_have_mcnemars_p(first: int, second: int) -> None:
    differences = [-1] * first + [1] * second + [0] * 5
    assert flip_signs(differences) == pytest.approx(Paired(100, first, second, 0).mcnemar, rel=1e-9)


@pytest.mark.parametrize(("batches", "least"), [(5, 0.0625), (6, 0.03125), (8, 0.0078125)])
def test_the_least_p_of_few_batches(batches: int, least: float) -> None:
    pair = paired([0] * batches, [3] * batches)
    assert (pair.p, pair.least_p) == (least, least)
    assert replace(pair, comparisons=3).least_p == 3 * least


def test_the_variance_over_batches_is_scipys_bootstrap() -> None:
    """Which divides by the number of batches, not by one less; sizes may differ."""
    rng = np.random.default_rng(0)
    sizes = np.array([32] * 15 + [11])
    totals = rng.binomial(sizes, rng.beta(2, 2, 16))

    def find_share(which: Ints, axis: int = -1) -> NDArray[np.float64]:
        return np.asarray(totals[which].sum(axis) / sizes[which].sum(axis))

    found = stats.bootstrap(
        (np.arange(16),), find_share, vectorized=True, n_resamples=20_000, method="percentile", rng=rng
    )
    n, share = sizes.sum(), totals.sum() / sizes.sum()
    effective = count_effective(totals.tolist(), sizes.tolist(), variance=share * (1 - share))
    error = math.sqrt(share * (1 - share) / effective) * Z / student_quantile(15)
    assert effective < n
    assert error * math.sqrt(15 / 16) == pytest.approx(found.standard_error, rel=0.05)


@given(st.lists(st.integers(0, 30), min_size=1, max_size=8), st.integers(1, 4))
def test_holm_by_its_definition(only_second: list[int], only_first: int) -> None:
    pairs = [Paired(100, only_first, one, 0) for one in only_second]
    raw = sorted(pair.mcnemar for pair in pairs)
    steps = [min(1.0, (len(raw) - rank) * p) for rank, p in enumerate(raw)]
    found = sorted(one.p_corrected or 0.0 for one in correct_pairs(pairs))
    assert found == pytest.approx(np.maximum.accumulate(steps).tolist())


def test_pairs_without_p_are_no_part_of_the_correction() -> None:
    pairs = [Paired(40, 0, 9, 5), paired([0] * 4, [3] * 4), Paired(40, 1, 9, 5)]
    first, without, third = correct_pairs(pairs)
    assert (without.p, without.p_corrected, without.is_beyond_chance) == (None, None, False)
    assert first.comparisons == third.comparisons == 2
    assert first.p_corrected == 2 * pairs[0].mcnemar


# Where there is little or nothing to estimate


@pytest.mark.parametrize("batches", [0, 1, 4])
def test_few_batches_have_no_interval_and_no_p(batches: int) -> None:
    few, pair = score([5] * batches, [8] * batches), paired([1] * batches, [3] * batches)
    why = (
        f"images of one batch are not independent: intervals and p need 5 batches or more, got {batches}"
    )
    assert (few.interval, few.why_no_interval) == (None, why)
    assert (pair.interval, pair.p, pair.why_no_p) == (None, None, why)
    assert (few.to_json()["low"], few.to_json()["why_no_interval"]) == (None, why)
    unknown = Score(5, 8, independent=False)
    assert unknown.interval is None
    assert (unknown.why_no_interval or "").endswith("got an unknown number")


@pytest.mark.parametrize("correct", [0, 4, 8])
def test_batches_that_are_alike_say_as_much_as_independent_points(correct: int) -> None:
    """At 0 %, at 100 %, and between: never a narrower interval than Wilson's."""
    low, high = wilson(5 * correct, 40)
    found = score([correct] * 5, [8] * 5).interval
    assert found == pytest.approx((100 * low, 100 * high))
    assert low < high


def test_equal_differences_still_have_an_interval() -> None:
    pair = paired([1] * 6, [3] * 6)
    independent = Paired(48, 6, 18, 0)
    assert pair.interval == pytest.approx(independent.interval)
    none = paired([0] * 6, [0] * 6)
    assert none.p == 1.0
    assert none.interval is not None
    assert none.interval[0] < 0 < none.interval[1]


@given(st.lists(st.integers(0, 8), min_size=5, max_size=12), st.integers(1, 8))
def test_an_interval_over_batches_is_within_bounds_and_not_narrower(
    correct: list[int], last: int
) -> None:
    sizes = [8] * (len(correct) - 1) + [last]
    correct[-1] = min(correct[-1], last)
    found = score(correct, sizes)
    wide, narrow = found.interval, Score(found.correct, found.n).interval
    assert wide is not None
    assert narrow is not None
    assert 0 <= wide[0] <= narrow[0] + 1e-9
    assert narrow[1] - 1e-9 <= wide[1] <= 100
    assert wide[0] - 1e-9 <= found.percent <= wide[1] + 1e-9


def test_a_short_last_batch_weighs_less() -> None:
    usual, sizes = [16, 16, 16, 16, 16], [32] * 5
    long, short = (score([*usual, size], [*sizes, size]) for size in (32, 4))
    assert long.interval is not None
    assert short.interval is not None
    assert short.percent == pytest.approx(100 * 84 / 164)
    widths = [high - low for low, high in (short.interval, long.interval)]
    assert widths[0] < 0.7 * widths[1]


# Points and their batches


def test_points_are_counted_by_batch() -> None:
    batch_of = {point: point // 3 for point in range(7)}
    found = score_points(JudgedPoints({point: point % 2 == 0 for point in range(7)}, False, batch_of))
    assert (found.correct, found.n, found.by_batch) == (4, 7, ((2, 3), (1, 3), (1, 1)))


def test_batches_of_two_cuts_that_share_points_are_one() -> None:
    points = {point: point % 3 > 0 for point in range(80)}

    def cut_to(size: int, independent: bool = False) -> JudgedPoints:
        return JudgedPoints(points, independent, {point: point // size for point in points})

    assert pair_points(cut_to(8), cut_to(8)).batches == 10
    assert pair_points(cut_to(8), cut_to(16)).batches == pair_points(cut_to(16), cut_to(8)).batches == 5
    assert pair_points(cut_to(8), cut_to(16, independent=True)).batches == 10
    assert pair_points(cut_to(16), cut_to(20)).batches == 1  # 0 to 79: each cut joins the other's
    assert pair_points(cut_to(8, True), cut_to(16, True)).p == 1.0
    assert pair_points(cut_to(16, True), cut_to(20, True)).batches == 5  # no answer depends on either


@pytest.mark.parametrize("independent", [False, True])
def test_every_score_of_a_run_is_over_its_batches(independent: bool) -> None:
    rng = np.random.default_rng(0)
    natural = rng.random(62) < 0.8
    survives = {NATURAL: natural, "apgd-ce": natural & (rng.random(62) < 0.6)}
    made = MadeUp(cut(62, 10), survives, Cell("net", "dent+", 0.1, "l2"), cumulative=independent)
    (cell,) = summary(made).cells
    for name, one in cell.scores():
        assert (one.batches, one.independent) == (7, independent), name
        assert one.by_batch is not None
        assert [size for _, size in one.by_batch] == [10] * 6 + [2]
        assert sum(correct for correct, _ in one.by_batch) == one.correct
    alone = Score(cell.worst.correct, 62)
    assert (cell.worst.interval == alone.interval) is independent


def natural_run(lost: int) -> list[MadeUp]:
    """A static model, and a defense that loses so many natural points of each of eight batches."""
    made = []
    for defense, wrong in (("static", 0), ("dent", lost)):
        natural = np.tile(np.arange(16) >= wrong, 8)
        batches = [list(range(16 * place, 16 * (place + 1))) for place in range(8)]
        cell = Cell("net", defense, 0.1, "l2")
        made.append(MadeUp(batches, {NATURAL: natural}, cell, cumulative=defense == "static"))
    return made


def test_a_finding_if_natural_accuracy_falls_beyond_chance() -> None:
    static, dent = summary(*natural_run(lost=1)).cells
    assert static.findings == ()
    (finding,) = dent.findings
    assert finding["name"] == "natural accuracy falls"
    assert finding["figures"] == {"points": -6.25, "p": 0.0078}
    assert "natural accuracy falls" in results_text(summary(*natural_run(lost=1)))
    assert summary(*natural_run(lost=0)).cells[1].findings == ()
    static_run, dent_run = natural_run(lost=1)
    gains = summary(replace(dent_run, cell=static_run.cell), replace(static_run, cell=dent_run.cell))
    assert gains.cells[1].findings == ()


def test_a_table_of_several_defenses_is_corrected_and_says_so() -> None:
    rng, made = np.random.default_rng(0), []
    for defense, share in (("static", 0.4), ("a", 0.5), ("b", 0.9)):
        survives = {NATURAL: np.ones(320, bool), "apgd-ce": rng.random(320) < share}
        cell = Cell("net", defense, 0.1, "l2")
        made.append(MadeUp(cut(320, 32), survives, cell, cumulative=cell.static))
    results = summary(*made)
    pairs = [cell.versus_static for cell in results.cells[1:]]
    assert [pair.comparisons for pair in pairs if pair] == [2, 2]
    for pair in pairs:
        assert pair is not None
        assert pair.p is not None
        content = pair.to_json()
        assert (content["p"], content["p_corrected"]) == (pair.p, pair.p_corrected)
        assert pair.p <= (pair.p_corrected or 0) <= 2 * pair.p
    text = " ".join(results_text(results).split())
    assert "corrected by Holm for 2 comparisons" in text
    alone = summary(*made[:2])
    assert "corrected by Holm" not in results_text(alone)
    rows = compare_runs(results, results)
    assert {row.paired.comparisons for row in rows} == {6}


def test_five_batches_say_that_they_cannot_show_anything() -> None:
    for batches, told in ((5, True), (8, False)):
        made = []
        for defense, share in (("static", 0.3), ("dent+", 0.9)):
            stand = np.tile(np.arange(10) < 10 * share, batches)
            cell = Cell("net", defense, 0.1, "l2")
            own = [list(range(10 * place, 10 * (place + 1))) for place in range(batches)]
            bits = {NATURAL: np.ones_like(stand), "apgd-ce": stand}
            made.append(MadeUp(own, bits, cell, cumulative=cell.static))
        text = results_text(summary(*made), 200)
        assert ("5 batches cannot show more than chance here, p is at least 0.06" in text) is told
        assert ("may be chance" in text) is told
        assert ("higher" in text) is not told


def test_a_static_model_has_no_gap() -> None:
    bits = {NATURAL: "11111111", "apgd-ce": "11111100", "denying": "11110000"}
    survives = {name: np.array([*map(int, row)], bool) for name, row in bits.items()}
    made = [
        MadeUp(cut(8, 4), survives, Cell("net", defense, 0.1, "l2"), cumulative=defense == "static")
        for defense in ("static", "dent+")
    ]
    static, dent = summary(*made).cells
    assert (static.gap, static.claimed, static.worst) == (None, static.worst, Score(4, 8))
    assert (dent.gap, dent.claimed, dent.worst) == (25.0, Score(6, 8), Score(4, 8))


# Simulation: what the rules are for


def draw_batches(rng: np.random.Generator, runs: int, batches: int, size: int) -> tuple[Ints, Ints]:
    """Draw, for each run and batch, how many points only the first and only the second has right.

    Each batch favors one of the two by chance, and by how much is random; on average, neither.
    """
    uneven = rng.binomial(size, 0.3, (runs, batches))
    first = rng.binomial(uneven, rng.beta(1.5, 1.5, (runs, batches)))
    return first, uneven - first


@pytest.mark.parametrize("batches", [6, 8, 16])
def test_with_batch_effects_and_no_true_difference_the_test_holds_and_mcnemars_does_not(
    batches: int,
) -> None:
    first, second = draw_batches(np.random.default_rng(0), 2000, batches, 32)
    ours = mcnemar = 0
    for one, other in zip(first.tolist(), second.tolist(), strict=True):
        pair = paired(one, other, 32)
        assert pair.p is not None
        ours += pair.p < 0.05
        mcnemar += pair.mcnemar < 0.05
    assert ours / 2000 < 0.07
    assert mcnemar / 2000 > 0.2


@pytest.mark.parametrize("batches", [5, 8, 16])
def test_intervals_over_batches_cover_the_truth_and_wilsons_does_not(batches: int) -> None:
    """Accuracies of batches differ by chance: a correlation of 0.1 within a batch."""
    rng, runs = np.random.default_rng(1), 2000
    covered = alone = differences = 0
    correct = rng.binomial(32, rng.beta(0.4 * 9, 0.6 * 9, (runs, batches)))
    for row in correct.tolist():
        found = score(row, [32] * batches)
        assert found.interval is not None
        covered += found.interval[0] <= 40 <= found.interval[1]
        low, high = wilson(found.correct, found.n)
        alone += low <= 0.4 <= high
    first, second = draw_batches(rng, runs, batches, 32)
    for one, other in zip(first.tolist(), second.tolist(), strict=True):
        interval = paired(one, other, 32).interval
        assert interval is not None
        differences += interval[0] <= 0 <= interval[1]
    assert covered / runs > 0.93
    assert differences / runs > 0.93
    assert alone / runs < 0.75
