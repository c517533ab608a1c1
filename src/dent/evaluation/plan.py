"""What a run does: its units of work, their order, and their cost."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dent.attacks.autoattack import VERSIONS
from dent.attacks.checks import check_labels, check_logits, refuse_probabilities
from dent.attacks.reference import import_reference
from dent.defense.text import parse_settings
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
    list_not_run,
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
class Plan:
    """The cells of a run with their attacks, and its batches.

    updates: number of updates that a cell's defense makes; None if it does not say.
    answers: about the cost of a cell's answer, in forwards of its static model.
    not_run: attacks of the suite that cannot be run on a cell's defense, with the reason.
    independent: whether no answer of a cell depends on the rest of its batch.
    randomized: whether the answers of a cell are random.
    exhaustive: attack also inputs that an earlier attack has broken.
    doublings: how often budgets may be doubled after these attacks; see `converge.py`.
    doubling_cost: largest cost of all doublings of a cell, as a multiple of its suite's; None: no limit.
    own_attacks: the user's own attacks, by name.
    """

    attacks: Mapping[Cell, Suite]
    updates: Mapping[Cell, int | None]
    answers: Mapping[Cell, float]
    independent: Mapping[Cell, bool]
    randomized: Mapping[Cell, bool]
    not_run: Mapping[Cell, Mapping[str, str]]
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
        return self.independent[cell] and not self.exhaustive

    @cached_property
    def points(self) -> tuple[Tensor, ...]:
        """Return the points of each batch, as indices of the data set."""
        return cut_batches(self.n, self.batch_size, seed=self.seed)

    @cached_property
    def sizes(self) -> list[int]:
        return [len(batch) for batch in self.points]

    def units(self) -> Iterator[Unit]:
        """Yield all units, those of a batch in the order of the attacks."""
        for cell, attacks in self.attacks.items():
            for batch in (*range(len(self.sizes)), WHOLE):
                for attack in attacks:
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
        for cell, attacks in self.attacks.items():
            if PROTOCOL in attacks:
                yield [Unit(cell, WHOLE, PROTOCOL)]
            for batch in range(len(self.sizes)):
                here = [Unit(cell, batch, name) for name in attacks if batch in self.batches(name)]
                if self.is_chained(cell):
                    yield [unit for unit in here if unit.attack not in (ABOUT, BATTLE)]
                    here = [unit for unit in here if unit.attack in (ABOUT, BATTLE)]
                yield from ([unit] for unit in here)

    def options(self, unit: Unit) -> dict[str, Any]:
        return self.attacks[unit.cell][unit.attack]

    def forwards(self, unit: Unit) -> float:
        """Return about how many images go through the static model, at most."""
        size = self._size(unit.batch, unit.attack)
        cost = Forwards(self.updates[unit.cell] or 0, size, self.answers[unit.cell])
        submissions = SUBMISSIONS if self.randomized[unit.cell] else 1
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
            for name in self.attacks[cell]
            if name not in SPECIAL
        }
        return [
            name for name, one in attacks.items() if one.kind != "scenario" and one.budget in one.options
        ]

    def double(self, chosen: Mapping[Cell, Iterable[str]], doubling: int) -> Plan:
        """Return the plan with these attacks once more, their budget doubled so many times."""
        times, attacks = 2**doubling, {cell: dict(suite) for cell, suite in self.attacks.items()}
        for cell, names in chosen.items():
            files = {slugify(name.lower()) for name in attacks[cell]}
            for name in names:
                new = name_multiple(name, times)
                if slugify(new.lower()) in files:
                    raise ValueError(
                        f"expected another name than {new}, which is that of {name} with {times} times "
                        "its budget; rename it, or ask for no convergence"
                    )
                attacks[cell][new] = find_attack(name).multiply_budget(self.attacks[cell][name], times)
        return replace(self, attacks=attacks)

    @cached_property
    def largest(self) -> Plan:
        """Return the plan with every doubling that results may call for."""
        plan, chosen = self, {cell: self.list_doubled(cell) for cell in self.attacks}
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
        cells = [
            {
                **asdict(cell),
                "attacks": attacks,
                **{name: getattr(self, name)[cell] for name in _OF_CELLS},
            }
            for cell, attacks in self.attacks.items()
        ]
        plain = ("n", "batch_size", "seed", "exhaustive", "doublings", "doubling_cost")
        kinds = {name: attack.kind for name, attack in self.own_attacks.items()}
        own = {"own_attacks": kinds} if kinds else {}
        return {name: getattr(self, name) for name in plain} | own | {"cells": cells}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Plan:
        rows = {Cell(*(row[key] for key in _CELL)): row for row in content["cells"]}
        fields: dict[str, Any] = {key: value for key, value in content.items() if key != "cells"}
        own: dict[str, Kind] = fields.pop("own_attacks", {})
        fields["own_attacks"] = {name: describe_own(name, kind) for name, kind in own.items()}
        for name in ("attacks", *_OF_CELLS):
            fields[name] = {cell: row[name] for cell, row in rows.items()}
        return cls(**fields)


_OF_CELLS = ("updates", "answers", "independent", "randomized", "not_run")
_CELL = ("model", "defense", "eps", "norm")


def check_needs(evaluation: Evaluation) -> None:
    """Raise an error that says what to do if this machine lacks a package or the precision."""
    if evaluation.mixed_precision:
        refuse_slow_bfloat16(torch.device(evaluation.device))
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
    facts: dict[Cell, Facts] = {}
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
        facts[cell] = Facts(
            subject.updates,
            subject.independent,
            Forwards(subject.updates or 0, known=subject.forwards).answer,
            lacks,
            subject.randomized,
        )
    return _plan(evaluation, len(dataset), facts, own)


def sketch_plan(evaluation: Evaluation, n: int) -> Plan:
    """Return the plan of n points without loading anything, for estimates.

    It takes every model to be independent of its batch.
    """
    settings = {cell: parse_settings(cell.defense) for cell in evaluation.cells()}
    facts = {cell: Facts(one.steps, one.independent, one.forwards, {}) for cell, one in settings.items()}
    return _plan(evaluation, n, facts, {})


class Facts(NamedTuple):
    """What a plan must know of a cell's defense."""

    updates: int | None
    independent: bool
    answer: float
    lacks: Mapping[str, str]
    randomized: bool = False


def _plan(
    evaluation: Evaluation, n: int, facts: Mapping[Cell, Facts], own: Mapping[str, Attack]
) -> Plan:
    suite = evaluation.find_attacks()
    attacks = {
        cell: select_attacks(
            suite,
            updates=one.updates,
            independent=one.independent,
            steps=evaluation.steps,
            queries=evaluation.queries,
            protocol=evaluation.has_protocol,
            battle=evaluation.battle and not (cell.static or cell.is_dynamic) and bool(suite),
            lacks=one.lacks,
            randomized=one.randomized,
            own=own,
        )
        for cell, one in facts.items()
    }
    return Plan(
        attacks=attacks,
        updates={cell: one.updates for cell, one in facts.items()},
        answers={cell: one.answer for cell, one in facts.items()},
        independent={cell: one.independent for cell, one in facts.items()},
        randomized={cell: one.randomized for cell, one in facts.items()},
        not_run={
            cell: list_not_run(
                suite, updates=one.updates, independent=one.independent, lacks=one.lacks, own=own
            )
            for cell, one in facts.items()
        },
        exhaustive=evaluation.exhaustive,
        doublings=evaluation.most_doublings,
        doubling_cost=evaluation.most_doubling_cost,
        own_attacks=own,
        n=n,
        batch_size=evaluation.batch_size,
        seed=evaluation.seed,
    )
