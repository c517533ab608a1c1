"""The paper's tables and figures as data: what each number is of, and what was published.

Each table is a file of `data`. The file, its parts, their rows and their columns each say something
about a number; a column overrides a row, a row its part, and a part the file.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import AfterValidator, BeforeValidator, Field

from dent.declared import Declared, Number, raise_faults
from dent.defense.text import format_defense
from dent.evaluation.attacks import find_attack
from dent.names import lookup
from dent.texts import join_lines, read_number

FOLDER = Path(__file__).parent / "data"
# Sets of attacks; a scale says which attacks they are.
AttackSet = Literal[
    "autoattack", "autoattack-plus", "apgd-ce", "pgd", "mixed", "transfer", "protocol", "none"
]  # fmt: skip
SETS: tuple[AttackSet, ...] = get_args(AttackSet)
# Or an attack's name. protocol: under the reference AutoAttack, re-batching included. joint: under all
# attacks on the defended model, each on whole batches.
MEASURES = (
    "natural", "adversarial", "protocol", "joint", "seconds", "times seconds", "times flops"
)  # fmt: skip
NORMS = ("linf", "l2", "l1")
Axis = Literal["attack steps", "updates", "batch size", "eps", "share of adversarial inputs"]


@dataclass(frozen=True)
class Ask:
    """What one number of the paper is of.

    model: the short name of a model of the paper; a scale says what is loaded for it.
    attack: a set of attacks; a scale says which attacks these are.
    attack_steps: the steps of each attack, where the paper varies them.
    measure: one of `MEASURES`, or the name of an attack or scenario, for the accuracy under it.
    minus: a defense; the number is the difference to the number of that defense.
    battle: if True, an attack is also recorded step by step.
    """

    model: str
    defense: str  # as `format_defense` writes it
    norm: str
    eps: float
    attack: AttackSet
    attack_steps: int | None = None
    batch_size: int = 128
    measure: str = "adversarial"
    minus: str | None = None
    battle: bool = False


@dataclass(frozen=True)
class PublishedNumber:
    """A place in a table; `published` is None where the paper prints no number."""

    row: str
    column: str
    published: float | None
    ask: Ask


@dataclass(frozen=True)
class Part:
    """Rows with the same columns; `numbers` holds a tuple for each row.

    at: the places of the columns on the axis, if the table is a curve.
    """

    name: str
    columns: tuple[str, ...]
    rows: tuple[str, ...]
    numbers: tuple[tuple[PublishedNumber, ...], ...]
    at: tuple[float, ...] = ()


@dataclass(frozen=True)
class PaperTable:
    """A table, a figure, or a sentence of the paper with numbers.

    label: its labels in the paper's source, without "tab:" or "fig:".
    note: what a reader must know about the numbers, and where the paper contradicts itself.
    across: the axis, if the table is a curve.
    """

    name: str
    label: str
    caption: str
    note: str
    parts: tuple[Part, ...]
    across: Axis | None = None

    def references(self) -> dict[str, PublishedNumber]:
        """Return the numbers by their references: table/part/row/column.

        >>> find_table("more-iter").references()["table-7/dent+/ding2020/6"].published
        64.4
        """
        return {
            f"{self.name}/{part.name}/{one.row}/{one.column}": one
            for part in self.parts
            for row in part.numbers
            for one in row
        }


def tables() -> dict[str, PaperTable]:
    """Return all tables by name: tables in the paper's order, then figures, then numbers in the text.

    >>> list(tables())[:2], tables()["table-1"].label
    (['table-1', 'table-2'], 'sota')
    """
    return dict(_read_tables())


def find_table(name: str) -> PaperTable:
    """Return a table by its name, or by its label in the paper's source.

    >>> find_table("tab:sota").name, find_table("battle").name
    ('table-1', 'figure-3')
    """
    known = tables()
    labels = {label: table for table in known.values() for label in table.label.split()}
    return lookup("table", re.sub("^(tab|fig):", "", name), known | labels)


def find_number(reference: str) -> PublishedNumber:
    """Return a number by its reference.

    >>> find_number("table-1/linf 8/255/carmon2019/dent+").published
    82.3
    """
    name = reference.partition("/")[0]
    return lookup("number", reference, find_table(name).references())


@cache
def _read_tables() -> dict[str, PaperTable]:
    kinds = ("table", "figure", "text")
    every = [read_table(path) for path in FOLDER.glob("*.yaml")]

    def place(table: PaperTable) -> tuple[int, int, str]:
        kind, _, rest = table.name.partition("-")
        return kinds.index(kind), int(rest) if rest.isdigit() else 0, rest

    return {table.name: table for table in sorted(every, key=place)}


def read_mapping(path: Path) -> dict[str, Any]:
    """Return the keys and values of a YAML file."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no YAML file: {join_lines(error)}") from error
    if not isinstance(content, dict):
        raise ValueError(f"expected keys and values in {path}, got {type(content).__name__}")
    return content


