"""Tables, lines and progress in the terminal; lines instead of a progress bar in files and pipes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table as RichTable
from rich.text import Text

from dent.evaluation.compare import ComparedCells
from dent.evaluation.estimate import Estimate
from dent.evaluation.results import Results, Score
from dent.paper.claims import Judgment
from dent.paper.reproduce import WorkEstimate
from dent.paper.results import Reproduction
from dent.paper.tables import PaperTable
from dent.report.blocks import INTERVAL, Table, Value
from dent.report.claims import claim_table
from dent.report.comparisons import comparison_table
from dent.report.evaluation import NOTHING_EVALUATED, list_remarks
from dent.report.evaluation_tables import result_tables, score_value
from dent.report.format import (
    NOTHING,
    format_ball,
    format_count,
    format_duration,
    format_percent,
    format_setting,
)
from dent.report.paper import part_tables, title_table
from dent.report.text import WIDTH, cell_text, fold_lines, table_lines
from dent.training import Epoch, Step

STYLES = {"title": "bold", "header": "bold", "group": "cyan", "row": "", "note": "dim"}
MARKS = {"best": "bold green", "worst": "bold red"}
TONES = {"good": "green", "bad": "red"}
FILE_WIDTH = 250  # a file or a pipe has no edge to fold at


def show_results(results: Results) -> None:
    """Print all tables, then findings and what is missing, as `results_text` writes them."""
    console = Console(highlight=False)
    tables = result_tables(results)
    for table in tables:
        _print_table(table, console)
        console.print()
    if not tables:
        console.print(NOTHING_EVALUATED)
    for title, lines in list_remarks(results, most=10):
        _print_line(console, Text(title, "bold"))
        for line in fold_lines(lines, _find_width(console), "- "):
            _print_line(console, Text(line))
        console.print()


def show_comparison(rows: Sequence[ComparedCells]) -> None:
    """Print the second of two runs beside the first."""
    _print_table(comparison_table(rows), Console(highlight=False))


def show_paper_table(reproduction: Reproduction, table: PaperTable) -> None:
    """Print a table of the paper beside our numbers."""
    console = Console(highlight=False)
    _print_line(console, Text(title_table(table), "bold"))
    for part in part_tables(reproduction, table, interval_rows=True):
        _print_table(part, console)
    console.print()


def show_claims(judgments: Sequence[Judgment]) -> None:
    """Print each claim with its verdicts."""
    table = claim_table(judgments)
    (group,) = table.groups
    shown = RichTable(box=None, header_style="bold", pad_edge=False)
    for column in table.columns:
        shown.add_column(column, overflow="fold")
    for claim, *verdicts in group.rows:
        text = f"{claim.text} ({', '.join(claim.details)})"
        shown.add_row(text, *(Text(cell_text(one), _find_style(one)) for one in verdicts))
    _open_console(160).print(shown)


def show_table(
    rows: Sequence[dict[str, Any]],
    *,
    right: Sequence[str] = (),
    title: str = "",
    is_cut: bool = False,
) -> None:
    """Print rows as an aligned table.

    right: the columns that hold numbers.
    is_cut: print one line for each row; cut the last column where the terminal ends.
    """
    table = RichTable(
        box=None, header_style="bold", pad_edge=False, title=title or None, title_justify="left"
    )
    for column in rows[0] if rows else ():
        justify = "right" if column in right else "left"
        table.add_column(column, overflow="fold", justify=justify)  # type: ignore[arg-type]
    console = _open_console(FILE_WIDTH)
    if is_cut and rows:
        *others, last = rows[0]
        widths = [max(len(_format_cell(row[column])) for row in rows) for column in others]
        cut = table.columns[-1]
        cut.no_wrap, cut.overflow = True, "ellipsis"
        cut.max_width = max(console.width - sum(widths) - 2 * len(widths), len(last))
    for row in rows:
        table.add_row(*(Text(_format_cell(value)) for value in row.values()))
    console.print(table)


def show_details(row: Mapping[str, Any]) -> None:
    """Print one row as lines, each with the name of its column."""
    table = RichTable(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for column, value in row.items():
        table.add_row(column, Text(_format_cell(value)))
    _open_console(FILE_WIDTH).print(table)


def _format_cell(value: Any) -> str:
    return format_setting(value, absent="the defaults" if isinstance(value, dict) else "")


def _open_console(file_width: int) -> Console:
    """Return a console; where the output is no terminal, its lines are this wide."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=file_width)


