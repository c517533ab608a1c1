"""Declared settings inside of others: one error lists the faults of all of them, and says where."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from pydantic import Field

from dent.declared import Declared


class Row(Declared):
    title: ClassVar[str] = "row"
    name: str
    n: int | None = Field(default=None, ge=1)


class Sheet(Declared):
    title: ClassVar[str] = "sheet"
    rows: list[Row] = Field(min_length=1)
    named: dict[str, Row] = Field(default_factory=dict)


def test_one_error_lists_every_fault_of_nested_settings() -> None:
    named: Any = {"x": {"name": "x", "n": True}}
    rows: list[Any] = [{"name": 3}, {"name": "a", "n": 0}, {"name": "b", "nn": 1}, 7, {"name": "c"}]
    with pytest.raises(ValueError, match="5 wrong settings of the sheet") as raised:
        Sheet(rows=rows, named=named)
    assert str(raised.value).splitlines()[1:] == [
        "  rows.3: name: expected text, got 3",
        "  rows.a: n: expected an integer >= 1, got 0",
        "  rows.b: unknown settings of the row: nn; did you mean 'n'? Expected any of: name, n",
        "  rows.3: expected keys and values, got 7",
        "  named.x: n: expected an integer >= 1, got True",
    ]


def test_settings_alone_raise_as_before_after_nested_ones_failed() -> None:
    with pytest.raises(ValueError, match=r"rows: expected 1 or more entries, got \[\]"):
        Sheet(rows=[])
    with pytest.raises(TypeError, match="unknown settings of the row: nam; did you mean 'name'"):
        Row(nam="x")  # type: ignore[call-arg]


def test_nested_settings_are_read() -> None:
    rows: Any = [{"name": "a", "n": 2}]
    sheet = Sheet(rows=rows, named={"b": Row(name="b")})
    assert sheet.rows == [Row(name="a", n=2)]
    assert sheet.named["b"].n is None
