"""Intervals of shares, from independent points and from batches of points that depend on one another."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

Z = 1.959963984540054  # of 95 %
LEAST_BATCHES = 5  # for an interval or a p where points of a batch depend on one another


def wilson(successes: float, n: float, *, z: float = Z) -> tuple[float, float]:
    """Return the Wilson score interval of a share, by default of 95 %; (0, 1) without trials.

    >>> low, high = wilson(81, 100)
    >>> round(low, 3), round(high, 3)
    (0.722, 0.875)
    """
    if n == 0:
        return 0.0, 1.0
    share = successes / n
    center = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return max(0.0, center - half), min(1.0, center + half)


def count_effective(totals: Sequence[float], sizes: Sequence[int], *, variance: float) -> float:
    """Return how many independent points say as much about the mean as batches of dependent points.

    totals: the sum of the values of the points of each batch. sizes: the number of these points.
    variance: of the value of a point.

    This is the effective sample size of Korn and Graubard (1998): n over the design effect, and times
    (z / t)^2, because the design effect is known from few batches; t is Student's quantile. It is never
    more than n: batches that happen to be alike do not say more than independent points.

    >>> count_effective([3, 4, 5, 4, 4], [8] * 5, variance=0.25)  # alike
    40.0
    >>> round(count_effective([0, 8, 0, 8, 4], [8] * 5, variance=0.25), 1)  # five points at best
    2.5
    """
    n, batches = sum(sizes), len(sizes)
    mean = sum(totals) / n
    residuals = [total - mean * size for total, size in zip(totals, sizes, strict=True)]
    over_batches = batches / (batches - 1) * sum(one * one for one in residuals) / n**2
    if variance == 0 or over_batches == 0:
        return float(n)
    effect = over_batches / (variance / n)
    return n / max(1.0, effect * (student_quantile(batches - 1) / Z) ** 2)


@cache
def student_quantile(freedom: int) -> float:
    """Return the quantile of Student's t for two-sided 95 % intervals, for 1, 2, ... degrees of freedom.

    >>> round(student_quantile(4), 3), round(student_quantile(7), 3)
    (2.776, 2.365)
    """
    low, high = 0.0, math.pi / 2  # of the angle whose tangent is t / sqrt(freedom)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _cover_student(middle, freedom) < 0.95 else (low, middle)
    return math.sqrt(freedom) * math.tan(low)


def _cover_student(angle: float, freedom: int) -> float:
    """Return the probability of -t to t (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    cosine, odd = math.cos(angle), freedom % 2
    total, term = 0.0, cosine if odd else 1.0
    for power in range(odd, freedom - 1, 2):
        total += term
        term *= (power + 1) / (power + 2) * cosine**2
    if odd:
        return 2 / math.pi * (angle + math.sin(angle) * total)
    return math.sin(angle) * total


def explain_few_batches(independent: bool, batches: int | None) -> str | None:
    """Return why points support no interval and no p, or None if they do.

    batches: how many hold these points; None if it is not known.

    >>> explain_few_batches(False, 1)
    'images of one batch are not independent: intervals and p need 5 batches or more, got 1'
    """
    if independent or (batches or 0) >= LEAST_BATCHES:
        return None
    got = "an unknown number" if batches is None else batches
    needed = f"intervals and p need {LEAST_BATCHES} batches or more, got {got}"
    return f"images of one batch are not independent: {needed}"
