"""What a run does: its units of work, their order, and their cost."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from dent.attacks.autoattack import VERSIONS
from dent.attacks.checks import check_labels, check_logits, refuse_probabilities
from dent.attacks.reference import import_reference
from dent.defense.text import parse_settings
from dent.devices import find_device
from dent.evaluation.attacks import Attack, Forwards, Kind, find_attack
from dent.evaluation.own_attacks import describe_own
from dent.evaluation.sources import Sources, cut_batches, ignore_low_diversity
from dent.evaluation.spec import Cell, Evaluation
from dent.evaluation.suites import (
    ABOUT,
    BATTLE,
    NATURAL,
    PROTOCOL,
    SPECIAL,
    Suite,
    select_attacks,
    slugify,
)
from dent.precision import refuse_slow_bfloat16
from dent.testing import refuse_broken_promises
from dent.texts import join_lines

WHOLE = -1  # the batch of a unit that takes all points at once
FEW = 32  # inputs that suffice for `BATTLE`, and for all of `ABOUT` that is not timed
BATTLE_STEPS = 10  # steps of each attack that `BATTLE` records
TIMED_CALLS = 3  # number of calls on a whole batch that `ABOUT` times, after one to warm up
ANSWERS_ABOUT = 12  # number of answers to few inputs that `ABOUT` asks of the model besides
SUBMISSIONS = 9  # of a random defense, for the majority; an odd number, so that there is one


@dataclass(frozen=True)
class Unit:
    """A piece of work that is done or not done: one attack on one batch of a cell."""

    cell: Cell
    batch: int
    attack: str

    @cached_property
    def file(self) -> str:
        """Return the path of its outcome in the folder of units."""
        batch = "all" if self.batch == WHOLE else f"{self.batch:05d}"
        return f"{self.cell.slug}/{batch}_{slugify(self.attack)}.json"

    def seed(self, seed: int) -> int:
        """Return the seed of all that is random in this unit, whoever runs it and when.

        >>> unit = Unit(Cell("m", "static", 0.1, "linf"), 0, "apgd-ce")
        >>> unit.seed(0) == unit.seed(0) != unit.seed(1)
        True
        """
        digest = hashlib.sha256(f"{seed} {self.file}".encode()).digest()
        return int.from_bytes(digest[:4], "big")  # every generator takes 32 bits

    def __str__(self) -> str:
        batch = "all images" if self.batch == WHOLE else f"batch {self.batch}"
        return f"{self.cell}, {self.attack}, {batch}"


def name_multiple(attack: str, times: int) -> str:
    """Return the name of an attack with a multiple of its budget.

    >>> name_multiple("apgd-ce", 2), name_multiple("fpa (long)", 4)
    ('apgd-ce (x2)', 'fpa (long, x4)')
    """
    name, _, variant = attack.partition(" (")
    return f"{name} ({variant.removesuffix(')')}{', ' if variant else ''}x{times})"


@dataclass(frozen=True, kw_only=True)
class CellPlan:
    """What is run on a cell, and what the plan must know of its defense.

    updates: number of updates of a call; None if the defense does not say.
    answers: about the cost of an answer, in forwards of the static model.
    independent: True if no answer depends on the rest of its batch.
    randomized: True if the answers are random.
    not_run: attacks of the suite that cannot be run on the defense, with the reason.
    """

    attacks: Suite
    updates: int | None
    answers: float
    independent: bool
    randomized: bool
    not_run: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The cells of a run with their attacks, and its batches.

    exhaustive: attack also inputs that an earlier attack has broken.
    doublings: how often budgets may be doubled after these attacks; see `converge.py`.
    doubling_cost: largest cost of all doublings of a cell, as a multiple of its suite's; None: no limit.
    own_attacks: the user's own attacks, by name.
    """

    cells: Mapping[Cell, CellPlan]
    exhaustive: bool = False
    doublings: int = 0
    doubling_cost: float | None = None
    own_attacks: Mapping[str, Attack] = field(default_factory=dict)
    n: int
    batch_size: int
    seed: int

    def is_chained(self, cell: Cell) -> bool:
        """Return True if each attack gets only what the attacks before it left standing.

        If the answers are random, a point stands until it is broken in one submission and by majority.
        """
        return self.cells[cell].independent and not self.exhaustive

    @cached_property
    def points(self) -> tuple[Tensor, ...]:
        """Return the points of each batch, as indices of the data set."""
        return cut_batches(self.n, self.batch_size, seed=self.seed)

    @cached_property
    def sizes(self) -> list[int]:
        return [len(batch) for batch in self.points]

    def units(self) -> Iterator[Unit]:
        """Yield all units, those of a batch in the order of the attacks."""
        for cell, one in self.cells.items():
            for batch in (*range(len(self.sizes)), WHOLE):
                for attack in one.attacks:
                    if batch in self.batches(attack):
                        yield Unit(cell, batch, attack)

    def batches(self, attack: str) -> Sequence[int]:
        """Return the batches of an attack's units; of several at a time, the first."""
        if attack == PROTOCOL:
            return (WHOLE,)
        if attack in (ABOUT, BATTLE):
            return (0,)
        if attack == NATURAL:
            return range(len(self.sizes))
        found = find_attack(attack, self.own_attacks)
        starts = range(0, len(self.sizes), found.span)
        if self._size(starts[0], attack) < found.least:
            return starts[:0]
        fits = self._size(starts[-1], attack) >= found.least  # all others are as large as the first
        return starts if fits else starts[:-1]

    def chains(self) -> Iterator[list[Unit]]:
        """Yield units that must follow one another. Chains may run in any order, and at once.

        A unit that takes all points comes first: at the end, all other workers would wait for it.
        """
        for cell, one in self.cells.items():
            if PROTOCOL in one.attacks:
                yield [Unit(cell, WHOLE, PROTOCOL)]
            for batch in range(len(self.sizes)):
                here = [Unit(cell, batch, name) for name in one.attacks if batch in self.batches(name)]
                if self.is_chained(cell):
                    yield [unit for unit in here if unit.attack not in (ABOUT, BATTLE)]
                    here = [unit for unit in here if unit.attack in (ABOUT, BATTLE)]
                yield from ([unit] for unit in here)

    def options(self, unit: Unit) -> dict[str, Any]:
        return self.cells[unit.cell].attacks[unit.attack]

    def forwards(self, unit: Unit) -> float:
        """Return about how many images go through the static model, at most."""
        size, cell = self._size(unit.batch, unit.attack), self.cells[unit.cell]
        cost = Forwards(cell.updates or 0, size, cell.answers)
        submissions = SUBMISSIONS if cell.randomized else 1
        if unit.attack == NATURAL:
            return size * submissions * cost.answer
        if unit.attack == ABOUT:
            timed = (TIMED_CALLS + 1) * (cost.answer + 1)  # the static model, too
            return size * timed + min(size, FEW) * ANSWERS_ABOUT * cost.answer
        if unit.attack == BATTLE:
            # The direct attack; then both others ask again what they asked, and the static model too.
            direct, others = (BATTLE_STEPS + 3) * cost.gradient, 2 * (BATTLE_STEPS + 3) * cost.answer
            return min(size, FEW) * (direct + others + 8 * BATTLE_STEPS)
        names = VERSIONS["standard"] if unit.attack == PROTOCOL else (unit.attack,)
        attacks, options = [find_attack(name, self.own_attacks) for name in names], self.options(unit)
        searched = sum(attack.count_forwards(cost, options) for attack in attacks)
        if unit.attack == PROTOCOL or attacks[0].kind == "scenario":  # their search is their judge
            submissions = 1
        return size * (searched + (submissions - 1) * cost.answer)

    def cost(self, cell: Cell, attack: str) -> float:
        """Return about how many forwards of the static model an attack takes for each input, at most."""
        unit = Unit(cell, self.batches(attack)[0], attack)
        return self.forwards(unit) / self._size(unit.batch, attack)

    def list_doubled(self, cell: Cell) -> list[str]:
        """Return the attacks of a cell that count for its worst case and have a budget to double."""
        attacks = {
            name: find_attack(name, self.own_attacks)
            for name in self.cells[cell].attacks
            if name not in SPECIAL
        }
        return [
            name for name, one in attacks.items() if one.kind != "scenario" and one.budget in one.options
        ]

    def double(self, chosen: Mapping[Cell, Iterable[str]], doubling: int) -> Plan:
        """Return the plan with these attacks once more, their budget doubled so many times."""
        times, cells = 2**doubling, dict(self.cells)
        for cell, names in chosen.items():
            attacks = dict(self.cells[cell].attacks)
            files = {slugify(name.lower()) for name in attacks}
            for name in names:
                new = name_multiple(name, times)
                if slugify(new.lower()) in files:
                    raise ValueError(
                        f"expected another name than {new}, which is that of {name} with {times} times "
                        "its budget; rename it, or ask for no convergence"
                    )
                attacks[new] = find_attack(name).multiply_budget(attacks[name], times)
            cells[cell] = replace(self.cells[cell], attacks=attacks)
        return replace(self, cells=cells)

    @cached_property
    def largest(self) -> Plan:
        """Return the plan with every doubling that results may call for."""
        plan, chosen = self, {cell: self.list_doubled(cell) for cell in self.cells}
        for doubling in range(1, self.doublings + 1):
            plan = plan.double(chosen, doubling)
        return plan

    def _size(self, batch: int, attack: str) -> int:
        """Return the number of inputs of a unit."""
        if batch == WHOLE:
            return self.n
        span = 1 if attack in SPECIAL else find_attack(attack, self.own_attacks).span
        return sum(self.sizes[batch : batch + span])

    def to_json(self) -> dict[str, Any]:
        """Return plain values for the file of the run, so that no models are needed to read it."""
        cells = [asdict(cell) | vars(one) for cell, one in self.cells.items()]
        plain = ("n", "batch_size", "seed", "exhaustive", "doublings", "doubling_cost")
        kinds = {name: attack.kind for name, attack in self.own_attacks.items()}
        own = {"own_attacks": kinds} if kinds else {}
        return {name: getattr(self, name) for name in plain} | own | {"cells": cells}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Plan:
        cells = dict(_read_cell(row) for row in content["cells"])
        kinds: dict[str, Kind] = content.get("own_attacks", {})
        own = {name: describe_own(name, kind) for name, kind in kinds.items()}
        return cls(**content | {"cells": cells, "own_attacks": own})


