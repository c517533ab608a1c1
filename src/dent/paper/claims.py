"""What the paper says in words, and whether the numbers measured here say the same.

A claim is data, in `claims.yaml`: a sentence, where it stands in the paper, and the conditions that it
comes down to (`dent.paper.verdicts` lists their kinds). A reference names a number:
"table-7/dent+/ding2020/6" is table, part, row, column. If a condition has `each`, every name of that
list takes the place of the star in its references.

A claim holds if all its conditions hold, does not hold if one does not, shows far less than published if
one of the others does, and otherwise cannot be told. A scale may leave numbers out, above all those of
models that it does not have. Conditions on these are left out too, and a series goes on without them;
the judgment says how many conditions are left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, ClassVar

import yaml
from pydantic import AfterValidator, BeforeValidator, Field

from dent.declared import Declared, raise_faults
from dent.paper.results import Measurement, Reproduction
from dent.paper.tables import tables
from dent.paper.verdicts import (
    FAILS,
    HOLDS,
    OPEN,
    SERIES,
    SMALLER,
    Condition,
    Evidence,
    Figure,
    Verdict,
    weigh,
)

PUBLISHED_SLACK = 0.5  # points that a published series may go the wrong way: chance, at 10,000 images


def _check_reference(reference: str) -> str:
    if "/" not in reference:
        raise ValueError(f"expected a reference such as table-7/dent+/ding2020/6, got {reference!r}")
    return reference


def _check_once(references: list[str]) -> list[str]:
    if len(set(references)) < len(references):
        raise ValueError(f"expected each reference once, got {references!r}")
    return references


Reference = Annotated[str, AfterValidator(_check_reference)]
Pair = Annotated[list[Reference], Field(min_length=2, max_length=2), AfterValidator(_check_once)]
Series = Annotated[list[Reference], Field(min_length=2), AfterValidator(_check_once)]


class _Written(Declared):
    """A condition as it is written; `each` lists the names that take the place of the star."""

    title = "condition"
    bound_name: ClassVar[str] = ""  # the setting that becomes `Condition.bound`
    each: list[str | int | float] | None = Field(default=None, min_length=1)

    def expand(self, kind: str) -> list[Condition]:
        """Return a condition for each name."""
        named = getattr(self, kind)
        references = [named] if isinstance(named, str) else list(named)
        references += filter(None, [getattr(self, "of", None)])
        if any("*" in one for one in references) != (self.each is not None):
            raise ValueError(f"{kind}: expected names in `each` for the * of its references")
        bound = float(getattr(self, self.bound_name)) if self.bound_name else 0.0
        factor = float(getattr(self, "factor", 1.0))
        return [
            Condition(kind, tuple(one.replace("*", str(star)) for one in references), bound, factor)
            for star in self.each or ["*"]
        ]


class _More(_Written):
    bound_name = "by"
    more: Pair
    by: float = 0.0


class _Same(_Written):
    bound_name = "within"
    same: Pair
    within: float


class _AtLeast(_Written):
    bound_name = "share"
    at_least: Reference
    share: float
    of: Reference


class _AtMost(_Written):
    bound_name = "share"
    at_most: Reference
    share: float
    of: Reference


class _Rises(_Written):
    rises: Series


class _Falls(_Written):
    falls: Series


class _ValueNear(_Written):
    bound_name = "value"
    value_near: Reference
    value: float
    factor: float = 1.25
    of: Reference | None = None


KINDS: dict[str, type[_Written]] = {
    "more": _More, "same": _Same, "at_least": _AtLeast, "at_most": _AtMost, "rises": _Rises,
    "falls": _Falls, "value_near": _ValueNear,
}  # fmt: skip


def _read_conditions(content: Any) -> Any:
    """Return the conditions of a claim: one for each entry, or for each name of its `each`."""
    if not isinstance(content, list) or not content:
        return content
    made: list[Condition] = []
    for entry in content:
        kinds = [key for key in entry if key in KINDS] if isinstance(entry, dict) else []
        if len(kinds) != 1:
            raise ValueError(f"expected a condition by one of {', '.join(KINDS)}, got {entry!r}")
        made += KINDS[kinds[0]](**entry).expand(kinds[0])
    return tuple(made)


class Claim(Declared):
    """A sentence of the paper, in our words.

    note: how it is read here, or how the paper's own numbers contradict it.
    stand_ins: False if it is about these very models and data, so that stand-ins say nothing about it.
    worst: False if it is about attacks or costs, which have no worst case.
    """

    title = "claim"
    text: str
    where: str
    conditions: Annotated[tuple[Condition, ...], BeforeValidator(_read_conditions)]
    note: str = ""
    stand_ins: bool = True
    worst: bool = True

    @property
    def references(self) -> tuple[str, ...]:
        """The numbers that decide it, each once."""
        return tuple(dict.fromkeys(one for part in self.conditions for one in part.references))

    @property
    def tables(self) -> tuple[str, ...]:
        """The names of the tables and figures of these numbers."""
        return tuple(dict.fromkeys(one.partition("/")[0] for one in self.references))


def read_claims(text: str) -> tuple[Claim, ...]:
    """Return the claims of a YAML text, or raise one ValueError that lists every fault."""
    content = yaml.safe_load(text)
    if not isinstance(content, list):
        raise ValueError(f"expected a list of claims, got {type(content).__name__}")
    made, faults = [], []
    for place, one in enumerate(content, 1):
        name = one.get("text") if isinstance(one, dict) else None
        try:
            if not isinstance(one, dict):
                raise ValueError(f"expected text, where and conditions, got {one!r}")
            made.append(Claim(**one))
        except (TypeError, ValueError) as error:
            own = getattr(error, "faults", [str(error)])
            faults += [f"{repr(name) if name else f'claim {place}'}: {fault}" for fault in own]
    raise_faults(faults, " of the claims")
    return tuple(made)


@cache
def claims() -> tuple[Claim, ...]:
    """Return every claim of the paper's text that its numbers can decide, in the order of the text."""
    return read_claims(Path(__file__).with_name("claims.yaml").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Judgment:
    """The verdicts on a claim: by our numbers, in the worst case, and by the paper's own numbers.

    worst_verdict: None if no number of the claim has a worst case.
    left_out: number of conditions about numbers that the scale leaves out; the verdicts are of the rest.
    """

    claim: Claim
    verdict: Verdict
    worst_verdict: Verdict | None
    evidence: tuple[Evidence, ...]
    worst_evidence: tuple[Evidence, ...] = ()
    published_verdict: Verdict = OPEN
    left_out: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return the claim in words, the verdicts, and the numbers behind them."""
        return {
            "text": self.claim.text,
            "where": self.claim.where,
            "note": self.claim.note,
            "verdict": self.verdict,
            "worst_verdict": self.worst_verdict,
            "published_verdict": self.published_verdict,
            "left_out": self.left_out,
            "evidence": [one.to_json() for one in self.evidence],
            "worst_evidence": [one.to_json() for one in self.worst_evidence],
        }


def judge_claims(reproduction: Reproduction) -> list[Judgment]:
    """Return the judgment of every claim of the paper's text."""
    measured: dict[str, Measurement] = {}
    for table in tables().values():
        measured |= reproduction.by_reference(table)
    return [judge(claim, measured) for claim in claims()]


def judge(claim: Claim, measured: Mapping[str, Measurement]) -> Judgment:
    """Return what measurements, by reference, say about a claim."""
    known = {one: measured[one] for one in claim.references if one in measured}
    conditions = _list_judged(claim, known)
    published = {name: one.number.published for name, one in known.items()}
    left_out = len(claim.conditions) - len(conditions)

    def weigh_all(*, worst: bool) -> tuple[Verdict, tuple[Evidence, ...]]:
        pick_figure = partial(_pick_figure, claim, known, worst=worst)
        return _weigh_all(conditions or claim.conditions, pick_figure, published=published)

    verdict, evidence = weigh_all(worst=False)
    own_verdict = judge_published(claim, published)
    made = Judgment(claim, verdict, None, evidence, (), own_verdict, left_out)
    if not claim.worst or not any(one.worst_judged for one in known.values()):
        return made
    worst_verdict, worst_evidence = weigh_all(worst=True)
    return replace(made, worst_verdict=worst_verdict, worst_evidence=worst_evidence)


def _list_judged(claim: Claim, known: Mapping[str, Measurement]) -> tuple[Condition, ...]:
    """Return the conditions that can be judged where the scale leaves numbers out."""
    left_out = {name for name, one in known.items() if one.is_left_out}
    made = []
    for condition in claim.conditions:
        rest = tuple(one for one in condition.references if one not in left_out)
        is_whole = len(rest) == len(condition.references)
        if is_whole or (condition.kind in SERIES and len(rest) > 1):
            made.append(replace(condition, references=rest))
    return tuple(made)


def judge_published(claim: Claim, published: Mapping[str, float | None]) -> Verdict:
    """Return whether the paper's own numbers, by reference, say what its text says."""

    def pick_figure(reference: str) -> Figure | str:
        value = published.get(reference)
        return "not published" if value is None else float(value)

    return _weigh_all(claim.conditions, pick_figure, PUBLISHED_SLACK)[0]


def _pick_figure(
    claim: Claim, known: Mapping[str, Measurement], reference: str, *, worst: bool
) -> Figure | str:
    """Return the figure to compare, or why there is none."""
    measured = known.get(reference)
    if measured is None:
        return "not measured"
    if measured.missing:
        return measured.missing
    if measured.work and measured.work.stands_in and not claim.stand_ins:
        return f"{measured.work.model} stands in for it"
    if measured.value is not None:
        return float(measured.value)
    judged = (worst and measured.worst_judged) or measured.judged
    return judged if judged and judged.points else "no images"


def _weigh_all(
    conditions: Iterable[Condition],
    pick_figure: Callable[[str], Figure | str],
    slack: float = 0.0,
    published: Mapping[str, float | None] = MappingProxyType({}),
) -> tuple[Verdict, tuple[Evidence, ...]]:
    """Return the verdict of all conditions together, and the evidence for each."""
    evidence = tuple(
        weigh(
            one,
            [pick_figure(reference) for reference in one.references],
            slack,
            [published.get(reference) for reference in one.references],
        )
        for one in conditions
    )
    verdicts = {one.verdict for one in evidence}
    decided = next((one for one in (FAILS, SMALLER) if one in verdicts), None)
    return decided or (HOLDS if verdicts == {HOLDS} else OPEN), evidence
