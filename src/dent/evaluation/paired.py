"""Two judgments of the same points: the difference, its interval, and whether it may be chance."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

Z = 1.959963984540054  # of 95 %
LEAST_BATCHES = 5  # for a p where points of a batch depend on one another


@dataclass(frozen=True)
class Paired:
    """How many points are correct in the first of two judgments alone, in the second alone, in both.

    >>> found = Paired(n=100, only_first=2, only_second=12, both=40)
    >>> found.first, found.second, found.difference
    (42.0, 52.0, 10.0)
    >>> round(found.low, 1), round(found.high, 1), found.p == found.mcnemar, round(found.mcnemar, 3)
    (2.6, 17.0, True, 0.013)

    independent: False if an answer in either judgment depends on the rest of its batch.
    batches: number of batches that hold these points; None if it is not known.
    """

    n: int
    only_first: int
    only_second: int
    both: int
    independent: bool = True
    batches: int | None = None

    def __post_init__(self) -> None:
        counts = (self.only_first, self.only_second, self.both)
        if min(counts) < 0 or sum(counts) > self.n:
            raise ValueError(f"expected counts >= 0 of {self.n} points together, got {counts}")

    @property
    def first(self) -> float:
        """Correct in the first, in %; nan without points."""
        return _percent(self.both + self.only_first, self.n)

    @property
    def second(self) -> float:
        return _percent(self.both + self.only_second, self.n)

    @property
    def difference(self) -> float:
        """The second minus the first, in percentage points."""
        return _percent(self.only_second - self.only_first, self.n)

    @property
    def low(self) -> float:
        return max(-100.0, self._interval[0])

    @property
    def high(self) -> float:
        return min(100.0, self._interval[1])

    @property
    def p(self) -> float | None:
        """Return the p of McNemar's test, or None if too few batches support one: see `why_no_p`."""
        return self.mcnemar if self.why_no_p is None else None

    @property
    def why_no_p(self) -> str | None:
        """Return why there is no p, or None if there is one.

        >>> Paired(n=128, only_first=2, only_second=12, both=40, independent=False, batches=1).why_no_p
        'points of one batch are not independent: p needs 5 batches or more, got 1'
        """
        if self.independent or (self.batches or 0) >= LEAST_BATCHES:
            return None
        got = "an unknown number" if self.batches is None else self.batches
        needed = f"p needs {LEAST_BATCHES} batches or more, got {got}"
        return f"points of one batch are not independent: {needed}"

    @cached_property
    def mcnemar(self) -> float:
        """Return the p of McNemar's exact two-sided test, which takes all points to be independent."""
        uneven = self.only_first + self.only_second
        term = total = 1  # whole numbers: exact, however many points there are
        for k in range(min(self.only_first, self.only_second)):
            term = term * (uneven - k) // (k + 1)
            total += term
        return min(1.0, float(2 * total / (1 << uneven)))

    @cached_property
    def _interval(self) -> tuple[float, float]:
        # Agresti and Min (2005): Wald's interval, with half a point more in each of the four counts.
        n = self.n + 2
        first, second = (self.only_first + 0.5) / n, (self.only_second + 0.5) / n
        center = second - first
        half = Z * math.sqrt((first + second - center**2) / n)
        return 100 * (center - half), 100 * (center + half)

    def to_json(self) -> dict[str, Any]:
        """The counts, and what follows from them; None for what no points say nothing about."""
        names = ("first", "second", "difference", "low", "high", "p", "why_no_p")
        return asdict(self) | {name: getattr(self, name) if self.n else None for name in names}


def paired(
    first: Mapping[int, bool],
    second: Mapping[int, bool],
    *,
    independent: bool = True,
    batch_of: Mapping[int, int] | None = None,
) -> Paired:
    """Compare two judgments on the points that both have.

    independent: False if an answer in either judgment depends on the rest of its batch.
    batch_of: the batch of each point.

    >>> paired({1: True, 2: True, 3: False}, {2: False, 3: False, 4: True})
    Paired(n=2, only_first=1, only_second=0, both=0, independent=True, batches=None)
    """
    common = first.keys() & second.keys()
    return Paired(
        n=len(common),
        only_first=sum(first[point] and not second[point] for point in common),
        only_second=sum(second[point] and not first[point] for point in common),
        both=sum(first[point] and second[point] for point in common),
        independent=independent,
        batches=None if batch_of is None else len({batch_of[point] for point in common}),
    )


def _percent(count: int, n: int) -> float:
    return 100 * count / n if n else math.nan