def _read_cell(row: Mapping[str, Any]) -> tuple[Cell, CellPlan]:
    of_cell, of_plan = ({one.name: row[one.name] for one in fields(kind)} for kind in (Cell, CellPlan))
    return Cell(**of_cell), CellPlan(**of_plan)


def check_needs(evaluation: Evaluation) -> None:
    """Raise an error that says what to do if this machine lacks a package or the precision."""
    if evaluation.mixed_precision:
        refuse_slow_bfloat16(find_device(evaluation.device))
    if evaluation.has_protocol:
        try:
            import_reference()
        except ImportError as error:
            raise ImportError(
                f"the attack {PROTOCOL} (the reference AutoAttack) needs: pip install "
                "'dent-defense[reference]'; or run the rest with --no-protocol (protocol=False)"
            ) from error


@ignore_low_diversity()
def make_plan(sources: Sources) -> Plan:
    """Return the plan of an evaluation; ask each cell once, so that faults show before long work."""
    sources.recognize_models()
    evaluation = sources.evaluation
    inputs, _ = sources.read(sources.batches()[0][:2])
    dataset = sources.dataset()
    own = sources.find_own_attacks()
    cells: dict[Cell, CellPlan] = {}
    for cell in evaluation.cells():
        try:
            subject = sources.subject(cell)
        except TypeError as error:  # its first answers
            raise ValueError(f"{cell}: {join_lines(error)}") from error
        try:
            with torch.no_grad():
                logits = subject.model(inputs)
            check_logits(logits, inputs)
            refuse_probabilities(subject.model, inputs, logits)
            check_labels(dataset.labels, logits.shape[1])
            dataset.check_outputs(logits.shape[1], owner="the model")
            lacks = {} if cell.static else subject.list_lacks(inputs)
        except (ValueError, TypeError, RuntimeError) as error:
            raise ValueError(f"{cell}: {join_lines(error)}") from error
        if sources.is_own(cell):
            refuse_broken_promises(subject.defense, inputs, of=str(cell))
        cells[cell] = _plan_cell(
            evaluation, cell, updates=subject.updates, independent=subject.independent,
            answers=Forwards(subject.updates or 0, known=subject.forwards).answer,
            lacks=lacks, randomized=subject.randomized, own=own,
        )  # fmt: skip
    return _join_cells(evaluation, len(dataset), cells, own)


