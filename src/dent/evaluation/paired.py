"""Compare two judgments of the same points: the difference, its interval, and a paired test."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from dent.intervals import Z, count_effective, explain_few_batches

LEVEL = 0.05  # a p below it is beyond chance
Counts = tuple[int, int, int, int]  # n, only_first, only_second, both


@dataclass(frozen=True)
class JudgedPoints:
    """Which points are correct, by their index.

    independent: False if an answer depends on the rest of its batch.
    batch_of: the batch of each point; None if it is not known.
    """

    points: Mapping[int, bool]
    independent: bool = True
    batch_of: Mapping[int, int] | None = None


@dataclass(frozen=True)
class Paired:
    """Number of points that are correct in the first judgment alone, in the second alone, in both.

    independent: False if an answer in either judgment depends on the rest of its batch.
    by_batch: these numbers for each batch, n first; None if the batches are not known.
    corrected: p by Holm, if this is one of several `comparisons`; see `correct_pairs`.

    >>> pair = Paired(n=100, only_first=2, only_second=12, both=40)
    >>> pair.first, pair.second, pair.difference
    (42.0, 52.0, 10.0)
    >>> [round(end, 1) for end in pair.interval], pair.p == pair.mcnemar, round(pair.mcnemar, 3)
    ([2.6, 17.0], True, 0.013)
    """

    n: int
    only_first: int
    only_second: int
    both: int
    independent: bool = True
    by_batch: tuple[Counts, ...] | None = field(default=None, repr=False)
    corrected: float | None = None
    comparisons: int = 1

    def __post_init__(self) -> None:
        counts = (self.only_first, self.only_second, self.both)
        if min(counts) < 0 or sum(counts) > self.n:
            raise ValueError(f"expected counts >= 0 of {self.n} points together, got {counts}")

    @property
    def batches(self) -> int | None:
        """Return the number of batches that hold these points; None if it is not known."""
        return None if self.by_batch is None else len(self.by_batch)

    @property
    def first(self) -> float:
        """Return the accuracy of the first in %; nan without points."""
        return _percent(self.both + self.only_first, self.n)

    @property
    def second(self) -> float:
        return _percent(self.both + self.only_second, self.n)

    @property
    def difference(self) -> float:
        """Return the second minus the first, in percentage points."""
        return _percent(self.only_second - self.only_first, self.n)

    @property
    def interval(self) -> tuple[float, float] | None:
        """Return the 95 % interval of the difference, or None if too few batches support one."""
        return self.find_interval()

    def find_interval(self, share: float = 1.0) -> tuple[float, float] | None:
        """Return the 95 % interval of the second minus a share of the first, in percentage points.

        Agresti and Min (2005): Wald's interval, with half a point more in each of the four counts. If
        points depend on their batch, each counts as a part of a point, by `count_effective`.
        """
        if self.why_no_p is not None:
            return None
        values = (1 - share, -share, 1.0, 0.0)  # what a point of each kind adds
        counts, part = _sort_counts((self.n, self.only_first, self.only_second, self.both)), 1.0
        if not self.independent and self.by_batch:
            mean, variance = _find_moments(values, counts)
            totals = [
                sum(value * count for value, count in zip(values, _sort_counts(one), strict=True))
                for one in self.by_batch
            ]
            sizes = [one[0] for one in self.by_batch]
            part = count_effective(totals, sizes, variance=variance) / self.n
        counts = [part * count + 0.5 for count in counts]
        mean, variance = _find_moments(values, counts)
        half = Z * math.sqrt(variance / sum(counts))
        return 100 * max(-share, mean - half), 100 * min(1.0, mean + half)

    @cached_property
    def p(self) -> float | None:
        """Return the two-sided p, or None if too few batches support one: see `why_no_p`.

        It is McNemar's if all points are independent. Otherwise the signs of the differences of whole
        batches are flipped in all ways: see `flip_signs`.
        """
        if self.independent:
            return self.mcnemar
        if self.why_no_p is not None or self.by_batch is None:
            return None
        return flip_signs([second - first for _, first, second, _ in self.by_batch])

    @property
    def p_corrected(self) -> float | None:
        """Return p by Holm for all `comparisons`; p itself if there is only this one."""
        return self.p if self.comparisons == 1 else self.corrected

    @property
    def is_beyond_chance(self) -> bool:
        """Return True if the corrected p is below 0.05."""
        return self.p_corrected is not None and self.p_corrected < LEVEL

    @property
    def least_p(self) -> float:
        """Return the least corrected p that the number of batches allows; 0 for independent points.

        >>> batch = (8, 0, 1, 4)
        >>> pair = Paired(40, 0, 5, 20, independent=False, by_batch=(batch,) * 5)
        >>> pair.least_p, pair.p, replace(pair, comparisons=2).least_p
        (0.0625, 0.0625, 0.125)
        """
        if self.independent or self.batches is None:
            return 0.0
        return min(1.0, self.comparisons * math.ldexp(1.0, 1 - self.batches))

    @property
    def why_no_p(self) -> str | None:
        """Return why there is neither a p nor an interval, or None if there are both."""
        return explain_few_batches(self.independent, self.batches)

    @cached_property
    def mcnemar(self) -> float:
        """Return the p of McNemar's exact two-sided test, which takes all points to be independent."""
        uneven = self.only_first + self.only_second
        term = total = 1  # integers: exact, however many points there are
        for k in range(min(self.only_first, self.only_second)):
            term = term * (uneven - k) // (k + 1)
            total += term
        return min(1.0, float(2 * total / (1 << uneven)))

    def to_json(self) -> dict[str, Any]:
        """Return the counts and what follows from them; None if there are no points."""
        counts = {name: getattr(self, name) for name in ("n", "only_first", "only_second", "both")}
        about = {"independent": self.independent, "batches": self.batches}
        low, high = self.interval or (None, None)
        names = ("first", "second", "difference", "p", "p_corrected", "why_no_p")
        figures = {name: getattr(self, name) for name in names} | {"low": low, "high": high}
        figures = figures if self.n else dict.fromkeys(figures)
        return counts | about | figures | {"comparisons": self.comparisons}


