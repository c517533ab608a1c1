"""The paper's tables with what was found here, for the terminal, Markdown and the page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from dent.evaluation.attacks import kind_of
from dent.paper.claims import Judgment
from dent.paper.measured import Measured
from dent.paper.reproduction import Reproduction
from dent.paper.scales import Work
from dent.paper.tables import Number, Part, Table, tables
from dent.report import wording
from dent.report.wording import NOTHING, points_text

LINES = ("published", "here", "95 % interval", "difference", "worst case")


@dataclass(frozen=True)
class Grid:
    """A part of a table: for each of its rows a line of each kind that has anything to say."""

    title: str
    columns: tuple[str, ...]  # the row, the kind of the line, and the columns of the paper
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()


def grids(found: Reproduction, table: Table) -> list[Grid]:
    """The parts of a table; the notes are of all of them, and come with the last."""
    made = []
    for part, measured in zip(table.parts, found.measured(table), strict=True):
        rows: list[tuple[str, ...]] = []
        for title, numbers in zip(part.rows, measured, strict=True):
            rows += _lines(title, numbers)
        made.append(Grid(part.title, (part_head(part), "", *part.columns), tuple(rows)))
    made[-1] = Grid(made[-1].title, made[-1].columns, made[-1].rows, tuple(notes(found, table)))
    return made


def part_head(part: Part) -> str:
    """What the rows are, if they are models, which are named by their authors and the year."""
    return "model" if all(row[-4:].isdigit() for row in part.rows) else ""


def _lines(title: str, numbers: Sequence[Measured]) -> list[tuple[str, ...]]:
    lines = {
        "published": [published_text(one.number) for one in numbers],
        "here": [number_text(one.ours) for one in numbers],
        "95 % interval": [interval_text(one) for one in numbers],
        "difference": [number_text(one.difference, sign=True) for one in numbers],
        "worst case": [number_text(one.worst.percent if one.worst else None) for one in numbers],
    }
    kept = [(name, texts) for name, texts in lines.items() if set(texts) != {NOTHING} or name == "here"]
    return [(title if not place else "", name, *texts) for place, (name, texts) in enumerate(kept)]


def number_text(value: float | None, *, sign: bool = False) -> str:
    """One digit after the point; of small numbers three.

    >>> number_text(63.28), number_text(-1.04, sign=True), number_text(0.0312)
    ('63.3', '-1.0', '0.031')
    """
    if value is None:
        return NOTHING
    if sign:
        return points_text(value, sign="+")
    return f"{value:.{1 if abs(value) >= 1 or value == 0 else 3}f}"


def published_text(number: Number) -> str:
    """As the paper prints it."""
    return NOTHING if number.published is None else f"{number.published:.1f}"


def interval_text(one: Measured) -> str:
    if one.score:
        return wording.interval_text(one.score)
    return NOTHING if one.low is None or one.high is None else f"{one.low:.0f} to {one.high:.0f}"


def notes(found: Reproduction, table: Table) -> list[str]:
    """What the numbers are of: stand-ins, points, attacks; and what is missing, with why."""
    numbers = list(found.by_reference(table).values())
    works = [one.work for one in numbers if one.work]
    said = [table.note] if table.note else []
    stands: dict[str, dict[str, None]] = {}
    for one in numbers:
        if one.work and one.work.stands_in:
            what = f"{one.work.model}, {one.work.note}," if one.work.note else one.work.model
            stands.setdefault(what, {})[one.number.ask.model] = None
    said += [f"{model} stands in for {', '.join(paper)}." for model, paper in stands.items()]
    if any(one.work.defense not in (one.number.ask.defense, "static") for one in numbers if one.work):
        said.append(f"At this scale, updates are at most {found.scale.most_updates}.")
    counts = sorted({one.n for one in numbers if one.n})
    if counts:
        said.append(f"n = {' to '.join(f'{n:,}' for n in dict.fromkeys((counts[0], counts[-1])))}.")
    said += _attacks(works)
    missing = Counter(one.missing for one in numbers if one.missing)
    said += [f"Missing, {count} of {len(numbers)} numbers: {why}." for why, count in missing.items()]
    keys = dict.fromkeys(map(found.key, works))
    failed = [key for key in keys if key in found.found and found.found[key].missing]
    if failed:
        first = found.found[failed[0]].missing[0]
        said.append(f"Incomplete, {len(failed)} of {len(keys)} evaluations: {first}.")
    return [" ".join(note.split()) for note in said]


def _attacks(works: Sequence[Work]) -> Iterator[str]:
    """Those of the paper as they are run here, and those that the worst case has besides."""
    own: dict[str, dict[str, None]] = {}
    added: dict[str, dict[str, None]] = {}
    for text in (text for work in works for text in work.attacks):
        name = text.partition(":")[0]
        kinds = added if kind_of(name) == "adaptive" else own
        kinds.setdefault(name, {})[text] = None
    reference = ["the reference AutoAttack, re-batching included"] * any(one.protocol for one in works)
    shown = reference + [_range(list(texts)) for texts in own.values()]
    if shown:
        yield f"Attacks: {'; '.join(shown)}."
    if added:
        yield f"For the worst case also: {'; '.join(_range(list(texts)) for texts in added.values())}."


def _range(texts: Sequence[str]) -> str:
    """An attack with its settings, where these vary from the first to the last.

    >>> _range(["pgd:steps=1"]), _range(["pgd:steps=1", "pgd:steps=2", "pgd:steps=9"])
    ('pgd:steps=1', 'pgd:steps=1 to pgd:steps=9')
    """
    word = " or " if len(texts) == 2 else " to "
    return word.join(dict.fromkeys((texts[0], texts[-1])))


VERDICTS = {
    "holds": "holds here",
    "does not hold": "does not hold here",
    "cannot be told": "cannot be told at this n",
}


def claim_rows(judgments: Sequence[Judgment]) -> list[dict[str, str]]:
    """A line for each claim: the paper's own numbers, here, and in the worst case."""
    return [
        {
            "claim": one.claim.text,
            "where": one.claim.where,
            "its own numbers": one.published_verdict,
            "here": VERDICTS[one.verdict],
            "in the worst case": VERDICTS[one.worst_verdict] if one.worst_verdict else NOTHING,
            "evidence": "; ".join(one.evidence),
        }
        for one in judgments
    ]


