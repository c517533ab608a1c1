"""Look names up, in a table of the library or in a module of the user."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from functools import update_wrapper
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from dent.texts import join_lines

T = TypeVar("T")


def lookup(kind: str, name: str, table: Mapping[str, T]) -> T:
    """Return the entry called `name`. Raise ValueError with the choices if there is none.

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
    """Raise TypeError if some names are not known; it lists all of them, and the nearest known names.

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


class FunctionError(ValueError):
    """A function of the user raised an error."""


def is_function_path(text: str) -> bool:
    """Return True for a text of the form package.module:function.

    >>> is_function_path("package.mine:make"), is_function_path("dent:steps=3")
    (True, False)
    """
    return re.fullmatch(r"[\w.]+:[\w.]+", text.strip()) is not None


def import_function(spec: str) -> Callable[..., Any]:
    """Return the function that `package.module:function` names.

    Modules of the current folder are found too. The folder is in `sys.path` only while the module is
    imported and while the function runs, so that both may import their neighbors. If the function
    raises an error, FunctionError says which function raised what.

    >>> import_function("math:hypot")(3, 4)
    5.0
    >>> import_function("math:hypotenuse")
    Traceback (most recent call last):
    ...
    ValueError: 'math' has no 'hypotenuse'; did you mean 'hypot'? Expected package.module:function
    """
    module_name, _, name = spec.partition(":")
    if not all(part.isidentifier() for part in (*module_name.split("."), *name.split("."))):
        raise ValueError(f"expected package.module:function, got {spec!r}")
    here = str(Path.cwd())
    try:
        with _search_in(here):
            found: Any = import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise ValueError(f"importing {module_name!r} failed: {error}") from error
        raise ValueError(
            f"no module {error.name!r} for {spec!r}; it is looked for in {here} and among the"
            " installed packages"
        ) from error
    except Exception as error:
        raise ValueError(f"importing {module_name!r} failed: {type(error).__name__}: {error}") from error
    for part in name.split("."):
        if not hasattr(found, part):
            near = get_close_matches(part, dir(found), 1)
            raise ValueError(
                f"{module_name!r} has no {name!r}{_hint(near)} Expected package.module:function"
            )
        found = getattr(found, part)
    if not callable(found):
        raise ValueError(f"expected a function at {spec!r}, got {type(found).__name__}")

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            with _search_in(here):
                return found(*args, **kwargs)
        except Exception as error:
            said = join_lines(error)
            raise FunctionError(f"{spec} raised {type(error).__name__}: {said}") from error

    return update_wrapper(call, found, updated=())


def accepts(function: Callable[..., Any], argument: str) -> bool:
    """Return True if a function can be called with an argument by this name."""
    parameters = inspect.signature(function).parameters
    return argument in parameters or any(one.kind is one.VAR_KEYWORD for one in parameters.values())


@contextmanager
def _search_in(folder: str) -> Iterator[None]:
    """Import modules from `folder` first while the block runs."""
    if folder in sys.path or "" in sys.path:
        yield
        return
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        with suppress(ValueError):  # the module removed it itself
            sys.path.remove(folder)


def _hint(near: list[str]) -> str:
    return f"; did you mean {' or '.join(map(repr, near))}?" if near else ";"
