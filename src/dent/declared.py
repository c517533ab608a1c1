"""Settings that come from files and flags: declared once as pydantic models, checked all at once."""

from __future__ import annotations

import types
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Annotated, Any, ClassVar, Literal, Self, Union, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError
from pydantic.fields import FieldInfo

from dent.names import check_known
from dent.texts import join_lines, read_number

# A float that may also be written as text: "0.5", "8/255".
Number = Annotated[float, BeforeValidator(read_number)]


# True while pydantic reads settings that stand inside of others.
_is_nested = ContextVar("_is_nested", default=False)


class Declared(BaseModel):
    """A group of settings that cannot change. One error names every value that is wrong.

    Declare each setting with `pydantic.Field(default, description="...", ge=...)`; bounds and choices
    become part of the error message, and the description becomes the help text of its flag. Types
    are strict: True is no integer, and "3" is no number (but `Number` reads text).

    >>> from pydantic import Field
    >>> class Example(Declared):
    ...     title: ClassVar[str] = "example"
    ...     steps: int = Field(3, description="Number of steps.", ge=1)
    ...     norm: Literal["linf", "l2"] = "linf"
    >>> Example(steps=0, norm="l1")
    Traceback (most recent call last):
    ...
    dent.declared.SettingsError: 2 wrong settings of the example:
      steps: expected an integer >= 1, got 0
      norm: expected one of linf, l2, got 'l1'
    >>> Example(step=3)
    Traceback (most recent call last):
    ...
    TypeError: unknown settings of the example: step; did you mean 'steps'? Expected any of: steps, norm
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
    title: ClassVar[str] = "settings"  # what error messages call the group

    def __init__(self, **given: Any) -> None:
        try:
            check_known(f"settings of the {self.title}", given, list(type(self).model_fields))
        except TypeError as error:
            if _is_nested.get():
                raise SettingsError([str(error)]) from None
            raise
        token = _is_nested.set(True)
        try:
            super().__init__(**given)
        except ValidationError as error:
            raise_faults(list_faults(type(self), error, given), f" of the {self.title}")
        finally:
            _is_nested.reset(token)

    def replace(self, **changes: Any) -> Self:
        """Return a copy with some settings changed, checked as a whole."""
        given = {name: getattr(self, name) for name in self.model_fields_set}
        return type(self)(**given | changes)


def list_faults(
    model: type[BaseModel], error: ValidationError, given: Mapping[str, Any] | None = None
) -> list[str]:
    """Return one line for each fault: the setting, what was expected, and what came.

    given: the settings as they came; entries of a list are then called by their title or name.
    """
    faults = []
    for one in error.errors(include_url=False):
        place = _name_place(one["loc"], given)
        cause = one.get("ctx", {}).get("error")
        if isinstance(cause, SettingsError):  # of settings inside of these, or of the whole model
            faults += [": ".join(filter(None, [place, fault])) for fault in cause.faults]
            continue
        if cause is not None:  # raised by a validator of one setting
            faults.append(": ".join(filter(None, [place, join_lines(cause)])))
            continue
        field = model.model_fields.get(str(one["loc"][0])) if one["loc"] else None
        expected = one["msg"].removeprefix("Input should be ").removeprefix("a valid ")
        if one["type"] in ("model_type", "dict_type"):
            expected = "keys and values"
        elif one["type"] in ("too_short", "too_long"):
            least, most = one["ctx"].get("min_length"), one["ctx"].get("max_length")
            expected = f"{least} or more entries" if most is None else f"{most} entries or fewer"
        elif field is not None and len(one["loc"]) == 1:
            expected = describe_field(field)
        got = "" if one["type"] == "missing" else f", got {one['input']!r}"
        faults.append(f"{place}: expected {expected}{got}")
    return list(dict.fromkeys(faults))  # a union reports a fault once for each of its members


class SettingsError(ValueError):
    """Settings are wrong; `faults` has one line for each of them."""

    def __init__(self, faults: list[str], of: str = "") -> None:
        self.faults = faults
        count = "1 wrong setting" if len(faults) == 1 else f"{len(faults)} wrong settings"
        super().__init__(f"{count}{of}:\n  " + "\n  ".join(faults))


def raise_faults(faults: list[str], of: str = "") -> None:
    """Raise one SettingsError that lists every fault; do nothing if there is none.

    >>> raise_faults(["steps: expected an integer >= 0, got -1"])
    Traceback (most recent call last):
    ...
    dent.declared.SettingsError: 1 wrong setting:
      steps: expected an integer >= 0, got -1
    """
    if faults:
        raise SettingsError(faults, of) from None


def _name_place(loc: tuple[int | str, ...], given: Any) -> str:
    """Return where a setting stands: parts.dent.rows, or parts.0.rows if that part has no title."""
    names = []
    for key in loc:
        try:
            given = given[key]
        except (KeyError, IndexError, TypeError):
            given = None
        title = given.get("title", given.get("name")) if isinstance(given, Mapping) else None
        names.append(str(title if isinstance(key, int) and title is not None else key))
    return ".".join(names)


def describe_field(field: FieldInfo) -> str:
    """Return what a setting accepts, in words: "an integer >= 1", "one of linf, l2"."""
    signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    bounds = [
        f"{sign} {getattr(limit, name)}"
        for limit in field.metadata
        for name, sign in signs.items()
        if getattr(limit, name, None) is not None
    ]
    return " ".join(filter(None, [_describe_type(field.annotation), " and ".join(bounds)]))


def plain_type(annotation: Any) -> Any:
    """Return the type of a setting without None and without `Annotated`."""
    if get_origin(annotation) is Annotated:
        return plain_type(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        first, *_ = (one for one in get_args(annotation) if one is not type(None))
        return plain_type(first)
    return annotation


def _describe_type(annotation: Any) -> str:
    plain = plain_type(annotation)
    if get_origin(plain) is Literal:
        return f"one of {', '.join(map(str, get_args(plain)))}"
    names = {int: "an integer", float: "a number", bool: "true or false", str: "text"}
    if plain in names:
        return names[plain]
    container = get_origin(plain) or plain
    if isinstance(container, type) and issubclass(container, Mapping):
        return "a mapping"
    return "a list" if container in (list, tuple) else getattr(container, "__name__", str(container))
