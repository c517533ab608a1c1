"""The command `dent`, and the flags that its verbs share."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any

import typer

import dent
from dent.report.terminal import show_table

app = typer.Typer(
    name="dent",
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    help="""
**dent**: dynamic defenses against adversarial attacks, and how much they really help.

A dynamic defense adapts a trained classifier to every batch at test time: it minimizes the entropy of
its own predictions. Training does not change:

    import dent

    defended = dent.defend(model, "dent+")

    logits = defended(inputs)

Start with `dent list defenses`. `dent list settings` lists what you can override.
""",
)


AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
Device = Annotated[str, typer.Option(help="Device: cpu, cuda, cuda:1 or mps.")]
DryRun = Annotated[bool, typer.Option(help="Show what would be done and how long it would take.")]
Engine = Annotated[str, typer.Option(help="Where to compute: here (this process) or ray.")]
Log = Annotated[
    list[str] | None, typer.Option(help="Also log to tensorboard or wandb. May be repeated.")
]
RayAddress = Annotated[
    str | None, typer.Option(help="Address of a running Ray cluster (default: start Ray here).")
]
Seed = Annotated[int, typer.Option(help="Seed of the batches and the attacks.")]
Threads = Annotated[int | None, typer.Option(help="Number of CPU threads (default: torch decides).")]
Workers = Annotated[int | None, typer.Option(help="Number of Ray workers (default: all cores).")]


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"dent {dent.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    pass


def show(rows: list[dict[str, Any]], as_json: bool, right: Sequence[str] = ()) -> None:
    """Print rows as JSON or as a table; the columns in `right` are numbers."""
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
    else:
        show_table(rows, right=right)
