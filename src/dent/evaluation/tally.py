"""The verdicts of a cell as they come in, whatever their order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from itertools import takewhile
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dent.evaluation.attacks import find_attack
from dent.evaluation.plan import Plan, Unit
from dent.evaluation.results import MissingUnit, Score, score_batches
from dent.evaluation.spec import Cell
from dent.evaluation.store import Outcome, UnitResult
from dent.evaluation.suites import ABOUT, BATTLE, NATURAL, PROTOCOL, SPECIAL

Bits = NDArray[np.bool_]
Points = dict[int, bool]  # verdicts by index of the data set


class Tally:
    """The verdicts of one cell as far as they are known, in any order: a bit for every attack and point.

    Points stand in the order of the batches. The bits of an attack on a batch mean nothing unless
    `there` is True. Every cell has natural inputs, which come first.

    planned: the batches on which each attack has units, in the order of the attacks.
    kinds: direct, adaptive or scenario, for each attack that is not `SPECIAL`.
    cumulative: each attack got only what the attacks before it left standing.
    randomized: the answers are random, and `majority` has verdicts of the majority of submissions.
    not_run: attacks that the defense does not allow to run, with the reason.
    costs: forwards of the static model for each input, by attack; see `Plan.cost`.
    rounds: attacks that count for the worst case, each with the one that it repeats at a larger budget;
        first the suite itself.
    skipped: attacks with a larger budget that would have cost too much.
    """

    def __init__(
        self,
        cell: Cell,
        batches: Sequence[Sequence[int]],
        planned: Mapping[str, Sequence[int]],
        kinds: Mapping[str, str],
        *,
        cumulative: bool,
        independent: bool,
        randomized: bool = False,
        not_run: Mapping[str, str] | None = None,
        costs: Mapping[str, float] | None = None,
    ) -> None:
        self.cell, self.batches = cell, batches
        self.planned, self.kinds, self.costs = dict(planned), dict(kinds), dict(costs or {})
        self.cumulative, self.independent, self.randomized = cumulative, independent, randomized
        self.not_run = dict(not_run or {})
        self.sizes = [len(batch) for batch in batches]
        self.starts = np.cumsum([0, *self.sizes])
        self.all_points = np.ones(self.starts[-1], bool)
        judging = [one for one in planned if one == NATURAL or kinds.get(one) in ("direct", "adaptive")]
        self.correct = {attack: np.zeros_like(self.all_points) for attack in judging}
        self.majority = {attack: np.zeros_like(self.all_points) for attack in judging}
        self.given = {attack: np.zeros_like(self.all_points) for attack in judging}
        self.there = {attack: np.zeros(len(batches), bool) for attack in judging}
        self.rounds = [{attack: attack for attack in judging if attack != NATURAL}]
        self.skipped: list[str] = []
        self.scenarios: dict[str, dict[int, Outcome]] = {name: {} for name in self.of_kind("scenario")}
        self.protocol: Points = {}
        self.about: UnitResult | None = None
        self.battle: dict[str, Any] | None = None
        self.errors: dict[tuple[str, int], str] = {}

    def add_round(self, attacks: Mapping[str, str], costs: Mapping[str, float] | None = None) -> None:
        """Make room for attacks with a larger budget, each with the one that it repeats.

        Where one of them is not done, it counts as if it had broken nothing.
        """
        for name, base in attacks.items():
            self.planned[name], self.kinds[name] = self.planned[base], self.kinds[base]
            self.correct[name], self.majority[name] = self.all_points.copy(), self.all_points.copy()
            self.given[name], self.there[name] = ~self.all_points, np.zeros(len(self.batches), bool)
        self.costs |= costs or {}
        self.rounds.append(dict(attacks))

    @property
    def natural(self) -> Bits:
        """Return the points that are correct without an attack."""
        return self.correct[NATURAL]

    @property
    def direct(self) -> list[str]:
        """Return natural inputs and the direct attacks, by name."""
        return [NATURAL, *self.of_kind("direct")]

    def of_kind(self, *kinds: str) -> list[str]:
        """Return the attacks of these kinds, in order."""
        return [attack for attack in self.planned if self.kinds.get(attack) in kinds]

    def add(self, result: UnitResult) -> None:
        """Add the result of a unit. An error does not matter once another attempt succeeds."""
        unit, outcome = result.unit, result.outcome
        if unit.attack not in self.planned:
            return
        if outcome is None:
            self.errors[unit.attack, unit.batch] = result.error or "no outcome"
        elif unit.attack == ABOUT:
            self.about = result
        elif unit.attack == BATTLE:
            self.battle = outcome.battle
        elif unit.attack == PROTOCOL:
            self.protocol = dict(zip(outcome.points, outcome.correct, strict=True))
        elif unit.attack in self.scenarios:
            self.scenarios[unit.attack][unit.batch] = outcome
        else:
            self._add_verdicts(unit, outcome)

    def _add_verdicts(self, unit: Unit, outcome: Outcome) -> None:
        batch = self.batches[unit.batch] if 0 <= unit.batch < len(self.batches) else ()
        if sorted(outcome.points) != sorted(batch):
            raise ValueError(
                f"{unit}: expected the {len(batch)} points of its batch, got {len(outcome.points)} that "
                "are not the same; this outcome is of another run"
            )
        places = {point: self.starts[unit.batch] + place for place, point in enumerate(batch)}
        at = [places[point] for point in outcome.points]
        given = np.array(outcome.given, bool)
        # In a chain, what was not given is broken already.
        counts = given | (not self.cumulative)
        self.correct[unit.attack][at] = np.array(outcome.correct, bool) & counts
        if self.randomized:
            self.majority[unit.attack][at] = np.array(outcome.majority, bool) & counts
        self.given[unit.attack][at] = given
        self.there[unit.attack][unit.batch] = True

    def find_standing(self, unit: Unit) -> tuple[bool, ...]:
        """Return which points of a unit's batch the attacks before it left.

        An attack that failed counts as if it had broken nothing. A point of a random defense is left as
        long as it stands in one submission or by majority.
        """
        batch = slice(self.starts[unit.batch], self.starts[unit.batch + 1])
        before = takewhile(lambda attack: attack != unit.attack, self.correct)
        done = [attack for attack in before if self.there[attack][unit.batch]]
        standing = self.find_correct(done)
        if self.randomized:
            standing = standing | self.by_majority().find_correct(done)
        return tuple(standing[batch].tolist())

    def by_majority(self) -> Tally:
        """Return the same tally with the verdicts of the majority, for a random defense."""
        other = copy(self)
        other.correct = self.majority
        return other

    def has(self, unit: Unit) -> bool:
        """Return True if a unit has an outcome."""
        attack, batch = unit.attack, unit.batch
        if attack == ABOUT:
            return self.about is not None
        if attack == BATTLE:
            return self.battle is not None
        if attack == PROTOCOL:
            return bool(self.protocol)
        if attack in self.scenarios:
            return batch in self.scenarios[attack]
        return 0 <= batch < len(self.batches) and bool(self.there[attack][batch])

    def list_missing(self) -> tuple[MissingUnit, ...]:
        """Return the units that failed, with their errors, or were not done."""
        units = (
            Unit(self.cell, batch, attack)
            for attack, batches in self.planned.items()
            for batch in batches
        )
        return tuple(
            MissingUnit(str(unit), self.errors.get((unit.attack, unit.batch)))
            for unit in units
            if not self.has(unit)
        )

    def find_judged(self, attacks: Iterable[str]) -> tuple[Bits, Bits]:
        """Return the batches, and the points, that all these attacks judged; none without attacks.

        Among attacks of the suite, those of later rounds are not asked.
        """
        asked, none = list(attacks), np.zeros(len(self.batches), bool)
        later = {name for attacks in self.rounds[1:] for name in attacks}
        names = [name for name in asked if name not in later] or asked
        batches = np.all([self.there[name] for name in names], axis=0) if names else none
        return batches, np.repeat(batches, self.sizes)

    def find_broken(self, attack: str) -> Bits:
        """Return the points that an attack broke itself."""
        broken: Bits = ~self.correct[attack]
        return broken & self.given[attack] if self.cumulative else broken

    def list_up_to(self, attack: str) -> list[str]:
        """Return the attacks that a score under this one is about."""
        names = list(self.correct)
        return names[: names.index(attack) + 1] if self.cumulative else [attack]

    def find_correct(self, attacks: Iterable[str]) -> Bits:
        """Return the points that all of these attacks leave correct."""
        bits: Bits = np.all([self.all_points, *(self.correct[name] for name in attacks)], axis=0)
        return bits

    def find_direct(self) -> Bits:
        """Return the points that direct attacks leave; adaptive ones may have taken some from them."""
        bits = self.natural
        for name in self.of_kind("direct"):
            bits = bits & ~self.find_broken(name)
        return bits

    def score_submitted(self, attacks: Iterable[str]) -> Score:
        """Score, for each batch, the attack that leaves the fewest points correct."""
        names = list(attacks)
        left = [self._count(self.find_correct(self.list_up_to(name))) for name in names]
        return self._score(np.min([np.array(self.sizes), *left], axis=0), self.find_judged(names)[0])

    def score(self, bits: Bits, batches: Bits) -> Score:
        """Score the points of these batches."""
        return self._score(self._count(bits), batches)

    def score_scenario(self, attack: str) -> Score:
        """Score a scenario as far as it is done. Its batches are those of its units."""
        done = self.scenarios[attack].values()
        return score_batches(((sum(one.correct), len(one.points)) for one in done), self.independent)

    def _count(self, bits: Bits) -> NDArray[np.int_]:
        """Return the number of correct points in each batch."""
        counts: NDArray[np.int_] = np.diff(np.pad(np.cumsum(bits), (1, 0))[self.starts])
        return counts

    def _score(self, counts: NDArray[np.int_], batches: Bits) -> Score:
        done = np.flatnonzero(batches)
        return score_batches(((int(counts[one]), self.sizes[one]) for one in done), self.independent)

    def scenario_points(self, attack: str) -> Points:
        """Return the verdicts of a scenario as far as it is done."""
        outcomes = self.scenarios[attack].values()
        return {
            point: correct
            for outcome in outcomes
            for point, correct in zip(outcome.points, outcome.correct, strict=True)
        }

    def to_points(self, bits: Bits, where: Bits) -> Points:
        """Return bits by the index of the point in the data set."""
        points = [point for batch in self.batches for point in batch]
        return {int(points[place]): bool(bits[place]) for place in np.flatnonzero(where)}


def make_tallies(plan: Plan) -> dict[Cell, Tally]:
    """Return an empty tally for each cell of a plan."""
    batches, own = [batch.tolist() for batch in plan.points], plan.own_attacks
    return {
        cell: Tally(
            cell, batches,
            planned={name: plan.batches(name) for name in one.attacks},
            kinds={name: find_attack(name, own).kind for name in one.attacks if name not in SPECIAL},
            cumulative=plan.is_chained(cell), independent=one.independent,
            randomized=one.randomized, not_run=one.not_run,
            costs={
                name: plan.cost(cell, name)
                for name in one.attacks.keys() - own if plan.batches(name)
            },
        )
        for cell, one in plan.cells.items()
    }  # fmt: skip
