"""A number of the paper, beside what was measured for it here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dent.evaluation.attacks import kind_of
from dent.evaluation.paired import paired
from dent.evaluation.results import Score
from dent.paper.found import Found, Points
from dent.paper.scales import Work
from dent.paper.tables import MEASURES, Ask, Number

COSTS = {"seconds": "seconds", "times seconds": "times_seconds", "times flops": "times_flops"}


@dataclass(frozen=True)
class Measured:
    """What was published, and what was found.

    score: under the paper's own attacks. worst: also under the attacks made for adaptation.
    value: of numbers that are no accuracies: costs, and differences in percentage points.
    """

    number: Number
    work: Work | None  # None where the scale leaves it out
    score: Score | None = None
    worst: Score | None = None
    value: float | None = None
    low: float | None = None  # 95 % interval of the value
    high: float | None = None
    points: Points = field(default_factory=dict, repr=False)
    worst_points: Points = field(default_factory=dict, repr=False)
    missing: str | None = None

    @property
    def ours(self) -> float | None:
        """In the unit of what was published."""
        return self.score.percent if self.score else self.value

    @property
    def difference(self) -> float | None:
        """Ours minus what was published."""
        if self.ours is None or self.number.published is None:
            return None
        return self.ours - self.number.published

    @property
    def n(self) -> int:
        return self.score.n if self.score else len(self.points)

    def to_json(self) -> dict[str, Any]:
        number, work = self.number, self.work
        return {
            "row": number.row,
            "column": number.column,
            "published": number.published,
            "ours": self.ours,
            "difference": self.difference,
            "n": self.n,
            "interval": _interval(self.score, self.low, self.high),
            "worst": self.worst.to_json() if self.worst else None,
            "model": work.model if work else None,
            "stands_in_for": number.ask.model if work and work.stands_in else None,
            "defense": number.ask.defense,
            "norm": number.ask.norm,
            "eps": number.ask.eps,
            "attacks": list(work.attacks) if work else None,
            "measure": number.ask.measure,
            "missing": self.missing,
        }


def measure(number: Number, work: Work | None, found: Found | None, other: Found | None) -> Measured:
    """What was found for a number; `other` is of the defense that it is compared with."""
    ask = number.ask
    if work is None:
        return Measured(number, None, missing="left out at this scale")
    if found is None:
        return Measured(number, work, missing="not run")
    if ask.measure in COSTS:
        value = getattr(found.cost, COSTS[ask.measure], None) if found.cost else None
        return Measured(number, work, value=value, missing=_why(found) if value is None else None)
    points = found.points(judged_as(ask), cumulative=_is_direct(ask))
    worst = {} if _has_no_worst(ask) else found.points("worst") or {}
    if points is None:
        return Measured(number, work, missing=_why(found))
    if ask.minus is not None:
        before = other.points(judged_as(ask), cumulative=_is_direct(ask)) if other else None
        if before is None:
            return Measured(number, work, missing=_why(other))
        gain = paired(before, points)
        if not gain.n:
            return Measured(number, work, missing=f"no points in common with {ask.minus}")
        return Measured(number, work, value=gain.difference, low=gain.low, high=gain.high, points=points)
    score = Score(sum(points.values()), len(points))
    left = Score(sum(worst.values()), len(worst)) if worst else None
    return Measured(number, work, score, left, points=points, worst_points=worst)


def judged_as(ask: Ask) -> str:
    """The name under which the points of a measure were judged."""
    return {"adversarial": "claimed"}.get(ask.measure, ask.measure)


def _is_direct(ask: Ask) -> bool:
    """Whether it is one of AutoAttack's: the paper's numbers under these are what all up to it leave."""
    return ask.measure not in MEASURES and kind_of(ask.measure) == "direct"


def _has_no_worst(ask: Ask) -> bool:
    """Natural inputs have no worst case, nor have mixed batches, which are not the deployed ones."""
    return ask.measure == "natural" or ask.measure.startswith(("mixed", "one among"))


def _why(found: Found | None) -> str:
    if found is None:
        return "not run"
    return found.missing[0] if found.missing else "not measured"


def _interval(score: Score | None, low: float | None, high: float | None) -> list[float] | None:
    if score:
        return [score.low, score.high]
    return None if low is None or high is None else [low, high]
