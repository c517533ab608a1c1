"""The report of a reproduction: the claims, then every table and figure beside what was published."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from dent.paper.claims import Judgment
from dent.paper.measured import Measured
from dent.paper.reproduction import Reproduction
from dent.paper.tables import Table as PaperTable
from dent.report import wording
from dent.report.evaluation_page import BATTLE, GALLERY
from dent.report.page import Battle, Block, Gallery, Page, Record, Rows, Table, Text, Value
from dent.report.paper import heading, interval_text, not_begun, notes, number_text, published_text
from dent.report.paper_plots import curves
from dent.report.wording import NOTHING

HOW_TO_READ = (
    "published: as the paper prints it",
    "here: the same under the attacks of this scale, with its 95 % interval",
    "difference: here minus published",
    "worst case: what stands when attacks made for adaptation are added, which the paper did not run",
)
STANDS_IN = (
    "Where another model stands in for the paper's, compare the direction of a row, not its numbers."
)
MISSING = "Numbers are missing, or of fewer points. The same command tries again what failed."
CLAIM_NOTES = (
    "here: by the 95 % interval of a difference, on the same points.",
    "worst case: the same with attacks made for adaptation added, which the paper did not run.",
    "published: by the paper's own numbers, as they are printed.",
)
NO_BREAK = "\N{NO-BREAK SPACE}"


def paper_page(found: Reproduction) -> Page:
    """Everything that was found at a scale, whatever of it there is."""
    begun = found.begun()
    judgments = found.judgments()
    facts = [("scale", found.scale.name), ("tables", str(len(begun))), ("seed", str(found.seed))]
    facts += [("evaluations", str(len(found.found))), ("device", found.device)]
    return Page(
        title="The paper, reproduced",
        lead=(*summary(judgments), f"Scale {found.scale.name}: {found.scale.title}."),
        facts=facts,
        blocks=tuple(_blocks(found, begun, judgments)),
        alerts=tuple(_alerts(found)),
    )


def summary(judgments: Sequence[Judgment]) -> list[str]:
    """How many of the claims hold, by the paper's attacks and in the worst case."""
    here = Counter(one.verdict for one in judgments)
    worst = Counter(one.worst_verdict for one in judgments if one.worst_verdict)
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
    found: Reproduction, begun: Sequence[PaperTable], judgments: Sequence[Judgment]
) -> Iterator[Block]:
    yield _claims(judgments)
    behind = list(map(_evidence, judgments))
    yield Text("The numbers behind each claim", items=behind, folded=True, level=3)
    if begun:
        yield Text("How to read the tables", (STANDS_IN,), HOW_TO_READ, level=3)
    for table in begun:
        yield from _table_blocks(found, table)
    records = [
        Record(str(cell), one.battle, cell.defense)
        for one in found.found.values()
        for cell in one.evaluation.cells()
        if one.battle and one.battle.get("images")
    ]
    if records:
        yield Battle("The battle", records, (BATTLE,))
        yield Gallery("Gallery", records, (GALLERY,))
    if absent := not_begun(found):
        yield Text("Not measured", items=absent, folded=len(absent) > 5)


def _claims(judgments: Sequence[Judgment]) -> Table:
    columns = ["claim", "here", "worst case", "published"]
    rows = []
    for one in judgments:
        said = (one.verdict, one.worst_verdict or NOTHING, one.published_verdict)
        rows.append([Value(one.claim.text, one.claim.where), *map(_verdict, said)])
    return Table("What the paper says, and what holds", columns, [Rows(rows)], CLAIM_NOTES)


def _evidence(one: Judgment) -> str:
    read = f" {one.claim.note}" if one.claim.note else ""
    worst = f" In the worst case: {'; '.join(one.worst_evidence)}." if one.worst_evidence else ""
    return f"{one.claim.text}{read} Here: {'; '.join(one.evidence)}.{worst}"


def _verdict(text: str) -> Value:
    tone = {"holds": "good", "does not hold": "bad"}.get(text, "")
    return Value(text, strong=bool(tone), tone=tone)


def _table_blocks(found: Reproduction, table: PaperTable) -> Iterator[Block]:
    alone = len(table.parts) == 1
    if not alone:
        yield Text(heading(table))
    measured = found.measured(table)
    said = notes(found, table)
    for part, rows in zip(table.parts, measured, strict=True):
        groups = [
            Rows(list(_lines(numbers)), title) for title, numbers in zip(part.rows, rows, strict=True)
        ]
        title = heading(table) if alone else part.title
        columns = [part.title if alone else "", *part.columns]
        own = said if part is table.parts[-1] else ()
        yield Table(title, columns, groups, own, level=2 if alone else 3)
    for part, rows in zip(table.parts, measured, strict=True):
        yield from curves(table, part, rows)


def _lines(numbers: Sequence[Measured]) -> Iterator[list[Value]]:
    """As in a grid, with the intervals below their numbers."""
    lines = {
        "published": [Value(published_text(one.number)) for one in numbers],
        "here": [
            Value(number_text(one.ours), _narrow(interval_text(one)), strong=True) for one in numbers
        ],
        "difference": [Value(number_text(one.difference, sign=True)) for one in numbers],
        "worst case": [
            Value(
                number_text(one.worst.percent),
                _narrow(wording.interval_text(one.worst)),
                strong=True,
                tone="bad",
            )
            if one.worst
            else Value(NOTHING)
            for one in numbers
        ],
    }
    for name, values in lines.items():
        if name == "here" or any(value.text != NOTHING for value in values):
            yield [Value(name.replace(" ", NO_BREAK)), *values]


def _narrow(interval: str) -> str:
    """A table may have many columns."""
    short = interval if "-" in interval else interval.replace(" to ", "\N{EN DASH}")
    return "" if interval == NOTHING else short


def _alerts(found: Reproduction) -> Iterator[Text]:
    troubles = list(dict.fromkeys(found.troubles.values()))
    failed = [
        f"{cell}: {one.missing[0]}" + (f", and {len(one.missing) - 1} more" * (len(one.missing) > 1))
        for one in found.found.values()
        for cell in one.evaluation.cells()
        if one.missing
    ]
    if items := troubles + failed:
        yield Text("Not all of it is there", (MISSING,), items, folded=len(items) > 3)
