"""The report of a reproduction: the claims, then every table and figure beside what was published."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from dent.paper.claims import Judgement
from dent.paper.measured import Measured
from dent.paper.reproduction import Reproduction
from dent.paper.tables import Part
from dent.paper.tables import Table as PaperTable
from dent.report import plots
from dent.report.evaluation_page import BATTLE, GALLERY
from dent.report.page import Battle, Block, Gallery, Page, Plot, Record, Rows, Table, Text, Value
from dent.report.paper import claim_rows, grids, heading, number_text

HOW_TO_READ = (
    "published: as the paper prints it. here: the same under the attacks of this scale. worst case: what "
    "stands when the attacks made for adaptation are added, which the paper did not run: points of "
    "highest loss of the static model, and attacks on the model as adapted to them. difference: here "
    "minus published, in percentage points or in the unit of the table. Where another model stands in "
    "for the paper's, compare the direction of a row, not its numbers."
)


def paper_page(found: Reproduction) -> Page:
    """Everything that was found at a scale, whatever of it there is."""
    begun = found.begun()
    judgements = found.judgements()
    facts = [("scale", found.scale.name), ("tables", str(len(begun))), ("seed", str(found.seed))]
    facts += [("evaluations", str(len(found.found))), ("device", found.device)]
    return Page(
        title="The paper, reproduced",
        lead=(*summary(judgements), found.scale.title),
        facts=facts,
        blocks=tuple(_blocks(found, begun, judgements)),
        alerts=tuple(_alerts(found)),
    )


def summary(judgements: Sequence[Judgement]) -> list[str]:
    """How many of the claims hold, by the paper's attacks and in the worst case."""
    here = Counter(one.verdict for one in judgements)
    worst = Counter(one.worst_verdict for one in judgements if one.worst_verdict)
    if not any(here[verdict] for verdict in ("holds", "does not hold")):
        return ["Nothing can be told of the paper's claims yet."]

    def text(counts: Counter[Any]) -> str:
        known = f"{counts['holds']} hold, {counts['does not hold']} do not"
        return f"{known}, {counts['cannot be told']} cannot be told"

    said = [f"Of {sum(here.values())} claims of the paper, under its own kind of attack: {text(here)}."]
    if worst:
        robust = f"Of the {sum(worst.values())} on robustness, in the worst case of attacks made for"
        said.append(f"{robust} adaptation: {text(worst)}.")
    return said


def _blocks(
    found: Reproduction, begun: Sequence[PaperTable], judgements: Sequence[Judgement]
) -> Iterator[Block]:
    yield Text("How to read it", (HOW_TO_READ,), level=3)
    yield _claims(judgements)
    for table in begun:
        yield from _table_blocks(found, table)
    records = [
        Record(key.rpartition("_")[0], one.battle) for key, one in found.found.items() if one.battle
    ]
    if records:
        yield Battle("The battle", records, (BATTLE,))
        yield Gallery("Gallery", records, (GALLERY,))


def _claims(judgements: Sequence[Judgement]) -> Table:
    marks = {"holds here": "best", "does not hold here": "worst"}
    columns = ["claim", "where", "its own numbers", "here", "in the worst case"]
    rows = []
    for row in claim_rows(judgements):
        verdicts = [Value(row[name], "", marks.get(row[name], "")) for name in columns[3:]]
        claim = Value(row["claim"], row["evidence"])
        rows.append([claim, Value(row["where"]), Value(row["its own numbers"]), *verdicts])
    note = "Verdicts are by the 95 % interval of the difference, on the same points."
    return Table("What the paper says, and what holds", columns, [Rows(rows)], (note,))


def _table_blocks(found: Reproduction, table: PaperTable) -> Iterator[Block]:
    shown = grids(found, table)
    for number, (grid, part) in enumerate(zip(shown, table.parts, strict=True)):
        groups: list[Rows] = []
        for row in grid.rows:
            if row[0]:
                groups.append(Rows([], row[0]))
            line = [Value(row[1]), *(Value(text) for text in row[2:])]
            groups[-1] = Rows([*groups[-1].rows, line], groups[-1].heading)
        title = heading(table) if number == 0 else grid.title
        columns = [grid.title if number == 0 else "", *part.columns]
        yield Table(title, columns, groups, grid.notes, level=2 if number == 0 else 3)
    if table.across:
        measured = found.measured(table)
        for part, rows in zip(table.parts, measured, strict=True):
            plot = _curve(table, part, rows)
            if plot:
                yield plot


def _curve(table: PaperTable, part: Part, rows: Sequence[Sequence[Measured]]) -> Plot | None:
    x = str(table.across)
    percent = all(one.score for numbers in rows for one in numbers if one.ours is not None)
    y = "accuracy in %" if percent else "multiples or seconds"
    points: list[dict[str, Any]] = []
    for title, numbers in zip(part.rows, rows, strict=True):
        for at, one in zip(part.at, numbers, strict=True):
            scores = {"here": one.score, "worst case": one.worst}
            figures = {"here": one.ours, "published": one.number.published}
            figures |= {"worst case": one.worst.percent if one.worst else None}
            for kind, figure in figures.items():
                if figure is None:
                    continue
                point: dict[str, Any] = {x: at, y: figure, "series": f"{title}, {kind}"}
                if score := scores.get(kind):
                    point |= {"low": score.low, "high": score.high, "n": score.n}
                points.append(point)
    names = list(dict.fromkeys(str(one["series"]) for one in points))
    if not any(name.endswith(", here") for name in names):
        return None
    spec = plots.curve(
        points, x, y, "series", "low", "high", percent=percent,
        dashed=[name for name in names if name.endswith(", published")],
    )  # fmt: skip
    lines = [
        [Value(str(one["series"])), Value(f"{one[x]:g}"), Value(number_text(one[y]), _detail(one))]
        for one in points
    ]
    title = f"{heading(table).partition(':')[0]}, {part.title}, across {x}"
    shown = Table("", ["series", x, y], [Rows(lines)])
    return Plot(title, spec, shown, ("Dashed: as published.",), level=3)


def _detail(one: dict[str, Any]) -> str:
    if "low" not in one:
        return ""
    return f"{one['low']:.1f} to {one['high']:.1f}, n = {one['n']}"


def _alerts(found: Reproduction) -> Iterator[Text]:
    failed = [f"{key}: {one.missing[0]}" for key, one in found.found.items() if one.missing]
    troubles = list(dict.fromkeys(found.troubles.values()))
    if failed or troubles:
        yield Text("Not all of it is there", items=[*troubles, *failed], folded=len(failed) > 3)
