"""The parts of a report as typed values: tables, plots, texts, and recorded attacks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from dent.report.format import NOTHING, format_count, format_interval

Mark = Literal["", "best", "worst"]
Tone = Literal["", "good", "bad"]
INTERVAL = "95 % interval"


@dataclass(frozen=True)
class Value:
    """A table cell: a text, the number behind it, its 95 % interval, and what sets it apart.

    number: what the cell is sorted by; None for names, and where there is no number.
    details: what else belongs to the number, such as its n or p.
    signed: the number is a difference, and its interval shows signs.
    strong: the number to look at. tone: its color; the text says the same without color.
    """

    text: str
    number: float | None = None
    interval: tuple[float, float] | None = None
    details: tuple[str, ...] = ()
    signed: bool = False
    mark: Mark = ""
    strong: bool = False
    tone: Tone = ""

    @property
    def is_empty(self) -> bool:
        return self.text in ("", NOTHING)

    def list_details(self, *, short: bool = False) -> list[str]:
        """Return the interval and the details as texts. short: with a dash in the interval."""
        return [*filter(None, [self.format_interval(short=short)]), *self.details]

    def format_interval(self, *, short: bool = False) -> str:
        """Return the interval as text, empty if there is none."""
        sign = "+" if self.signed else ""
        return format_interval(*self.interval, sign=sign, short=short) if self.interval else ""


EMPTY = Value(NOTHING)


def count_value(n: int) -> Value:
    """Return a cell with a count."""
    return Value(format_count(n), n)


@dataclass(frozen=True)
class Note:
    """A sentence under a table or a plot. term: the word that it explains."""

    text: str
    term: str = ""

    def __str__(self) -> str:
        return f"{self.term}: {self.text}" if self.term else self.text


@dataclass(frozen=True)
class Group:
    """Rows of a table that belong together and are sorted among themselves.

    labels: what they have in common, by name, such as the model and the ball. Pages and the terminal
    show the labels as a heading, Markdown as columns.
    """

    rows: Sequence[Sequence[Value]]
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def heading(self) -> str:
        counts = ("n", "batches")
        return ", ".join(
            f"{name} = {text}" if name in counts else text for name, text in self.labels.items()
        )


@dataclass(frozen=True)
class Table:
    """A table. The first column names the rows.

    interval_of: the column whose intervals get a column of their own where text shows the table.
    level: of its heading; the table of contents lists level 2.
    """

    title: str
    columns: Sequence[str]
    groups: Sequence[Group]
    notes: Sequence[Note] = ()
    interval_of: str | None = None
    level: int = 2

    def numeric_columns(self) -> list[bool]:
        """Return for each column True if every cell that is not empty has a number."""
        rows = [row for group in self.groups for row in group.rows]
        return [
            place > 0 and all(row[place].number is not None for row in rows if not row[place].is_empty)
            for place in range(len(self.columns))
        ]

    def spread_interval(self) -> Table:
        """Return the table with the intervals of `interval_of` in a column of their own."""
        if self.interval_of is None:
            return self
        place = self.columns.index(self.interval_of)

        def spread(row: Sequence[Value]) -> list[Value]:
            cell = row[place]
            own = Value(cell.format_interval(), cell.interval[0]) if cell.interval else EMPTY
            return [*row[:place], replace(cell, interval=None), own, *row[place + 1 :]]

        columns = [*self.columns[: place + 1], INTERVAL, *self.columns[place + 1 :]]
        groups = [replace(one, rows=[spread(row) for row in one.rows]) for one in self.groups]
        return replace(self, columns=columns, groups=groups, interval_of=None)


@dataclass(frozen=True)
class Plot:
    """A Vega-Lite specification, see `dent.report.plots`, and its numbers as a table."""

    title: str
    spec: Mapping[str, Any]
    numbers: Table
    notes: Sequence[Note] = ()
    level: int = 2


@dataclass(frozen=True)
class Record:
    """The attacks on a cell that were recorded step by step: see `list_recordings`.

    captions: what each of them is. The page opens on the first.
    """

    name: str
    recordings: Sequence[Mapping[str, Any]]
    captions: Sequence[str]
    defense: str = "defended"


@dataclass(frozen=True)
class Gallery:
    """Images before and after attacks, and what the models say about them."""

    title: str
    records: Sequence[Record]
    notes: Sequence[Note] = ()
    level: int = 2


@dataclass(frozen=True)
class Battle:
    """Recorded attacks to step through, on the static and the defended model side by side."""

    title: str
    records: Sequence[Record]
    notes: Sequence[Note] = ()
    level: int = 2


@dataclass(frozen=True)
class Text:
    """Paragraphs, then a list. is_closed: the list is shown only after a click."""

    title: str
    paragraphs: Sequence[str] = ()
    items: Sequence[str] = ()
    is_closed: bool = False
    level: int = 2


@dataclass(frozen=True)
class Glossary:
    """Names with a line on each, to which every table of the page links."""

    title: str
    entries: Sequence[Note]
    level: int = 2


Block = Table | Plot | Gallery | Battle | Text | Glossary


@dataclass(frozen=True)
class Page:
    """A report. The first sentence of the lead is the one to remember.

    alerts: what is wrong or missing; they stand above everything.
    is_folded: each chapter but the first is closed until one clicks it or a link to it. The first is
        an overview, with links from titles of chapters.
    """

    title: str
    lead: Sequence[str] = ()
    facts: Sequence[tuple[str, str]] = ()
    blocks: Sequence[Block] = ()
    alerts: Sequence[Text] = ()
    is_folded: bool = False
