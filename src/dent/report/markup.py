"""The blocks of a report as HTML; all that comes from data is escaped here."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from dent.report.blocks import Battle, Block, Gallery, Plot, Record, Rows, Table, Text, Value

NOTHING = "-"  # where there is no number, as in all tables of results
MINUS = "\N{MINUS SIGN}"
WORDY = 40  # letters in the first column: sentences, not names
NUMBER = re.compile(r"(?:< )?[-+]?[\d,]*\.?\d+")


@dataclass
class Data:
    """What the script of the page is given; battles that several blocks show are kept once."""

    plots: list[Mapping[str, Any]] = field(default_factory=list)
    battles: list[Mapping[str, Any]] = field(default_factory=list)

    def number_of(self, battle: Mapping[str, Any]) -> int:
        for number, known in enumerate(self.battles):
            if known is battle:
                return number
        self.battles.append(battle)
        return len(self.battles) - 1


def block_html(block: Block, name: str, data: Data) -> str:
    """A section with the block's title, under this name."""
    if isinstance(block, Text):
        inside = text_html(block, titled=False)
    elif isinstance(block, Table):
        inside = table_html(block)
    elif isinstance(block, Plot):
        inside = _plot(block, data)
    elif isinstance(block, Gallery):
        inside = "".join(
            _pictures(record, data, is_open=number == 0) for number, record in enumerate(block.records)
        )
    else:
        inside = _battle(block, data)
    notes = () if isinstance(block, Text | Table | Plot) else block.notes
    above = "".join(f'<p class="note">{escape(note)}</p>' for note in notes)
    heading = f"<h{block.level}>{escape(block.title)}</h{block.level}>" if block.title else ""
    return f'<section id="{name}">{heading}{above}{inside}</section>'


def lead_html(texts: Sequence[str]) -> str:
    """The first larger than the others; a number and its unit stay in a line."""
    kept = [re.sub(r"(\d) %", "\\1&nbsp;%", escape(text)) for text in texts]
    names = ["lead"] + ["more"] * len(kept)
    return "".join(f'<p class="{name}">{text}</p>' for name, text in zip(names, kept, strict=False))


def text_html(block: Text, *, titled: bool = True) -> str:
    """Paragraphs and a list, the title as a sentence of its own."""
    title = f"<p><strong>{escape(block.title)}</strong></p>" if titled and block.title else ""
    paragraphs = "".join(f"<p>{escape(text)}</p>" for text in block.paragraphs)
    items = "".join(f"<li>{escape(item)}</li>" for item in block.items)
    listed = f"<ul>{items}</ul>" if items else ""
    if listed and block.folded:
        listed = f"<details><summary>Show all {len(block.items):,}</summary>{listed}</details>"
    return title + paragraphs + listed


def table_html(table: Table) -> str:
    """A table that can be sorted, in a box of its own in which it may scroll."""
    numeric = [
        number > 0 and _all_numbers([row[number] for group in table.groups for row in group.rows])
        for number in range(len(table.columns))
    ]
    heads = "".join(
        f'<th scope="col" aria-sort="none"{" class=number" if is_number else ""}>'
        f'<button type="button"{"" if column else " aria-label=name"}>{escape(column)}'
        '<span aria-hidden="true"></span></button></th>'
        for column, is_number in zip(table.columns, numeric, strict=True)
    )
    bodies = "".join(_body(group, numeric) for group in table.groups)
    label = escape(table.title or "table")
    names = [
        row[0] if isinstance(row[0], str) else row[0].text for one in table.groups for row in one.rows
    ]
    wordy = " class=wordy" if any(len(name) > WORDY for name in names) else ""
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{label}">'
        f"<table{wordy}><thead><tr>{heads}</tr></thead>{bodies}</table></div>{_notes(table)}"
    )


def sort_key(text: str) -> float | None:
    """The number that a text begins with.

    >>> sort_key("1,234.5"), sort_key("-8.6"), sort_key("< 0.001"), sort_key("13x"), sort_key("-")
    (1234.5, -8.6, 0.001, 13.0, None)
    """
    found = NUMBER.match(text)
    return float(found[0].removeprefix("< ").replace(",", "")) if found else None


def _body(group: Rows, numeric: Sequence[bool]) -> str:
    heading = (
        f'<tr class="heading"><th colspan="{len(numeric)}" scope="rowgroup">'
        f"<span>{escape(group.heading)}</span></th></tr>"
        if group.heading
        else ""
    )
    rows = []
    for row in group.rows:
        first, *others = (Value(one) if isinstance(one, str) else one for one in row)
        cells = [f'<th scope="row" data-sort="{escape(first.text)}">{_value(first)}</th>']
        for value, is_number in zip(others, numeric[1:], strict=True):
            key = sort_key(value.text) if is_number else value.text
            sort = "" if key is None or value.text == NOTHING else f' data-sort="{escape(str(key))}"'
            cells.append(f"<td{' class=number' if is_number else ''}{sort}>{_value(value)}</td>")
        rows.append(f"<tr>{''.join(cells)}</tr>")
    return f"<tbody>{heading}{''.join(rows)}</tbody>"


