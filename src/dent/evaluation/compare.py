"""Two runs on the same points: which differences hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dent.evaluation.paired import Paired, paired
from dent.evaluation.results import CellResult, Results
from dent.evaluation.units import Cell


@dataclass(frozen=True)
class Comparison:
    """A cell of the first run beside one of the second."""

    first: Cell
    second: Cell
    what: str  # natural, or worst case
    paired: Paired

    def to_json(self) -> dict[str, Any]:
        cells = {"model": self.first.model, "eps": self.first.eps, "norm": self.first.norm}
        cells |= {"first_defense": self.first.defense, "second_defense": self.second.defense}
        return cells | {"what": self.what} | self.paired.to_json()


def compare(first: Results, second: Results) -> list[Comparison]:
    """The second run beside the first, on the points that both have: natural, and the worst case.

    Equal cells are compared; and, for a model and ball without any, the only cell of each run: static in
    one run beside dent+ in the other.
    """
    digests = [one.about.get("data_sha256") for one in (first, second)]
    if None not in digests and digests[0] != digests[1]:
        raise ValueError(
            f"expected two runs on the same data, got {_data(first)} and {_data(second)}; "
            "evaluate both with the same data, n and seed"
        )
    rows = [
        Comparison(one.cell, other.cell, what, found)
        for one, other in _pairs(first.cells, second.cells)
        for what, found in (
            ("natural", _pair(one, other, one.points_natural, other.points_natural)),
            ("worst case", _pair(one, other, one.points, other.points)),
        )
        if found.n
    ]
    if not rows:
        raise ValueError(
            "expected runs with a cell in common (model, defense, eps, norm), judged on some of the "
            f"same points; got {_cells(first)} in the first and {_cells(second)} in the second"
        )
    return rows


def _pairs(
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
    made = [
        paired(first, second, independent=cell.independent, batch_of=cell.batch_of) for cell in dependent
    ]
    return min(made, key=lambda pair: pair.batches or 0)


def _place(result: CellResult) -> tuple[str, float, str]:
    return result.cell.model, result.cell.eps, result.cell.norm


def _data(results: Results) -> str:
    asked = results.about.get("asked", results.about)
    return f"{asked.get('data', 'data')} (sha256 {str(results.about['data_sha256'])[:8]})"


def _cells(results: Results) -> str:
    return "; ".join(f"({cell.cell})" for cell in results.cells) or "no cells"
