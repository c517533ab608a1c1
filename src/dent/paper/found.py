"""What was found for a piece of the paper's work: which points stand, and what inference costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dent.evaluation import Evaluation, load_results, make_evaluation
from dent.evaluation.results import Cost
from dent.evaluation.run import load_points

Points = dict[int, bool]  # by index of the data set: is it answered correctly


@dataclass(frozen=True)
class Found:
    """The outcome of one evaluation of one cell.

    judged: which points are correct: "natural", under each attack by name, "direct" (all attacks on the
    defended model itself), "protocol" (the reference AutoAttack, where it was run) and "worst" (all).
    missing: what failed or was not done.
    """

    asked: dict[str, Any]
    judged: dict[str, Points]
    cost: Cost | None = None
    missing: tuple[str, ...] = ()
    battle: dict[str, Any] | None = field(default=None, repr=False)
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def evaluation(self) -> Evaluation:
        return make_evaluation(self.asked)

    def points(self, name: str, *, cumulative: bool = False) -> Points | None:
        """Of natural inputs, or under an attack; None if it was not judged.

        "claimed" is what the paper would say: by its protocol, else by the direct attacks.
        cumulative: only what all attacks before it leave too; they are judged in order.
        """
        if name == "claimed":
            name = "protocol" if "protocol" in self.judged else "direct"
        if not self.judged.get(name) or not cumulative:
            return self.judged.get(name) or None
        names = list(self.judged)
        left = [self.judged[one] for one in names[: names.index(name) + 1]]
        common = set.intersection(*map(set, left))
        return {point: all(one[point] for one in left) for point in left[-1] if point in common}

    def to_json(self) -> dict[str, Any]:
        """Small: a digit for each point, and the points once where they are the same."""
        usual = list(self.judged.get("natural", {}))
        judged = {}
        for name, points in self.judged.items():
            bits = "".join("01"[one] for one in points.values())
            same = list(points) == usual
            judged[name] = bits if same else {"points": list(points), "correct": bits}
        content: dict[str, Any] = {"asked": self.asked, "points": usual, "judged": judged}
        content |= {"cost": vars(self.cost) if self.cost else None, "missing": list(self.missing)}
        return content | {"versions": self.versions} | ({"battle": self.battle} if self.battle else {})

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Found:
        """What `to_json` gave.

        >>> found = Found({"n": 2}, {"natural": {4: True, 7: False}, "fpa": {7: False}})
        >>> Found.from_json(found.to_json()) == found
        True
        """
        judged = {}
        for name, bits in content["judged"].items():
            points = content["points"] if isinstance(bits, str) else bits["points"]
            bits = bits if isinstance(bits, str) else bits["correct"]
            if set(bits) - set("01"):
                raise ValueError(f"expected digits 0 and 1 for {name}, got {bits!r}")
            judged[name] = {int(one): bit == "1" for one, bit in zip(points, bits, strict=True)}
        return cls(
            asked=dict(content["asked"]),
            judged=judged,
            cost=Cost(**content["cost"]) if content["cost"] else None,
            missing=tuple(content["missing"]),
            battle=content.get("battle"),
            versions=dict(content["versions"]),
        )


def found_in(folder: Path) -> Found:
    """What the run of a single cell has found, as far as it is."""
    results = load_results(folder)
    (judged,) = load_points(folder).values()
    (cell,) = results.cells
    return Found(
        asked=results.about["asked"],
        judged=judged,
        cost=cell.cost,
        missing=cell.missing,
        battle=cell.battle,
        versions=results.about["versions"],
    )
