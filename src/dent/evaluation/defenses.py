"""Defenses as text: a preset, and what is overridden, "dent:steps=10,lr=0.002"."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from dent.defense import PRESETS, Dent, defend
from dent.defense.settings import Settings, make_settings
from dent.evaluation.texts import join_text, read_value, split_text


def defense_text(asked: str | Mapping[str, Any]) -> str:
    """The one way to write a defense: what was overridden in order of names, without what is default.

    A mapping has the name as `preset`, as a YAML file may have it.

    >>> defense_text("dent: steps=10, lr=1e-3"), defense_text({"preset": "dent+", "steps": 3})
    ('dent:steps=10', 'dent+:steps=3')
    """
    preset, overrides = _parts(asked)
    settings, base = make_settings(preset, **overrides), PRESETS[preset]
    if settings.continual:
        raise ValueError(
            f"{preset} carries its adaptation from batch to batch, and every batch starts from a clean "
            f"state; evaluate {preset}:continual=False,predict=after instead"
        )
    changed = {
        name: _written(name, getattr(settings, name))
        for name in overrides
        if getattr(settings, name) != getattr(base, name)
    }
    return join_text(preset, changed)


def defense_settings(text: str) -> Settings:
    """The settings of a defense, without a model.

    >>> defense_settings("dent:betas=(0.8,0.9)").betas
    (0.8, 0.9)
    """
    preset, overrides = _parts(text)
    return make_settings(preset, **overrides)


def as_defense(model: nn.Module, text: str) -> Dent:
    """The model with a defense: with `adapt` and `predict`, also for "static"."""
    preset, overrides = _parts(text)
    made = defend(model, preset, **overrides)
    assert isinstance(made, Dent)  # continual ones were refused
    return made


def _parts(asked: str | Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The preset, and what is overridden."""
    if isinstance(asked, Mapping):
        rest = {str(name): read_value(value) for name, value in asked.items()}
        if not isinstance(preset := rest.pop("preset", None), str):
            raise ValueError(f"expected a defense with its preset, got {dict(asked)}")
        for name in ("affine", "blur"):
            if rest.get(name) is False:  # what YAML makes of off
                rest[name] = "off"
        return preset, rest
    if not isinstance(asked, str):
        raise TypeError(f"expected a defense such as dent+ or dent:steps=10, got {asked!r}")
    return split_text(asked, "dent+ or dent:steps=10,lr=0.002")


def _written(name: str, value: Any) -> str:
    """The one way to write a value: 1 and 1.0 are the same learning rate, but not the same text."""
    if isinstance(value, tuple):
        return f"({','.join(_written(name, one) for one in value)})"
    whole = isinstance(value, int) and not isinstance(value, bool) and name != "steps"
    return str(float(value) if whole else value)
