"""Names for what users bring along in memory: defenses and attacks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any


def name_own(
    asked: Any,
    kind: str,
    *,
    is_text: Callable[[Any], bool],
    is_listed: Callable[[Any, str], bool],
    is_taken: Callable[[str], bool],
    read: Callable[[Any, str], Any],
) -> tuple[list[Any], dict[str, Any]]:
    """Return all entries as an evaluation lists them, and those that are in memory, by name.

    asked: one entry, a list, or a mapping from names.
    kind: what the entries are, for messages: "defense" or "attack".
    is_text: True for an entry that needs no name, because it is written.
    is_listed: True if an entry that was given under a name is the text of that very name.
    is_taken: True for names that entries in memory may not have.
    read: returns what an evaluation uses for an entry in memory, or raises ValueError.
    """
    if isinstance(asked, Mapping):
        entries: list[tuple[str | None, Any]] = [(str(name), one) for name, one in asked.items()]
    else:
        given = list(asked) if isinstance(asked, list | tuple) else [asked]
        entries = [(None if is_text(one) else _find_name(one, kind), one) for one in given]
    names: list[Any] = []
    own: dict[str, Any] = {}
    for name, one in entries:
        if name is None or is_listed(one, name):
            names.append(one)
            continue
        if is_taken(name):
            raise ValueError(f"expected another name for your own {kind}: {name!r} is of dent's list")
        if name in own:
            raise ValueError(
                f"expected each {kind} in memory under a name of its own, got two as {name!r}; give "
                f"them as {{'name': {kind}, ...}}"
            )
        own[name] = read(one, name)
        names.append(name)
    return names, own


def _find_name(one: Any, kind: str) -> str:
    """Return the name of an entry in memory that was given without one."""
    while isinstance(one, partial):
        one = one.func
    name = getattr(one, "__name__", None) or type(one).__name__
    if name == "<lambda>":
        raise ValueError(f"expected a name for a lambda; give {kind}s as {{'name': {kind}, ...}}")
    return str(name)