def _print_table(table: Table, console: Console) -> None:
    for line in table_lines(table, _find_width(console)):
        text = Text(line.text, STYLES[line.role])
        for span in line.spans:
            text.stylize(_find_style(span.cell), span.start, span.end)
        _print_line(console, text)


def _find_style(cell: Value) -> str:
    if cell.mark:
        return MARKS[cell.mark]
    return " ".join(filter(None, ["bold" if cell.strong else "", TONES.get(cell.tone, "")]))


def _find_width(console: Console) -> int:
    """Return the width to fill: longer lines than `WIDTH` are hard to follow."""
    return min(console.width, WIDTH) if console.is_terminal else WIDTH


def _print_line(console: Console, text: Text) -> None:
    console.print(text, soft_wrap=True)  # the lines are already as wide as they may be


@contextmanager
def progress_bar(what: str, *, has_lines: bool = True) -> Iterator[Callable[..., None]]:
    """Show a bar on stderr with the time left; yield the function (done, total, text) that moves it.

    has_lines: where stderr is no terminal, print a line for each text whose work has moved on.
    """
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield _ProgressLines(what, console) if has_lines else lambda *moved: None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(None),
        TextColumn("{task.percentage:3.0f} %, left"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[text]}"),
    )
    with Progress(*columns, console=console, transient=True, expand=True) as progress:
        task = progress.add_task(what, total=None, text="")

        def move(done: float, total: float | None, text: str = "") -> None:
            progress.update(task, completed=done, total=total, text=text)

        yield move


class _ProgressLines:
    """Print a line when more is done and the text is new: the share that is done and the time left."""

    def __init__(self, what: str, console: Console) -> None:
        self._what, self._console, self._printed = what, console, ""
        self._total: float | None = None
        self._done = self._begun = self._began = 0.0

    def __call__(self, done: float, total: float | None, text: str = "") -> None:
        now = time.monotonic()
        if total != self._total:  # other work, of another size
            self._total, self._done, self._begun, self._began = total, done, done, now
        if total and done > self._done and text != self._printed:
            self._printed = text
            left = (now - self._began) * (total - done) / (done - self._begun)
            line = f"{self._what}: {100 * done / total:.0f} %, {format_duration(left)} left, {text}"
            _print_line(self._console, Text(line))
        self._done = max(done, self._done)


def show_scores(scores: Mapping[str, Score], title: str) -> None:
    """Print a row for each score, by what the images are, and why there are no intervals."""
    rows = [
        {
            "images": name,
            "accuracy %": format_percent(one.percent),
            INTERVAL: score_value(one).format_interval() or NOTHING,
            "n": one.n,
            "batches": one.batches,
        }
        for name, one in scores.items()
    ]
    show_table(rows, right=["accuracy %", "n", "batches"], title=title)
    for why in dict.fromkeys(one.why_no_interval for one in scores.values()):
        if why:
            _print_line(Console(highlight=False), Text(f"no interval: {why}.", STYLES["note"]))


def estimate_rows(estimates: Sequence[Estimate]) -> list[dict[str, Any]]:
    """Return a row for each attack on each cell of an evaluation that was not run."""
    return [
        {
            "model, defense, ball": str(one.cell),
            "attack": one.attack,
            "units": one.units,
            "forwards": f"{one.forwards:,.0f}" if one.is_known else "unknown",
            "minutes": f"{one.seconds / 60:.1f}" if one.is_known else "unknown",
        }
        for one in estimates
    ]


def total_line(estimates: Sequence[Estimate]) -> str:
    """Return what an evaluation would cost in total, as far as it is known."""
    known = [one for one in estimates if one.is_known]
    units, of_known = (sum(one.units for one in some) for some in (estimates, known))
    total = f"{format_count(units)} units"
    if known:
        forwards, seconds = (
            sum(getattr(one, name) for one in known) for name in ("forwards", "seconds")
        )
        total += f", {_describe_cost(forwards, seconds)}"
    if unknown := units - of_known:
        total += (
            f"; the cost of {format_count(unknown)} units of your own attacks or defenses is unknown"
        )
    return total


def work_rows(estimates: Sequence[WorkEstimate]) -> list[dict[str, Any]]:
    """Return a row for each evaluation of a reproduction that was not run."""
    return [
        {
            "table": one.table,
            "loads": one.loads,
            "defense": one.defense,
            "ball": format_ball(one.norm, one.eps),
            "data": one.data,
            "n": one.n,
            "forwards": f"{one.forwards:,.0f}",
            "time": "unknown" if one.seconds is None else format_duration(one.seconds),
            "here": "" if one.trouble is None else "no",
        }
        for one in estimates
    ]


