"""Looking a name up in one of the library's visible tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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
    near = get_close_matches(str(name), table)
    raise ValueError(f"unknown {kind} {name!r}{_hint(near)} Expected one of: {', '.join(table)}")


def check_known(kind: str, names: Iterable[str], known: list[str]) -> None:
    """Refuse names that are not known, all at once, with the nearest that are.

    >>> check_known("settings", ["step", "lr"], ["steps", "lr"])
    Traceback (most recent call last):
    ...
    TypeError: unknown settings: step; did you mean 'steps'? Expected any of: steps, lr
    """
    unknown = [name for name in names if name not in known]
    if unknown:
        near = [match for name in unknown for match in get_close_matches(name, known, 1)]
        raise TypeError(
            f"unknown {kind}: {', '.join(unknown)}{_hint(near)} Expected any of: {', '.join(known)}"
        )


def _hint(near: list[str]) -> str:
    return f"; did you mean {' or '.join(map(repr, near))}?" if near else ";"
