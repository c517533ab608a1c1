"""Results as tables of text, for whatever prints them: one row for each defense of a model in a ball."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dent.evaluation.units import Cell
from dent.report.wording import (
    NOTHING,
    ball_text,
    cost_text,
    interval_text,
    p_text,
    percent_text,
    points_text,
    versus_text,
)

if TYPE_CHECKING:
    from dent.evaluation.compare import Comparison
    from dent.evaluation.paired import Paired
    from dent.evaluation.results import CellResult, Results, Score

Row = dict[str, str]
BEST, WORST = "best", "worst"  # beside a worst case


@dataclass(frozen=True)
class Group:
    """The rows of a model in a ball; the first column is the defense."""

    model: str
    ball: str
    n: str  # of all numbers of which nothing else is said; empty where rows differ
    rows: list[Row]

    @property
    def heading(self) -> str:
        return f"{self.model}, {self.ball}" + (f", n = {self.n}" if self.n else "")


@dataclass(frozen=True)
class Section:
    """A table: what it shows, its rows in groups, all with the same columns, and what explains it."""

    title: str
    groups: list[Group]
    notes: tuple[str, ...] = ()


def sections(results: Results, *, intervals: bool = False) -> list[Section]:
    """All tables of the results, those without rows left out.

    intervals: behind every number its own; else only that of the worst case.
    """
    shown = [
        _main(results, intervals),
        _attacks(results, intervals),
        _alone(results),
        _scenarios(results, intervals),
    ]
    return [section for section in shown if section.groups]


def marks(results: Results) -> dict[Cell, str]:
    """Which worst case is the best, and which the worst, of a model's in a ball on the same points."""
    found = {}
    for cells in _places(results).values():
        scored = [cell for cell in cells if cell.worst.n]
        percents = [cell.worst.percent for cell in scored]
        same = all(cell.points.keys() == scored[0].points.keys() for cell in scored)
        if same and len(set(percents)) > 1:
            for cell, percent in zip(scored, percents, strict=True):
                if percent in (max(percents), min(percents)):
                    found[cell.cell] = BEST if percent == max(percents) else WORST
    return found


def _main(results: Results, intervals: bool) -> Section:
    marked = marks(results)
    protocols = {cell.protocol is not None for cell in results.cells if cell.claimed}
    costs = any(cell.cost for cell in results.cells)

    def row(cell: CellResult, usual: int) -> Row:
        def text(score: Score | None) -> str:
            return percent_text(score, usual, intervals)

        mark = marked.get(cell.cell, "")
        other = " (direct)" if len(protocols) > 1 and cell.protocol is None and cell.claimed else ""
        row = {"defense": cell.cell.defense, "natural": text(cell.natural)}
        row |= {"claimed": text(cell.claimed) + other} if protocols else {}
        row |= {"worst case": f"{mark} {percent_text(cell.worst, usual)}".strip()}
        row |= {"95 % interval": interval_text(cell.worst), "submitted": text(cell.submitted)}
        row |= {"gap": points_text(cell.gap)} if protocols else {}
        row |= {"vs static": "" if cell.cell.static else versus_text(cell.versus_static)}
        return row | ({"cost": cost_text(cell.cost)} if costs else {})

    notes = [
        "worst case: correct without an attack and under every one. submitted: of each batch, under the "
        "one attack that hurts it most.",
        "vs static: worst case minus that of the static model, in percentage points on the same points; "
        "p by McNemar's exact test.",
    ]
    if protocols:
        notes.insert(0, f"claimed: {_claim(protocols)}.")
        notes.insert(2, "gap: claimed minus worst case, in percentage points on the same points.")
    if marked:
        notes.append(f"{BEST}, {WORST}: the highest and the lowest worst case of a model in a ball.")
    notes += [f"no p: {why}." for why in _reasons(cell.versus_static for cell in results.cells)]
    if costs:
        notes.append("cost: operations (FLOPs) of an answer, in multiples of the static model's.")
    return Section("Accuracy in %", _groups(results, row), tuple(notes))


def _claim(protocols: set[bool]) -> str:
    """What is claimed, in words: by the protocol, by direct attacks, or by one here, the other there."""
    by_protocol = "under the paper's own protocol (the reference AutoAttack)"
    by_direct = "under the attacks on the defended model itself, without those made for adaptation"
    if len(protocols) > 1:
        return f"{by_protocol}; (direct): {by_direct}"
    return by_protocol if True in protocols else by_direct


