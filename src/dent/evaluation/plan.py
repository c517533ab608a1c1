"""What a run will do: its units in order, which of them wait for others, and what they cost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from dent.attacks.autoattack import VERSIONS
from dent.attacks.checks import check_labels, check_logits, refuse_probabilities
from dent.attacks.reference import import_reference
from dent.defense.dent.settings import Settings
from dent.defense.text import parse_settings
from dent.evaluation.attacks import attack_named
from dent.evaluation.config import Evaluation
from dent.evaluation.forwards import Forwards
from dent.evaluation.perform import BATTLE_STEPS, FEW
from dent.evaluation.sources import Sources, cut
from dent.evaluation.suites import Suite, attacks_on
from dent.evaluation.units import ABOUT, BATTLE, NATURAL, PROTOCOL, SPECIAL, WHOLE, Cell, Unit

ANSWERS_ABOUT = 16  # of the model, for what is to be known about a cell


@dataclass(frozen=True)
class Plan:
    """The cells of a run with their attacks, and its batches."""

    attacks: Mapping[Cell, Suite]
    updates: Mapping[Cell, int]
    independent: Mapping[Cell, bool]  # whether no answer depends on the rest of its batch
    exhaustive: bool  # attack also what an attack before has broken
    n: int
    batch_size: int
    seed: int

    def is_chained(self, cell: Cell) -> bool:
        """Return True if an attack is given only what the attacks before it left standing."""
        return self.independent[cell] and not self.exhaustive

    @cached_property
    def points(self) -> tuple[Tensor, ...]:
        """The points of each batch, as indices of the data set."""
        return cut(self.n, self.batch_size, self.seed)

    @cached_property
    def sizes(self) -> list[int]:
        return [len(batch) for batch in self.points]

    def units(self) -> Iterator[Unit]:
        """All units; those of a batch in the order of the attacks."""
        for cell, attacks in self.attacks.items():
            for batch in (*range(len(self.sizes)), WHOLE):
                for attack in attacks:
                    if batch in self.batches(attack):
                        yield Unit(cell, batch, attack)

    def batches(self, attack: str) -> Sequence[int]:
        """The batches that an attack is run on; where it takes several at a time, the first of them."""
        if attack == PROTOCOL:
            return (WHOLE,)
        if attack in (ABOUT, BATTLE):
            return (0,)
        if attack == NATURAL:
            return range(len(self.sizes))
        kind = attack_named(attack)
        starts = range(0, len(self.sizes), kind.span)
        if self._size(starts[0], attack) < kind.least:
            return starts[:0]
        fits = self._size(starts[-1], attack) >= kind.least  # all others are as large as the first
        return starts if fits else starts[:-1]

    def chains(self) -> Iterator[list[Unit]]:
        """Units that must follow one another; chains can be done in any order, and at once.

        What takes all points comes first: at the end it would keep one worker, while others wait.
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

    def settings(self, unit: Unit) -> dict[str, Any]:
        return self.attacks[unit.cell][unit.attack]

    def forwards(self, unit: Unit) -> float:
        """About how many images go through the static model, at most."""
        size = self._size(unit.batch, unit.attack)
        cost = Forwards(self.updates[unit.cell], size)
        if unit.attack == NATURAL:
            return size * cost.answer
        if unit.attack == ABOUT:
            return min(size, FEW) * ANSWERS_ABOUT * cost.answer
        if unit.attack == BATTLE:
            return min(size, FEW) * (BATTLE_STEPS + ANSWERS_ABOUT / 4) * cost.gradient
        names = VERSIONS["standard"] if unit.attack == PROTOCOL else (unit.attack,)
        return size * sum(attack_named(name).calls(cost, self.settings(unit)) for name in names)

    def _size(self, batch: int, attack: str) -> int:
        """How many inputs a unit has."""
        if batch == WHOLE:
            return self.n
        span = 1 if attack in SPECIAL else attack_named(attack).span
        return sum(self.sizes[batch : batch + span])

    def to_json(self) -> dict[str, Any]:
        """For the file of the run, which can then be read without its models."""
        cells = [
            {
                **asdict(cell),
                "updates": self.updates[cell],
                "independent": self.independent[cell],
                "attacks": attacks,
            }
            for cell, attacks in self.attacks.items()
        ]
        plain = ("n", "batch_size", "seed", "exhaustive")
        return {name: getattr(self, name) for name in plain} | {"cells": cells}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Plan:
        attacks, updates, independent = {}, {}, {}
        for row in content["cells"]:
            cell = Cell(row["model"], row["defense"], row["eps"], row["norm"])
            attacks[cell], updates[cell] = row["attacks"], row["updates"]
            independent[cell] = row["independent"]
        return cls(
            attacks, updates, independent, content["exhaustive"], content["n"], content["batch_size"],
            content["seed"],
        )  # fmt: skip


def make_plan(sources: Sources) -> Plan:
    """The plan, after all that can be wrong before an attack was looked at: each cell is asked once."""
    evaluation = sources.evaluation
    attacks: dict[Cell, Suite] = {}
    updates, independent = {}, {}
    batches = sources.batches()
    inputs, _ = sources.read(batches[0][:2])
    dataset = sources.dataset()
    everyone = dataset.labels
    if evaluation.with_protocol:
        import_reference()
    for cell in evaluation.cells():
        subject = sources.subject(cell)
        try:
            with torch.no_grad():
                logits = subject.model(inputs)
            check_logits(logits, inputs)
            refuse_probabilities(subject.model, inputs, logits)
            check_labels(everyone, logits.shape[1])
            dataset.check_outputs(logits.shape[1], owner="the model")
        except (ValueError, TypeError, RuntimeError) as error:
            raise ValueError(f"{cell}: {' '.join(str(error).split())}") from error
        settings = subject.defense.settings
        attacks[cell] = _attacks(evaluation, cell, settings, independent=subject.independent)
        updates[cell] = settings.steps
        independent[cell] = subject.independent
    return Plan(
        attacks, updates, independent, evaluation.exhaustive, len(everyone), evaluation.batch_size,
        evaluation.seed,
    )  # fmt: skip


def sketch_plan(evaluation: Evaluation, n: int) -> Plan:
    """The plan of n points as far as it is known without loading anything: for estimates.

    A model that sees its batch by itself is not known as such.
    """
    settings = {cell: parse_settings(cell.defense) for cell in evaluation.cells()}
    return Plan(
        {
            cell: _attacks(evaluation, cell, one, independent=one.independent)
            for cell, one in settings.items()
        },
        {cell: one.steps for cell, one in settings.items()},
        {cell: one.independent for cell, one in settings.items()},
        evaluation.exhaustive,
        n,
        evaluation.batch_size,
        evaluation.seed,
    )


def _attacks(evaluation: Evaluation, cell: Cell, settings: Settings, *, independent: bool) -> Suite:
    suite = evaluation.attacks_in(cell.norm)
    return attacks_on(
        settings,
        suite=suite,
        independent=independent,
        steps=evaluation.steps,
        queries=evaluation.queries,
        protocol=evaluation.with_protocol,
        battle=evaluation.battle and not cell.static and bool(suite),
    )
