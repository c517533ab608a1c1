"""Runs that were never run: which attack would break which point is known from the start."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from dent.evaluation.plan import WHOLE, Unit
from dent.evaluation.results import Results
from dent.evaluation.score import summarize
from dent.evaluation.spec import Cell
from dent.evaluation.store import Outcome, UnitResult
from dent.evaluation.suites import ABOUT, BATTLE, NATURAL, PROTOCOL, SPECIAL
from dent.evaluation.tally import Tally

KINDS = {"apgd-ce": "direct", "square": "direct", "denying": "adaptive", "fpa": "adaptive"}
KINDS |= {"mixed (50 %)": "scenario", "sorted": "scenario"}
ATTACKS = [name for name, kind in KINDS.items() if kind != "scenario"]
Bits = NDArray[np.bool_]


@dataclass
class MadeUp:
    """One cell. `survives` has a row for each attack, natural inputs first, a column for each point.

    failed: units (attack, batch) that ended in an error.
    """

    batches: Sequence[Sequence[int]]
    survives: Mapping[str, Bits]
    cell: Cell = Cell("net", "dent+", 8 / 255, "linf")
    cumulative: bool = False
    failed: frozenset[tuple[str, int]] = frozenset()

    def outcome(self, attack: str, batch: int) -> Outcome:
        """As the rules have it: in a chain, an attack gets what those before it left standing."""
        points = list(self.batches[batch])
        given = np.ones(len(points), bool)
        for before in self.survives:
            if before == attack:
                break
            if self.cumulative and (before, batch) not in self.failed:
                given &= self.survives[before][points]
        correct = self.survives[attack][points] & given
        return Outcome(tuple(points), tuple(correct.tolist()), tuple(given.tolist()))

    def done(self) -> list[UnitResult]:
        found = []
        for attack in self.survives:
            for batch in range(len(self.batches)):
                unit = Unit(self.cell, batch, attack)
                broken = (attack, batch) in self.failed
                error = "RuntimeError: no memory" if broken else None
                found.append(UnitResult(unit, None if broken else self.outcome(attack, batch), error))
        return found

    def complete(self, attacks: Sequence[str]) -> list[int]:
        """The points of the batches in which none of these attacks failed."""
        failed = {batch for attack, batch in self.failed if attack in attacks}
        return [point for b, batch in enumerate(self.batches) for point in batch if b not in failed]


def cut(n: int, size: int, seed: int = 0) -> list[list[int]]:
    order = np.random.default_rng(seed).permutation(n).tolist()
    return [order[start : start + size] for start in range(0, n, size)]


@st.composite
def made_up(draw: st.DrawFn, failures: bool = True) -> MadeUp:
    """Any cell: sizes, attacks, what breaks what, which units fail."""
    n, size = draw(st.integers(1, 30)), draw(st.integers(1, 12))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    attacks = draw(st.lists(st.sampled_from(ATTACKS), unique=True))
    names = [NATURAL, *sorted(attacks, key=ATTACKS.index)]
    share = draw(st.sampled_from([0.0, 0.5, 0.8, 1.0]))
    survives: dict[str, Bits] = {name: rng.random(n) < share for name in names}
    batches = cut(n, size, seed=int(rng.integers(100)))
    units = [(name, batch) for name in names for batch in range(len(batches))]
    failed = draw(st.sets(st.sampled_from(units), max_size=3)) if failures else set()
    return MadeUp(batches, survives, cumulative=draw(st.booleans()), failed=frozenset(failed))


def tally_units(
    attacks: Mapping[Cell, Sequence[str]],
    batches: Sequence[Sequence[int]],
    results: Iterable[UnitResult],
    *,
    cumulative: Callable[[Cell], bool],
    kind_of: Callable[[str], str],
    planned: Callable[[str], Sequence[int]] | None = None,
) -> dict[Cell, Tally]:
    """Tally results without a plan. A cell is independent of its batch if it is cumulative."""

    def usual(attack: str) -> Sequence[int]:
        return {PROTOCOL: (WHOLE,), ABOUT: (0,), BATTLE: (0,)}.get(attack, range(len(batches)))

    made = {
        cell: Tally(
            cell,
            batches,
            {name: (planned or usual)(name) for name in names},
            {name: kind_of(name) for name in names if name not in SPECIAL},
            cumulative=cumulative(cell),
            independent=cumulative(cell),
        )
        for cell, names in attacks.items()
    }
    for one in results:
        if one.unit.cell in made:
            made[one.unit.cell].add(one)
    return made


def tallies(
    *made: MadeUp, extra: Sequence[UnitResult] = (), done: Iterable[UnitResult] | None = None
) -> dict[Cell, Tally]:
    """The tallies of these cells, and of further units of theirs; or of what is done."""
    further = {
        one.cell: [done.unit.attack for done in extra if done.unit.cell == one.cell] for one in made
    }
    every = [*(one for cell in made for one in cell.done()), *extra]
    return tally_units(
        {one.cell: [*one.survives, *dict.fromkeys(further[one.cell])] for one in made},
        made[0].batches,
        iter(every) if done is None else done,
        cumulative={one.cell: one.cumulative for one in made}.__getitem__,
        kind_of=KINDS.__getitem__,
    )


def summary(*made: MadeUp, extra: Sequence[UnitResult] = (), **about: Any) -> Results:
    """What `summarize` makes of them."""
    return summarize(tallies(*made, extra=extra), about)


def example(*, failed: frozenset[tuple[str, int]] = frozenset(), protocol: bool = True) -> Results:
    """Three defenses of two models, all that a report can show among them."""
    batches, made, extra = cut(200, 40), [], []
    for number, (model, defense) in enumerate(
        [("net-a", "static"), ("net-a", "dent:steps=10"), ("net-a", "dent+"), ("net-b", "dent+")]
    ):
        cell = Cell(model, defense, 8 / 255, "linf")
        rng = np.random.default_rng(number)
        natural = rng.random(200) < 0.8
        survives = {NATURAL: natural}
        for attack, share in {"apgd-ce": 0.7, "square": 0.9, "denying": 0.6, "fpa": 0.7}.items():
            survives[attack] = natural & (rng.random(200) < share + 0.03 * number)
        made.append(MadeUp(batches, survives, cell, cell.static, failed if number == 1 else frozenset()))
        figures = {"flops": 1e6 if cell.static else 13e6, "static_flops": 1e6}
        took = {"seconds": 9.0, "forward_seconds": 0.3, "static_seconds": 0.02}
        found = {"name": "randomized", "message": "the same inputs differ", "figures": {"largest": 0.5}}
        about = Outcome(figures=figures, findings=() if cell.static else (found,))
        extra.append(UnitResult(Unit(cell, 0, ABOUT), about, took=took))
        if protocol:
            bits = tuple((natural & (rng.random(200) < 0.75)).tolist())
            everyone = Outcome(tuple(range(200)), bits, (True,) * 200)
            extra.append(UnitResult(Unit(cell, WHOLE, PROTOCOL), everyone))
        if not cell.static:
            for batch, points in enumerate(batches):
                part = Outcome(tuple(points[:16]), (True,) * 9 + (False,) * 7, (True,) * 16)
                extra.append(UnitResult(Unit(cell, batch, "mixed (50 %)"), part))
    return summary(*made, extra=extra, data="digits", n=200, batch_size=40, data_sha256="0" * 64)
