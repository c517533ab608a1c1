"""The results of a reproduction: the judged points of each evaluation, and every number beside ours."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from dent.defense.text import parse_settings
from dent.evaluation import Evaluation, load_results
from dent.evaluation.attacks import find_attack
from dent.evaluation.paired import JudgedPoints, pair_points
from dent.evaluation.pipeline import load_points
from dent.evaluation.plan import sketch_plan
from dent.evaluation.results import Cost, Score, score_points
from dent.paper.scales import Scale, Work, find_scale, resolve
from dent.paper.tables import MEASURES, Ask, PaperTable, PublishedNumber, tables

RESULTS = "paper.json"
FORMAT = 1
COSTS = {"seconds": "seconds", "times seconds": "times_seconds", "times flops": "times_flops"}
USUAL_SIZE = {"imagenet": 50_000}  # images of a test set, for estimates; CIFAR's have 10,000
Points = dict[int, bool]  # by index in the data set: whether the answer is correct


@dataclass(frozen=True)
class JudgedCell:
    """The outcome of one evaluation of one cell.

    judged: which points are correct: "natural", under each attack by name, "direct" (all attacks on the
    defended model itself), "protocol" (the reference AutoAttack, if it was run) and "worst" (all).
    missing: units that failed or were not done.
    """

    asked: dict[str, Any]
    judged: dict[str, Points]
    cost: Cost | None = None
    missing: tuple[str, ...] = ()
    battle: dict[str, Any] | None = field(default=None, repr=False)
    versions: dict[str, str] = field(default_factory=dict)

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
        return content | {"versions": self.versions} | ({"battle": self.battle} if self.battle else {})

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
        )


def load_judged_cell(folder: Path) -> JudgedCell:
    """Return what the run of a single cell has judged so far."""
    results = load_results(folder)
    (judged,) = load_points(folder).values()
    (cell,) = results.cells
    return JudgedCell(
        asked=results.about["asked"],
        judged=judged,
        cost=cell.cost,
        missing=tuple(map(str, cell.missing)),
        battle=cell.battle,
        versions=results.about["versions"],
    )


@dataclass(frozen=True)
class Measurement:
    """A number of the paper beside what was measured for it here.

    work: None if the scale leaves the number out.
    score: under the paper's own attacks. worst: also under the attacks made for adaptation.
    value: of a number that is no accuracy: a cost, or a difference in percentage points.
    value_interval: the 95 % interval of the value. missing: why nothing was measured.
    judged, worst_judged: the points of score and worst; those of the same work are the same object.
    """

    number: PublishedNumber
    work: Work | None
    score: Score | None = None
    worst: Score | None = None
    value: float | None = None
    value_interval: tuple[float, float] | None = None
    judged: JudgedPoints | None = field(default=None, repr=False)
    worst_judged: JudgedPoints | None = field(default=None, repr=False)
    missing: str | None = None

    @property
    def ours(self) -> float | None:
        """The number measured here, in the unit of the published one."""
        return self.score.percent if self.score else self.value

    @property
    def difference(self) -> float | None:
        """Ours minus published."""
        if self.ours is None or self.number.published is None:
            return None
        return self.ours - self.number.published

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % interval of our number; None if too few batches support one."""
        return self.score.interval if self.score else self.value_interval

    @property
    def n(self) -> int:
        return len(self.judged.points) if self.judged else 0

    @property
    def batches(self) -> int | None:
        """The number of batches that hold these points; None if it is not known."""
        return score_points(self.judged).batches if self.judged else None

    def to_json(self) -> dict[str, Any]:
        number, work = self.number, self.work
        return {
            "row": number.row,
            "column": number.column,
            "published": number.published,
            "ours": self.ours,
            "difference": self.difference,
            "n": self.n,
            "batches": self.batches,
            "interval": list(self.interval) if self.interval else None,
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


def measure(
    number: PublishedNumber,
    work: Work | None,
    cell: JudgedCell | None,
    other: JudgedCell | None = None,
) -> Measurement:
    """Return what a judged cell says about a number.

    other: the cell of the defense that the number is compared with (`Ask.minus`).
    """
    ask = number.ask
    if work is None:
        return Measurement(number, None, missing="left out at this scale")
    if cell is None:
        return Measurement(number, work, missing="not run")
    if ask.measure in COSTS:
        value = getattr(cell.cost, COSTS[ask.measure], None) if cell.cost else None
        missing = _explain_missing(cell) if value is None else None
        return Measurement(number, work, value=value, missing=missing)
    name = "claimed" if ask.measure == "adversarial" else ask.measure
    # The paper's numbers under AutoAttack's attacks are what all attacks up to each one leave.
    cumulative = ask.measure not in MEASURES and find_attack(ask.measure).kind == "direct"
    points = cell.points(name, cumulative=cumulative)
    if points is None:
        return Measurement(number, work, missing=_explain_missing(cell))
    judged = cell.judge(points)
    if ask.minus is not None:
        before = other.points(name, cumulative=cumulative) if other else None
        if other is None or before is None:
            return Measurement(number, work, missing=_explain_missing(other))
        gain = pair_points(other.judge(before), judged)
        if not gain.n:
            return Measurement(number, work, missing=f"no images in common with {ask.minus}")
        value, interval = gain.difference, gain.interval
        return Measurement(number, work, value=value, value_interval=interval, judged=judged)
    worst = cell.points("worst") if _has_worst_case(ask) else None
    worst_judged = cell.judge(worst) if worst else None
    left = score_points(worst_judged) if worst_judged else None
    return Measurement(
        number, work, score_points(judged), left, judged=judged, worst_judged=worst_judged
    )  # fmt: skip


def _has_worst_case(ask: Ask) -> bool:
    """Return False for natural inputs, and for mixed batches, which are not the deployed ones."""
    if ask.measure in MEASURES:
        return ask.measure == "adversarial"
    return find_attack(ask.measure).kind != "scenario"


def _explain_missing(cell: JudgedCell | None) -> str:
    if cell is None:
        return "not run"
    return cell.missing[0] if cell.missing else "not measured"


@dataclass(frozen=True)
class Reproduction:
    """What was measured at a scale.

    cells: by the name of the folder of their work. troubles: why other work has no result.
    """

    scale: Scale
    cells: dict[str, JudgedCell]
    troubles: dict[str, str] = field(default_factory=dict)
    seed: int = 0
    device: str = "cpu"

    def measure_table(self, table: PaperTable) -> tuple[tuple[tuple[Measurement, ...], ...], ...]:
        """Return the measurement of every number of a table: by part, row and column."""
        return tuple(
            tuple(tuple(self._measure(table, number) for number in row) for row in part.numbers)
            for part in table.parts
        )

    def by_reference(self, table: PaperTable) -> dict[str, Measurement]:
        """Return the measurement of every number of a table by its reference."""
        return {name: self._measure(table, number) for name, number in table.references().items()}

    def _measure(self, table: PaperTable, number: PublishedNumber) -> Measurement:
        if self.scale.skips(table.name, number.column):
            return measure(number, None, None)
        works = _list_works(number.ask, self.scale, table.name)
        keys = [self.key(work) for work in works]
        for key in keys:
            if key in self.troubles:
                return Measurement(number, works[0], missing=self.troubles[key])
        return measure(number, works[0], *(self.cells.get(key) for key in keys))

    def key(self, work: Work) -> str:
        """Return the name of the folder of a piece of work."""
        return _make_key(work, self.seed, self.device)

    def list_begun(self) -> list[PaperTable]:
        """Return the tables of which at least one number was measured."""
        return [
            table
            for table in tables().values()
            if any(one.ours is not None for one in self.by_reference(table).values())
        ]

    def is_complete(self, chosen: Iterable[PaperTable]) -> bool:
        """Return True if every number that the scale asks for was measured, on all its points."""
        numbers = [one for table in chosen for one in self.by_reference(table).values() if one.work]
        cells = (self.cells.get(self.key(one.work)) for one in numbers if one.work)
        return not any(one.missing for one in numbers) and not any(one and one.missing for one in cells)

    def to_json(self) -> dict[str, Any]:
        """Return everything that is needed to make every table again."""
        usual = find_scale(self.scale.name).models
        data = {
            name: one.data
            for name, one in self.scale.models.items()
            if name in usual and one.data != usual[name].data
        }
        about = {"format": FORMAT, "scale": self.scale.name, "seed": self.seed, "device": self.device}
        cells = {key: self.cells[key].to_json() for key in sorted(self.cells)}
        return about | {"data": data, "found": cells, "troubles": self.troubles}


def load_reproduction(path: Path) -> Reproduction:
    """Return what `dent reproduce` wrote: path is its folder, or the file paper.json alone."""
    file = path / RESULTS if path.is_dir() else path
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise ValueError(f"its format is {content['format']}, expected {FORMAT}")
        cells = {key: JudgedCell.from_json(one) for key, one in content["found"].items()}
        scale = find_scale(content["scale"]).with_data(content.get("data", {}))
        troubles = {str(key): str(why) for key, why in content["troubles"].items()}
        return Reproduction(scale, cells, troubles, int(content["seed"]), str(content["device"]))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(
            f"{file} is no reproduction ({type(error).__name__}: {error}); dent reproduce writes one"
        ) from error


def make_work_evaluation(work: Work, *, seed: int, device: str) -> Evaluation:
    """Return the evaluation of a piece of work."""
    return Evaluation(
        models=(work.model,),
        defenses=(work.defense,),
        suite="none",
        attacks=work.attacks,
        data=work.data,
        n=work.n,
        batch_size=work.batch_size,
        norm=work.norm,
        eps=work.eps,
        protocol=work.protocol,
        battle=work.battle,
        seed=seed,
        device=device,
    )


def name_folder(evaluation: Evaluation) -> str:
    """Return a readable name that belongs to this evaluation alone."""
    (cell,) = evaluation.cells()
    text = json.dumps(evaluation.to_json(), sort_keys=True)
    return f"{cell.slug.rpartition('_')[0]}_{hashlib.sha256(text.encode()).hexdigest()[:10]}"


@cache
def _make_key(work: Work, seed: int, device: str) -> str:
    """Return the folder's name; cached, because every number of every table asks for it."""
    return name_folder(make_work_evaluation(work, seed=seed, device=device))


def list_works(chosen: Iterable[PaperTable], scale: Scale) -> list[Work]:
    """Return everything that the tables need, each piece of work once."""
    works: dict[str, Work] = {}
    for table in chosen:
        for number in table.references().values():
            if not scale.skips(table.name, number.column):
                for work in _list_works(number.ask, scale, table.name):
                    works.setdefault(_make_key(work, 0, "cpu"), work)
    return list(works.values())


def _list_works(ask: Ask, scale: Scale, table: str) -> list[Work]:
    """Return the work of a number, and that of the defense which it is compared with."""
    asks = [ask] + ([replace(ask, defense=ask.minus, minus=None)] if ask.minus else [])
    return [resolve(one, scale, table) for one in asks]


def count_forwards(work: Work) -> float:
    """Return about how many images go through the static model, at most."""
    evaluation = make_work_evaluation(work, seed=0, device="cpu")
    plan = sketch_plan(evaluation, work.n or USUAL_SIZE.get(re.split("[:#]", work.data)[0], 10_000))
    return sum(map(plan.forwards, plan.units()))
