"""Results as text: for the terminal and as the report of a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from textwrap import wrap
from typing import TYPE_CHECKING

from dent.report.sections import Group, Row, Section, sections
from dent.report.wording import value_text

if TYPE_CHECKING:
    from dent.evaluation.results import Results

INDENT = "  "
HOW_TO_READ = (
    "The worst case is the number to believe, and an upper bound: a point counts if the model is right "
    "about it without an attack and under every attack that was made, and other attacks exist. What is "
    "claimed is what one would report without the attacks made for adaptation; the gap is how much of "
    "that does not stand. All attacks judge the same points in the same batches, so a defense is "
    "compared with its static model point by point: p says how often chance alone makes such a "
    "difference. Behind an accuracy stands its 95 % interval (Wilson) and, where it is not that of its "
    "row, its number of points."
)


def text(results: Results, width: int = 100) -> str:
    """All tables, aligned; columns that do not fit into the width follow in a block of their own."""
    parts = [section_text(section, width) for section in sections(results)] or ["Nothing was evaluated."]
    for title, lines in remarks(results):
        parts.append("\n".join([title, *folded(lines, width, "- ")]))
    return "\n\n".join(parts)


def section_text(section: Section, width: int = 100) -> str:
    """A table with its title above and its notes below."""
    return "\n".join(line for _, line in section_lines(section, width))


def section_lines(section: Section, width: int = 100) -> Iterator[tuple[str, str]]:
    """The same line by line, each with what it is: title, header, group, row or note."""
    sizes = widths(section)
    yield "title", section.title
    for number, block in enumerate(blocks(sizes, width)):
        if number:
            yield "row", ""
        heads = [wrap(name, sizes[name]) for name in block]  # words below one another
        height = max(map(len, heads))
        for words in zip(*([""] * (height - len(head)) + head for head in heads), strict=True):
            yield "header", _line(words, block, sizes)
        for group in section.groups:
            yield "group", group.heading
            for row in group.rows:
                first, *others = (row[name] for name in block)
                yield "row", _line([INDENT + first, *others], block, sizes)
    for line in folded(section.notes, width):
        yield "note", line


def folded(lines: Sequence[str], width: int, mark: str = "") -> list[str]:
    """Lines of at most this width; names with a hyphen stay whole.

    >>> folded(["fast and resnet20-at"], 18, "- ")
    ['- fast and', '  resnet20-at']
    """
    how = {"initial_indent": mark, "subsequent_indent": INDENT, "break_on_hyphens": False}
    return [part for line in lines for part in wrap(line, width, **how)]  # type: ignore[arg-type]


def widths(section: Section) -> dict[str, int]:
    """What each column needs: its longest entry, or the longest word of its header."""
    every = [row for group in section.groups for row in group.rows]
    sizes = {name: max(*map(len, name.split()), *(len(row[name]) for row in every)) for name in every[0]}
    label = next(iter(sizes))
    return sizes | {label: sizes[label] + len(INDENT)}


def blocks(sizes: Mapping[str, int], width: int) -> list[list[str]]:
    """The columns, cut where the width ends; the first of them leads every block.

    >>> blocks({"defense": 10, "natural": 7, "worst case": 10, "gap": 5}, width=30)
    [['defense', 'natural'], ['defense', 'worst case', 'gap']]
    """
    label, *names = sizes
    made, left = [[label]], width - sizes[label]
    for name in names:
        needed = sizes[name] + 2
        if needed > left and len(made[-1]) > 1:
            made.append([label])
            left = width - sizes[label]
        made[-1].append(name)
        left -= needed
    return made


def _line(cells: Sequence[str], block: Sequence[str], sizes: Mapping[str, int]) -> str:
    label, *others = zip(cells, block, strict=True)
    aligned = [label[0].ljust(sizes[label[1]]), *(cell.rjust(sizes[name]) for cell, name in others)]
    return "  ".join(aligned).rstrip()


def remarks(results: Results, most: int = 10) -> Iterator[tuple[str, list[str]]]:
    """What tables do not say: findings, each with the cells that it is about, and units not done."""
    where: dict[str, list[str]] = {}
    for cell in results.cells:
        for finding in cell.findings:
            figures = ", ".join(
                f"{name} {value:g}" for name, value in finding.get("figures", {}).items()
            )
            said = f"{finding['name']}: {finding['message']}"
            where.setdefault(said, []).append(str(cell.cell) + (f" ({figures})" if figures else ""))
    if where:
        yield "Findings", [f"{said} [{'; '.join(cells)}]" for said, cells in where.items()]
    names = [name for cell in results.cells for name in cell.missing]
    if names:
        names.sort(key=lambda name: name.endswith(": not done"))  # errors first
        more = [f"and {len(names) - most:,} more; results.json has all"] if len(names) > most else []
        yield f"Missing: {len(names):,} units failed or were not done", names[:most] + more


def markdown(results: Results) -> str:
    """The report of a run: what was asked, the tables with all intervals, and how to read them."""
    about = results.about.get("asked", {}) | {
        name: value for name, value in results.about.items() if name not in ("asked", "plan")
    }
    parts = ["# Evaluation", _list(f"{key}: {value_text(value)}" for key, value in about.items())]
    if not results.complete:
        parts.append("**The run is not complete**: what is missing is named at the end.")
    for section in sections(results, intervals=True):
        parts += [f"## {section.title}", _markdown_table(section), _list(section.notes)]
    parts += ["## How to read it", HOW_TO_READ]
    for title, lines in remarks(results, most=100):
        parts += [f"## {title}", _list(lines)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _markdown_table(section: Section) -> str:
    flat = [_flat(group, row) for group in section.groups for row in group.rows]
    rules = ["---" if name in ("model", "defense", "ball") else "---:" for name in flat[0]]
    lines: list[Sequence[str]] = [list(flat[0]), rules, *(list(row.values()) for row in flat)]
    return "\n".join(f"| {' | '.join(map(_escaped, line))} |" for line in lines)


def _flat(group: Group, row: Row) -> Row:
    label, *names = row
    flat = {"model": group.model, label: row[label], "ball": group.ball}
    n = {"n": group.n} if group.n else {}
    return flat | {name: row[name] for name in names} | n


def _list(lines: Iterator[str] | Sequence[str]) -> str:
    return "\n".join(f"- {_escaped(line)}" for line in lines)


def _escaped(line: str) -> str:
    for sign in "\\|*<`":
        line = line.replace(sign, f"\\{sign}")
    return line
