"""Whether a worst case has converged: double the budget of attacks that still gain, round by round.

A round is what follows from the results of the rounds before it, for each cell by itself:

- Round 0 is the suite. The next round repeats, at twice the budget, the attacks that broke a point
  which no other attack broke, and in any case the attack that broke the most points (all of them if
  several did). In a chain, where broken points leave, an attack alone broke what it broke at all.
- Each further round repeats, at twice the budget again, the attacks of the last round that broke a
  point which stood before that round.
- A cell has converged if a round changes its worst case by less than half a percentage point, or if
  no point stands. It goes on until then, as long as the plan allows, and only if every unit of the
  round was done: a decision never has to be taken back.
- All rounds of a cell cost at most as much as the plan allows (`doubling_cost` times its suite). Of a
  round that costs more, the cheapest attacks are run. It is the last one, and the cell has not
  converged.

All of this follows from verdicts, so that a run that was stopped comes to the same rounds again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from dent.evaluation.plan import Plan, Unit, name_multiple
from dent.evaluation.spec import Cell
from dent.evaluation.suites import NATURAL

if TYPE_CHECKING:
    from dent.evaluation.tally import Bits, Tally

ENOUGH = 0.5  # percentage points: a round that changes less has converged


@dataclass(frozen=True)
class TracedAttack:
    """The worst case once an attack is done, and the cost of all attacks up to it."""

    attack: str
    cost: float  # for each input, in forwards of the static model, at most
    correct: int


@dataclass(frozen=True)
class Convergence:
    """How far the worst case of a cell is from one that more budget would not lower.

    doublings: number of rounds of doubled budgets that are done.
    change: number of points that the last of these rounds broke; None without one.
    alone: the most points that one attack, with its doublings, breaks alone: what the worst case would
        gain without it. None where broken points leave, because it is not known there.
    n: number of points of the worst case.
    doubled: the attacks of these rounds and of one that is not done yet, in order.
    skipped: attacks that should have been doubled, but cost more than what was left to spend.
    """

    converged: bool
    doublings: int
    change: int | None
    alone: int | None
    alone_by: str | None
    n: int
    doubled: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    trace: tuple[TracedAttack, ...] = ()

    @property
    def change_percent(self) -> float | None:
        """Return what the last doubling changed, in % of n.

        >>> Convergence(False, 1, 3, 4, "fpa", n=128).change_percent
        2.34375
        """
        return self._share(self.change)

    @property
    def alone_percent(self) -> float | None:
        return self._share(self.alone)

    def _share(self, count: int | None) -> float | None:
        return None if count is None or not self.n else 100 * count / self.n

    def to_json(self) -> dict[str, Any]:
        percents = {"change_percent": self.change_percent, "alone_percent": self.alone_percent}
        return asdict(self) | percents | {"trace": [asdict(one) for one in self.trace]}


def list_rounds(plan: Plan, tallies: Mapping[Cell, Tally]) -> Iterator[tuple[Plan, list[Unit]]]:
    """Yield the plan of each round, which includes the rounds before it, and its new units.

    Add the results of these units to the tallies before you ask for the next round.
    """
    yield plan, list(plan.units())
    for doubling in range(1, plan.doublings + 1):
        chosen, times = {}, 2**doubling
        for cell, tally in tallies.items():
            wanted = choose_attacks(tally, plan.list_doubled(cell))
            all_of_it = plan.double({cell: wanted}, doubling)
            costs = {name: all_of_it.cost(cell, name_multiple(name, times)) for name in wanted}
            chosen[cell] = select_affordable(tally, costs, plan.doubling_cost)
            skipped = (name for name in wanted if name not in chosen[cell])
            tally.skipped += [name_multiple(name, times) for name in skipped]
        larger = plan.double(chosen, doubling)
        units = [unit for unit in larger.units() if unit.attack not in plan.cells[unit.cell].attacks]
        if not units:
            return
        for cell, bases in chosen.items():
            new = {name_multiple(base, times): base for base in bases}
            if new:
                tallies[cell].add_round(new, {name: larger.cost(cell, name) for name in new})
        plan = larger
        yield plan, units


def choose_attacks(tally: Tally, candidates: list[str]) -> list[str]:
    """Return the attacks of the suite to repeat with a larger budget; none if no round follows.

    candidates: attacks whose budget can be doubled.
    """
    judged = judge_convergence(tally)
    is_over = judged is None or judged.converged or tally.skipped
    if is_over or not _is_done(tally, len(tally.rounds)):
        return []
    *before, last = tally.rounds
    stood = _find_standing(tally, len(before))
    broken = {name: tally.find_broken(name) & stood for name in last}
    if before:
        return [base for name, base in last.items() if broken[name].any()]
    alone = count_alone(broken)
    counts = {name: int(broken[name].sum()) for name in last if name in candidates}
    most = max(counts.values(), default=0)
    return [name for name in counts if alone[name] or counts[name] == most]


def select_affordable(tally: Tally, costs: Mapping[str, float], most: float | None) -> list[str]:
    """Return the attacks that can still be paid, chosen from the cheapest on; the order stays.

    costs: cost of each attack for each input.
    most: largest cost of all rounds after the suite, as a multiple of the suite's; None is no limit.
    """
    if most is None:
        return list(costs)
    suite, *later = (sum(tally.costs.get(name, 0) for name in attacks) for attacks in tally.rounds)
    left = most * suite - sum(later)
    affordable = set()
    for name in sorted(costs, key=costs.__getitem__):
        left -= costs[name]
        if left >= 0:
            affordable.add(name)
    return [name for name in costs if name in affordable]


def judge_convergence(tally: Tally) -> Convergence | None:
    """Return what is known of a cell's convergence; None if no attack was asked for."""
    if not tally.rounds[0]:
        return None
    done = 0
    while done < len(tally.rounds) and _is_done(tally, done + 1):
        done += 1
    left = [int(_find_standing(tally, number).sum()) for number in range(1, done + 1)]
    change = left[-2] - left[-1] if done > 1 else None
    n = len(tally.all_points)
    settled = change is not None and 100 * change < ENOUGH * n and not tally.skipped
    where = tally.find_judged(tally.correct)[1]
    counts = {} if tally.cumulative else count_alone(_join_rounds(tally, where))
    by = max(counts, key=counts.__getitem__, default=None)
    return Convergence(
        converged=done == len(tally.rounds) and (settled or left[-1] == 0),
        doublings=max(done - 1, 0),
        change=change,
        alone=counts[by] if by else None,
        alone_by=by if by and counts[by] else None,
        n=int(where.sum()),
        doubled=tuple(name for attacks in tally.rounds[1:] for name in attacks),
        skipped=tuple(tally.skipped),
        trace=tuple(_trace_worst_case(tally, where)),
    )


