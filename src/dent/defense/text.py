"""Parse and format defenses as text: a preset and the settings that replace its own, `dent+:steps=3`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dent.defense.dent.settings import PRESETS, Settings, make_settings
from dent.texts import format_text, parse_text, parse_value


def parse_defense(asked: str | Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the preset and the settings that replace its own.

    A mapping names the preset under `preset`, as a YAML file may.

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


def parse_settings(text: str) -> Settings:
    """Return the settings that a text asks for.

    >>> parse_settings("dent+:steps=3").steps
    3
    """
    preset, overrides = parse_defense(text)
    return make_settings(preset, **overrides)


def format_defense(asked: str | Mapping[str, Any]) -> str:
    """Return the one text of a defense: settings in alphabetical order, without the preset's own.

    Raise ValueError for a continual defense: evaluation and serving start every batch clean.

    >>> format_defense("dent: steps=10, lr=1e-3"), format_defense({"preset": "dent+", "steps": 3})
    ('dent:steps=10', 'dent+:steps=3')
    """
    preset, overrides = parse_defense(asked)
    settings, base = make_settings(preset, **overrides), PRESETS[preset]
    if settings.continual:
        raise ValueError(
            f"{preset} carries its adaptation from batch to batch, and every batch starts from a clean "
            f"state; evaluate {preset}:continual=False,predict=after instead"
        )
    changed = {
        name: _format_value(name, getattr(settings, name))
        for name in overrides
        if getattr(settings, name) != getattr(base, name)
    }
    return format_text(preset, changed)


def _format_value(name: str, value: Any) -> str:
    """Return the one text of a value: a learning rate of 1 and one of 1.0 are the same."""
    if isinstance(value, tuple):
        return f"({','.join(_format_value(name, one) for one in value)})"
    whole = isinstance(value, int) and not isinstance(value, bool) and name != "steps"
    return str(float(value) if whole else value)
