"""Defenses by text: those of dent's list, and a user's own by import path."""

from __future__ import annotations

import inspect
from collections.abc import Collection
from typing import Any

from torch import nn

from dent.defense import defend
from dent.defense.catalog import DEFENSES
from dent.defense.dent.online import Online
from dent.defense.text import format_defense
from dent.names import import_function, is_function_path


def is_import_path(text: str) -> bool:
    """Return True for package.module:function, which is no defense of dent's list with settings.

    >>> is_import_path("package.mine:make"), is_import_path("dent:steps=3"), is_import_path("views")
    (True, False, False)
    """
    name = text.partition(":")[0]
    return name not in DEFENSES and is_function_path(text)


def name_defense(asked: Any, *, own: Collection[str] = ()) -> str:
    """Return the one text of a defense: its name if it is in memory, its import path or its settings.

    own: names of those in memory.

    >>> name_defense(" package.mine:make"), name_defense("dent: steps=10, lr=1e-3")
    ('package.mine:make', 'dent:steps=10')
    """
    if isinstance(asked, str) and (asked in own or is_import_path(asked)):
        return asked.strip()
    try:
        return format_defense(asked)
    except TypeError as error:  # which pydantic would not collect with other faults
        raise ValueError(str(error)) from error


def make_by_text(text: str, model: nn.Module) -> Any:
    """Return the defense of a text or an import path, on a model."""
    return import_defense(text, model) if is_import_path(text) else defend(model, text)


def import_defense(path: str, model: nn.Module) -> Any:
    """Return what the function `package.module:function` makes of a model, if it can be a defense."""
    return check_made(import_function(path.strip())(model), path)


def check_made(defense: Any, name: str) -> Any:
    """Return the defense; raise ValueError if it is none, or if batches are not apart in it."""
    if inspect.isclass(defense) or not callable(defense):
        raise ValueError(
            f"expected {name} to return a defense, which answers defense(inputs) with logits, got "
            f"{type(defense).__name__}"
        )
    refuse_continual(defense, name)
    return defense


def refuse_continual(defense: Any, name: str) -> None:
    """Raise ValueError if a defense carries its adaptation from batch to batch."""
    if isinstance(defense, Online):
        raise ValueError(
            f"{name} carries its adaptation from batch to batch, and every batch starts from a clean "
            "state; give it with continual=False and predict='after' instead"
        )
