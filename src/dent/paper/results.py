"""The results of a reproduction: every number of the paper beside ours."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from dent.evaluation import Evaluation
from dent.evaluation.attacks import find_attack
from dent.evaluation.paired import JudgedPoints, pair_points
from dent.evaluation.plan import sketch_plan
from dent.evaluation.results import Score, score_points
from dent.paper.cells import JudgedCell
from dent.paper.scales import ALONE, Scale, Work, resolve
from dent.paper.tables import MEASURES, Ask, PaperTable, PublishedNumber, tables

RESULTS = "paper.json"
FORMAT = 2  # from 2 on, the whole scale is in the file: a later change of it changes no stored number
COSTS = {"seconds": "seconds", "times seconds": "times_seconds", "times flops": "times_flops"}
NAMES = {"adversarial": "claimed", "joint": "direct"}  # of the judged points, where they differ
USUAL_SIZE = {"imagenet": 50_000}  # images of a test set, for estimates; CIFAR's have 10,000


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
    def is_left_out(self) -> bool:
        """True if the scale does not measure this number."""
        return self.work is None and self.missing is not None

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
    work: Work,
    cell: JudgedCell | None,
    other: JudgedCell | None = None,
) -> Measurement:
    """Return what a judged cell says about a number.

    other: the cell of the defense that the number is compared with (`Ask.minus`).
    """
    ask = number.ask
    if cell is None:
        return Measurement(number, work, missing="not run")
    if ask.measure in COSTS:
        value = getattr(cell.cost, COSTS[ask.measure], None) if cell.cost else None
        missing = _explain_missing(cell) if value is None else None
        return Measurement(number, work, value=value, missing=missing)
    name = NAMES.get(ask.measure, ask.measure)
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
    """Return False for natural inputs, mixed batches, and sets of attacks that are run alone."""
    if ask.attack in ALONE:
        return False
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
        if reason := self.scale.explain_left_out(table.name, number):
            return Measurement(number, None, missing=reason)
        works = _list_works(number.ask, self.scale, table.name)
        keys = [self.key(work) for work in works]
        for key in keys:
            if key in self.troubles:
                return Measurement(number, works[0], missing=self.troubles[key])
        return measure(number, works[0], *(self.cells.get(key) for key in keys))

    def key(self, work: Work) -> str:
        """Return the name of the folder of a piece of work."""
        return make_key(work, self.seed, self.device)

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
        about = {"format": FORMAT, "scale": self.scale.model_dump(mode="json", exclude_defaults=True)}
        about |= {"seed": self.seed, "device": self.device}
        cells = {key: self.cells[key].to_json() for key in sorted(self.cells)}
        return about | {"found": cells, "troubles": self.troubles}


def load_reproduction(path: Path) -> Reproduction:
    """Return what `dent reproduce` wrote: path is its folder, or the file paper.json alone."""
    file = path / RESULTS if path.is_dir() else path
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise ValueError(f"its format is {content['format']}, expected {FORMAT}")
        cells = {key: JudgedCell.from_json(one) for key, one in content["found"].items()}
        scale = Scale(**content["scale"])
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
        steps=work.steps,
        queries=work.queries,
        mixed_precision=work.mixed_precision,
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
def make_key(work: Work, seed: int, device: str) -> str:
    """Return the folder's name; cached, because every number of every table asks for it."""
    return name_folder(make_work_evaluation(work, seed=seed, device=device))


def list_works(chosen: Iterable[PaperTable], scale: Scale) -> list[Work]:
    """Return everything that the tables need, each piece of work once."""
    works: dict[str, Work] = {}
    for table in chosen:
        for number in table.references().values():
            if scale.explain_left_out(table.name, number) is None:
                for work in _list_works(number.ask, scale, table.name):
                    works.setdefault(make_key(work, 0, "cpu"), work)
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
