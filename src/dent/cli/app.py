"""The command `dent`, and the flags that its verbs share."""

from __future__ import annotations

import json
import traceback
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from dent import __version__
from dent.cli import DEBUG, INTERRUPTED, import_module
from dent.cli.verbs import VERBS
from dent.names import FunctionError


class _Verbs(TyperGroup):
    """List the verbs without importing their modules, which load torch; import the one that is run."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        return name, load_command(name) if name else command, rest


app = typer.Typer(
    name="dent",
    cls=_Verbs,
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
        typer.echo(f"dent {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version."),
    ] = False,
    debug: Annotated[
        bool, typer.Option(DEBUG, help="Show where an error came from. May stand anywhere.")
    ] = False,
) -> None:
    pass


for _name, _verb in VERBS.items():
    app.command(_name, help=_verb.summary)(lambda: None)


def load_command(name: str) -> Any:
    """Return the command of a verb, with all its flags."""
    module, _, function = VERBS[name].function.partition(":")
    alone = typer.Typer(add_completion=False, rich_markup_mode="markdown")
    alone.command(name)(getattr(import_module(module), function))
    return get_command(alone)


def run_app(arguments: list[str], *, debug: bool = False) -> int:
    """Run a command and return its exit code; print errors of the user on stderr, as one line each.

    debug: print the traceback too.
    """
    try:
        code = app(arguments, standalone_mode=False)
    except typer.TyperException as error:
        usage: Any = error
        message = " ".join(usage.format_message().split())
        if message:
            typer.echo(f"dent: {message} Try 'dent --help'.", err=True)
    except (ValueError, TypeError, OSError, ImportError) as error:
        if debug:
            traceback.print_exception(error)
        hint = f"; {DEBUG} shows where" if isinstance(error, FunctionError) and not debug else ""
        typer.echo(f"dent: {error}{hint}", err=True)
    else:
        if code == INTERRUPTED:
            raise KeyboardInterrupt
        return code or 0
    return 2


def show(rows: list[dict[str, Any]], as_json: bool, right: Sequence[str] = ()) -> None:
    """Print rows as JSON or as a table; the columns in `right` are numbers."""
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
    else:
        from dent.report.terminal import show_table  # loads torch

        show_table(rows, right=right)
