"""Compare two judgments of the same points: the difference, its interval, and a paired test."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from dent.evaluation.spec import Cell

if TYPE_CHECKING:
    from dent.evaluation.results import CellResult, Results

Z = 1.959963984540054  # of 95 %
LEAST_BATCHES = 5  # for a p where points of a batch depend on one another


@dataclass(frozen=True)
class Paired:
    """Number of points that are correct in the first judgment alone, in the second alone, in both.

    independent: False if an answer in either judgment depends on the rest of its batch.
    batches: number of batches that hold these points; None if it is not known.

    >>> pair = Paired(n=100, only_first=2, only_second=12, both=40)
    >>> pair.first, pair.second, pair.difference
    (42.0, 52.0, 10.0)
    >>> round(pair.low, 1), round(pair.high, 1), pair.p == pair.mcnemar, round(pair.mcnemar, 3)
    (2.6, 17.0, True, 0.013)
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
        term = total = 1  # integers: exact, however many points there are
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
        """Return the counts and what follows from them; None if there are no points."""
        names = ("first", "second", "difference", "low", "high", "p", "why_no_p")
        return asdict(self) | {name: getattr(self, name) if self.n else None for name in names}


def pair_points(
    first: Mapping[int, bool],
    second: Mapping[int, bool],
    *,
    independent: bool = True,
    batch_of: Mapping[int, int] | None = None,
) -> Paired:
    """Compare two judgments on the points that both have.

    independent: False if an answer in either judgment depends on the rest of its batch.
    batch_of: the batch of each point.

    >>> pair_points({1: True, 2: True, 3: False}, {2: False, 3: False, 4: True})
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


@dataclass(frozen=True)
class ComparedCells:
    """A cell of the first run beside one of the second."""

    first: Cell
    second: Cell
    what: str  # natural, or worst case
    paired: Paired
    suite_versions: tuple[str | None, str | None] = (None, None)  # of both runs; None if not known

    def to_json(self) -> dict[str, Any]:
        cells = {"model": self.first.model, "eps": self.first.eps, "norm": self.first.norm}
        cells |= {"first_defense": self.first.defense, "second_defense": self.second.defense}
        versions = zip(("first_suite_version", "second_suite_version"), self.suite_versions, strict=True)
        return cells | {"what": self.what} | self.paired.to_json() | dict(versions)


def compare_runs(first: Results, second: Results) -> list[ComparedCells]:
    """Compare two runs on the points that both have, naturally and in the worst case.

    Equal cells are compared. If each run has one cell of a model and ball, these are compared too:
    static in one run with dent+ in the other.
    """
    digests = [one.about.get("data_sha256") for one in (first, second)]
    if None not in digests and digests[0] != digests[1]:
        raise ValueError(
            f"expected two runs on the same data, got {_name_data(first)} and {_name_data(second)}; "
            "evaluate both with the same data, n and seed"
        )
    versions = (first.about.get("suite_version"), second.about.get("suite_version"))
    rows = [
        ComparedCells(one.cell, other.cell, what, pair, versions)
        for one, other in _match_cells(first.cells, second.cells)
        for what, pair in (
            ("natural", _pair(one, other, one.points_natural, other.points_natural)),
            ("worst case", _pair(one, other, one.points, other.points)),
        )
        if pair.n
    ]
    if not rows:
        raise ValueError(
            "expected runs with a cell in common (model, defense, eps, norm), judged on some of the "
            f"same points; got {_list_cells(first)} in the first and {_list_cells(second)} in the second"
        )
    return rows


def _match_cells(
    first: Sequence[CellResult], second: Sequence[CellResult]
) -> list[tuple[CellResult, CellResult]]:
    pairs = []
    for one in first:
        here = [cell for cell in first if _place(cell) == _place(one)]
        there = [cell for cell in second if _place(cell) == _place(one)]
        equal = [cell for cell in there if cell.cell == one.cell]
        if len(here) == len(there) == 1:
            equal = there
        pairs += [(one, other) for other in equal]
    return pairs


def _pair(one: CellResult, other: CellResult, first: dict[int, bool], second: dict[int, bool]) -> Paired:
    """Pair points of two cells. If both depend on their batches, the one with fewer batches counts."""
    dependent = [cell for cell in (one, other) if not cell.independent] or [one]
    pairs = [
        pair_points(first, second, independent=cell.independent, batch_of=cell.batch_of)
        for cell in dependent
    ]
    return min(pairs, key=lambda pair: pair.batches or 0)


def _place(result: CellResult) -> tuple[str, float, str]:
    return result.cell.model, result.cell.eps, result.cell.norm


def _name_data(results: Results) -> str:
    asked = results.about.get("asked", results.about)
    return f"{asked.get('data', 'data')} (sha256 {str(results.about['data_sha256'])[:8]})"


def _list_cells(results: Results) -> str:
    return "; ".join(f"({cell.cell})" for cell in results.cells) or "no cells"


def _percent(count: int, n: int) -> float:
    return 100 * count / n if n else math.nan
