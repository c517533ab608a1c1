"""The command itself, and what its verbs share."""

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
**dent**: dynamic defenses against adversarial attacks, and what they are really worth.

A dynamic defense adapts a trained classifier to every batch at test time, by minimizing the entropy of
its own predictions. Training is not touched:

    import dent

    defended = dent.defend(model, "dent+")

    logits = defended(inputs)

Start with `dent list defenses`; `dent list settings` says what can be overridden.
""",
)


Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, mps.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
Threads = Annotated[int | None, typer.Option(help="Of the CPU; torch decides if not given.")]
Log = Annotated[list[str] | None, typer.Option(help="Also log to: tensorboard, wandb.")]


def _version(show: bool) -> None:
    if show:
        typer.echo(f"dent {dent.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def show(rows: list[dict[str, Any]], as_json: bool, right: Sequence[str] = ()) -> None:
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
    else:
        show_table(rows, right=right)