def sketch_plan(evaluation: Evaluation, n: int) -> Plan:
    """Return the plan of n points without loading anything, for estimates.

    It takes every model to be independent of its batch.
    """
    settings = {cell: parse_settings(cell.defense) for cell in evaluation.cells()}
    cells = {
        cell: _plan_cell(
            evaluation, cell, updates=one.steps, independent=one.independent, answers=one.forwards
        )
        for cell, one in settings.items()
    }
    return _join_cells(evaluation, n, cells)


def _plan_cell(
    evaluation: Evaluation,
    cell: Cell,
    *,
    updates: int | None,
    independent: bool,
    answers: float,
    lacks: Mapping[str, str] | None = None,
    randomized: bool = False,
    own: Mapping[str, Attack] | None = None,
) -> CellPlan:
    suite = evaluation.find_attacks()
    attacks, not_run = select_attacks(
        suite,
        updates=updates,
        independent=independent,
        steps=evaluation.steps,
        queries=evaluation.queries,
        protocol=evaluation.has_protocol,
        battle=evaluation.battle and not (cell.static or cell.is_dynamic) and bool(suite),
        lacks=lacks,
        randomized=randomized,
        own=own,
    )
    return CellPlan(
        attacks=attacks, updates=updates, answers=answers, independent=independent,
        randomized=randomized, not_run=not_run,
    )  # fmt: skip


def _join_cells(
    evaluation: Evaluation,
    n: int,
    cells: Mapping[Cell, CellPlan],
    own: Mapping[str, Attack] | None = None,
) -> Plan:
    return Plan(
        cells=cells,
        exhaustive=evaluation.exhaustive,
        doublings=evaluation.most_doublings,
        doubling_cost=evaluation.most_doubling_cost,
        own_attacks=own or {},
        n=n,
        batch_size=evaluation.batch_size,
        seed=evaluation.seed,
    )