def parse_ball(text: Any) -> tuple[str, float]:
    """Return the norm and the radius of a ball.

    >>> parse_ball("l2 0.5")
    ('l2', 0.5)
    """
    norm, _, eps = str(text).partition(" ")
    if norm not in NORMS:
        raise ValueError(f"expected a ball such as linf 8/255 or l2 0.5, got {text!r}")
    return norm, read_number(eps)


def _check_measure(name: str) -> str:
    if name not in MEASURES:
        find_attack(name)
    return name


Name = Annotated[str, Field(min_length=1)]


class _Level(Declared):
    """What a file, a part, a row or a column says about its numbers; None says nothing."""

    title = "cell"
    model: str | None = None
    defense: str | None = None
    settings: dict[str, Any] = Field(default_factory=dict)  # of the defense
    ball: Annotated[tuple[str, float], BeforeValidator(parse_ball)] | None = None
    attack: AttackSet | None = None
    attack_steps: int | None = Field(default=None, ge=1)
    batch_size: int | None = Field(default=None, ge=1)
    measure: Annotated[str, AfterValidator(_check_measure)] | None = None
    minus: Annotated[str, AfterValidator(format_defense)] | None = None
    battle: bool | None = None


class _Column(_Level):
    title = "column"
    name: Name
    at: Number | None = None  # the place on the axis, if the name is no number


class _Row(_Level):
    title = "row"
    name: Name
    published: list[float | None] | None  # null: nothing is printed in this row


class _Part(Declared):
    title = "part"
    name: Name
    cell: _Level = _Level()
    columns: list[_Column] = Field(min_length=1)
    rows: list[_Row] = Field(min_length=1)


class _File(Declared):
    title = "table"
    name: Name
    label: Name
    caption: Name
    note: str = ""
    across: Axis | None = None
    cell: _Level = _Level()
    parts: list[_Part] = Field(min_length=1)


def read_table(path: Path) -> PaperTable:
    """Return the table of a file, or raise one ValueError that lists everything wrong with it."""
    try:
        file = _File(**read_mapping(path))
        if file.name != path.stem:
            raise_faults([f"name: expected {path.stem}, the name of the file, got {file.name!r}"])
        faults = _list_repeated("parts", file.parts)
        parts = [_make_part(file, part, faults) for part in file.parts]
        raise_faults(faults, " of the table")
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path.name}: {error}") from error
    note = " ".join(file.note.split())
    return PaperTable(file.name, file.label, file.caption, note, tuple(parts), file.across)


def _make_part(file: _File, part: _Part, faults: list[str]) -> Part:
    """Return a part; what is wrong with it joins the faults."""
    place = f"parts.{part.name}"
    faults += _list_repeated(f"{place}.columns", part.columns)
    faults += _list_repeated(f"{place}.rows", part.rows)
    at = []
    for column in part.columns if file.across else ():
        try:
            at.append(column.at if column.at is not None else read_number(column.name))
        except ValueError as error:
            faults.append(f"{place}.columns.{column.name}: {error}; say its place on the axis by `at`")
    numbers = []
    for row in part.rows:
        published = row.published or [None] * len(part.columns)
        if len(published) != len(part.columns):
            expected = f"expected {len(part.columns)} published numbers, got {published!r}"
            faults.append(f"{place}.rows.{row.name}: {expected}")
            continue
        made = []
        for column, value in zip(part.columns, published, strict=True):
            try:
                ask = _make_ask([file.cell, part.cell, row, column])
                made.append(PublishedNumber(row.name, column.name, value, ask))
            except (ValueError, TypeError) as error:
                text = join_lines(error)
                faults.append(f"{place}.rows.{row.name}, column {column.name}: {text}")
        numbers.append(tuple(made))
    columns, rows = (tuple(one.name for one in every) for every in (part.columns, part.rows))
    return Part(part.name, columns, rows, tuple(numbers), tuple(at))


def _make_ask(levels: Sequence[_Level]) -> Ask:
    """Return what all levels say together; the last that says something decides."""
    settings: dict[str, Any] = {}
    said: dict[str, Any] = {}
    for level in levels:
        settings |= level.settings
        own = level.model_fields_set & _Level.model_fields.keys()
        said |= {key: getattr(level, key) for key in own}
    said.pop("settings", None)
    if missing := [key for key in ("model", "defense", "ball", "attack") if said.get(key) is None]:
        raise ValueError(f"expected {' and '.join(missing)}, which no level says")
    # Settings of a defense say nothing about the static model.
    settings = {} if said["defense"] == "static" else settings
    said["defense"] = format_defense({"preset": said["defense"], **settings})
    said["norm"], said["eps"] = said.pop("ball")
    return Ask(**said)


def _list_repeated(place: str, entries: Sequence[_Part | _Row | _Column]) -> list[str]:
    counts = Counter(one.name for one in entries)
    return [
        f"{place}: expected names of their own, got {name!r} {count} times"
        for name, count in counts.items()
        if count > 1
    ]
