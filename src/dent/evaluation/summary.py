"""From finished units to results: the rules of evaluation, in numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dent.attacks.findings import Finding, detect_stronger_square
from dent.evaluation.paired import paired
from dent.evaluation.results import CellResult, Results, Score
from dent.evaluation.tally import Bits, Tally, score_of
from dent.evaluation.units import ABOUT, BATTLE, NATURAL, PROTOCOL, WHOLE, Cell, Done

LEAST_GAIN = 1  # percentage points, of the attacks made for adaptation over the direct ones


def count_units(
    cells: Sequence[Cell],
    attacks: Mapping[Cell, Sequence[str]],
    batches: Sequence[Sequence[int]],
    done: Iterable[Done],
    *,
    cumulative: Callable[[Cell], bool],
    independent: Callable[[Cell], bool] | None = None,
    kind_of: Callable[[str], str],
    planned: Callable[[str], Iterable[int]] | None = None,
) -> dict[Cell, Tally]:
    """What finished units add up to, by cell, whatever order they come in, and if some are missing.

    attacks: what is done to each cell, in order, `NATURAL`, `PROTOCOL` and `ABOUT` among it.
    batches: the indices of each batch's points in the data set.
    done: read once. What belongs to none of the cells or attacks is passed over.
    cumulative: whether a cell's attacks were given only what those before them left standing.
    independent: whether a cell's answers depend on their input alone; as `cumulative` unless told.
    kind_of: direct, adaptive or scenario, for an attack's name.
    planned: the batches on which an attack has units; unless told, all of them, for `ABOUT` the first,
        and for `PROTOCOL` the whole at once.
    """

    def usual(attack: str) -> Iterable[int]:
        return {PROTOCOL: (WHOLE,), ABOUT: (0,), BATTLE: (0,)}.get(attack, range(len(batches)))

    tallies = {
        cell: Tally(
            cell, attacks[cell], batches,
            cumulative=cumulative(cell), independent=(independent or cumulative)(cell),
            kind_of=kind_of, planned=planned or usual,
        )
        for cell in cells
    }  # fmt: skip
    for one in done:
        if one.unit.cell in tallies:
            tallies[one.unit.cell].add(one)
    return tallies


def summarize(
    tallies: Mapping[Cell, Tally], about: dict[str, Any], folder: Path | None = None
) -> Results:
    """The numbers of all cells."""
    results = {cell: cell_result(tally) for cell, tally in tallies.items()}
    return Results(tuple(_beside_static(result, results) for result in results.values()), about, folder)


def cell_result(tally: Tally) -> CellResult:
    """What the units of one cell say together."""
    every, alone = list(tally.correct), [NATURAL] * (NATURAL in tally.correct)
    points_natural, points_direct, points = (
        tally.judged_by(names)[1] for names in (alone, alone + tally.of("direct"), every)
    )
    natural = tally.correct.get(NATURAL, ~tally.all_points)
    without, worst = _without_adaptive(tally), tally.worst(every)
    result = CellResult(
        cell=tally.cell,
        natural=score_of(natural[points_natural]),
        attacks={name: tally.score(name) for name in tally.of("direct", "adaptive")},
        cumulative=tally.cumulative,
        worst=score_of(worst[points]),
        submitted=tally.submitted(every),
        direct=score_of(without[points_direct]),
        protocol=score_of(np.array([*tally.protocol.values()], bool)) if tally.protocol else None,
        scenarios={
            name: _counted(tally.scenario(name)) for name, done in tally.scenarios.items() if done
        },
        alone=None if tally.cumulative else _alone(tally, points),
        cost=tally.cost(),
        findings=tuple(_findings(tally, without & ~worst & points, points, points_direct)),
        missing=tally.missing(),
        kinds={name: kind for name, kind in tally.kinds.items() if kind != "scenario"},
        battle=tally.battle,
        points=tally.as_points(worst, points),
        points_natural=tally.as_points(natural, points_natural),
        independent=tally.independent,
        batch_of={point: number for number, batch in enumerate(tally.batches) for point in batch},
    )
    claims = tally.protocol or tally.as_points(without, points_direct)
    gap = paired(result.points, claims)  # on the same points, also where some are missing
    return replace(result, gap=gap.difference if gap.n and result.claimed else None)


def judged_points(tally: Tally) -> dict[str, dict[int, bool]]:
    """Which points are correct: naturally, under each attack, in each scenario, under the paper's
    protocol ("protocol"), under all direct attacks ("direct") and under all ("worst").
    """
    every, alone = list(tally.correct), [NATURAL] * (NATURAL in tally.correct)

    def left(names: list[str]) -> dict[int, bool]:
        return tally.as_points(tally.worst(names), tally.judged_by(names)[1])

    direct = tally.judged_by(alone + tally.of("direct"))[1]
    found = {name: left(tally.up_to(name)) for name in every}
    found |= {name: tally.scenario(name) for name in tally.scenarios}
    found |= {"protocol": tally.protocol} if tally.protocol else {}
    return found | {"direct": tally.as_points(_without_adaptive(tally), direct), "worst": left(every)}


def _without_adaptive(tally: Tally) -> Bits:
    """What the direct attacks leave, also of points that adaptive ones took away from them."""
    bits = tally.correct.get(NATURAL, tally.all_points)
    for name in tally.of("direct"):
        bits = bits & ~tally.broken(name)
    return bits


def _alone(tally: Tally, where: Bits) -> dict[str, int]:
    names = tally.of("direct", "adaptive")
    if not names:
        return {}
    where = where & tally.correct.get(NATURAL, tally.all_points)
    broken = np.stack([tally.broken(name) & where for name in names])
    once = broken.sum(0) == 1
    return {name: int((bits & once).sum()) for name, bits in zip(names, broken, strict=True)}


def _findings(tally: Tally, gained: Bits, points: Bits, points_direct: Bits) -> Iterable[dict[str, Any]]:
    found = tally.about.outcome.findings if tally.about and tally.about.outcome else ()
    yield from found
    for finding in (_square(tally, points_direct), _adaptive(tally, gained, points)):
        if finding is not None and finding.name not in {one["name"] for one in found}:
            yield asdict(finding)


def _square(tally: Tally, where: Bits) -> Finding | None:
    names = tally.of("direct")
    if tally.cumulative and "square" in names and names[-1] != "square":
        return None  # those after it had no chance at what it broke
    natural = tally.correct.get(NATURAL, tally.all_points)
    broken = {name: torch.from_numpy((tally.broken(name) & natural)[where]) for name in names}
    return detect_stronger_square(broken)


def _adaptive(tally: Tally, gained: Bits, where: Bits) -> Finding | None:
    count, enough = int(gained.sum()), LEAST_GAIN * int(where.sum())
    if tally.cell.static or not tally.of("direct") or not 100 * count >= enough > 0:
        return None
    return Finding(
        "adaptive is stronger",
        "attacks made for adaptation break what all attacks on the defended model together do not: its "
        "own gradient misleads; the accuracy without them claims too much",
        {"inputs": float(count)},
    )


def _counted(points: Mapping[int, bool]) -> Score:
    return Score(sum(points.values()), len(points))


def _beside_static(result: CellResult, results: Mapping[Cell, CellResult]) -> CellResult:
    static = results.get(replace(result.cell, defense="static"))
    if static is None or static is result:
        return result
    found = paired(
        static.points, result.points,
        independent=static.independent and result.independent, batch_of=result.batch_of,
    )  # fmt: skip
    return replace(result, versus_static=found if found.n else None)
