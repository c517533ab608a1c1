"""What was found for the paper at a scale: every number beside the published one, every claim judged."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from dent.evaluation import Evaluation, make_evaluation
from dent.evaluation.plan import sketch_plan
from dent.paper.claims import Judgment, claims, judge
from dent.paper.found import Found
from dent.paper.measured import Measured, measure
from dent.paper.scales import Scale, Work, find_scale, resolve
from dent.paper.tables import Ask, Number, Table, tables

RESULTS = "paper.json"
FORMAT = 1
USUAL_SIZE = {"imagenet": 50_000}  # of test sets, for estimates; CIFAR's are of 10,000


@dataclass(frozen=True)
class Reproduction:
    """What was found at a scale, by the name of the work's folder; and why other work has no result."""

    scale: Scale
    found: dict[str, Found]
    troubles: dict[str, str] = field(default_factory=dict)
    seed: int = 0
    device: str = "cpu"

    def measured(self, table: Table) -> tuple[tuple[tuple[Measured, ...], ...], ...]:
        """Every number of a table: by part, row and column."""
        return tuple(
            tuple(tuple(self._measure(table, number) for number in row) for row in part.numbers)
            for part in table.parts
        )

    def _measure(self, table: Table, number: Number) -> Measured:
        if self.scale.skips(table.name, number.column):
            return measure(number, None, None, None)
        work = resolve(number.ask, self.scale, table.name)
        before = compared_with(number.ask)
        needed = [work] + ([resolve(before, self.scale, table.name)] if before else [])
        keys = [self.key(one) for one in needed]
        for key in keys:
            if key in self.troubles:
                return Measured(number, work, missing=self.troubles[key])
        found, *others = (self.found.get(key) for key in keys)
        return measure(number, work, found, others[0] if others else None)

    def key(self, work: Work) -> str:
        return _key(work, self.seed, self.device)

    def begun(self) -> list[Table]:
        """The tables of which some number is there."""
        return [
            table
            for table in tables().values()
            if any(one.ours is not None for one in self.by_reference(table).values())
        ]

    def by_reference(self, table: Table) -> dict[str, Measured]:
        return {name: self._measure(table, number) for name, number in table.references().items()}

    def is_complete(self, chosen: Iterable[Table]) -> bool:
        """Whether every number of the tables is there that the scale asks for, and of all its points."""
        numbers = [one for table in chosen for one in self.by_reference(table).values() if one.work]
        found = (self.found.get(self.key(one.work)) for one in numbers if one.work)
        return not any(one.missing for one in numbers) and not any(one and one.missing for one in found)

    def judgments(self) -> list[Judgment]:
        """Every claim of the paper's text, judged by these numbers."""
        evidence: dict[str, Measured] = {}
        for table in tables().values():
            evidence |= self.by_reference(table)
        return [judge(claim, evidence) for claim in claims()]

    def to_json(self) -> dict[str, Any]:
        """All that is needed to make every table again."""
        found = {key: self.found[key].to_json() for key in sorted(self.found)}
        usual = find_scale(self.scale.name).models
        data = {
            name: one.data
            for name, one in self.scale.models.items()
            if name in usual and one.data != usual[name].data
        }
        about = {"format": FORMAT, "scale": self.scale.name, "seed": self.seed, "device": self.device}
        return about | {"data": data, "found": found, "troubles": self.troubles}


def load_reproduction(path: Path) -> Reproduction:
    """What `dent reproduce` wrote: its folder, or the file paper.json alone."""
    file = path / RESULTS if path.is_dir() else path
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise ValueError(f"its format is {content['format']}, expected {FORMAT}")
        found = {key: Found.from_json(one) for key, one in content["found"].items()}
        scale = _with_data(find_scale(content["scale"]), content.get("data", {}))
        troubles = {str(key): str(why) for key, why in content["troubles"].items()}
        return Reproduction(scale, found, troubles, int(content["seed"]), str(content["device"]))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(
            f"{file} is no reproduction ({type(error).__name__}: {error}); dent reproduce writes one"
        ) from error


def _with_data(scale: Scale, data: Mapping[str, str]) -> Scale:
    """The same with other data for some models of the paper, such as ImageNet of a folder."""
    models = {name: replace(one, data=data.get(name, one.data)) for name, one in scale.models.items()}
    return replace(scale, models=models) if data else scale


def compared_with(ask: Ask) -> Ask | None:
    """What a difference is a difference to."""
    return replace(ask, defense=ask.minus, minus=None) if ask.minus else None


def evaluation_of(work: Work, *, seed: int, device: str) -> Evaluation:
    return make_evaluation(
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


def folder_name(evaluation: Evaluation) -> str:
    """Readable, and of this evaluation alone."""
    (cell,) = evaluation.cells()
    text = json.dumps(evaluation.to_json(), sort_keys=True)
    return f"{cell.slug.rpartition('_')[0]}_{hashlib.sha256(text.encode()).hexdigest()[:10]}"


@cache
def _key(work: Work, seed: int, device: str) -> str:
    """Asked for often: each number of each table has its work."""
    return folder_name(evaluation_of(work, seed=seed, device=device))


def works(chosen: Iterable[Table], scale: Scale) -> list[Work]:
    """What is to be done for the tables, each once."""
    found: dict[str, Work] = {}
    for table in chosen:
        for number in table.references().values():
            if scale.skips(table.name, number.column):
                continue
            for ask in filter(None, (number.ask, compared_with(number.ask))):
                work = resolve(ask, scale, table.name)
                found.setdefault(_key(work, 0, "cpu"), work)
    return list(found.values())


def forwards(work: Work) -> float:
    """About how many images go through the static model, at most."""
    evaluation = evaluation_of(work, seed=0, device="cpu")
    plan = sketch_plan(evaluation, work.n or USUAL_SIZE.get(re.split("[:#]", work.data)[0], 10_000))
    return sum(map(plan.forwards, plan.units()))
