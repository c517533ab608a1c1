"""The report of a reproduction: the claims, then every table and figure beside what was published."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dent.evaluation import wording
from dent.evaluation.wording import NOTHING
from dent.paper.claims import Judgement
from dent.paper.measured import COSTS, Measured
from dent.paper.reproduction import Reproduction
from dent.paper.tables import Ask, Part
from dent.paper.tables import Table as PaperTable
from dent.report import plots
from dent.report.evaluation_page import BATTLE, GALLERY
from dent.report.page import Battle, Block, Gallery, Page, Plot, Record, Rows, Table, Text, Value
from dent.report.paper import heading, interval_text, not_begun, notes, number_text

HOW_TO_READ = (
    "published: as the paper prints it. here: the same under the attacks of this scale, with a 95 % "
    "interval. difference: here minus published. worst case: what stands when attacks made for "
    "adaptation are added, which the paper did not run. Where another model stands in for the paper's, "
    "compare the direction of a row, not its numbers."
)
MISSING = "Numbers are missing, or of fewer points. The same command tries again what failed."
CLAIM_NOTES = (
    "A verdict is by the 95 % interval of a difference, on the same points; the paper's own numbers, "
    "which have none, are compared as they are printed.",
    "worst case: the same with attacks made for adaptation added, which the paper did not run.",
)
KINDS = {  # of the lines of a plot: shape, and dashes
    "here": ("circle", [1, 0]),
    "worst case": ("triangle-down", [2, 3]),
    "published": ("diamond", [7, 4]),
}


def paper_page(found: Reproduction) -> Page:
    """Everything that was found at a scale, whatever of it there is."""
    begun = found.begun()
    judgements = found.judgements()
    facts = [("scale", found.scale.name), ("tables", str(len(begun))), ("seed", str(found.seed))]
    facts += [("evaluations", str(len(found.found))), ("device", found.device)]
    return Page(
        title="The paper, reproduced",
        lead=(*summary(judgements), f"Scale {found.scale.name}: {found.scale.title}."),
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
    yield _claims(judgements)
    if begun:
        yield Text("How to read the tables", (HOW_TO_READ,), level=3)
    for table in begun:
        yield from _table_blocks(found, table)
    records = [
        Record(str(cell), one.battle, cell.defence)
        for one in found.found.values()
        for cell in one.evaluation.cells()
        if one.battle and one.battle.get("images")
    ]
    if records:
        yield Battle("The battle", records, (BATTLE,))
        yield Gallery("Gallery", records, (GALLERY,))
    if absent := not_begun(found):
        yield Text("Not measured", items=absent, folded=len(absent) > 5)


def _claims(judgements: Sequence[Judgement]) -> Table:
    columns = ["claim", "the paper's own numbers", "here", "worst case"]
    rows = []
    for one in judgements:
        said = (one.published_verdict, one.verdict, one.worst_verdict or NOTHING)
        why = [one.claim.where, *([one.claim.note] if one.claim.note else []), *one.evidence]
        rows.append([Value(one.claim.text, " \N{MIDDLE DOT} ".join(why)), *map(_verdict, said)])
    return Table("What the paper says, and what holds", columns, [Rows(rows)], CLAIM_NOTES)


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
        yield from _curves(table, part, rows)


def _lines(numbers: Sequence[Measured]) -> Iterator[list[Value]]:
    """As in a grid, with the intervals below their numbers."""
    lines = {
        "published": [Value(number_text(one.number.published)) for one in numbers],
        "here": [
            Value(number_text(one.ours), _unless_nothing(interval_text(one)), strong=True)
            for one in numbers
        ],
        "difference": [Value(number_text(one.difference, sign=True)) for one in numbers],
        "worst case": [
            Value(
                number_text(one.worst.percent), wording.interval_text(one.worst), strong=True, tone="bad"
            )
            if one.worst
            else Value(NOTHING)
            for one in numbers
        ],
    }
    for name, values in lines.items():
        if name == "here" or any(value.text != NOTHING for value in values):
            yield [Value(name), *values]


def _unless_nothing(text: str) -> str:
    return "" if text == NOTHING else text


def _curves(table: PaperTable, part: Part, rows: Sequence[Sequence[Measured]]) -> Iterator[Plot]:
    """A plot for each unit, if the table is a curve."""
    units: dict[str, list[tuple[str, Sequence[Measured]]]] = {}
    for title, numbers in zip(part.rows, rows, strict=True):
        units.setdefault(unit_of(numbers[0].number.ask), []).append((title, numbers))
    for unit, own in units.items() if table.across else ():
        points = list(_points(own, part.at))
        if any(one["kind"] != "published" for one in points):
            name = f", {unit}" if len(units) > 1 else ""
            title = f"{part.title}, across {table.across}{name}"
            yield _curve(title, points, str(table.across), unit)


def unit_of(ask: Ask) -> str:
    """What an axis of such numbers is called."""
    if ask.measure == "seconds":
        return "seconds for a batch"
    if ask.measure in COSTS:
        return "multiples of the static model"
    return "accuracy in %" if ask.minus is None else "percentage points"


def _points(
    rows: Sequence[tuple[str, Sequence[Measured]]], at: Sequence[float]
) -> Iterator[dict[str, Any]]:
    """What is to be drawn; rows that are one and the same measurement, once for all of them."""
    same: dict[Any, list[str]] = {}
    for title, numbers in rows:
        same.setdefault(_measurement(numbers), []).append(title)
    for place, (title, numbers) in enumerate(rows):
        together = same[_measurement(numbers)]
        name = "all rows" if 1 < len(together) == len(rows) else ", ".join(together)
        for x, one in zip(at, numbers, strict=True):
            row = {"x": x, "row": place}
            if one.number.published is not None:
                yield row | {"series": title, "kind": "published", "y": one.number.published}
            if together[0] != title:
                continue
            for kind, score in (("here", one.score), ("worst case", one.worst)):
                if score:
                    ends = {"low": score.low, "high": score.high, "n": score.n}
                    yield row | {"series": name, "kind": kind, "y": score.percent} | ends
            if one.value is not None:
                yield row | {"series": name, "kind": "here", "y": one.value}


def _measurement(numbers: Sequence[Measured]) -> tuple[Any, ...]:
    return tuple((one.work, one.number.ask.measure, one.number.ask.minus) for one in numbers)


def _curve(title: str, points: Sequence[Mapping[str, Any]], x: str, y: str) -> Plot:
    """A colour for each row; shape and dashes say whether it is ours."""
    points = sorted(points, key=lambda one: (one["row"], list(KINDS).index(one["kind"])))
    drawn: list[dict[str, Any]] = []
    rows: dict[str, int] = {}
    kinds: dict[str, str] = {}
    for one in points:
        name = f"{one['series']}, {one['kind']}"
        rows[name], kinds[name] = one["row"], one["kind"]
        rest = {key: one[key] for key in ("low", "high", "n") if key in one}
        drawn.append({x: one["x"], y: one["y"], "series": name, **rest})
    spec = plots.curve(drawn, x, y, "series", "low", "high", percent="%" in y)
    styles = {
        "color": [plots.PALETTE[row % len(plots.PALETTE)] for row in rows.values()],
        "shape": [KINDS[kind][0] for kind in kinds.values()],
        "strokeDash": [KINDS[kind][1] for kind in kinds.values()],
    }
    for layer in spec["layer"]:
        for channel, style in styles.items():
            if channel in layer["encoding"]:
                scale = {"domain": list(rows), "range": style}
                layer["encoding"][channel] |= {"field": "series", "scale": scale}
    lines = [
        [Value(one["series"]), Value(f"{one[x]:g}"), Value(number_text(one[y]), _detail(one))]
        for one in drawn
    ]
    return Plot(title, spec, Table("", ["series", x, y], [Rows(lines)]), level=3)


def _detail(one: Mapping[str, Any]) -> str:
    return f"{one['low']:.1f} to {one['high']:.1f}, n = {one['n']:,}" if "low" in one else ""


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
