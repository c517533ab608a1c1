"""Paired comparisons as cells and tables: a difference, its interval, p, and how p was found."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from dent.evaluation.compare import ComparedCells
from dent.evaluation.paired import LEVEL, Paired
from dent.evaluation.spec import Cell
from dent.report.blocks import EMPTY, Group, Note, Table, Value, count_value
from dent.report.format import format_ball, format_p, format_percent, format_points


def comparison_table(rows: Sequence[ComparedCells]) -> Table:
    """Return two runs side by side, on the same points."""
    groups: dict[tuple[Cell, Cell], list[list[Value]]] = {}
    for row in rows:
        pair = row.paired
        numbers = [Value(format_percent(one), one) for one in (pair.first, pair.second)]
        line = [Value(row.what), *numbers, difference_value(pair), p_value(pair.p)]
        line += [p_value(pair.p_corrected), count_value(pair.n)]
        batches = EMPTY if pair.batches is None else count_value(pair.batches)
        groups.setdefault((row.first, row.second), []).append([*line, batches])
    pairs = [row.paired for row in rows]
    return Table(
        "Accuracy in %: the second run beside the first, on the same images",
        ("accuracy", "first", "second", "difference", "p", "corrected p", "n", "batches"),
        [
            Group(lines, {"model": first.model, "defense": _name_defenses(first, second),
                          "ball": format_ball(first.norm, first.eps)})
            for (first, second), lines in groups.items()
        ],
        (
            Note("second minus first, in percentage points, with its interval.", "difference"),
            *list_tests(pairs),
            *list_reasons(pair.why_no_p for pair in pairs),
            *_list_versions(rows),
        ),
        interval_of="difference",
    )  # fmt: skip


def _list_versions(rows: Sequence[ComparedCells]) -> list[Note]:
    """Return a warning if the attacks of two runs are of different versions."""
    differ = dict.fromkeys(row.suite_versions for row in rows if len(set(row.suite_versions)) > 1)
    return [
        Note(
            f"{first or 'unknown'} in the first run, {second or 'unknown'} in the second: the attacks "
            "differ, and so may the worst cases for this reason alone.",
            "suite versions",
        )
        for first, second in differ
    ]


def _name_defenses(first: Cell, second: Cell) -> str:
    return first.defense if first == second else f"{first.defense} and {second.defense}"


def points_value(points: float | None, *, sign: str = "") -> Value:
    """Return a cell with percentage points."""
    return Value(format_points(points, sign=sign), points)


def versus_value(versus: Paired | None) -> Value:
    """Return a cell with a difference in percentage points and its corrected p."""
    if versus is None or not versus.n:
        return EMPTY
    details = () if versus.p_corrected is None else (format_p(versus.p_corrected, named=True),)
    return replace(points_value(versus.difference, sign="+"), details=details)


def difference_value(pair: Paired) -> Value:
    """Return a cell with a difference in percentage points and its interval."""
    return replace(points_value(pair.difference, sign="+"), interval=pair.interval, signed=True)


def p_value(p: float | None) -> Value:
    """Return a cell with a p, empty if there is none."""
    return EMPTY if p is None else Value(format_p(p), p)


def list_reasons(reasons: Iterable[str | None]) -> list[Note]:
    """Return why some numbers have no interval and no p, each reason once."""
    return [Note(f"{why}.", "no interval, no p") for why in dict.fromkeys(reasons) if why]


def list_tests(pairs: Iterable[Paired | None]) -> list[Note]:
    """Return how p was found, and how small it can be where that is not small enough."""
    known = [pair for pair in pairs if pair and pair.p is not None]
    if not known:
        return []
    batches = "by flipping the signs of the differences of whole batches in all ways"
    tests = [batches] * any(not pair.independent for pair in known)
    if any(pair.independent for pair in known):
        tests.append("by McNemar's exact test" + " for independent images" * bool(tests))
    comparisons = max(pair.comparisons for pair in known)
    holm = f"; corrected by Holm for {comparisons} comparisons" if comparisons > 1 else ""
    notes = [Note(f"{'; '.join(tests)}{holm}.", "p")]
    least = {pair.batches: pair.least_p for pair in known if pair.least_p >= LEVEL}
    for number, p in least.items():
        never = f"{number} batches cannot show more than chance here, p is at least {format_p(p)}"
        notes.append(Note(f"{never}; evaluate more batches.", "p"))
    return notes


def read_difference(pair: Paired) -> str:
    """Return what a difference says, in words."""
    if pair.p is None:
        return "too few batches"
    if not pair.is_beyond_chance:
        return "may be chance"
    return "higher" if pair.difference > 0 else "lower"
