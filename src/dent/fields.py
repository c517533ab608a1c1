"""Typed settings: what a field of theirs says of itself, and how wrong values are told, all at once."""

from __future__ import annotations

from dataclasses import field, fields
from typing import Any


def setting(default: Any, doc: str, choices: Any = None) -> Any:
    """A field of a settings class: its default, a line on what it is, and its values if they are few."""
    return field(default=default, metadata={"doc": doc, "choices": choices})


def number(text: str | float) -> float:
    """A number, also as a fraction.

    >>> number("8/255") == 8 / 255, number("0.5")
    (True, 0.5)
    """
    try:
        above, _, below = str(text).partition("/")
        return float(above) / float(below or 1)
    except (ValueError, ZeroDivisionError) as error:
        raise ValueError(f"expected a number such as 0.5 or 8/255, got {text!r}") from error


def wrong_choices(settings: Any) -> list[str]:
    """What is wrong with the fields that have a choice of values."""
    faults = []
    for one in fields(settings):
        choices, value = one.metadata["choices"], getattr(settings, one.name)
        if choices and value not in choices:
            faults.append(f"{one.name}: expected one of {', '.join(map(str, choices))}, got {value!r}")
    return faults


def refuse(faults: list[str], of: str = "") -> None:
    """Raise one error that names every fault; nothing if there is none.

    >>> refuse(["steps: expected an integer >= 0, got -1"])
    Traceback (most recent call last):
    ...
    ValueError: 1 wrong setting:
      steps: expected an integer >= 0, got -1
    """
    if faults:
        count = "1 wrong setting" if len(faults) == 1 else f"{len(faults)} wrong settings"
        raise ValueError(f"{count}{of}:\n  " + "\n  ".join(faults))
