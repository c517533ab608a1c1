"""Two judgments of the same points: the difference, its interval, and whether it may be chance."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

Z = 1.959963984540054  # of 95 %


@dataclass(frozen=True)
class Paired:
    """How many points are correct in the first of two judgments alone, in the second alone, in both.

    >>> found = Paired(n=100, only_first=2, only_second=12, both=40)
    >>> found.first, found.second, found.difference
    (42.0, 52.0, 10.0)
    >>> round(found.low, 1), round(found.high, 1), round(found.p, 3)
    (2.6, 17.0, 0.013)
    """

    n: int
    only_first: int
    only_second: int
    both: int

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

    @cached_property
    def p(self) -> float:
        """McNemar's test, exact and two-sided: how often a fair coin is as uneven as these points."""
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
        shown = {
            name: getattr(self, name) for name in ("first", "second", "difference", "low", "high", "p")
        }
        return asdict(self) | {name: value if self.n else None for name, value in shown.items()}


def paired(first: Mapping[int, bool], second: Mapping[int, bool]) -> Paired:
    """Compare two judgments on the points that both have.

    >>> paired({1: True, 2: True, 3: False}, {2: False, 3: False, 4: True})
    Paired(n=2, only_first=1, only_second=0, both=0)
    """
    common = first.keys() & second.keys()
    return Paired(
        n=len(common),
        only_first=sum(first[point] and not second[point] for point in common),
        only_second=sum(second[point] and not first[point] for point in common),
        both=sum(first[point] and second[point] for point in common),
    )


def _percent(count: int, n: int) -> float:
    return 100 * count / n if n else math.nan
