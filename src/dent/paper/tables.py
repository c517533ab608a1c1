"""The paper's tables and figures as data: what each number is of, and what was published.

Each is a file of `data`, which says what its numbers have in common, and what its parts, rows and
columns say besides; a number is of all that together, and columns have the last word.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from dent.defense.text import format_defense
from dent.evaluation.attacks import attack_named
from dent.fields import number
from dent.names import check_known, lookup

FOLDER = Path(__file__).parent / "data"
SETS = ("autoattack", "autoattack-plus", "apgd-ce", "pgd", "mixed", "none")  # scales say what they are
MEASURES = ("natural", "adversarial", "seconds", "times seconds", "times flops")  # or an attack's name
NORMS = ("linf", "l2", "l1")
ACROSS = ("attack steps", "updates", "batch size", "eps", "share of adversarial inputs")


@dataclass(frozen=True)
class Ask:
    """What one number is of.

    model: of the paper, by a short name; a scale says what is loaded for it.
    attack: a set of attacks, one of `SETS`; a scale says which these are.
    attack_steps: of each of them, where the paper varies them.
    measure: one of `MEASURES`, or the accuracy under the attack or in the scenario of that name.
    minus: a defense; the number is the difference to that defense's.
    battle: whether an attack is recorded step by step besides.
    """

    model: str
    defense: str  # as `format_defense` writes it
    norm: str
    eps: float
    attack: str
    attack_steps: int | None = None
    batch_size: int = 128
    measure: str = "adversarial"
    minus: str | None = None
    battle: bool = False


@dataclass(frozen=True)
class Number:
    """A place of a table; `published` is None where the paper prints no number."""

    row: str
    column: str
    published: float | None
    ask: Ask


@dataclass(frozen=True)
class Part:
    """Rows with the same columns; `numbers` has a tuple for each row.

    at: where the columns are on an axis, if the table goes across something.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[str, ...]
    numbers: tuple[tuple[Number, ...], ...]
    at: tuple[float, ...] = ()


@dataclass(frozen=True)
class Table:
    """A table, a figure, or a sentence of the paper with numbers.

    label: those of the paper's source, without what comes before the colon.
    note: what a reader must know of the numbers, and where the paper contradicts itself.
    across: what the columns are numbers of, if the table is a curve, one of `ACROSS`.
    """

    name: str
    label: str
    title: str
    note: str
    parts: tuple[Part, ...]
    across: str | None = None

    def references(self) -> dict[str, Number]:
        """Its numbers, each as table/part/row/column.

        >>> find_table("more-iter").references()["table-7/dent+/ding2020/6"].published
        64.4
        """
        return {
            f"{self.name}/{part.title}/{one.row}/{one.column}": one
            for part in self.parts
            for row in part.numbers
            for one in row
        }


def tables() -> dict[str, Table]:
    """All tables by name: those of the paper in its order, then figures, then what is in the text.

    >>> list(tables())[:2], tables()["table-1"].label
    (['table-1', 'table-2'], 'sota')
    """
    return dict(_all())


def find_table(name: str) -> Table:
    """A table by its name, or by its label in the paper's source.

    >>> find_table("tab:sota").name, find_table("battle").name
    ('table-1', 'figure-3')
    """
    known = tables()
    labels = {label: table for table in known.values() for label in table.label.split()}
    return lookup("table", re.sub("^(tab|fig):", "", name), known | labels)


def find_number(reference: str) -> Number:
    """A number by its reference.

    >>> find_number("table-1/linf 8/255/carmon2019/dent+").published
    82.3
    """
    name = reference.partition("/")[0]
    return lookup("number", reference, find_table(name).references())


@cache
def _all() -> dict[str, Table]:
    kinds = ("table", "figure", "text")
    found = [read_table(path) for path in FOLDER.glob("*.yaml")]

    def place(table: Table) -> tuple[int, int, str]:
        kind, _, rest = table.name.partition("-")
        return kinds.index(kind), int(rest) if rest.isdigit() else 0, rest

    return {table.name: table for table in sorted(found, key=place)}


def read_table(path: Path) -> Table:
    """The table of a file; whatever is wrong with it is an error that says where."""
    content = read_mapping(path)
    keys = ("name", "label", "title", "note", "across", "cell", "parts")
    _keys(path.name, content, keys, needed=("name", "label", "title", "parts"))
    for key in ("name", "label", "title"):
        _text(path.name, key, content[key])
    if content["name"] != path.stem:
        raise ValueError(f"{path.name}: expected the name of the file, got {content['name']!r}")
    across = content.get("across")
    if across is not None and across not in ACROSS:
        raise ValueError(f"{path.name}: expected across as one of {', '.join(ACROSS)}, got {across!r}")
    parts = tuple(_part(path.name, content, part) for part in _list(path.name, content, "parts"))
    _once(path.name, "parts", [part.title for part in parts])
    note = " ".join(str(content.get("note", "")).split())
    return Table(content["name"], content["label"], content["title"], note, parts, across)


