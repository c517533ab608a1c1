"""What the units of a cell add up to: a bit for every attack and point, whatever order they come in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dent.evaluation.results import Cost, Score
from dent.evaluation.units import ABOUT, BATTLE, NATURAL, PROTOCOL, SPECIAL, Cell, Done, Outcome, Unit

Bits = NDArray[np.bool_]


class Tally:
    """The outcomes of one cell, as far as they are known.

    Points are counted in the order of the batches. An attack on a batch that is not there has no bits
    that mean anything: `there` says where it has.
    """

    def __init__(
        self,
        cell: Cell,
        attacks: Sequence[str],
        batches: Sequence[Sequence[int]],
        *,
        cumulative: bool,
        independent: bool,
        kind_of: Callable[[str], str],
        planned: Callable[[str], Iterable[int]],
    ) -> None:
        self.cell, self.batches = cell, batches
        self.cumulative, self.independent = cumulative, independent
        self.planned = {attack: tuple(planned(attack)) for attack in attacks}
        self.kinds = {one: kind_of(one) for one in attacks if one not in SPECIAL}
        self.sizes = [len(batch) for batch in batches]
        self.starts = np.cumsum([0, *self.sizes])
        self.all_points = np.ones(self.starts[-1], bool)
        judged = [NATURAL] * (NATURAL in attacks) + self.of("direct", "adaptive")
        judged.sort(key=list(attacks).index)
        self.correct = {attack: np.zeros_like(self.all_points) for attack in judged}
        self.given = {attack: np.zeros_like(self.all_points) for attack in judged}
        self.there = {attack: np.zeros(len(batches), bool) for attack in judged}
        self.scenarios: dict[str, dict[int, Outcome]] = {attack: {} for attack in self.of("scenario")}
        self.protocol: dict[int, bool] = {}
        self.about: Done | None = None
        self.battle: dict[str, Any] | None = None
        self.errors: dict[tuple[str, int], str] = {}

    def of(self, *kinds: str) -> list[str]:
        """The attacks of these kinds, in order."""
        return [attack for attack, kind in self.kinds.items() if kind in kinds]

    def add(self, done: Done) -> None:
        """Take in what became of a unit; an error does not matter once another attempt was done."""
        unit, outcome = done.unit, done.outcome
        if unit.attack not in self.planned:
            return
        if outcome is None:
            self.errors[unit.attack, unit.batch] = done.error or "no outcome"
            return
        if unit.attack == ABOUT:
            self.about = done
        elif unit.attack == BATTLE:
            self.battle = outcome.battle
        elif unit.attack == PROTOCOL:
            self.protocol = dict(zip(outcome.points, outcome.correct, strict=True))
        elif unit.attack in self.scenarios:
            self.scenarios[unit.attack][unit.batch] = outcome
        else:
            self._judge(unit, outcome)

    def _judge(self, unit: Unit, outcome: Outcome) -> None:
        batch = self.batches[unit.batch] if 0 <= unit.batch < len(self.batches) else ()
        if sorted(outcome.points) != sorted(batch):
            raise ValueError(
                f"{unit}: expected the {len(batch)} points of its batch, got {len(outcome.points)} that "
                "are not the same; this outcome is of another run"
            )
        places = {point: self.starts[unit.batch] + place for place, point in enumerate(batch)}
        at = [places[point] for point in outcome.points]
        given = np.array(outcome.given, bool)
        # Where later attacks see only what stands, what was not given is broken already.
        self.correct[unit.attack][at] = np.array(outcome.correct, bool) & (given | (not self.cumulative))
        self.given[unit.attack][at] = given
        self.there[unit.attack][unit.batch] = True

    def judged_by(self, attacks: Iterable[str]) -> tuple[Bits, Bits]:
        """The batches, and the points, of which all these attacks are there; none without attacks."""
        names, none = list(attacks), np.zeros(len(self.batches), bool)
        batches = np.all([self.there[name] for name in names], axis=0) if names else none
        return batches, np.repeat(batches, self.sizes)

    def broken(self, attack: str) -> Bits:
        """What an attack broke itself."""
        broken: Bits = ~self.correct[attack]
        return broken & self.given[attack] if self.cumulative else broken

    def up_to(self, attack: str) -> list[str]:
        """The attacks that a score under this one is about."""
        names = list(self.correct)
        return names[: names.index(attack) + 1] if self.cumulative else [attack]

    def score(self, attack: str) -> Score:
        """Under one attack, or under all up to it."""
        names = self.up_to(attack)
        return score_of(self.worst(names)[self.judged_by(names)[1]])

    def worst(self, attacks: Iterable[str]) -> Bits:
        """The points that all of these leave correct."""
        bits: Bits = np.all([self.all_points, *(self.correct[name] for name in attacks)], axis=0)
        return bits

    def submitted(self, attacks: Iterable[str]) -> Score:
        """For each batch the attack that leaves fewest correct, summed over the batches."""
        names = list(attacks)
        batches, points = self.judged_by(names)
        if not batches.any():
            return Score(0, 0)
        left = [self.worst(self.up_to(name)) for name in names]
        counts = np.pad(np.cumsum(left, axis=1), ((0, 0), (1, 0)))[:, self.starts]
        each = np.diff(counts, axis=1)  # correct, of each attack in each batch
        return Score(int(each.min(0)[batches].sum()), int(points.sum()))

    def scenario(self, attack: str) -> dict[int, bool]:
        """The points that count in a scenario, as far as it is done."""
        outcomes = self.scenarios[attack].values()
        return {
            point: correct
            for outcome in outcomes
            for point, correct in zip(outcome.points, outcome.correct, strict=True)
        }

    def as_points(self, bits: Bits, where: Bits) -> dict[int, bool]:
        """Bits by the index of the point in the data set."""
        points = [point for batch in self.batches for point in batch]
        return {int(points[place]): bool(bits[place]) for place in np.flatnonzero(where)}

    def cost(self) -> Cost | None:
        """What the unit `ABOUT` measured."""
        if self.about is None or self.about.outcome is None:
            return None
        figures, took = self.about.outcome.figures, self.about.took
        return Cost(
            flops=figures.get("flops"),
            static_flops=figures.get("static_flops"),
            seconds=took.get("forward_seconds"),
            static_seconds=took.get("static_seconds"),
        )

    def missing(self) -> tuple[str, ...]:
        """The units that failed or were not done, in order."""
        return tuple(
            f"{Unit(self.cell, batch, attack)}: {self.errors.get((attack, batch), 'not done')}"
            for attack, batches in self.planned.items()
            for batch in batches
            if not self._has(attack, batch)
        )

    def _has(self, attack: str, batch: int) -> bool:
        if attack == ABOUT:
            return self.about is not None
        if attack == BATTLE:
            return self.battle is not None
        if attack == PROTOCOL:
            return bool(self.protocol)
        if attack in self.scenarios:
            return batch in self.scenarios[attack]
        return 0 <= batch < len(self.batches) and bool(self.there[attack][batch])


def score_of(bits: Bits) -> Score:
    return Score(int(bits.sum()), len(bits))
