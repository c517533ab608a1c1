"""Looking a name up in one of the library's visible tables."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import TypeVar

T = TypeVar("T")


def lookup(kind: str, name: str, table: Mapping[str, T]) -> T:
    """The entry called `name`; an unknown name is an error that lists the choices.

    >>> lookup("preset", "dentt", {"dent": 1, "tent": 2})
    Traceback (most recent call last):
    ...
    ValueError: unknown preset 'dentt'; did you mean 'dent' or 'tent'? Expected one of: dent, tent
    """
    if name in table:
        return table[name]
    near = " or ".join(repr(match) for match in get_close_matches(str(name), table))
    hint = f"; did you mean {near}?" if near else ";"
    raise ValueError(f"unknown {kind} {name!r}{hint} Expected one of: {', '.join(table)}")
