"""What a report is made of, as plain values: tables, plots, text, and recorded attacks."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Value:
    """What stands in a table: a text, and below it, small, its interval, n or p.

    >>> Value.of("best 38.3 (30 to 47, n = 128)")
    Value(text='38.3', detail='30 to 47, n = 128', mark='best', strong=False, tone='')
    """

    text: str
    detail: str = ""
    mark: str = ""  # a word that sets it apart: best, worst
    strong: bool = False  # the number to look at
    tone: str = ""  # of its color: good or bad; its text says so too

    @classmethod
    def of(cls, text: str, marks: Sequence[str] = ("best", "worst")) -> Value:
        """Of a text as tables in the terminal have it."""
        mark = next((word for word in marks if text.startswith(f"{word} ")), "")
        plain = text.removeprefix(mark).strip()
        found = re.fullmatch(r"(\S+) \((.+)\)", plain)
        return cls(found[1], found[2], mark) if found else cls(plain, "", mark)


@dataclass(frozen=True)
class Rows:
    """Rows of a table that belong together; they are sorted among themselves."""

    rows: Sequence[Sequence[Value | str]]
    heading: str = ""


@dataclass(frozen=True)
class Table:
    """The first column names the rows; a column of numbers is known by its values."""

    title: str
    columns: Sequence[str]
    groups: Sequence[Rows]
    notes: Sequence[str] = ()
    level: int = 2  # of its heading; only those of level 2 are in the table of contents


@dataclass(frozen=True)
class Plot:
    """A Vega-Lite specification, see `dent.report.plots`, and its numbers for those who read."""

    title: str
    spec: Mapping[str, Any]
    numbers: Table
    notes: Sequence[str] = ()
    level: int = 2


@dataclass(frozen=True)
class Record:
    """An attack recorded step by step, as `CellResult.battle` has it, and of what it is."""

    name: str
    battle: Mapping[str, Any]
    defense: str = "defended"


@dataclass(frozen=True)
class Gallery:
    """Images before and after attacks, and what is said of them."""

    title: str
    records: Sequence[Record]
    notes: Sequence[str] = ()
    level: int = 2


@dataclass(frozen=True)
class Battle:
    """An attack on an image to step through, on the static and the defended model side by side."""

    title: str
    records: Sequence[Record]
    notes: Sequence[str] = ()
    level: int = 2


@dataclass(frozen=True)
class Text:
    """Paragraphs, then a list. folded: the list is shown when asked for."""

    title: str
    paragraphs: Sequence[str] = ()
    items: Sequence[str] = ()
    folded: bool = False
    level: int = 2


Block = Table | Plot | Gallery | Battle | Text


@dataclass(frozen=True)
class Page:
    """A report. The first sentence of the lead is what to remember."""

    title: str
    lead: Sequence[str] = ()
    facts: Sequence[tuple[str, str]] = ()
    blocks: Sequence[Block] = ()
    alerts: Sequence[Text] = ()  # above everything: what is wrong or missing
