"""Why claims of the paper do not hold: one sentence each, from a measurement.

The sentences are data: a file `why.yaml` beside stored results, with an entry for each claim and scale.
An entry names what was measured: a JSON file by its path from there, or numbers of the tables by
reference. Every number of its sentence must be one of these.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field

from dent.declared import Declared, raise_faults
from dent.names import lookup
from dent.paper.claims import claims
from dent.paper.results import Reproduction
from dent.paper.tables import tables
from dent.texts import join_lines

REASONS = "why.yaml"
NUMBER = re.compile(r"(?<![\w.-])-?\d[\d,]*(?:\.\d+)?(?![\w-])")  # none that is part of a name


class Reason(Declared):
    """Why a claim does not hold at a scale.

    claim: its text. source: path, from the folder of this file, of a JSON file with the numbers.
    where: what the entries of that file must have for their numbers to count, such as a model.
    references: numbers of the tables that are in the sentence.
    """

    title = "reason"
    claim: str
    scale: str
    why: str = Field(min_length=1)
    source: str | None = None
    where: dict[str, str | int | float] = Field(default_factory=dict)
    references: list[str] = Field(default_factory=list)


def read_reasons(folder: Path, reproductions: Iterable[Reproduction]) -> dict[tuple[str, str], str]:
    """Return the sentences of a folder by scale and claim; none if it has no such file.

    Raise one ValueError that lists every fault: an unknown claim or scale, more than a sentence, or a
    number that was not measured.
    """
    file = folder / REASONS
    if not file.is_file():
        return {}
    content = yaml.safe_load(file.read_text(encoding="utf-8")) or []
    if not isinstance(content, list):
        raise ValueError(f"expected a list of reasons in {file}, got {type(content).__name__}")
    known = {one.scale.name: one for one in reproductions}
    reasons: dict[tuple[str, str], str] = {}
    faults = []
    for place, entry in enumerate(content, 1):
        try:
            if not isinstance(entry, dict):
                raise TypeError(f"expected claim, scale, why and what was measured, got {entry!r}")
            reason = Reason(**entry)
            lookup("claim", reason.claim, {one.text: one for one in claims()})
            if (reason.scale, reason.claim) in reasons:
                raise ValueError(f"expected one sentence for scale {reason.scale}, got another")
            _check_sentence(reason, folder, lookup("scale with results", reason.scale, known))
            reasons[reason.scale, reason.claim] = reason.why
        except (ValueError, TypeError, OSError) as error:
            faults.append(f"reason {place}: {join_lines(error)}")
    raise_faults(faults, f" of {file}")
    return reasons


def _check_sentence(reason: Reason, folder: Path, found: Reproduction) -> None:
    """Raise ValueError if it is not one sentence, or has a number that was not measured."""
    if not re.fullmatch(r"[^.]*(?:\.\d[^.]*)*\.", reason.why):
        raise ValueError(f"expected one sentence that ends with a full stop, got {reason.why!r}")
    if reason.source is None and not reason.references:
        raise ValueError("expected a source or references: what was measured")
    measured = list(_list_referenced(reason.references, found))
    if reason.source is not None:
        content = json.loads((folder / reason.source).read_text(encoding="utf-8"))
        for entry in _list_entries(content, reason.where):
            measured += _list_numbers(entry)
    for text in NUMBER.findall(reason.why):
        digits = len(text.partition(".")[2])
        value = text.replace(",", "")
        if all(f"{one:.{digits}f}" != value for one in measured):
            raise ValueError(f"{text} is none of the numbers that were measured")


def _list_referenced(references: Iterable[str], found: Reproduction) -> Iterator[float]:
    """Yield our numbers, in the worst case too, their n, and the published ones."""
    for reference in references:
        table = lookup("table", reference.partition("/")[0], tables())
        one = lookup("number", reference, found.by_reference(table))
        worst = one.worst.percent if one.worst else None
        for value in (one.ours, worst, float(one.n), one.number.published):
            if value is not None:
                yield value


def _list_entries(content: Any, where: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the mappings of a JSON file that have all of these values, wherever they stand."""
    if isinstance(content, Mapping) and where.items() <= content.items():
        yield content
    elif isinstance(content, Mapping | list):
        for one in content.values() if isinstance(content, Mapping) else content:
            yield from _list_entries(one, where)


def _list_numbers(content: Any) -> Iterator[float]:
    """Yield every number in a piece of JSON."""
    if isinstance(content, Mapping):
        content = list(content.values())
    if isinstance(content, list):
        for one in content:
            yield from _list_numbers(one)
    elif isinstance(content, int | float) and not isinstance(content, bool):
        yield float(content)
