"""The results of evaluations in the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from dent.evaluation.compare import Comparison
from dent.evaluation.results import Results
from dent.report.sections import BEST, WORST, Section, comparison_section, sections
from dent.report.table import folded, remarks, section_lines

WIDTH = 100  # where nobody watches, and at the most: longer lines are hard to follow
STYLES = {"title": "bold", "header": "bold", "group": "cyan", "row": "", "note": "dim"}
COLORS = {BEST: "green", WORST: "red"}


def show_results(results: Results) -> None:
    """Print all tables, the best and the worst in color, then findings and what is missing.

    It is the text of `Results.table`, in the width of the terminal.
    """
    console = Console(highlight=False)
    shown = sections(results)
    for section in shown:
        _show(section, console)
        console.print()
    if not shown:
        console.print("Nothing was evaluated.")
    for title, lines in remarks(results):
        _print(console, Text(title, "bold"))
        for line in folded(lines, _width(console), "- "):
            _print(console, Text(line))
        console.print()


def show_comparison(rows: Sequence[Comparison]) -> None:
    """Print the second of two runs beside the first, with intervals and p."""
    _show(comparison_section(rows), Console(highlight=False))


def _show(section: Section, console: Console) -> None:
    for role, line in section_lines(section, _width(console)):
        text = Text(line, STYLES[role])
        if role == "row":
            for mark, color in COLORS.items():
                text.highlight_regex(rf" {mark} [\d.]+", f"bold {color}")
        _print(console, text)


def _width(console: Console) -> int:
    return min(console.width, WIDTH) if console.is_terminal else WIDTH


def _print(console: Console, text: Text) -> None:
    console.print(text, soft_wrap=True)  # the lines are already as wide as they may be
