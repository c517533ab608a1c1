"""When a comparison of numbers holds, does not hold, is far smaller, or cannot be told."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from dent.evaluation.paired import JudgedPoints, pair_points
from dent.paper.verdicts import (
    FAILS,
    HOLDS,
    OPEN,
    SMALLER,
    Condition,
    Figure,
    Verdict,
    subtract,
    weigh,
)

count = st.integers(0, 40)
counts = st.tuples(count, count, count, count).filter(any)
Counts = tuple[int, int, int, int]


def two(of: Counts) -> tuple[JudgedPoints, JudgedPoints]:
    """Points of two numbers: correct in neither, in the first alone, in the second alone, in both."""
    sorts = [(False, False), (True, False), (False, True), (True, True)]
    pairs = [sort for sort, times in zip(sorts, of, strict=True) for _ in range(times)]
    return tuple(JudgedPoints(dict(enumerate(own))) for own in zip(*pairs, strict=True))  # type: ignore[return-value]


def share(correct: int, n: int) -> JudgedPoints:
    """The first so many points are correct: of two such numbers, one has what the other has."""
    return JudgedPoints({i: i < correct for i in range(n)})


def verdict(kind: str, *numbers: Figure | str, bound: float = 0.0, factor: float = 1.0) -> Verdict:
    names = [f"t/p/r/{i}" for i in range(len(numbers))]
    return weigh(Condition(kind, tuple(names), bound, factor), numbers).verdict


# The interval


@given(counts, st.floats(0.1, 3.0))
def test_the_interval_is_walds_with_half_a_point_more_of_each_sort(of: Counts, weight: float) -> None:
    found = subtract(*two(of), share=weight)
    each = np.array([0.0, 1.0, -weight, 1 - weight])  # first less a share of the second, of each sort
    weights = np.array(of) + 0.5
    mean = np.average(each, weights=weights)
    error = np.sqrt(np.average((each - mean) ** 2, weights=weights) / weights.sum())
    half = stats.norm.ppf(0.975) * error
    ends = max(-weight, mean - half), min(1.0, mean + half)
    assert found.interval == pytest.approx((100 * ends[0], 100 * ends[1]), abs=1e-6)
    assert found.value == pytest.approx(100 * np.average(each, weights=of), abs=1e-6)


@given(counts)
def test_of_the_whole_the_interval_is_that_of_pairs(of: Counts) -> None:
    first, second = two(of)
    found, near, pair = (
        subtract(first, second),
        subtract(first, second, share=1 + 1e-9),
        pair_points(second, first),
    )
    assert (found.interval, found.n, found.p) == (pair.interval, pair.n, pair.mcnemar)
    assert near.interval == pytest.approx(pair.interval, abs=1e-5)


@pytest.mark.parametrize("weight", [0.5, 0.9, 1.3])
def test_the_interval_of_a_share_covers_the_truth(weight: float) -> None:
    """Over all that 24 points can say, weighted by how likely it is: no sampling error."""
    n = 24
    every = [of for of in product(range(n + 1), repeat=3) if sum(of) <= n]
    every_count = np.array([(*of, n - sum(of)) for of in every])
    found = [subtract(*two((neither, a, b, both)), share=weight) for a, b, both, neither in every_count]
    low, high = np.array([one.interval for one in found]).T
    for truth in ([0.1, 0.1, 0.5, 0.3], [0.02, 0.3, 0.4, 0.28], [0.2, 0.05, 0.6, 0.15]):
        likely = stats.multinomial.pmf(every_count, n, truth)
        exact = 100 * (truth[0] + truth[2] - weight * (truth[1] + truth[2]))
        assert likely[(low <= exact) & (exact <= high)].sum() > 0.93


# Each kind of comparison

DENT, STATIC = share(70, 100), share(50, 100)  # 20 points, surely more than 10, perhaps than 20


@pytest.mark.parametrize(
    ("kind", "numbers", "bound", "expected"),
    [
        ("more", (DENT, STATIC), 0, HOLDS),
        ("more", (STATIC, DENT), 0, FAILS),
        ("more", (DENT, share(69, 100)), 0, OPEN),
        ("more", (DENT, STATIC), 10, HOLDS),
        ("more", (DENT, STATIC), 20, OPEN),
        ("more", (DENT, STATIC), 30, FAILS),
        ("more", (share(69, 100), DENT), -5, HOLDS),  # kept
        ("more", (STATIC, DENT), -5, FAILS),
        ("more", (share(66, 100), DENT), -5, OPEN),
        ("same", (share(500, 1000), share(503, 1000)), 2, HOLDS),
        ("same", (DENT, STATIC), 5, FAILS),
        ("same", (STATIC, DENT), 5, FAILS),
        ("same", (DENT, share(69, 100)), 2, OPEN),
        ("at_least", (DENT, share(72, 100)), 0.9, HOLDS),
        ("at_least", (STATIC, share(72, 100)), 0.9, FAILS),
        ("at_least", (share(63, 100), DENT), 0.9, OPEN),
        ("at_most", (share(0, 100), share(90, 100)), 0.1, HOLDS),
        ("at_most", (share(30, 100), share(90, 100)), 0.1, FAILS),
        ("at_most", (share(9, 100), share(90, 100)), 0.1, OPEN),
        ("more", (15.0, 8.8), 0, HOLDS),
        ("more", (8.8, 8.8), 0, FAILS),
        ("more", (64.4, 41.4), 23, FAILS),  # exactly 23, which is not more
        ("same", (47.6, 45.1), 2.5, HOLDS),
        ("same", (45.4, 38.3), 3, FAILS),
        ("at_least", (81.0, 90.0), 0.9, HOLDS),
        ("at_most", (81.0, 90.0), 0.9, HOLDS),
    ],
)
def test_comparisons(kind: str, numbers: tuple[Figure, ...], bound: float, expected: Verdict) -> None:
    assert verdict(kind, *numbers, bound=bound) == expected


@pytest.mark.parametrize("kind", ["more", "rises", "falls"])
@given(counts, st.floats(-60, 60))
def test_far_smaller_is_below_half_of_what_was_published(kind: str, of: Counts, gain: float) -> None:
    """It is said only where nothing else can be, and of every gain that the interval rules out."""
    low, high = two(of)
    numbers, published = ((low, high), [50.0, 50 + gain])
    if kind != "rises":
        numbers, published = (high, low), [50 + gain, 50.0]
    condition = Condition(kind, ("a", "b"))
    without, found = weigh(condition, numbers), weigh(condition, numbers, published=published)
    interval = subtract(high, low).interval
    assert interval is not None
    if without.verdict == OPEN and 2 * interval[1] < 50 + gain - 50:
        assert found.verdict == SMALLER
    else:
        assert found.verdict == without.verdict


@pytest.mark.parametrize(
    ("kind", "bound"), [("more", -5.0), ("same", 2.0), ("at_least", 0.9), ("at_most", 0.9)]
)
def test_other_comparisons_are_never_far_smaller(kind: str, bound: float) -> None:
    numbers = share(50, 100), share(51, 100)
    alone = weigh(Condition(kind, ("a", "b"), bound), numbers)
    assert weigh(Condition(kind, ("a", "b"), bound), numbers, published=[99.0, 1.0]) == replace(
        alone, published=99.0 - (bound if kind.startswith("at_") else 1.0)
    )


@given(counts, st.floats(-30, 30))
def test_more_the_other_way_round(of: Counts, by: float) -> None:
    """That it is more by x, and that it is not, are told by the same interval."""
    first, second = two(of)
    here, there = verdict("more", first, second, bound=by), verdict("more", second, first, bound=-by)
    other = {HOLDS: FAILS, FAILS: HOLDS, OPEN: OPEN}
    assert there == other[here]


@given(counts, st.floats(0, 30))
def test_the_same_is_neither_more_nor_less(of: Counts, within: float) -> None:
    first, second = two(of)
    kept = [verdict("more", *pair, bound=-within) for pair in ((first, second), (second, first))]
    same = verdict("same", first, second, bound=within)
    assert (same == HOLDS) == (kept == [HOLDS, HOLDS])
    assert (same == FAILS) == (FAILS in kept)


@given(counts, st.floats(0.2, 2.0))
def test_at_least_and_at_most(of: Counts, weight: float) -> None:
    first, second = two(of)
    least, most = (verdict(kind, first, second, bound=weight) for kind in ("at_least", "at_most"))
    assert (least == OPEN) == (most == OPEN)
    assert least == OPEN or least != most
    assert verdict("at_least", first, second, bound=1.0) == verdict("more", first, second)


@pytest.mark.parametrize(
    ("correct", "expected"),
    [
        ((40, 50, 60, 70), HOLDS),
        ((70, 60, 50, 40), FAILS),
        ((50, 50, 51, 52), OPEN),
        ((40, 61, 60, 70), HOLDS),  # a step back that may be chance
        ((40, 75, 60, 70), FAILS),  # one that is not
        ((10, 60, 57, 54, 51, 48), FAILS),  # each step may be chance, but not all of them together
        ((40, 70), HOLDS),
    ],
)
def test_series(correct: tuple[int, ...], expected: Verdict) -> None:
    up = [share(one, 100) for one in correct]
    down = [share(100 - one, 100) for one in correct]
    assert verdict("rises", *up) == verdict("falls", *down) == expected
    figures = [float(one) for one in correct]
    assert verdict("rises", *figures) == (HOLDS if correct == tuple(sorted(correct)) else FAILS)


def test_a_flat_series_seldom_fails_by_chance() -> None:
    """Nine numbers have 36 pairs; without the correction for them, most such series would fail."""
    rng, fails = np.random.default_rng(0), 0
    for _ in range(100):
        series = [JudgedPoints(dict(enumerate((rng.random(60) < 0.5).tolist()))) for _ in range(9)]
        fails += weigh(Condition("rises", tuple("abcdefghi")), series).against is not None
    assert fails <= 5


def test_a_series_with_holes() -> None:
    ends = share(40, 100), share(70, 100)
    assert verdict("rises", ends[0], "left out", ends[1]) == HOLDS
    assert verdict("rises", ends[0], ends[1], "left out") == OPEN
    assert verdict("rises", "left out", *ends) == OPEN


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ((25.9,), HOLDS),
        ((20.8,), HOLDS),
        ((20.7,), FAILS),
        ((32.3,), HOLDS),
        ((32.4,), FAILS),
        ((51.8, 2.0), HOLDS),
        ((51.8, 1.0), FAILS),
        ((1.0, 0.0), OPEN),
        (("not run",), OPEN),
    ],
)
def test_values_near(numbers: tuple[float | str, ...], expected: Verdict) -> None:
    assert verdict("value_near", *numbers, bound=25.9, factor=1.25) == expected


def test_accuracies_are_no_costs() -> None:
    with pytest.raises(TypeError, match="expected figures such as costs, got accuracies: t/p/r/0"):
        verdict("value_near", DENT, bound=1.0)
    with pytest.raises(TypeError, match="expected two accuracies or two other figures"):
        verdict("more", DENT, 3.0)