def _sort_counts(counts: Counts) -> list[float]:
    """Return the number of points that are correct in both, the first, the second, and neither."""
    n, only_first, only_second, both = counts
    return [both, only_first, only_second, n - both - only_first - only_second]


def _find_moments(values: Sequence[float], counts: Sequence[float]) -> tuple[float, float]:
    """Return the mean and the variance of values that occur so many times."""
    n = sum(counts)
    mean = sum(value * count for value, count in zip(values, counts, strict=True)) / n
    return mean, sum((v - mean) ** 2 * count for v, count in zip(values, counts, strict=True)) / n


def flip_signs(differences: Iterable[int]) -> float:
    """Return the two-sided p of a paired permutation test over batches.

    differences: for each batch, how many more points are correct in the second judgment. If both
    judgments are alike but for chance, each difference might as well have the other sign. p is the share
    of all choices of signs whose sum is at least as far from 0. It is exact for any number of batches:
    the distribution of the sum is built up batch by batch.

    >>> flip_signs([3, 1, 2, 2, 4]), flip_signs([3, 1, 2, 2, 4, 1])  # the least p of 5 and 6 batches
    (0.0625, 0.03125)
    >>> flip_signs([3, -3, 0]), flip_signs([])
    (1.0, 1.0)
    """
    chances = np.ones(1)  # of each sum, from the least to the greatest
    total = 0
    for difference in differences:
        total += difference
        step = 2 * abs(difference)
        chances = (np.pad(chances, (0, step)) + np.pad(chances, (step, 0))) / 2
    sums = np.arange(len(chances)) - len(chances) // 2
    return min(1.0, float(chances[abs(sums) >= abs(total)].sum()))


def correct_pairs(pairs: Sequence[Paired]) -> list[Paired]:
    """Return comparisons with p corrected by Holm (1979) for all of them that have a p.

    The chance that any difference is called real, if none is, stays below 5 %.

    >>> pairs = [Paired(20, 0, 10, 5), Paired(20, 1, 8, 5), Paired(20, 4, 5, 5)]
    >>> [round(pair.p_corrected, 3) for pair in correct_pairs(pairs)]
    [0.006, 0.078, 1.0]
    """
    known = sorted(
        (pair.p, place) for place, pair in enumerate(pairs) if pair.n and pair.p is not None
    )  # fmt: skip
    corrected: dict[int, float] = {}
    largest = 0.0
    for rank, (p, place) in enumerate(known):
        largest = max(largest, min(1.0, (len(known) - rank) * p))
        corrected[place] = largest
    return [
        replace(pair, corrected=corrected.get(place), comparisons=max(1, len(known)))
        for place, pair in enumerate(pairs)
    ]


def pair_points(first: JudgedPoints, second: JudgedPoints) -> Paired:
    """Compare two judgments on the points that both have.

    If both depend on their batches, batches with points in common are taken as one. If neither does, the
    batches are those of the first.

    >>> first = JudgedPoints({1: True, 2: True, 3: False})
    >>> pair_points(first, JudgedPoints({2: False, 3: False, 4: True})).only_first
    1
    """
    common = sorted(first.points.keys() & second.points.keys())
    dependent = [one for one in (first, second) if not one.independent]
    cuts = [one.batch_of for one in dependent or (first,)]
    known = [one for one in cuts if one is not None]
    are_known = len(known) == len(cuts)
    batches: dict[int, list[int]] = {}
    for point, batch in (
        _join_batches(common, known) if are_known else dict.fromkeys(common, 0)
    ).items():
        batches.setdefault(batch, []).append(point)
    by_batch = tuple(_count_points(first.points, second.points, own) for own in batches.values())
    n, only_first, only_second, both = (sum(one[place] for one in by_batch) for place in range(4))
    return Paired(
        n, only_first, only_second, both, not dependent, by_batch if are_known else None
    )  # fmt: skip


def _count_points(
    first: Mapping[int, bool], second: Mapping[int, bool], points: Sequence[int]
) -> Counts:
    return (
        len(points),
        sum(first[point] and not second[point] for point in points),
        sum(second[point] and not first[point] for point in points),
        sum(first[point] and second[point] for point in points),
    )


def _join_batches(points: Sequence[int], cuts: Sequence[Mapping[int, int]]) -> dict[int, int]:
    """Return the batch of each point; batches of several cuts that have a point in common are one."""
    leaders: dict[tuple[int, int], tuple[int, int]] = {}

    def find_leader(batch: tuple[int, int]) -> tuple[int, int]:
        while (leader := leaders.setdefault(batch, batch)) != batch:
            batch = leader
        return batch

    for point in points:
        for cut, batch_of in enumerate(cuts):
            leaders[find_leader((cut, batch_of[point]))] = find_leader((0, cuts[0][point]))
    numbers: dict[tuple[int, int], int] = {}
    return {
        point: numbers.setdefault(find_leader((0, cuts[0][point])), len(numbers)) for point in points
    }


def _percent(count: int, n: int) -> float:
    return 100 * count / n if n else math.nan
