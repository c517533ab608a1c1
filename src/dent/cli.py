"""The command line: verbs only; the work is done in the rooms that they call."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, fields
from enum import StrEnum
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

import dent
from dent.defense import PRESET_NOTES, PRESETS, Settings

app = typer.Typer(
    name="dent",
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    help="""
**dent**: dynamic defences against adversarial attacks, and what they are really worth.

A dynamic defence adapts a trained classifier to every batch at test time, by minimizing the entropy of
its own predictions. Training is not touched:

    import dent

    defended = dent.defend(model, "dent+")

    logits = defended(inputs)

Start with `dent list presets`; `dent list settings` says what can be overridden.
""",
)


class Listing(StrEnum):
    presets = "presets"
    settings = "settings"


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


@app.command("list")
def list_(
    what: Annotated[Listing, typer.Argument(help="What to list.")] = Listing.presets,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """List what the library knows by name: the presets of the paper, or the settings of a defence."""
    rows = _presets() if what is Listing.presets else _settings()
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in rows[0]:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(_shown(value) for value in row.values()))
    Console().print(table)


def _presets() -> list[dict[str, Any]]:
    default = asdict(Settings())
    return [
        {
            "preset": name,
            "what it is": PRESET_NOTES[name],
            "settings": {key: value for key, value in asdict(preset).items() if value != default[key]},
        }
        for name, preset in PRESETS.items()
    ]


def _settings() -> list[dict[str, Any]]:
    return [
        {
            "setting": setting.name,
            "default": setting.default,
            "values": list(setting.metadata["choices"] or []),
            "what it is": setting.metadata["doc"],
        }
        for setting in fields(Settings)
    ]


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key}={shown}" for key, shown in value.items()) or "the defaults"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return "" if value is None else str(value)


def main() -> None:
    """Run the command line; what the user got wrong is one line on stderr and exit code 2."""
    try:
        sys.exit(app(standalone_mode=False))
    except typer.TyperException as error:
        usage: Any = error
        message = " ".join(usage.format_message().split())
        if message:
            typer.echo(f"dent: {message} Try 'dent --help'.", err=True)
    except (ValueError, TypeError, OSError) as error:
        typer.echo(f"dent: {error}", err=True)
    sys.exit(2)


if __name__ == "__main__":
    main()
