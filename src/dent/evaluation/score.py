"""From the results of units to numbers: the rules of evaluation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from dent.attacks.findings import Finding, detect_stronger_square
from dent.evaluation.compare import compare_with_static
from dent.evaluation.converge import count_alone, find_all_broken, judge_convergence
from dent.evaluation.paired import JudgedPoints, pair_points
from dent.evaluation.results import (
    CellResult,
    Cost,
    MajorityScores,
    Results,
    score_points,
)
from dent.evaluation.spec import Cell
from dent.evaluation.suites import NATURAL, describe_randomness
from dent.evaluation.tally import Bits, Points, Tally

LEAST_GAIN = 1  # percentage points that adaptive attacks gain over the direct ones, for a finding


def summarize(
    tallies: Mapping[Cell, Tally], about: dict[str, Any], folder: Path | None = None
) -> Results:
    """Return the numbers of all cells, each beside its static model."""
    return Results(compare_with_static(map(score_cell, tallies.values())), about, folder)


def score_cell(tally: Tally) -> CellResult:
    """Return the numbers of one cell."""
    every, verdicts = list(tally.correct), collect_points(tally)
    batches_direct, points_direct = tally.find_judged(tally.direct)
    batches, points = tally.find_judged(every)
    scores = {}
    for name in tally.of_kind("direct", "adaptive"):
        names = tally.list_up_to(name)
        judged = tally.find_judged(names)[0] & tally.find_judged([name])[0]
        scores[name] = tally.score(tally.find_correct(names), judged)
    batch_of = {point: number for number, batch in enumerate(tally.batches) for point in batch}
    result = CellResult(
        cell=tally.cell,
        natural=tally.score(tally.natural, tally.find_judged([NATURAL])[0]),
        attacks=scores,
        cumulative=tally.cumulative,
        worst=tally.score(tally.find_correct(every), batches),
        submitted=tally.score_submitted(every),
        direct=tally.score(tally.find_direct(), batches_direct),
        verdicts=verdicts,
        protocol=score_points(JudgedPoints(tally.protocol, tally.independent, batch_of))
        if tally.protocol
        else None,
        scenarios={name: tally.score_scenario(name) for name, done in tally.scenarios.items() if done},
        alone=None if tally.cumulative else count_alone(find_all_broken(tally, points)),
        cost=_read_cost(tally),
        findings=tuple(_list_findings(tally, points, points_direct)),
        convergence=judge_convergence(tally),
        missing=tally.list_missing(),
        not_run=tally.not_run,
        kinds={name: kind for name, kind in tally.kinds.items() if kind != "scenario"},
        battle=tally.battle,
        independent=tally.independent,
        majority=_score_majority(tally) if tally.randomized else None,
        batch_of=batch_of,
    )
    if tally.cell.static or result.claimed is None:
        return result
    claims = JudgedPoints(tally.protocol or verdicts["direct"])
    gap = pair_points(result.judged, claims)  # on the points of both
    return replace(result, gap=gap.difference if gap.n else None)


def _score_majority(tally: Tally) -> MajorityScores:
    """Return the accuracies by majority, each on the points of its counterpart in one submission."""
    votes, every = tally.by_majority(), list(tally.correct)
    return MajorityScores(
        natural=tally.score(votes.natural, tally.find_judged([NATURAL])[0]),
        direct=tally.score(votes.find_direct(), tally.find_judged(tally.direct)[0]),
        worst=tally.score(votes.find_correct(every), tally.find_judged(every)[0]),
    )


def collect_points(tally: Tally) -> dict[str, Points]:
    """Return the verdicts by name: natural, each attack and scenario, and three sets of attacks.

    These are "protocol" (the reference AutoAttack, if it was run), "direct" (all direct attacks) and
    "worst" (all attacks).
    """
    every = list(tally.correct)

    def collect(names: list[str], last: str) -> Points:
        where = tally.find_judged(names)[1] & tally.find_judged([last])[1]
        return tally.to_points(tally.find_correct(names), where)

    direct = tally.find_judged(tally.direct)[1]
    points = {name: collect(tally.list_up_to(name), name) for name in every}
    points |= {name: tally.scenario_points(name) for name in tally.scenarios}
    points |= {"protocol": tally.protocol} if tally.protocol else {}
    return points | {
        "direct": tally.to_points(tally.find_direct(), direct),
        "worst": collect(every, NATURAL),
    }


def _read_cost(tally: Tally) -> Cost | None:
    if tally.about is None or tally.about.outcome is None:
        return None
    figures, took = tally.about.outcome.figures, tally.about.took
    counts = {name: figures.get(name) for name in ("flops", "static_flops", "backward_passes")}
    return Cost(**counts, seconds=took.get("forward_seconds"), static_seconds=took.get("static_seconds"))


def _list_findings(tally: Tally, points: Bits, points_direct: Bits) -> Iterable[dict[str, Any]]:
    tally = tally.by_majority() if tally.randomized else tally  # in one submission, luck breaks some
    gained = tally.find_direct() & ~tally.find_correct(tally.correct) & points
    known = tally.about.outcome.findings if tally.about and tally.about.outcome else ()
    yield from known
    if tally.randomized:
        yield asdict(describe_randomness(tally.of_kind("direct", "adaptive")))
    for finding in (_find_stronger_square(tally, points_direct), _find_gain(tally, gained, points)):
        if finding is not None and finding.name not in {one["name"] for one in known}:
            yield asdict(finding)


def _find_stronger_square(tally: Tally, where: Bits) -> Finding | None:
    names = [name for name in tally.of_kind("direct") if name in tally.rounds[0]]
    if tally.cumulative and "square" in names and names[-1] != "square":
        return None  # the attacks after it had no chance at what it broke
    broken = {name: torch.from_numpy((tally.find_broken(name) & tally.natural)[where]) for name in names}
    return detect_stronger_square(broken)


def _find_gain(tally: Tally, gained: Bits, where: Bits) -> Finding | None:
    """Return a finding if adaptive attacks break many points that direct attacks do not."""
    count, enough = int(gained.sum()), LEAST_GAIN * int(where.sum())
    if tally.cell.static or not tally.of_kind("direct") or not 100 * count >= enough > 0:
        return None
    return Finding(
        "adaptive is stronger",
        "attacks made for adaptation break images that no attack on the defended model breaks: its "
        "own gradient misleads; the accuracy without them claims too much",
        {"inputs": float(count)},
    )
