"""Compare cells: with their static model, with one another, and between two runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from typing import TYPE_CHECKING, Any, Literal

from dent.attacks.findings import Finding
from dent.evaluation.paired import LEVEL, Paired, correct_pairs, pair_points
from dent.evaluation.spec import Cell

if TYPE_CHECKING:
    from dent.evaluation.results import CellResult, Results


def compare_with_static(cells: Iterable[CellResult]) -> tuple[CellResult, ...]:
    """Return the cells, each compared with its static model in the worst case and on natural inputs.

    p is corrected by Holm for all cells together. A cell whose natural accuracy is lower beyond chance
    gets a finding.
    """
    every = {one.cell: one for one in cells}
    couples = [
        (static, one)
        for cell, one in every.items()
        if (static := every.get(replace(cell, defense="static"))) and static is not one
    ]
    worst = correct_pairs([pair_points(static.judged, one.judged) for static, one in couples])
    natural = correct_pairs(
        [pair_points(static.judged_natural, one.judged_natural) for static, one in couples]
    )
    for (_, one), pair, pair_natural in zip(couples, worst, natural, strict=True):
        every[one.cell] = _add_natural_finding(
            replace(
                one,
                versus_static=pair if pair.n and one.is_attacked else None,
                natural_versus_static=pair_natural if pair_natural.n else None,
            )
        )
    return tuple(every.values())


def _add_natural_finding(result: CellResult) -> CellResult:
    pair = result.natural_versus_static
    if pair is None or pair.difference >= 0 or not pair.is_beyond_chance:
        return result
    finding = Finding(
        "natural accuracy falls",
        f"without an attack, fewer inputs are correct than on the static model, beyond chance "
        f"(p < {LEVEL:g})",
        {"points": round(pair.difference, 2), "p": float(f"{pair.p_corrected:.2g}")},
    )
    return replace(result, findings=(*result.findings, asdict(finding)))


def find_extremes(cells: Sequence[CellResult]) -> dict[Literal["best", "worst"], Cell]:
    """Return the cell with the best and the one with the worst worst case, by "best" and "worst".

    A cell is named only if it differs from every other beyond chance, by Holm for all pairs of cells.
    """
    scored = [one for one in cells if one.worst.n and one.is_attacked]
    if len(scored) < 2 or any(one.points.keys() != scored[0].points.keys() for one in scored):
        return {}
    couples = list(combinations(scored, 2))
    pairs = correct_pairs([pair_points(first.judged, second.judged) for first, second in couples])
    chance = [couple for couple, pair in zip(couples, pairs, strict=True) if not pair.is_beyond_chance]
    ordered = sorted(scored, key=lambda one: one.worst.correct)
    extremes: dict[Literal["best", "worst"], CellResult] = {"best": ordered[-1], "worst": ordered[0]}
    return {
        name: one.cell
        for name, one in extremes.items()
        if not any(one is first or one is second for first, second in chance)
    }


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
    static in one run with dent+ in the other. p is corrected by Holm for all rows together.
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
            ("natural", pair_points(one.judged_natural, other.judged_natural)),
            ("worst case", pair_points(one.judged, other.judged)),
        )
        if pair.n
    ]
    if not rows:
        raise ValueError(
            "expected runs with a cell in common (model, defense, eps, norm), judged on some of the "
            f"same images; got {_list_cells(first)} in the first and {_list_cells(second)} in the second"
        )
    corrected = correct_pairs([row.paired for row in rows])
    return [replace(row, paired=pair) for row, pair in zip(rows, corrected, strict=True)]


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


def _place(result: CellResult) -> tuple[str, float, str]:
    return result.cell.model, result.cell.eps, result.cell.norm


def _name_data(results: Results) -> str:
    asked = results.about.get("asked", results.about)
    return f"{asked.get('data', 'data')} (sha256 {str(results.about['data_sha256'])[:8]})"


def _list_cells(results: Results) -> str:
    return "; ".join(f"({cell.cell})" for cell in results.cells) or "no cells"
