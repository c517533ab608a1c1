"""Parse and format defenses as text: a name and the settings that replace its own, `dent+:steps=3`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dent.defense.catalog import DEFENSES, make_defense_settings
from dent.defense.defended import Method
from dent.defense.dent.settings import Settings
from dent.texts import format_text, parse_text, parse_value


def parse_defense(asked: str | Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the name of a defense and the settings that replace its own.

    A mapping has the name under `preset`, as a YAML file may.

    >>> parse_defense("dent:betas=(0.8,0.9)")
    ('dent', {'betas': (0.8, 0.9)})
    """
    if isinstance(asked, str):
        return parse_text(asked, "dent+ or dent:steps=10,lr=0.002")
    if not isinstance(asked, Mapping):
        raise TypeError(f"expected a defense such as dent+ or dent:steps=10, got {asked!r}")
    settings = {str(name): parse_value(value) for name, value in asked.items()}
    if not isinstance(preset := settings.pop("preset", None), str):
        raise ValueError(f"expected a defense with its preset, got {dict(asked)}")
    for name in ("affine", "blur"):
        if settings.get(name) is False:  # YAML reads off as False
            settings[name] = "off"
    return preset, settings


def parse_settings(text: str) -> Settings | Method:
    """Return the settings that a text asks for.

    >>> parse_settings("dent+:steps=3").steps
    3
    """
    name, overrides = parse_defense(text)
    return make_defense_settings(name, **overrides)


def format_defense(asked: str | Mapping[str, Any]) -> str:
    """Return the one text of a defense: settings in alphabetical order, without its own.

    Raise ValueError for a continual defense: evaluation and serving start every batch clean.

    >>> format_defense("dent: steps=10, lr=1e-3"), format_defense({"preset": "dent+", "steps": 3})
    ('dent:steps=10', 'dent+:steps=3')
    >>> format_defense("views: shifts=1, mirror=True")
    'views:shifts=1'
    """
    name, overrides = parse_defense(asked)
    settings = make_defense_settings(name, **overrides)
    base = DEFENSES[name].settings
    if isinstance(settings, Settings) and settings.continual:
        raise ValueError(
            f"{name} carries its adaptation from batch to batch, and every batch starts from a clean "
            f"state; evaluate {name}:continual=False,predict=after instead"
        )
    changed = {
        key: _format_value(value, is_count=isinstance(getattr(base, key), int))
        for key in overrides
        if (value := getattr(settings, key)) != getattr(base, key)
    }
    return format_text(name, changed)


def _format_value(value: Any, *, is_count: bool) -> str:
    """Return the one text of a value: a learning rate of 1 and one of 1.0 are the same."""
    if isinstance(value, tuple):
        return f"({','.join(_format_value(one, is_count=is_count) for one in value)})"
    whole = isinstance(value, int) and not isinstance(value, bool) and not is_count
    return str(float(value) if whole else value)
