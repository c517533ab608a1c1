"""A name with settings as one text, "dent:steps=10,lr=0.002": how defenses and attacks are written."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from typing import Any


def split_text(text: str, example: str) -> tuple[str, dict[str, Any]]:
    """The name, and its settings.

    >>> split_text("fpa: rounds=3, steps=10", "fpa:rounds=3")
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
        settings[key] = read_value(value)
    return name.strip(), settings


def join_text(name: str, settings: Mapping[str, str]) -> str:
    """The one way to write it.

    >>> join_text("dent", {"steps": "10", "lr": "0.002"})
    'dent:lr=0.002,steps=10'
    """
    text = ",".join(f"{key}={settings[key]}" for key in sorted(settings))
    return f"{name}:{text}" if text else name


def read_value(value: Any) -> Any:
    """A value as it is typed, or as YAML has it (where 1e-3 is text, and a tuple is a list)."""
    if isinstance(value, str):
        try:
            value = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            return value
    return tuple(value) if isinstance(value, list) else value
