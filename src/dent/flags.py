"""Turn declared settings into flags of a command."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
from pydantic import BeforeValidator
from pydantic.fields import FieldInfo

from dent.declared import Declared, plain_type
from dent.texts import read_number


def parse_number(text: str) -> float:
    """Return the number that a flag was given, also as a fraction."""
    try:
        return float(read_number(text))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _reads_text(field: FieldInfo) -> bool:
    """Return True if a setting parses its own text, as 10ms or 32x32."""
    readers = [one.func for one in field.metadata if isinstance(one, BeforeValidator)]
    return any(reader is not read_number for reader in readers)


def add_flags(
    settings: type[Declared], *, without: Sequence[str] = ()
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that adds one flag for each setting to a command with `**settings`.

    The command receives the settings whose flags were given.

    without: settings for which the command has flags of its own.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        chosen = {name: field for name, field in settings.model_fields.items() if name not in without}
        own = inspect.signature(command, eval_str=True).parameters.values()
        parameters = [one for one in own if one.kind is not one.VAR_KEYWORD]
        for name, field in chosen.items():
            kind = plain_type(field.annotation)
            choices = get_args(kind) if get_origin(kind) is Literal else ()
            if _reads_text(field) or kind not in (int, float, bool):
                kind = str
            note = (field.description or name).rstrip(".")
            option = typer.Option(
                help=f"{note}: {', '.join(map(str, choices))}." if choices else f"{note}.",
                parser=parse_number if kind is float else None,
                metavar={float: "NUMBER", int: "INTEGER", str: "TEXT"}.get(kind),
                rich_help_panel=f"Settings of the {settings.title}",
            )
            parameters.append(
                inspect.Parameter(
                    name,
                    inspect.Parameter.KEYWORD_ONLY,
                    default=None,
                    annotation=Annotated[kind | None, option],
                )
            )

        def run_command(**given: Any) -> None:
            asked = {name: given.pop(name) for name in chosen}
            command(**given, **{name: value for name, value in asked.items() if value is not None})

        run_command.__doc__, run_command.__name__ = command.__doc__, command.__name__
        run_command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run_command.__annotations__ = {one.name: one.annotation for one in parameters}
        return run_command

    return decorate
