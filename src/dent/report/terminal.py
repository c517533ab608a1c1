"""Tables and progress in the terminal; no progress where nobody watches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table


def show_table(rows: Sequence[dict[str, Any]], *, right: Sequence[str] = (), title: str = "") -> None:
    """The rows as an aligned table; the columns in `right` are numbers."""
    table = Table(
        box=None, header_style="bold", pad_edge=False, title=title or None, title_justify="left"
    )
    for column in rows[0] if rows else ():
        justify = "right" if column in right else "left"
        table.add_column(column, overflow="fold", justify=justify)  # type: ignore[arg-type]
    for row in rows:
        table.add_row(*(escape(shown(value)) for value in row.values()))
    console = Console()
    if not console.is_terminal:  # a file or a pipe has no edge to fold at
        console = Console(width=250)
    console.print(table)


def shown(value: Any) -> str:
    """A value as a person reads it."""
    if isinstance(value, dict):
        return ", ".join(f"{key}={shown(item)}" for key, item in value.items()) or "the defaults"
    if isinstance(value, list | tuple):
        return ", ".join(map(shown, value))
    if isinstance(value, float):
        return f"{value:g}"
    return "" if value is None else str(value)


@contextmanager
def progress_bar(what: str) -> Iterator[Callable[..., None]]:
    """A bar on stderr with the time left, moved by calls of (done, total, text)."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(None),
        TextColumn("{task.percentage:3.0f} %, left"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[text]}"),
    )
    quiet = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=quiet, expand=True) as progress:
        task = progress.add_task(what, total=None, text="")

        def move(done: float, total: float | None, text: str = "") -> None:
            progress.update(task, completed=done, total=total, text=text)

        yield move
