"""Tables as text: aligned for the terminal, and as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from textwrap import wrap
from typing import Literal

from dent.report.blocks import Group, Table, Value

INDENT = "  "
WIDTH = 100


@dataclass(frozen=True)
class Span:
    """A part of a line that shows one cell."""

    start: int
    end: int
    cell: Value


@dataclass(frozen=True)
class Line:
    """A line of a table, and where it shows cells."""

    role: Literal["title", "header", "group", "row", "note"]
    text: str
    spans: tuple[Span, ...] = ()


def table_text(table: Table, width: int = WIDTH) -> str:
    """Return an aligned table with its title above and its notes below."""
    return "\n".join(line.text for line in table_lines(table, width))


def table_lines(table: Table, width: int = WIDTH) -> Iterator[Line]:
    """Yield an aligned table line by line. Columns that do not fit follow in a block of their own."""
    table = table.spread_interval()
    sizes = _measure_columns(table)
    yield Line("title", table.title)
    for number, block in enumerate(split_columns(sizes, width)):
        if number:
            yield Line("row", "")
        heads = [wrap(table.columns[place], sizes[place]) or [""] for place in block]
        height = max(map(len, heads))
        for words in zip(*([""] * (height - len(head)) + head for head in heads), strict=True):
            yield Line("header", _align(words, block, sizes))
        for group in table.groups:
            if group.heading:
                yield Line("group", group.heading)
            for row in group.rows:
                yield _row_line(group, row, block, sizes)
    for text in fold_lines(map(str, table.notes), width):
        yield Line("note", text)


def fold_lines(lines: Iterable[str], width: int, bullet: str = "") -> list[str]:
    """Return lines of at most this width. Names with a hyphen stay whole.

    >>> fold_lines(["fast and resnet20-at"], 18, "- ")
    ['- fast and', '  resnet20-at']
    """
    return [
        part
        for line in lines
        for part in wrap(
            line, width, initial_indent=bullet, subsequent_indent=INDENT, break_on_hyphens=False
        )
    ]


def split_columns(sizes: Sequence[int], width: int) -> list[list[int]]:
    """Return the places of the columns in blocks that fit the width; the first column leads each block.

    >>> split_columns([10, 7, 10, 5], width=30)
    [[0, 1], [0, 2, 3]]
    """
    blocks, left = [[0]], width - sizes[0]
    for place, size in enumerate(sizes[1:], 1):
        needed = size + 2
        if needed > left and len(blocks[-1]) > 1:
            blocks.append([0])
            left = width - sizes[0]
        blocks[-1].append(place)
        left -= needed
    return blocks


def _measure_columns(table: Table) -> list[int]:
    """Return the width of each column: its longest cell, or the longest word of its header."""
    sizes = []
    for place, column in enumerate(table.columns):
        cells = [
            len(cell_text(row[place])) + (len(_indent(group)) if place == 0 else 0)
            for group in table.groups
            for row in group.rows
        ]
        sizes.append(max([*map(len, column.split()), *cells], default=0))
    return sizes


def _row_line(group: Group, row: Sequence[Value], block: Sequence[int], sizes: Sequence[int]) -> Line:
    texts = [cell_text(row[place]) for place in block]
    text = _align([_indent(group) + texts[0], *texts[1:]], block, sizes)
    spans, end = [], 0
    for place, shown in zip(block, texts, strict=True):
        end += sizes[place] + (2 if place else 0)
        start = len(_indent(group)) if not place else end - len(shown)
        spans.append(Span(start, start + len(shown), row[place]))
    return Line("row", text, tuple(spans))


def _indent(group: Group) -> str:
    return INDENT if group.heading else ""


def _align(texts: Sequence[str], block: Sequence[int], sizes: Sequence[int]) -> str:
    first, *others = zip(texts, block, strict=True)
    aligned = [first[0].ljust(sizes[first[1]]), *(text.rjust(sizes[place]) for text, place in others)]
    return "  ".join(aligned).rstrip()


def cell_text(cell: Value, *, interval: bool = False) -> str:
    """Return a cell with its mark and details. interval: with its interval too."""
    details = cell.list_details() if interval else cell.details
    return f"{cell.mark} {cell.text}".strip() + (f" ({', '.join(details)})" if details else "")


def table_markdown(table: Table) -> str:
    """Return a Markdown table; the labels of a group stand in the first of its rows."""
    table = table.spread_interval()
    labels = list(table.groups[0].labels)
    rules = ["---:" if is_numeric else "---" for is_numeric in table.numeric_columns()]
    lines = [_markdown_row([*labels, *table.columns]), f"|{'|'.join(['---'] * len(labels) + rules)}|"]
    for group in table.groups:
        own: Mapping[str, str] = group.labels
        for row in group.rows:
            lines.append(
                _markdown_row([*own.values(), *(cell_text(cell, interval=True) for cell in row)])
            )
            own = dict.fromkeys(labels, "")
    return "\n".join(lines)


def markdown_list(items: Iterable[object]) -> str:
    """Return a Markdown list of texts."""
    return "\n".join(f"- {escape_markdown(str(item))}" for item in items)


def escape_markdown(text: str) -> str:
    r"""Return a text that Markdown shows as it is: no HTML, no emphasis, no cell borders.

    >>> print(escape_markdown("a|b <i> *c*"))
    a\|b &lt;i> \*c\*
    """
    for sign in "\\|*`":
        text = text.replace(sign, f"\\{sign}")
    return " ".join(text.replace("&", "&amp;").replace("<", "&lt;").split())


def _markdown_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(map(escape_markdown, cells))} |"
