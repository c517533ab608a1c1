"""The fields of a settings object as flags of a command."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import typer
from pydantic import BeforeValidator
from pydantic.fields import FieldInfo

from dent.declared import Declared, plain_type, read_number
from dent.fields import number


def parsed_number(text: str) -> float:
    """A number as `dent.fields.number` reads it, for flags."""
    try:
        return number(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def flags(
    settings: type, *, without: Sequence[str] = ()
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command with `**settings` one flag for each field; it receives those that were given.

    without: fields for which the command has flags of its own.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        hints = get_type_hints(settings)
        chosen = [field for field in fields(settings) if field.name not in without]
        own = inspect.signature(command, eval_str=True)
        parameters = [one for one in own.parameters.values() if one.kind is not one.VAR_KEYWORD]
        for field in chosen:
            kind = _plain(hints[field.name])
            choices = field.metadata["choices"]
            note = field.metadata["doc"] + (f": {', '.join(map(str, choices))}" if choices else "")
            option = typer.Option(
                help=f"{note}.",
                parser=parsed_number if kind is float else None,
                metavar={float: "NUMBER", int: "INTEGER", str: "TEXT"}.get(kind),
                rich_help_panel=f"Settings of the {settings.__name__.lower()}",
            )
            parameters.append(
                inspect.Parameter(
                    field.name,
                    inspect.Parameter.KEYWORD_ONLY,
                    default=None,
                    annotation=_annotated(kind, option),
                )
            )

        def called(**given: Any) -> None:
            asked = {field.name: given.pop(field.name) for field in chosen}
            command(**given, **{name: value for name, value in asked.items() if value is not None})

        called.__doc__, called.__name__ = command.__doc__, command.__name__
        called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        called.__annotations__ = {one.name: one.annotation for one in parameters}
        return called

    return decorate


def _plain(hint: Any) -> type:
    """What is typed for a field: a Literal is text, an optional number is a number."""
    if get_origin(hint) in (Union, types.UnionType):
        (hint,) = (one for one in get_args(hint) if one is not type(None))
    return hint if hint in (int, float, bool, str) else str


def _annotated(kind: type, option: Any) -> Any:
    return Annotated[kind | None, option]


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
    """Give a command with `**settings` one flag for each field; it receives those that were given.

    without: fields for which the command has flags of its own.
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
