"""The command line: verbs only; the work is done in the rooms that they call."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import dent
from dent.data import DATA, fetch_data
from dent.defense import PRESET_NOTES, PRESETS, Settings
from dent.flags import flags
from dent.models import model_table
from dent.report.models import model_row
from dent.report.terminal import progress_bar, show_table
from dent.report.training import epoch_line, step_text
from dent.training import RECIPE_NOTES, RECIPES, Recipe, make_recipe
from dent.training.run import run

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
    models = "models"
    data = "data"
    recipes = "recipes"


INTERRUPTED = 130  # what typer returns after an interrupt, as shells do
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, mps.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


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
    as_json: AsJson = False,
) -> None:
    """List what the library knows by name: presets and settings of a defence, models, data, recipes."""
    tables = {
        Listing.presets: _presets,
        Listing.settings: lambda: _documented(Settings),
        Listing.models: model_table,
        Listing.data: lambda: [{"data": name, "what it is": note} for name, note in DATA.items()],
        Listing.recipes: _recipes,
    }
    rows = tables[what]()
    if what is Listing.models and not as_json:
        rows = [model_row(row) for row in rows]
    _show(rows, as_json, right=("parameters",))


@app.command()
def data(
    name: Annotated[str, typer.Argument(help="cifar10 or cifar100.")],
    root: Annotated[Path | None, typer.Option(help="Folder that holds the files already.")] = None,
    as_json: AsJson = False,
) -> None:
    """Fetch a data set, verify it, and say where it is."""
    with progress_bar(name) as move:
        rows = [asdict(found) for found in fetch_data(name, root=root, progress=move)]
    _show(rows, as_json)


@app.command()
@flags(Recipe)
def train(
    architecture: Annotated[str, typer.Argument(help="See `dent list models`.")],
    recipe: Annotated[str, typer.Option(help="See `dent list recipes`.")] = "nominal",
    data: Annotated[
        str, typer.Option(help="cifar10, cifar100, a folder, an .npz, module:function.")
    ] = "cifar10",
    test_data: Annotated[
        str | None, typer.Option(help="Other test images than those of the data.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the run; runs/ARCHITECTURE-RECIPE.")
    ] = None,
    device: Device = "cpu",
    threads: Annotated[int | None, typer.Option(help="Of the CPU; torch decides if not given.")] = None,
    compile: Annotated[
        bool, typer.Option(help="Compile the model first; faster after a minute.")
    ] = False,
    mixed_precision: Annotated[
        bool | None, typer.Option(help="Half precision where it does no harm; on for GPUs.")
    ] = None,
    log: Annotated[list[str] | None, typer.Option(help="Also log to: tensorboard, wandb.")] = None,
    **settings: Any,
) -> None:
    """Train a model; the same command resumes it. Any setting of the recipe can be overridden.

    Several processes: `torchrun --nproc-per-node 8 -m dent train ...`.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    folder = out or Path("runs") / f"{architecture}-{recipe}".replace(":", "-")
    with progress_bar("training") as move:
        card = run(
            architecture,
            make_recipe(recipe, **settings),
            data=data,
            test_data=test_data,
            out=folder,
            device=device,
            compile=compile,
            mixed_precision=mixed_precision,
            loggers=log or [],
            progress=move,
            on_step=lambda step: move(step.done, step.total, step_text(step)),
            on_epoch=lambda epoch: typer.echo(epoch_line(epoch)),
        )
    if card is not None:
        show_table(card["accuracies"], right=("n", "percent", "low", "high"))
        typer.echo(f"model, log and card: {folder}")


def _show(rows: list[dict[str, Any]], as_json: bool, right: Sequence[str] = ()) -> None:
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
    else:
        show_table(rows, right=right)


def _presets() -> list[dict[str, Any]]:
    return _named("preset", PRESETS, PRESET_NOTES, Settings())


def _recipes() -> list[dict[str, Any]]:
    return _named("recipe", RECIPES, RECIPE_NOTES, Recipe())


def _named(
    kind: str, table: Mapping[str, Any], notes: Mapping[str, str], base: Any
) -> list[dict[str, Any]]:
    default = asdict(base)
    return [
        {
            kind: name,
            "what it is": notes[name],
            "settings": {key: value for key, value in asdict(entry).items() if value != default[key]},
        }
        for name, entry in table.items()
    ]


def _documented(settings: Any) -> list[dict[str, Any]]:
    return [
        {
            "setting": setting.name,
            "default": setting.default,
            "values": list(setting.metadata["choices"] or []),
            "what it is": setting.metadata["doc"],
        }
        for setting in fields(settings)
    ]


def main() -> None:
    """Run the command line; what the user got wrong is one line on stderr and exit code 2."""
    try:
        code = app(standalone_mode=False)
        if code == INTERRUPTED:
            typer.echo("dent: stopped", err=True)
        sys.exit(code)
    except typer.TyperException as error:
        usage: Any = error
        message = " ".join(usage.format_message().split())
        if message:
            typer.echo(f"dent: {message} Try 'dent --help'.", err=True)
    except (ValueError, TypeError, OSError, ImportError) as error:
        typer.echo(f"dent: {error}", err=True)
    sys.exit(2)


if __name__ == "__main__":
    main()