def paper_markdown(found: Reproduction) -> str:
    """All tables that were begun, what was not, and the claims."""
    scale = found.scale
    lines = [f"# The paper, reproduced: scale {scale.name}", "", sentence(scale.title), ""]
    for table in found.begun():
        lines += [f"## {heading(table)}", ""]
        for grid in grids(found, table):
            lines += [f"**{grid.title}**", "", *_markdown_rows(grid), ""]
            lines += [f"- {_plain(note)}" for note in grid.notes] + [""] * bool(grid.notes)
    if absent := not_begun(found):
        lines += ["## Not measured", "", *(f"- {_plain(line)}" for line in absent), ""]
    lines += ["## Claims of the paper's text", ""]
    rows = claim_rows(found.judgments())
    columns = [name for name in rows[0] if name != "evidence"]
    lines += [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    lines += [f"| {' | '.join(_escaped(row[name]) for name in columns)} |" for row in rows]
    return "\n".join(lines) + "\n"


def sentence(text: str) -> str:
    """With a capital and a full stop."""
    return f"{text[:1].upper()}{text[1:]}."


def not_begun(found: Reproduction) -> list[str]:
    """The tables of which no number is there, each with why."""
    begun = {table.name for table in found.begun()}
    lines = []
    for table in tables().values():
        if table.name not in begun:
            why = dict.fromkeys(one.missing or "" for one in found.by_reference(table).values())
            lines.append(" ".join(f"{heading(table)}: {'; '.join(filter(None, why))}.".split()))
    return lines


def heading(table: Table) -> str:
    """Its name as one says it, and what it is.

    >>> from dent.paper.tables import find_table
    >>> heading(find_table("sota")).partition(":")[0]
    'Table 1'
    """
    kind = table.name.partition("-")[0]
    name = "In the text" if kind == "text" else table.name.replace("-", " ").capitalize()
    return f"{name}: {table.title}"


def _markdown_rows(grid: Grid) -> list[str]:
    head = [
        f"| {' | '.join(map(_escaped, grid.columns))} |",
        "|---|---|" + "---:|" * (len(grid.columns) - 2),
    ]
    return head + [f"| {' | '.join(map(_escaped, row))} |" for row in grid.rows]


def _escaped(text: str) -> str:
    return _plain(text).replace("|", "\\|")


def _plain(text: str) -> str:
    """Markdown takes it for no HTML."""
    return text.replace("&", "&amp;").replace("<", "&lt;")


def show_table(found: Reproduction, table: Table) -> None:
    """Print a table of the paper with what was found."""
    console = Console(highlight=False) if Console().is_terminal else Console(highlight=False, width=140)
    console.print(Text(heading(table), "bold"))
    for grid in grids(found, table):
        shown = RichTable(box=None, header_style="bold", pad_edge=False, title_justify="left")
        for place, column in enumerate(grid.columns):
            shown.add_column(
                Text(column or (grid.title if not place else "")),
                justify="left" if place < 2 else "right",
            )
        for row in grid.rows:
            shown.add_row(*map(Text, row), style=STYLES.get(row[1], ""))
        console.print(shown)
        for note in grid.notes:
            console.print(Text(note, "dim"))
    console.print()


STYLES = {
    "here": "bold",
    "worst case": "bold red",
    "published": "",
    "95 % interval": "dim",
    "difference": "dim",
}


def show_claims(judgments: Sequence[Judgment]) -> None:
    """Print each claim with its verdicts."""
    console = Console(highlight=False) if Console().is_terminal else Console(highlight=False, width=160)
    shown = RichTable(box=None, header_style="bold", pad_edge=False)
    rows = claim_rows(judgments)
    for column in rows[0]:
        if column != "evidence":
            shown.add_column(column, overflow="fold")
    for row in rows:
        shown.add_row(*(Text(value, _color(value)) for name, value in row.items() if name != "evidence"))
    console.print(shown)


def _color(text: str) -> str:
    return {"holds here": "green", "does not hold here": "red"}.get(text, "")


def paper_rows(found: Reproduction) -> list[dict[str, object]]:
    """Every table and figure, and how much of it is measured."""
    rows = []
    for table in tables().values():
        numbers = found.by_reference(table).values()
        rows.append(
            {
                "name": table.name,
                "label": table.label,
                "what it is": table.title,
                "numbers": len(numbers),
                "published": sum(one.number.published is not None for one in numbers),
                "here": sum(one.ours is not None for one in numbers),
            }
        )
    return rows
