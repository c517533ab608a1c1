"""Whether a condition on numbers holds: by the interval of their difference, on the same points.

| condition                                 | holds if, for the 95 % interval, | does not hold if     |
|-------------------------------------------|----------------------------------|----------------------|
| more: [a, b], by: x (default 0)           | low > x, for a - b               | high <= x            |
| same: [a, b], within: x                   | it lies within -x and x          | it lies outside      |
| at_least: a, share: s, of: b              | low >= 0, for a - s b            | high < 0             |
| at_most: a, share: s, of: b               | high <= 0, for a - s b           | low > 0              |
| rises: [a, ..., z]; falls the other way   | low > 0, for z - a; and no fall  | high <= 0, or a fall |
| value_near: a, value: x, factor: f, of: b | x / f <= a (or a / b) <= x f     | otherwise            |

Where more, a rise or a fall is asked and neither holds nor fails, the difference is "far smaller" if
its interval lies below half of the published difference. Otherwise it cannot be told. The interval is
that of the difference on the same points. If points depend on their batch, there is an interval from
five batches on: from fewer, nothing can be told. A fall is a decrease between any two numbers of the
series that is more than chance: p, times the number of pairs, is below 0.05. Costs and published numbers
have no interval and are compared as they are. A negative `by` asks for "not much less": this is how an
accuracy is said to be kept.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any, Literal

from dent.evaluation.paired import LEVEL, JudgedPoints, pair_points

Verdict = Literal["holds", "does not hold", "far smaller", "cannot be told"]
HOLDS: Verdict = "holds"
FAILS: Verdict = "does not hold"
SMALLER: Verdict = "far smaller"
OPEN: Verdict = "cannot be told"
Figure = JudgedPoints | float  # an accuracy by its points, or a number that has none
SERIES = ("rises", "falls")
SHARES = ("at_least", "at_most")


@dataclass(frozen=True)
class Condition:
    """One condition of a claim; `bound` is its `by`, `within`, `share` or `value`."""

    kind: str
    references: tuple[str, ...]
    bound: float = 0.0
    factor: float = 1.0


@dataclass(frozen=True)
class Difference:
    """A number minus a share of another, with its 95 % interval.

    interval, p: None if too few batches support them. n: None if there are no points.
    """

    first: float
    second: float
    interval: tuple[float, float] | None
    n: int | None = None
    batches: int | None = None
    p: float | None = None

    @property
    def value(self) -> float:
        return round(self.first - self.second, 9)  # as decimals: 64.4 - 41.4 is 23

    def judge(self, kind: str, bound: float = 0.0, published: float = math.nan) -> Verdict:
        """Return the verdict by the table above; `published` is the difference in the paper."""
        if self.interval is None:
            return OPEN
        low, high = self.interval
        holds, fails = {
            "more": (low > bound, high <= bound),
            "same": (-bound <= low and high <= bound, low > bound or high < -bound),
            "at_least": (low >= 0, high < 0),
            "at_most": (high <= 0, low > 0),
        }[kind]
        if holds or fails:
            return HOLDS if holds else FAILS
        is_smaller = kind == "more" and bound >= 0 and high < published / 2
        return SMALLER if is_smaller else OPEN

    def count_needed(self, kind: str, bound: float = 0.0) -> float | None:
        """Return about how many images would tell, if the difference stays as it is; None if unknown.

        The width of an interval falls with the root of n. With few batches it falls faster, so that
        fewer images may do.

        >>> Difference(55.0, 50.0, (-5.0, 15.0), 100).count_needed("more")
        400.0
        """
        distance = abs(self.value) - bound if kind == "same" else self.value - bound * (kind == "more")
        if self.interval is None or self.n is None or distance == 0:
            return None
        return self.n * ((self.interval[1] - self.interval[0]) / 2 / distance) ** 2

    def to_json(self) -> dict[str, Any]:
        interval = list(self.interval) if self.interval else None
        return {"value": self.value, "interval": interval, "n": self.n, "batches": self.batches}


def subtract(first: Figure, second: Figure, share: float = 1.0) -> Difference:
    """Return the first minus a share of the second: in percentage points, on the points of both.

    >>> first, second = JudgedPoints({1: True, 2: True}), JudgedPoints({1: True, 2: False})
    >>> subtract(first, second).n
    2
    >>> subtract(82.3, 89.6, share=0.9).value
    1.66
    """
    if isinstance(first, float) and isinstance(second, float):
        difference = round(first - share * second, 9)
        return Difference(first, share * second, (difference, difference))
    if isinstance(first, float) or isinstance(second, float):
        raise TypeError("expected two accuracies or two other figures, got one of each")
    pair = pair_points(second, first)
    interval = pair.find_interval(share)
    return Difference(pair.second, share * pair.first, interval, pair.n, pair.batches, pair.p)


@dataclass(frozen=True)
class Evidence:
    """What the numbers say about one condition.

    values: by reference, the number that was compared, or why there is none.
    difference: the first number minus (a share of) the last; of a series, the last minus the first.
    against: of a series, the two references with the largest change the wrong way, and the change.
    ratio: what `value_near` compares. published: the difference in the paper, NaN if unknown. reason:
    why the condition cannot be told although the numbers are there. needed: about how many images would
    tell, if it cannot be told by these.
    """

    condition: Condition
    verdict: Verdict
    values: Mapping[str, float | str]
    difference: Difference | None = None
    against: tuple[str, str, Difference] | None = None
    ratio: float | None = None
    reason: str = ""
    published: float = math.nan

    @property
    def needed(self) -> float | None:
        if self.verdict != OPEN or self.difference is None:
            return None
        kind, bound = self.condition.kind, self.condition.bound
        return self.difference.count_needed("more" if kind in SERIES else kind, bound)

    def to_json(self) -> dict[str, Any]:
        against = None
        if self.against:
            early, late, step = self.against
            against = {"from": early, "to": late} | step.to_json()
        return asdict(self.condition) | {
            "references": list(self.condition.references),
            "verdict": self.verdict,
            "values": dict(self.values),
            "difference": self.difference.to_json() if self.difference else None,
            "against": against,
            "ratio": self.ratio,
            "published": None if math.isnan(self.published) else round(self.published, 9),
            "reason": self.reason,
            "needed": self.needed,
        }


def weigh(
    condition: Condition,
    figures: Sequence[Figure | str],
    slack: float = 0.0,
    published: Sequence[float | None] = (),
) -> Evidence:
    """Return what figures say about a condition; a text in place of a figure is why there is none.

    slack: how far published numbers of a series may go the wrong way.
    published: the paper's own numbers, in the order of the references.

    >>> dent, static = JudgedPoints({1: True, 2: False}), JudgedPoints({1: False, 2: False})
    >>> weigh(Condition("more", ("dent", "static")), [dent, static]).verdict
    'cannot be told'
    """
    references = condition.references
    values = {
        reference: figure if isinstance(figure, str) else _read_figure(figure)
        for reference, figure in zip(references, figures, strict=True)
    }
    known = {
        reference: figure
        for reference, figure in zip(references, figures, strict=True)
        if not isinstance(figure, str)
    }
    needed = (references[0], references[-1]) if condition.kind in SERIES else references
    if any(reference not in known for reference in needed):
        return Evidence(condition, OPEN, values)
    if condition.kind == "value_near":
        return _weigh_ratio(condition, list(known.values()), values)
    first, last = known[references[0]], known[references[-1]]
    both = [one.points for one in (first, last) if isinstance(one, JudgedPoints)]
    if len(both) == 2 and both[0] is both[1]:
        return Evidence(condition, OPEN, values, reason="are one and the same measurement here")
    share = condition.bound if condition.kind in SHARES else 1.0
    difference = subtract(first, last, share)
    if difference.n == 0:
        return Evidence(condition, OPEN, values, reason="have no images in common")
    ends = [math.nan if one is None else one for one in published] or [math.nan]
    if condition.kind in SERIES:
        return _weigh_series(condition, known, values, slack, ends[-1] - ends[0])
    gain = ends[0] - share * ends[-1]
    verdict = difference.judge(condition.kind, condition.bound, gain)
    return Evidence(condition, verdict, values, difference, published=gain)


def _weigh_series(
    condition: Condition,
    known: Mapping[str, Figure],
    values: Mapping[str, float | str],
    slack: float,
    published: float,
) -> Evidence:
    sign = 1 if condition.kind == "rises" else -1
    names, figures = list(known), list(known.values())
    difference = subtract(figures[-1], figures[0])
    pairs = list(combinations(range(len(figures)), 2))
    against = []
    for early, late in pairs:
        step = subtract(figures[late], figures[early])
        is_real = -sign * step.value > slack
        if step.n:
            is_real = step.p is not None and step.p * len(pairs) < LEVEL
        if sign * step.value < 0 and is_real:
            against.append((names[early], names[late], step))
    if against:
        largest = max(against, key=lambda one: abs(one[2].value))
        return Evidence(condition, FAILS, values, difference, largest)
    ends = difference if sign > 0 else subtract(figures[0], figures[-1])
    verdict = ends.judge("more", published=sign * published)
    return Evidence(condition, verdict, values, difference, published=published)


def _weigh_ratio(
    condition: Condition, figures: Sequence[Figure], values: Mapping[str, float | str]
) -> Evidence:
    value, below = figures[0], figures[1] if len(figures) == 2 else 1.0
    if not isinstance(value, float) or not isinstance(below, float):
        names = ", ".join(condition.references)
        raise TypeError(f"expected figures such as costs, got accuracies: {names}")
    if below == 0:
        return Evidence(condition, OPEN, values, reason="there is no ratio to 0")
    ratio = value / below
    is_near = condition.bound / condition.factor <= ratio <= condition.bound * condition.factor
    return Evidence(condition, HOLDS if is_near else FAILS, values, ratio=ratio)


def _read_figure(figure: Figure) -> float:
    if isinstance(figure, float):
        return figure
    return 100 * sum(figure.points.values()) / len(figure.points) if figure.points else math.nan