def _attacks(results: Results, intervals: bool) -> Section:
    names = _names(results, lambda cell: list(cell.attacks))
    kinds = {name: kind for cell in results.cells for name, kind in cell.kinds.items()}
    direct = [name for name in names if kinds.get(name) == "direct"]
    adaptive = [name for name in names if kinds.get(name) != "direct"]

    def row(cell: CellResult, usual: int) -> Row:
        def text(score: Score | None) -> str:
            return percent_text(score, usual, intervals)

        shown = {"defense": cell.cell.defense + "*" * cell.cumulative}
        shown |= {name: text(cell.attacks.get(name)) for name in direct}
        # Where the paper's protocol was not run, this is what is claimed.
        shown |= {"all direct": text(cell.direct)} if len(direct) > 1 and adaptive else {}
        return shown | {name: text(cell.attacks.get(name)) for name in adaptive}

    notes = [f"made for adaptation: {', '.join(adaptive)}; the others are direct."] if adaptive else []
    if any(cell.cumulative for cell in results.cells):
        notes.append(
            "*: each attack was given only what those before it left standing; its number is what "
            "stands after all of these."
        )
    return Section(
        "Accuracy in % under each attack", _groups(results, row) if names else [], tuple(notes)
    )


def _alone(results: Results) -> Section:
    broken = {name for cell in results.cells for name, count in (cell.alone or {}).items() if count}
    names = [name for name in _names(results, lambda cell: list(cell.attacks)) if name in broken]

    def row(cell: CellResult, usual: int) -> Row:
        n, alone = cell.worst.n, cell.alone or {}
        shares = {
            name: f"{100 * alone[name] / n:.1f}" if name in alone and n else NOTHING for name in names
        }
        return {"defense": cell.cell.defense} | shares

    groups = _groups(results, row, lambda cell: bool(cell.alone)) if names else []
    return Section("Points that one attack alone breaks, in %", groups)


def _scenarios(results: Results, intervals: bool) -> Section:
    names = _names(results, lambda cell: list(cell.scenarios))

    def row(cell: CellResult, usual: int) -> Row:
        scores = {name: percent_text(cell.scenarios.get(name), 0, intervals) for name in names}
        return {"defense": cell.cell.defense} | scores

    groups = _groups(results, row, lambda cell: bool(cell.scenarios), own_n=True)
    note = "Each on points of its own; they are no part of the worst case."
    return Section("Accuracy in % in other batches", groups, (note,))


def _groups(
    results: Results,
    row: Callable[[CellResult, int], Row],
    shown: Callable[[CellResult], bool] = lambda cell: True,
    *,
    own_n: bool = False,
) -> list[Group]:
    """Rows by model and ball, with n in the heading, or in every row if it is not the same in all.

    own_n: every number of these rows has its n beside it.
    """
    groups = []
    differ = any(len({cell.worst.n for cell in cells}) > 1 for cells in _places(results).values())
    for cells in _places(results).values():
        rows = []
        for cell in filter(shown, cells):
            n = {"n": f"{cell.worst.n:,}"} if differ and not own_n else {}
            rows.append(row(cell, cell.worst.n) | n)
        if rows:
            n_of_all = "" if differ or own_n else f"{cells[0].worst.n:,}"
            groups.append(Group(cells[0].cell.model, ball_text(cells[0].cell), n_of_all, rows))
    return groups


def _places(results: Results) -> dict[tuple[str, float, str], list[CellResult]]:
    places: dict[tuple[str, float, str], list[CellResult]] = {}
    for cell in results.cells:
        places.setdefault((cell.cell.model, cell.cell.eps, cell.cell.norm), []).append(cell)
    return places


def _names(results: Results, of: Callable[[CellResult], list[str]]) -> list[str]:
    """In the order of the cell that has most: others leave some out."""
    each = sorted((of(cell) for cell in results.cells), key=len, reverse=True)
    return list(dict.fromkeys(name for names in each for name in names))


def comparison_section(rows: Sequence[Comparison]) -> Section:
    """The comparisons as a table."""
    groups: dict[tuple[Cell, Cell], list[Row]] = {}
    for row in rows:
        found = row.paired
        numbers = {"first": f"{found.first:.1f}", "second": f"{found.second:.1f}"}
        numbers |= {"difference": points_text(found.difference, sign="+")}
        numbers |= {"95 % interval": f"{found.low:+.1f} to {found.high:+.1f}", "p": p_text(found.p)}
        line = {"accuracy": row.what} | numbers | {"n": f"{found.n:,}"}
        groups.setdefault((row.first, row.second), []).append(line)
    return Section(
        "Accuracy in %: the second run beside the first, on the same points",
        [
            Group(f"{first.model}, {_defenses(first, second)}", ball_text(first), "", lines)
            for (first, second), lines in groups.items()
        ],
        (
            "difference: second minus first, in percentage points, with its interval (Agresti and Min).",
            "p: by McNemar's exact test.",
            *(f"no p: {why}." for why in _reasons(row.paired for row in rows)),
        ),
    )


def _reasons(pairs: Iterable[Paired | None]) -> list[str]:
    """Return why some of the pairs have no p, each reason once."""
    return list(dict.fromkeys(pair.why_no_p for pair in pairs if pair and pair.why_no_p))


def _defenses(first: Cell, second: Cell) -> str:
    return first.defense if first == second else f"{first.defense} and {second.defense}"
