"""What the paper says in words, and whether the numbers measured here say the same.

A claim is data, in `claims.yaml`: a sentence, where it stands, and the comparisons that it comes down to
(`dent.paper.verdicts` has their kinds, and when they hold). A number is meant by its reference,
"table-7/dent+/ding2020/6": table, part, row, column. Where a comparison is `for` several names, each of
them takes the place of the star in its references.

A claim holds if all its comparisons do, and does not hold if one does not; else it cannot be told.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any, Protocol

import yaml

from dent.fields import refuse
from dent.names import check_known
from dent.paper.verdicts import (
    FAILS,
    HOLDS,
    KINDS,
    OPEN,
    Comparison,
    Number,
    Points,
    Verdict,
    compare,
)

PUBLISHED_SLACK = 0.5  # points that a published series may go the wrong way: chance, at 10,000 images


class Published(Protocol):
    """A number of the paper."""

    @property
    def published(self) -> float | None: ...


class Loaded(Protocol):
    """The model that was loaded for it."""

    @property
    def model(self) -> str: ...
    @property
    def stands_in(self) -> bool: ...  # for the paper's own


class Evidence(Protocol):
    """What was found for a number of the paper.

    Two numbers that are one piece of work, because one model stands in for two or because a budget is
    cut, have the same `points` object: they are not compared with one another.
    """

    @property
    def number(self) -> Published: ...
    @property
    def work(self) -> Loaded | None: ...
    @property
    def points(self) -> Points: ...  # correct or not under the paper's attacks
    @property
    def worst_points(self) -> Points: ...  # also under those made for adaptation; empty if none
    @property
    def value(self) -> float | None: ...  # of what is no accuracy: a cost
    @property
    def missing(self) -> str | None: ...  # why there is nothing


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper, in our words."""

    text: str
    where: str
    comparisons: tuple[Comparison, ...]
    note: str = ""  # how it is read here, or what the paper's own numbers say against it
    # False where it is about these very models and data: what stands in for them says nothing of it.
    stand_ins: bool = True
    worst: bool = True  # False where it is about attacks or costs: there is no worst case of these

    @property
    def references(self) -> tuple[str, ...]:
        """The numbers that decide it, each once."""
        return tuple(dict.fromkeys(one for part in self.comparisons for one in part.references))

    @property
    def tables(self) -> tuple[str, ...]:
        """The tables and figures of these numbers, by name."""
        return tuple(dict.fromkeys(one.partition("/")[0] for one in self.references))


@dataclass(frozen=True)
class Judgment:
    """What becomes of a claim: by the numbers found here, in the worst case, by the paper's own."""

    claim: Claim
    verdict: Verdict
    worst_verdict: Verdict | None  # None where no number of the claim has a worst case
    evidence: tuple[str, ...]
    worst_evidence: tuple[str, ...] = ()
    published_verdict: Verdict = OPEN

    def to_json(self) -> dict[str, Any]:
        """The claim in words, the verdicts, and the numbers behind them."""
        claim = {"text": self.claim.text, "where": self.claim.where, "note": self.claim.note}
        rest = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "claim"}
        return claim | {key: list(v) if isinstance(v, tuple) else v for key, v in rest.items()}


@cache
def claims() -> tuple[Claim, ...]:
    """Every claim of the paper's text that its numbers can decide, in the order of the text."""
    return read_claims(Path(__file__).with_name("claims.yaml").read_text(encoding="utf-8"))


def judge(claim: Claim, measured: Mapping[str, Evidence]) -> Judgment:
    """What the numbers measured, by reference, say of a claim."""
    known = {one: measured[one] for one in claim.references if one in measured}
    verdict, evidence = _weigh(claim, lambda one: _number(claim, known.get(one), worst=False))
    published = published_verdict(claim, {one: found.number.published for one, found in known.items()})
    if not claim.worst or not any(found.worst_points for found in known.values()):
        return Judgment(claim, verdict, None, evidence, (), published)
    worst_verdict, worst_evidence = _weigh(claim, lambda one: _number(claim, known.get(one), worst=True))
    return Judgment(claim, verdict, worst_verdict, evidence, worst_evidence, published)


def published_verdict(claim: Claim, published: Mapping[str, float | None]) -> Verdict:
    """Whether the paper's own numbers, by reference, say what its text says: by plain comparison."""

    def number(reference: str) -> Number | str:
        value = published.get(reference)
        return "not published" if value is None else float(value)

    return _weigh(claim, number, PUBLISHED_SLACK)[0]


def _number(claim: Claim, found: Evidence | None, *, worst: bool) -> Number | str:
    """What a comparison is made with, or why there is nothing."""
    if found is None:
        return "not measured"
    if found.missing:
        return found.missing
    if found.work and found.work.stands_in and not claim.stand_ins:
        return f"{found.work.model} stands in for it"
    if found.value is not None:
        return float(found.value)
    return (worst and found.worst_points) or found.points or "no points"


def _weigh(
    claim: Claim, number: Callable[[str], Number | str], slack: float = 0.0
) -> tuple[Verdict, tuple[str, ...]]:
    """The verdict of all comparisons, and their lines; what two of them say in the same words, once."""
    verdicts: list[Verdict] = []
    lines: dict[str, dict[str, None]] = {}
    for one in claim.comparisons:
        place, names = _names(one.references)
        verdict, line = compare(one, names, [number(reference) for reference in one.references], slack)
        verdicts.append(verdict)
        lines.setdefault(line, {})[place] = None
    told = tuple(": ".join(filter(None, (_together(places), line))) for line, places in lines.items())
    if FAILS in verdicts:
        return FAILS, told
    return (HOLDS if set(verdicts) == {HOLDS} else OPEN), told