def missing_checkpoint_lines(keys: Sequence[str], folder: Path) -> Iterator[str]:
    """Yield which checkpoint files of RobustBench are not in a folder, and where they come from."""
    for key in keys:
        yield f"not in {folder}: {key}.pt; its row is not measured"
    if keys:
        dataset, threat, name = keys[0].split("/")
        yield (
            "These files come from RobustBench's model zoo, https://github.com/RobustBench/robustbench. "
            f"Its package brings each to its place: robustbench.load_model({name!r}, "
            f"model_dir={str(folder)!r}, dataset={dataset!r}, threat_model={threat!r})"
        )


def work_total_line(estimates: Sequence[WorkEstimate]) -> str:
    """Return what a reproduction would cost in total."""
    known = [one.seconds for one in estimates if one.seconds is not None]
    unknown = len(estimates) - len(known)
    cost = _describe_cost(sum(one.forwards for one in estimates), sum(known))
    end = f", {unknown} of unknown time" if unknown else ""
    return f"{len(estimates)} evaluations, {cost} on this machine{end}"


def _describe_cost(forwards: float, seconds: float) -> str:
    images = f"at most {forwards:,.0f} forwards of an image through a static model"
    return f"{images}, about {format_duration(seconds)}"


def model_row(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row of `list_models` for people.

    >>> accuracies = [{"what": "natural", "n": 10000, "percent": 89.69, "low": 89.08, "high": 90.27}]
    >>> row = {"name": "a", "summary": "b", "parameters": 1234, "needs": "c", "accuracies": accuracies}
    >>> model_row(row)["accuracy in %"]
    'natural 89.69 (n = 10,000)'
    """
    return {
        "model": row["name"],
        "what it is": row["summary"],
        "parameters": "" if row["parameters"] is None else format_count(row["parameters"]),
        "needs": row["needs"],
        "accuracy in %": "; ".join(accuracy_text(one) for one in row["accuracies"]),
    }


def accuracy_text(one: dict[str, Any]) -> str:
    """Return an accuracy of a model card, with its number of images."""
    return f"{one['what']} {one['percent']:.2f} (n = {format_count(one['n'])})"


def step_text(step: Step) -> str:
    """Return this epoch's loss so far, and the accuracies after the last epoch, for the progress bar.

    >>> step_text(Step(5, 9, 2, 1.25, 0.5, Epoch(1, 0.1, 1.5, 0.4, 0.62, 0.33, 0.38, 61.2)))
    'epoch 2 loss 1.250 natural 62.0 % PGD 33.0 %'
    """
    text = f"epoch {step.epoch} loss {step.loss:.3f}"
    if step.last is not None:
        text += f" natural {100 * step.last.natural:.1f} %"
        if step.last.robust is not None:
            text += f" PGD {100 * step.last.robust:.1f} %"
    return text


def epoch_line(epoch: Epoch) -> str:
    """Return one epoch as a line, aligned with the others.

    >>> print(epoch_line(Epoch(3, 0.1, 1.25, 0.5, 0.62, None, None, 61.2)))
    epoch   3  lr 0.1000  loss 1.250  trained-on 50.0 %  natural 62.0 %    61 s
    >>> averaged = Epoch(3, 0.1, 1.25, 0.5, 0.62, 0.4, 0.45, 61.2, 0.65, 0.42)
    >>> epoch_line(averaged).partition("natural ")[2]
    '62.0 %  PGD-10 40.0 %  FGSM 45.0 %  averaged: natural 65.0 %  PGD-10 42.0 %    61 s'
    """
    robust = ""
    if epoch.robust is not None and epoch.fgsm is not None:
        robust = f"  PGD-10 {100 * epoch.robust:4.1f} %  FGSM {100 * epoch.fgsm:4.1f} %"
    averaged = ""
    if epoch.average_natural is not None:
        averaged = f"  averaged: natural {100 * epoch.average_natural:4.1f} %"
    if epoch.average_robust is not None:
        averaged += f"  PGD-10 {100 * epoch.average_robust:4.1f} %"
    return (
        f"epoch {epoch.epoch:3d}  lr {epoch.lr:.4f}  loss {epoch.loss:.3f}  "
        f"trained-on {100 * epoch.accuracy:4.1f} %  natural {100 * epoch.natural:4.1f} %"
        f"{robust}{averaged}  {epoch.seconds:4.0f} s"
    )
