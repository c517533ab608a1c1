"""Parse and format texts: a name with settings, such as `dent:steps=10,lr=0.002`, and numbers."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from typing import Any


def parse_text(text: str, example: str) -> tuple[str, dict[str, Any]]:
    """Return the name and the settings of a text. `example` is shown in the error.

    >>> parse_text("fpa: rounds=3, steps=10", "fpa:rounds=3")
    ('fpa', {'rounds': 3, 'steps': 10})
    """
    name, _, rest = text.partition(":")
    settings: dict[str, Any] = {}
    for part in filter(None, re.split(r",\s*(?=\w+\s*=)", rest.strip())):
        key, sign, value = (piece.strip() for piece in part.partition("="))
        if not sign:
            raise ValueError(f"expected a text such as {example}, got {text!r}")
        if key in settings:
            raise ValueError(f"expected each setting once, got {key} twice in {text!r}")
        settings[key] = parse_value(value)
    return name.strip(), settings


def parse_value(value: Any) -> Any:
    """Return a value that was typed or read from YAML, where `1e-3` is text and a tuple is a list."""
    if isinstance(value, str):
        try:
            value = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            return value
    return tuple(value) if isinstance(value, list) else value


def read_number(value: Any) -> Any:
    """Return a number that is written as text, also as a fraction; return other values unchanged.

    >>> read_number("8/255") == 8 / 255, read_number("0.5"), read_number(2)
    (True, 0.5, 2)
    """
    if not isinstance(value, str):
        return value
    try:
        above, _, below = value.partition("/")
        return float(above) / float(below or 1)
    except (ValueError, ZeroDivisionError) as error:
        raise ValueError(f"expected a number such as 0.5 or 8/255, got {value!r}") from error


def join_lines(text: object) -> str:
    r"""Return a text, or the message of an error, on one line.

    >>> join_lines(ValueError("no such\n  file"))
    'no such file'
    """
    return " ".join(str(text).split())


def format_text(name: str, settings: Mapping[str, str]) -> str:
    """Return the text of a name and its settings, in alphabetical order.

    >>> format_text("dent", {"steps": "10", "lr": "0.002"})
    'dent:lr=0.002,steps=10'
    """
    text = ",".join(f"{key}={settings[key]}" for key in sorted(settings))
    return f"{name}:{text}" if text else name
