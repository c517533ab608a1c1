"""The outcome of one evaluation of one cell: which of its points are correct, and what it cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from dent.defense.text import parse_settings
from dent.evaluation import Evaluation, load_results
from dent.evaluation.paired import JudgedPoints
from dent.evaluation.results import Cost

Points = dict[int, bool]  # by index in the data set: whether the answer is correct


@dataclass(frozen=True)
class JudgedCell:
    """The outcome of one evaluation of one cell.

    judged: which points are correct: "natural", under each attack by name, "direct" (all attacks on the
    defended model itself), "protocol" (the reference AutoAttack, if it was run) and "worst" (all).
    missing: units that failed or were not done.
    weights: digest of the model that was evaluated; empty in files that do not have it.
    """

    asked: dict[str, Any]
    judged: dict[str, Points]
    cost: Cost | None = None
    missing: tuple[str, ...] = ()
    battle: dict[str, Any] | None = field(default=None, repr=False)
    versions: dict[str, str] = field(default_factory=dict)
    weights: str = ""

    @property
    def evaluation(self) -> Evaluation:
        return Evaluation(**self.asked)

    def judge(self, points: Points) -> JudgedPoints:
        """Return points of this cell with their batches, in whose order they stand."""
        known = points.keys() <= self._batch_of.keys()
        return JudgedPoints(points, self._independent, self._batch_of if known else None)

    @cached_property
    def _batch_of(self) -> dict[int, int]:
        size = self.evaluation.batch_size
        return {point: place // size for place, point in enumerate(self.judged.get("natural", ()))}

    @cached_property
    def _independent(self) -> bool:
        (defense,) = self.evaluation.defenses
        return parse_settings(defense).independent

    def points(self, name: str, *, cumulative: bool = False) -> Points | None:
        """Return which points are correct naturally or under an attack; None if this was not judged.

        "claimed" is what the paper would report: by its protocol, otherwise by the direct attacks.
        cumulative: count only points that all attacks before this one leave correct too.
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
        """Return a small form: a digit for each point, and the points once where they are the same."""
        usual = list(self.judged.get("natural", {}))
        judged = {}
        for name, points in self.judged.items():
            bits = "".join("01"[one] for one in points.values())
            same = list(points) == usual
            judged[name] = bits if same else {"points": list(points), "correct": bits}
        content: dict[str, Any] = {"asked": self.asked, "points": usual, "judged": judged}
        content |= {"cost": vars(self.cost) if self.cost else None, "missing": list(self.missing)}
        content |= {"versions": self.versions, "weights": self.weights}
        return content | ({"battle": self.battle} if self.battle else {})

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> JudgedCell:
        """Return the cell that `to_json` wrote.

        >>> cell = JudgedCell({"n": 2}, {"natural": {4: True, 7: False}, "fpa": {7: False}})
        >>> JudgedCell.from_json(cell.to_json()) == cell
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
            weights=content.get("weights", ""),
        )


def load_judged_cell(folder: Path) -> JudgedCell:
    """Return what the run of a single cell has judged so far."""
    results = load_results(folder)
    (cell,) = results.cells
    (weights,) = results.about["models_sha256"].values()
    return JudgedCell(
        asked=results.about["asked"],
        judged=cell.verdicts,
        cost=cell.cost,
        missing=tuple(map(str, cell.missing)),
        battle=cell.battle,
        versions=results.about["versions"] | {"suite": results.about["suite_version"]},
        weights=weights,
    )
