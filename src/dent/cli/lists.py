"""`dent list` and `dent data`: list what has a name, and fetch data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import typer

from dent.cli.app import AsJson, show
from dent.data import DATA, fetch_data
from dent.defense import DEFENSES, Settings
from dent.evaluation import SUITE_NOTES
from dent.evaluation.attacks import ATTACKS
from dent.models import list_models
from dent.names import lookup
from dent.report.terminal import model_row, progress_bar, show_details, show_table
from dent.training import RECIPE_NOTES, RECIPES, Recipe


class Listing(StrEnum):
    defenses = "defenses"
    settings = "settings"
    models = "models"
    data = "data"
    recipes = "recipes"
    suites = "suites"
    attacks = "attacks"


def list_(
    what: Annotated[Listing, typer.Argument(help="What to list.")] = Listing.defenses,
    name: Annotated[
        str | None, typer.Argument(help="Show all about this one (default: list all).")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List defenses, settings of dent, models, data, recipes, suites or attacks by name."""
    tables: dict[Listing, Callable[[], list[dict[str, Any]]]] = {
        Listing.defenses: _list_defenses,
        Listing.settings: _describe_settings,
        Listing.models: list_models,
        Listing.data: lambda: [{"data": name, "what it is": note} for name, note in DATA.items()],
        Listing.recipes: _list_recipes,
        Listing.suites: lambda: [
            {"suite": name, "what it is": note} for name, note in SUITE_NOTES.items()
        ],
        Listing.attacks: lambda: [
            {"attack": name, "kind": one.kind, "what it is": one.note} for name, one in ATTACKS.items()
        ],
    }
    rows = tables[what]()
    if name is not None:
        rows = [lookup(what.removesuffix("s"), name, {next(iter(row.values())): row for row in rows})]
    if as_json:
        show(rows, True)
    elif name is not None:
        show_details(model_row(rows[0]) if what is Listing.models else rows[0])
    elif what is Listing.models:
        show_table([{"model": row["name"], "what it is": row["summary"]} for row in rows], is_cut=True)
        typer.echo("`dent list models NAME` shows what a model needs, and its accuracies.")
    else:
        show_table(rows)


def data(
    name: Annotated[str, typer.Argument(help="Data set: cifar10 or cifar100.")],
    root: Annotated[
        Path | None, typer.Option(help="Folder that already has the files (default: download them).")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Find or download a data set, verify it, and print where it is."""
    with progress_bar(name) as move:
        rows = [asdict(split) for split in fetch_data(name, root=root, progress=move)]
    show(rows, as_json)


def _list_defenses() -> list[dict[str, Any]]:
    """Return a row for each defense: settings in which a preset of dent differs, or all of a method."""
    default = vars(Settings())
    return [
        {
            "defense": name,
            "what it is": entry.note,
            "source": entry.source,
            "forwards": entry.settings.forwards,
            "independent": entry.settings.independent,
            "settings": {
                key: value for key, value in vars(entry.settings).items() if value != default.get(key)
            },
        }
        for name, entry in DEFENSES.items()
    ]


def _list_recipes() -> list[dict[str, Any]]:
    """Return a row for each recipe with the settings in which it differs from the defaults."""
    default = vars(Recipe())
    return [
        {
            "recipe": name,
            "what it is": RECIPE_NOTES[name],
            "settings": {key: value for key, value in vars(recipe).items() if value != default[key]},
        }
        for name, recipe in RECIPES.items()
    ]


def _describe_settings() -> list[dict[str, Any]]:
    return [
        {
            "setting": name,
            "default": field.default,
            "values": _list_choices(field.annotation),
            "what it is": field.description,
        }
        for name, field in Settings.model_fields.items()
    ]


def _list_choices(annotation: Any) -> list[Any]:
    if annotation is bool:
        return [False, True]
    return list(get_args(annotation)) if get_origin(annotation) is Literal else []