def count_alone(broken: Mapping[str, Bits]) -> dict[str, int]:
    """Count, for each attack, the points that no other attack breaks."""
    once = np.sum(list(broken.values()), axis=0) == 1
    return {name: int((bits & once).sum()) for name, bits in broken.items()}


def find_all_broken(tally: Tally, where: Bits) -> dict[str, Bits]:
    """Return which of these points each attack breaks; only points that are correct naturally."""
    where = where & tally.natural
    return {name: tally.find_broken(name) & where for name in _list_attacks(tally, len(tally.rounds))}


def _join_rounds(tally: Tally, where: Bits) -> dict[str, Bits]:
    """Return which of these points each attack of the suite breaks, with any of its budgets."""
    broken = find_all_broken(tally, where)
    for attacks in tally.rounds[1:]:
        for name, base in attacks.items():
            broken[base] = broken[base] | broken.pop(name)
    return broken


def _trace_worst_case(tally: Tally, where: Bits) -> Iterator[TracedAttack]:
    """Yield the worst case after each attack, on the points that count; nothing without their costs.

    In a chain, an attack costs only for the points that it was given.
    """
    if not where.any() or tally.correct.keys() - tally.costs.keys():
        return
    cost, standing = 0.0, where
    for name, bits in tally.correct.items():
        cost += tally.costs[name] * float(tally.given[name][where].mean())
        standing = standing & bits
        yield TracedAttack(name, cost, int(standing.sum()))


def _is_done(tally: Tally, rounds: int) -> bool:
    """Return True if every unit of the first so many rounds, and natural inputs, has its verdicts."""
    names = [NATURAL, *_list_attacks(tally, rounds)]
    return all(tally.there[name][batch] for name in names for batch in tally.planned[name])


def _find_standing(tally: Tally, rounds: int) -> Bits:
    """Return the points that are correct naturally and under the attacks of the first so many rounds."""
    return tally.find_correct([NATURAL, *_list_attacks(tally, rounds)])


def _list_attacks(tally: Tally, rounds: int) -> list[str]:
    return [name for attacks in tally.rounds[:rounds] for name in attacks]