def _names(references: Sequence[str]) -> tuple[str, list[str]]:
    """What references have in common, and how each is called beside the others.

    >>> _names(["table-7/dent+/ding2020/6", "table-7/dent/ding2020/40"])
    ('table-7 ding2020', ['dent+ 6', 'dent 40'])
    >>> _names(["figure-4/linf/dent/8/255", "figure-4/linf/dent/4/255"])
    ('figure-4 linf dent', ['8/255', '4/255'])
    """
    parts = [re.split(r"/(?!255\b)", reference) for reference in references]  # 8/255 is one word
    if len({len(one) for one in parts}) > 1:
        return "", list(references)
    common = [len(set(column)) == 1 for column in zip(*parts, strict=True)]
    place = " ".join(part for part, same in zip(parts[0], common, strict=True) if same)
    return place, [
        " ".join(part for part, same in zip(one, common, strict=True) if not same) for one in parts
    ]


def _together(places: Iterable[str]) -> str:
    """Several places in one, what they begin with once.

    >>> _together(["table-1 linf carmon2019", "table-1 linf wong2020"])
    'table-1 linf carmon2019, wong2020'
    """
    words = [place.split(" ") for place in places]
    columns = zip(*words, strict=False)  # as far as the shortest goes
    shared = [column[0] for column in takewhile(lambda column: len(set(column)) == 1, columns)]
    rests = (" ".join(one[len(shared) :]) for one in words)
    return " ".join([*shared, ", ".join(filter(None, rests))]).strip()


def read_claims(text: str) -> tuple[Claim, ...]:
    """Claims as YAML has them; all that is wrong with them is said at once.

    >>> read_claims("[{text: dent helps, where: Table 1, comparisons: [{more: [t/p/r/dent]}]}]")
    Traceback (most recent call last):
    ...
    ValueError: 1 wrong setting of the claims:
      'dent helps': more: expected 2 references, got 1
    """
    content = yaml.safe_load(text)
    if not isinstance(content, list):
        raise ValueError(f"expected a list of claims, got {type(content).__name__}")
    found, faults = [], []
    for place, one in enumerate(content, 1):
        try:
            found.append(_claim(one))
        except (TypeError, ValueError) as error:
            name = one.get("text") if isinstance(one, dict) else None
            faults.append(f"{repr(name) if name else f'claim {place}'}: {error}")
    refuse(faults, " of the claims")
    return tuple(found)


def _claim(content: Any) -> Claim:
    if not isinstance(content, dict):
        raise TypeError(f"expected text, where and comparisons, got {content!r}")
    check_known("keys of a claim", map(str, content), [one.name for one in fields(Claim)])
    for key in ("stand_ins", "worst"):
        if not isinstance(content.get(key, True), bool):
            raise TypeError(f"expected true or false for {key}, got {content[key]!r}")
    for key in ("text", "where", "note"):
        if not isinstance(content.get(key, "" if key == "note" else None), str):
            raise TypeError(f"expected a text for {key}, got {content.get(key)!r}")
    if not isinstance(asked := content.get("comparisons"), list) or not asked:
        raise TypeError(f"expected a list of comparisons, got {asked!r}")
    comparisons = tuple(made for one in asked for made in _comparisons(one))
    return Claim(**content | {"comparisons": comparisons})


def _comparisons(content: Any) -> list[Comparison]:
    """One for each name that it is `for`."""
    kinds = [key for key in content if key in KINDS] if isinstance(content, dict) else []
    if len(kinds) != 1:
        raise TypeError(f"expected a comparison by one of {', '.join(KINDS)}, got {content!r}")
    name, kind = kinds[0], KINDS[kinds[0]]
    check_known(f"keys of {name}", map(str, content), [name, *kind.keys, "for"])
    told = {key: content.get(key, default) for key, default in kind.keys.items()}
    for key, value in told.items():
        if key != "of" and type(value) not in (int, float):
            raise TypeError(f"{name}: expected a number for {key}, got {value!r}")
    references = content[name] if isinstance(content[name], list) else [content[name]]
    if told.get("of", "") != "":
        references = [*references, told["of"]]
    if not all(isinstance(one, str) and "/" in one for one in references):
        raise TypeError(f"{name}: expected references as table-7/dent+/ding2020/6, got {references!r}")
    if not kind.least <= len(references) <= kind.most:
        count = f"{kind.least} to {kind.most}" if kind.least < kind.most else f"{kind.least}"
        raise ValueError(f"{name}: expected {count} references, got {len(references)}")
    if len(set(references)) < len(references):
        raise ValueError(f"{name}: expected each reference once, got {references!r}")
    each = content.get("for", ["*"])
    if (
        not isinstance(each, list)
        or not each
        or any("*" in one for one in references) != ("for" in content)
    ):
        raise ValueError(f"{name}: expected names `for` the * of its references, got {content!r}")
    bound = next((float(told[key]) for key in ("by", "within", "share", "value") if key in told), 0.0)
    factor = float(told.get("factor", 1.0))
    return [
        Comparison(name, tuple(one.replace("*", str(star)) for one in references), bound, factor)
        for star in each
    ]