def read_mapping(path: Path) -> dict[str, Any]:
    """What a YAML file holds."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no YAML file: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise ValueError(f"expected keys and values in {path}, got {type(content).__name__}")
    return content


_CELL = ("model", "defense", "settings", "ball", "attack", "attack_steps", "batch_size", "measure")
CELL = (*_CELL, "minus", "battle")  # what a table, its parts, rows and columns can say of a number


def _part(file: str, table: dict[str, Any], content: Any) -> Part:
    _keys(file, content, ("title", "cell", "columns", "rows"), needed=("title", "columns", "rows"))
    where = f"{file}, part {_text(file, 'title', content['title'])}"
    columns, rows = (_list(where, content, key) for key in ("columns", "rows"))
    for column in columns:
        _keys(f"{where}, column", column, ("title", "at", *CELL), needed=("title",))
    for row in rows:
        _keys(f"{where}, row", row, ("title", "published", *CELL), needed=("title", "published"))
    titles = [_text(f"{where}, column", "title", column["title"]) for column in columns]
    names = [_text(f"{where}, row", "title", row["title"]) for row in rows]
    _once(where, "columns", titles)
    _once(where, "rows", names)
    above = [table.get("cell", {}), content.get("cell", {})]
    for one in above:
        _keys(where, one, CELL)
    numbers = []
    for name, row in zip(names, rows, strict=True):
        here, published = f"{where}, row {name}", row["published"]
        if published is None:  # nothing is printed there
            published = [None] * len(columns)
        if not isinstance(published, list) or len(published) != len(columns):
            raise ValueError(f"{here}: expected {len(columns)} published numbers, got {published!r}")
        if not all(value is None or type(value) in (int, float) for value in published):
            raise ValueError(f"{here}: expected numbers or null as published, got {published!r}")
        asks = [_ask(f"{here}, column {column['title']}", [*above, row, column]) for column in columns]
        numbers.append(tuple(Number(name, *rest) for rest in zip(titles, published, asks, strict=True)))
    at = tuple(_at(where, column) for column in columns) if table.get("across") else ()
    return Part(content["title"], tuple(titles), tuple(names), tuple(numbers), at)


def _ask(where: str, levels: Sequence[Mapping[str, Any]]) -> Ask:
    """All levels together, the last first."""
    said: dict[str, Any] = {}
    settings: dict[str, Any] = {}
    for level in levels:
        settings |= level.get("settings", {})
        said |= {key: level[key] for key in CELL if key in level}
    if missing := [key for key in ("model", "defense", "ball", "attack") if key not in said]:
        raise ValueError(f"{where}: expected {' and '.join(missing)}, which nothing says")
    said.pop("settings", None)
    try:
        # What is varied of a defense is nothing of the model without one.
        defense = {"preset": said["defense"], **({} if said["defense"] == "static" else settings)}
        said["defense"] = format_defense(defense)
        if said.get("minus") is not None:
            said["minus"] = format_defense(said["minus"])
        said["norm"], said["eps"] = ball(said.pop("ball"))
        lookup("set of attacks", said["attack"], dict.fromkeys(SETS))
        if said.get("measure", "natural") not in MEASURES:
            attack_named(said["measure"])
        for key in ("attack_steps", "batch_size"):
            if type(said.get(key, 1)) is not int or said.get(key, 1) < 1:
                raise ValueError(f"expected {key} as an integer >= 1, got {said[key]!r}")
    except (ValueError, TypeError) as error:
        raise ValueError(f"{where}: {' '.join(str(error).split())}") from error
    return Ask(**said)


def ball(text: str) -> tuple[str, float]:
    """The norm and the radius.

    >>> ball("l2 0.5")
    ('l2', 0.5)
    """
    norm, _, eps = str(text).partition(" ")
    if norm not in NORMS:
        raise ValueError(f"expected a ball such as linf 8/255 or l2 0.5, got {text!r}")
    return norm, number(eps)


def _at(where: str, column: Mapping[str, Any]) -> float:
    try:
        return number(column.get("at", column["title"]))
    except ValueError as error:
        raise ValueError(f"{where}, column {column['title']}: {error}; say where it is by at") from error


def _keys(where: str, content: Any, known: Sequence[str], needed: Sequence[str] = ()) -> None:
    if not isinstance(content, dict):
        raise ValueError(f"{where}: expected keys and values, got {content!r}")
    title = f" {content['title']}" if "title" in content else ""
    try:
        check_known("keys", map(str, content), list(known))
    except TypeError as error:
        raise ValueError(f"{where}{title}: {error}") from error
    if missing := [key for key in needed if key not in content]:
        raise ValueError(f"{where}{title}: expected {' and '.join(missing)}, got {', '.join(content)}")


def _list(where: str, content: Mapping[str, Any], key: str) -> list[Any]:
    if not isinstance(value := content[key], list) or not value:
        raise ValueError(f"{where}: expected {key} as a list of one or more, got {value!r}")
    return value


def _text(where: str, key: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{where}: expected {key} as a text (in quotes, if a number), got {value!r}")
    return value


def _once(where: str, what: str, titles: Sequence[str]) -> None:
    if twice := sorted({title for title in titles if titles.count(title) > 1}):
        raise ValueError(f"{where}: expected {what} with titles of their own, got {twice[0]} twice")