def _value(value: Value) -> str:
    if value.text == NOTHING:
        return '<span class="nothing">&ndash;</span>'
    text = value.text
    if sort_key(text) is not None:
        text = re.sub(r"^-", MINUS, text)
    mark = f'<span class="mark {escape(value.mark)}">{escape(value.mark)}</span> ' if value.mark else ""
    detail = f" <small>{escape(value.detail)}</small>" if value.detail else ""
    tag = "strong" if value.strong else "span"
    tone = f' class="{escape(value.tone)}"' if value.tone else ""
    return f"{mark}<{tag}{tone}>{_breakable(text)}</{tag}>{detail}"


def _breakable(text: str) -> str:
    """Names of defenses are long: they may go on in another line behind a colon or a comma."""
    return re.sub(r"([:,])(?=\w)", r"\1<wbr>", escape(text)) if sort_key(text) is None else escape(text)


def _all_numbers(values: Sequence[Value | str]) -> bool:
    texts = [one if isinstance(one, str) else one.text for one in values]
    found = [text for text in texts if text not in ("", NOTHING)]
    return all(sort_key(text) is not None for text in found)


def _notes(of: Table | Plot) -> str:
    """Below a table; the words that a note explains stand out."""
    items = (re.sub(r"(^|\. )([^:.]{1,24}): ", r"\1<b>\2</b>: ", escape(note)) for note in of.notes)
    lines = "".join(f"<li>{item}</li>" for item in items)
    return f'<ul class="notes">{lines}</ul>' if lines else ""


def _plot(plot: Plot, data: Data) -> str:
    data.plots.append(plot.spec)
    label = escape(f"{plot.title}; the numbers follow as a table")
    return (
        f'<div class="plot" data-plot="{len(data.plots) - 1}" role="img" aria-label="{label}"></div>'
        "<noscript><p>The plot needs scripts; its numbers follow.</p></noscript>"
        f"{_notes(plot)}<details><summary>The numbers as a table</summary>"
        f"{table_html(plot.numbers)}</details>"
    )


def _battle(block: Battle, data: Data) -> str:
    records = [
        {"name": one.name, "defense": one.defense, "battle": data.number_of(one.battle)}
        for one in block.records
    ]
    return (
        f'<div class="battle" data-records="{escape(json.dumps(records))}"></div>'
        "<noscript><p>The battle needs scripts.</p></noscript>"
    )


def _pictures(record: Record, data: Data, *, is_open: bool) -> str:
    """A row for each image: natural, attacked for the static model, attacked for the defended one."""
    battle, number = record.battle, data.number_of(record.battle)
    rows = []
    for index, image in enumerate(battle["images"]):
        natural = {side: image[side]["frames"][0]["probabilities"] for side in ("static", "defended")}
        shown: list[tuple[str, str, str, Mapping[str, Any]]] = [("natural", "natural", "", natural)]
        shown += [
            (side, f"attack on the {side} model", side, image[side]["answers"])
            for side in ("static", "defended")
        ]
        figures = []
        for name, caption, side, answers in shown:
            canvases = [_canvas(number, index, side, "image", f"{caption}, point {image['point']}")]
            if side:
                canvases.append(_canvas(number, index, side, "delta", "its perturbation, magnified"))
            said = "".join(_said(who, answers[who], image["label"], battle) for who in answers)
            figures.append(
                f'<figure class="{name}"><div>{"".join(canvases)}</div>'
                f"<figcaption>{caption}<ul>{said}</ul></figcaption></figure>"
            )
        label = escape(class_name(battle, image["label"]))
        heading = f"<h4>{label} <small>point {int(image['point'])}</small></h4>"
        rows.append(f'<div class="picture">{heading}{"".join(figures)}</div>')
    how = f"{battle['attack']}, {battle['steps']} steps, {battle['norm']}; batch of {battle['batch']}"
    summary = f"<summary>{escape(record.name)} <small>{escape(how)}</small></summary>"
    opened = " open" if is_open else ""
    return (
        f'<details class="record"{opened}>{summary}<div class="gallery">{"".join(rows)}</div></details>'
    )


def _canvas(battle: int, image: int, side: str, what: str, label: str) -> str:
    return (
        f'<canvas data-battle="{battle}" data-image="{image}" data-side="{side}" '
        f'data-what="{what}" role="img" aria-label="{escape(label)}"></canvas>'
    )


def _said(who: str, probabilities: Sequence[float], label: int, battle: Mapping[str, Any]) -> str:
    if not probabilities:
        return ""
    answer = max(range(len(probabilities)), key=probabilities.__getitem__)
    right = answer == label
    sign, word = ("✓", "right") if right else ("✗", "wrong")
    said = f"{escape(class_name(battle, answer))} {100 * probabilities[answer]:.0f}&nbsp;%"
    verdict = f'<span class="verdict">{sign}<span class="unseen"> {word}</span></span>'
    return (
        f'<li class="{word}"><span class="who">{escape(who)}</span> '
        f'<span class="answer">{said} {verdict}</span></li>'
    )


def class_name(battle: Mapping[str, Any], number: int) -> str:
    """By its name where classes have names.

    >>> class_name({"classes": ["cat", "dog"]}, 1), class_name({"classes": None}, 1)
    ('dog', 'class 1')
    """
    names = battle.get("classes")
    return str(names[number]) if names and 0 <= number < len(names) else f"class {number}"
