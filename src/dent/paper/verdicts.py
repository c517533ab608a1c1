"""Whether a comparison of numbers holds: by the interval of their difference, on the same points.

| comparison                                | holds if, of the 95 % interval, | does not hold if      |
|-------------------------------------------|---------------------------------|-----------------------|
| more: [a, b], by: x (0 unless told)       | low > x, of a - b               | high <= x             |
| same: [a, b], within: x                   | it lies within -x and x         | it lies outside       |
| at_least: a, share: s, of: b              | low >= 0, of a - s b            | high < 0              |
| at_most: a, share: s, of: b               | high <= 0, of a - s b           | low > 0               |
| rises: [a, ..., z]; falls the other way   | low > 0, of z - a; and no fall  | high <= 0, or a fall  |
| value_near: a, value: x, factor: f, of: b | x / f <= a (or a / b) <= x f    | otherwise             |

Else it cannot be told. A fall is one between any two of the series that is more than chance: McNemar's
p, times the number of pairs, below 0.05. Costs and published numbers have no interval: they are taken as
they are. A negative `by` asks for not much less: this is how an accuracy is said to be kept.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Literal, NamedTuple

from dent.evaluation.paired import Paired, Z, paired

Verdict = Literal["holds", "does not hold", "cannot be told"]
HOLDS: Verdict = "holds"
FAILS: Verdict = "does not hold"
OPEN: Verdict = "cannot be told"


class Kind(NamedTuple):
    """What a comparison of a kind is told besides its first references.

    keys: with their defaults, None where there is none. least, most: how many references, `of` included.
    """

    keys: dict[str, Any]
    least: int = 2
    most: int = 2


KINDS: dict[str, Kind] = {
    "more": Kind({"by": 0.0}),
    "same": Kind({"within": None}),
    "at_least": Kind({"share": None, "of": None}),
    "at_most": Kind({"share": None, "of": None}),
    "rises": Kind({}, most=99),
    "falls": Kind({}, most=99),
    "value_near": Kind({"value": None, "factor": 1.25, "of": ""}, least=1),
}


@dataclass(frozen=True)
class Comparison:
    """One comparison; `bound` is what `by`, `within`, `share` or `value` says."""

    kind: str
    references: tuple[str, ...]
    bound: float = 0.0
    factor: float = 1.0


Points = Mapping[int, bool]
Number = Points | float


@dataclass(frozen=True)
class Gap:
    """A number less a share of another, with its 95 % interval; n is None where there are no points."""

    first: float
    second: float
    low: float
    high: float
    n: int | None = None
    p: float = math.nan

    @property
    def difference(self) -> float:
        return round(self.first - self.second, 9)  # as decimals: 64.4 - 41.4 is 23

    def __str__(self) -> str:
        difference = _points_text(self.difference, sign="+")
        if self.low == self.high:
            return difference
        n = "" if self.n is None else f", n = {self.n:,}"
        return f"{difference} [{_points_text(self.low)}, {_points_text(self.high)}]{n}"

    def verdict(self, kind: str, bound: float = 0.0) -> Verdict:
        """By the table above."""
        low, high = self.low, self.high
        holds, fails = {
            "more": (low > bound, high <= bound),
            "same": (-bound <= low and high <= bound, low > bound or high < -bound),
            "at_least": (low >= 0, high < 0),
            "at_most": (high <= 0, low > 0),
        }[kind]
        return HOLDS if holds else FAILS if fails else OPEN


def gap(first: Number, second: Number, share: float = 1.0) -> Gap:
    """The first less a share of the second: in percentage points, on the points that both have.

    >>> print(gap({1: True, 2: True, 3: True}, {1: True, 2: False, 3: False}))
    +66.7 [-18.1, 98.1], n = 3
    >>> print(gap(82.3, 89.6, share=0.9))
    +1.7
    """
    if isinstance(first, float) and isinstance(second, float):
        difference = round(first - share * second, 9)
        return Gap(first, share * second, difference, difference)
    if isinstance(first, float) or isinstance(second, float):
        raise TypeError("expected two accuracies or two other figures, got one of each")
    pair = paired(second, first)
    low, high = (pair.low, pair.high) if share == 1 else _interval(pair, share)
    return Gap(pair.second, share * pair.first, low, high, pair.n, pair.mcnemar)


def _interval(pair: Paired, share: float) -> tuple[float, float]:
    """Of the second of a pair less a share of the first: half a point more in each count, as for 1."""
    neither = pair.n - pair.both - pair.only_first - pair.only_second
    values = (1 - share, -share, 1.0, 0.0)  # of a point of each sort
    counts = (pair.both, pair.only_first, pair.only_second, neither)
    weighted = [
        (value, (count + 0.5) / (pair.n + 2)) for value, count in zip(values, counts, strict=True)
    ]
    mean = sum(value * weight for value, weight in weighted)
    spread = sum((value - mean) ** 2 * weight for value, weight in weighted)
    half = Z * math.sqrt(spread / (pair.n + 2))
    return 100 * max(-share, mean - half), 100 * min(1.0, mean + half)


def compare(
    one: Comparison, names: Sequence[str], numbers: Sequence[Number | str], slack: float = 0.0
) -> tuple[Verdict, str]:
    """The verdict, and a line to read; a text in place of a number is why there is none.

    slack: how far figures of a series may go the wrong way.

    >>> dent, static = {1: True, 2: True, 3: False}, {1: False, 2: True, 3: False}
    >>> compare(Comparison("more", ("a", "b")), ["dent", "static"], [dent, static])
    ('cannot be told', 'dent 66.7, static 33.3: +33.3 [-32.6, 72.6], n = 3')
    """
    is_series = one.kind in ("rises", "falls")
    needed = (0, len(numbers) - 1) if is_series else range(len(numbers))
    lacking = [f"{names[i]}: {numbers[i]}" for i in needed if isinstance(numbers[i], str)]
    if lacking:
        return OPEN, "; ".join(text.removeprefix(": ") for text in lacking)
    there = {
        name: value for name, value in zip(names, numbers, strict=True) if not isinstance(value, str)
    }
    if one.kind == "value_near":
        return _near(one, list(there.values()))
    first, last = there[names[0]], there[names[-1]]
    if isinstance(first, Mapping) and first is last:
        return OPEN, f"{names[0]} and {names[-1]} are one and the same measurement here"
    share = one.bound if one.kind in ("at_least", "at_most") else 1.0
    found = gap(first, last, share)
    if found.n == 0:
        return OPEN, f"{names[0]} and {names[-1]} have no points in common"
    if is_series:
        return _series(one, there, slack)
    other = names[-1] if share == 1 else f"{share:g} of {names[-1]}"
    asked = f" (asked for: within {one.bound:g})" if one.kind == "same" else ""
    if one.kind == "more" and one.bound:
        asked = f" (asked for: more than {one.bound:g})"
    line = f"{names[0]} {found.first:.1f}, {other} {found.second:.1f}: {found}{asked}"
    return found.verdict(one.kind, one.bound), line


def _series(one: Comparison, numbers: Mapping[str, Number], slack: float) -> tuple[Verdict, str]:
    sign = 1 if one.kind == "rises" else -1
    names, values = list(numbers), list(numbers.values())
    shown = ", ".join(f"{_figure(number):.1f} ({name})" for name, number in numbers.items())
    line = f"{shown}; {names[0]} to {names[-1]} {gap(values[-1], values[0])}"
    pairs = list(combinations(range(len(values)), 2))
    against: dict[str, float] = {}
    for early, late in pairs:
        found = gap(values[late], values[early])
        is_real = found.p * len(pairs) < 0.05 if found.n else -sign * found.difference > slack
        if sign * found.difference < 0 and is_real:
            against[f"{names[early]} to {names[late]} {found}"] = abs(found.difference)
    if against:
        return FAILS, f"{line}; but {max(against, key=against.__getitem__)}"
    ends = gap(values[-1], values[0]) if sign > 0 else gap(values[0], values[-1])
    return ends.verdict("more"), line


def _near(one: Comparison, figures: Sequence[Number]) -> tuple[Verdict, str]:
    value, below = figures[0], figures[1] if len(figures) == 2 else 1.0
    if not isinstance(value, float) or not isinstance(below, float):
        raise TypeError(f"expected figures such as costs, got accuracies: {', '.join(one.references)}")
    if below == 0:
        return OPEN, "there is no ratio to 0"
    ratio = value / below
    is_near = one.bound / one.factor <= ratio <= one.bound * one.factor
    asked = f"(asked for: {one.bound:g}, within a factor of {one.factor:g})"
    return (HOLDS if is_near else FAILS), f"{ratio:.1f} {asked}"


def _figure(number: Number) -> float:
    return number if isinstance(number, float) else gap(number, number).first


def _points_text(value: float, *, sign: str = "") -> str:
    """Return percentage points; zero has no sign."""
    return "0.0" if abs(value) < 0.05 else f"{value:{sign}.1f}"
