"""A report as one HTML file that fetches nothing; the template escapes everything from data."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from dent.evaluation.results import to_plain
from dent.report.blocks import Battle, Block, Glossary, Page, Plot, Table, Value
from dent.report.format import NOTHING
from dent.report.plots import look
from dent.theme import theme

WORDY = 40  # letters in a first column that holds sentences, not names
POLICY = "; ".join(
    [
        "default-src 'none'",
        "style-src 'unsafe-inline'",
        "script-src 'unsafe-inline'",  # without 'unsafe-eval': Vega's expressions are interpreted
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
    ]
)


def page_html(page: Page) -> str:
    """Return the page as HTML.

    >>> html = page_html(Page("A < B", lead=["Nothing yet."]))
    >>> "<h1>A &lt; B</h1>" in html
    True
    """
    data = Data([block for block in page.blocks if isinstance(block, Plot)])
    names = make_anchors(block.title for block in page.blocks)
    sections = list(zip(page.blocks, names, strict=True))
    chapters = [(block, name) for block, name in sections if block.level == 2 and block.title]
    return environment().get_template("page.html").render(
        page=page,
        sections=sections,
        chapters=chapters,
        folds=_list_folds(sections) if page.is_folded else [],
        links=Links({block.title: name for block, name in chapters}, _name_entries(page.blocks)),
        data=data,
        nothing=NOTHING,
        policy=Markup(POLICY),
        style=Markup(theme("theme.css") + _asset("page.css")),
        script=_guard_script(theme("theme.js") + _asset("page.js")),
        vega=_guard_script(load_vega()) if data.plots else "",
    )  # fmt: skip


@dataclass
class Data:
    """What the script of the page reads. A battle that several blocks show is stored once."""

    plots: list[Plot]
    battles: list[Mapping[str, Any]] = field(default_factory=list)

    def plot_number(self, plot: Plot) -> int:
        return next(number for number, one in enumerate(self.plots) if one is plot)

    def battle_number(self, battle: Mapping[str, Any]) -> int:
        for number, known in enumerate(self.battles):
            if known is battle:
                return number
        self.battles.append(battle)
        return len(self.battles) - 1

    def list_records(self, block: Battle) -> str:
        """Return the records of a block as JSON, with the numbers of their battles."""
        records = [
            {
                "name": one.name,
                "defense": one.defense,
                "battles": list(map(self.battle_number, one.recordings)),
                "captions": one.captions,
            }
            for one in block.records
        ]
        return json.dumps(records)

    def to_json(self) -> Markup:
        content: dict[str, Any] = {"plots": [plot.spec for plot in self.plots], "battles": self.battles}
        return Markup(script_json(content | ({"config": look()} if self.plots else {})))


@dataclass(frozen=True)
class Links:
    """Where the names in tables lead to: chapters by title, and entries of the glossary."""

    chapters: Mapping[str, str]
    entries: Mapping[str, str]

    def find(self, text: str) -> str:
        """Return the anchor of an attack, also for a variant such as `fpa (x2)`; empty if none."""
        return self.entries.get(text) or self.entries.get(text.partition(" (")[0], "")


def _name_entries(blocks: Iterable[Block]) -> dict[str, str]:
    entries = [one.term for block in blocks if isinstance(block, Glossary) for one in block.entries]
    return dict(zip(entries, make_anchors(f"about-{term}" for term in entries), strict=True))


def _list_folds(
    sections: Iterable[tuple[Block, str]],
) -> list[tuple[Block, str, list[tuple[Block, str]]]]:
    """Return each chapter with the sections that belong to it; the first is the overview."""
    chapters: list[tuple[Block, str, list[tuple[Block, str]]]] = []
    for block, name in sections:
        if block.level == 2 and block.title:
            chapters.append((block, name, []))
        else:
            chapters[-1][2].append((block, name))
    return chapters


@cache
def environment() -> Environment:
    """Return the jinja2 environment: everything is escaped, and an undefined name is an error."""
    made = Environment(
        loader=PackageLoader("dent.report"),
        autoescape=True,
        undefined=StrictUndefined,
        keep_trailing_newline=True,
    )
    made.filters |= {
        "breakable": _make_breakable,
        "class_name": class_name,
        "is_wordy": _is_wordy,
        "keep_units": lambda text: text.replace(" %", "\N{NO-BREAK SPACE}%"),
        "kind": lambda block: type(block).__name__,
        "list_views": _list_views,
    }
    return made


def make_anchors(titles: Iterable[str]) -> list[str]:
    """Return a name to link to for each title.

    >>> make_anchors(["The gap, in %", "The gap in %", "?"])
    ['the-gap-in', 'the-gap-in-2', 'part']
    """
    names: list[str] = []
    for title in titles:
        name = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-") or "part"
        count = 1
        while (numbered := name if count == 1 else f"{name}-{count}") in names:
            count += 1
        names.append(numbered)
    return names


def script_json(value: Any) -> str:
    r"""Return JSON that may stand in a script element: nothing in it can end the element.

    >>> print(script_json(["</script>", float("nan")]))
    ["\u003c/script\u003e",null]
    """
    text = json.dumps(to_plain(value), separators=(",", ":"), allow_nan=False)  # ASCII only
    for sign in "<>&":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text


@cache
def load_vega() -> str:
    """Return Vega, Vega-Lite and Vega-Embed as one script."""
    import vl_convert

    return vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")


def class_name(battle: Mapping[str, Any], number: int) -> str:
    """Return the name of a class, or its number if classes have no names.

    >>> class_name({"classes": ["cat", "dog"]}, 1), class_name({"classes": None}, 1)
    ('dog', 'class 1')
    """
    names: Sequence[str] | None = battle.get("classes")
    return names[number] if names and 0 <= number < len(names) else f"class {number}"


def _list_views(
    battle: Mapping[str, Any], image: Mapping[str, Any]
) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Yield an image before the attack and after it: the side that has it, a caption, all answers."""
    sides = ("static", "defended")
    yield "", "natural", {side: image[side]["frames"][0]["probabilities"] for side in sides}
    if battle.get("shared"):
        yield "static", str(battle["attack"]), image["static"]["answers"]
        return
    for side in sides:
        yield side, f"{battle['attack']} on the {side} model", image[side]["answers"]


def _make_breakable(cell: Value) -> Markup:
    """Return a text in HTML: long names may break behind a colon or a comma; minus is a real minus."""
    if cell.number is None:
        text = escape(cell.text)
        for sign in ":,":
            text = text.replace(sign, Markup(f"{sign}<wbr>"))
        return text
    minus = "\N{MINUS SIGN}" if cell.text.startswith("-") else ""
    return escape(minus + cell.text.removeprefix("-"))


def _is_wordy(table: Table) -> bool:
    return any(len(row[0].text) > WORDY for group in table.groups for row in group.rows)


def _guard_script(text: str) -> Markup:
    return Markup(text.replace("</script", "<\\/script").replace("<!--", "<\\!--"))


def _asset(name: str) -> str:
    return resources.files("dent.report").joinpath("assets", name).read_text(encoding="utf-8")
