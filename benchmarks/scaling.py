"""How an evaluation scales: this process, one worker of Ray and two, with one thread each.

    python benchmarks/scaling.py [--rounds 3] [--json FILE]

The same evaluation by each in turns: static and dent+ on resnet20-at, suite `quick` with few steps. The
start of Ray, of its workers and their models is timed apart; so is the end, when one worker has nothing
left to do and waits for the other, which is as long for many units as it is for few. What is lost around
the units is the rest of the workers' time less what the units took by themselves: the store and the
engine. Two workers should do 1.8 times as much as one, and less than 3 % be lost.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import environment  # noqa: F401

from dent.evaluation import make_evaluation
from dent.evaluation.engines import ENGINES, Engine
from dent.evaluation.perform import Task
from dent.evaluation.plan import Plan, make_plan
from dent.evaluation.run import counted, identity, save, work
from dent.evaluation.sources import Sources
from dent.evaluation.store import Store
from dent.report.terminal import progress_bar, show_table

JOB: dict[str, Any] = {
    "models": "resnet20-at", "defenses": ["static", "dent+"], "n": 128, "batch_size": 16, "steps": 2,
}  # fmt: skip
ENGINES_MEASURED = {"this process": ("here", 1), "1 worker": ("ray", 1), "2 workers": ("ray", 2)}
SPEED_UP, LOST = 1.8, 3.0


def measure(engine: str, workers: int) -> dict[str, float]:
    """The seconds of the start, of the run, and of its units by themselves."""
    sources = Sources(make_evaluation(JOB))
    plan = make_plan(sources)
    about = identity(sources, plan)
    started = time.perf_counter()
    with (
        TemporaryDirectory() as folder,
        ENGINES[engine](sources, threads=1, workers=workers, address=None) as working,
    ):
        warm_up(plan, working)
        began = time.perf_counter()
        store = Store(Path(folder))
        store.begin(about)
        store.check(plan.units())
        all_done, times = [], []
        for done in work(plan, store, working, set(plan.units())):
            all_done.append(done)
            times.append(time.perf_counter())
        save(counted(plan, store, about), Path(folder))
        wall = time.perf_counter() - began
    if failed := [done for done in all_done if done.outcome is None]:
        raise RuntimeError(f"{failed[0].unit} failed: {failed[0].error}")
    return {
        "start": began - started,
        "wall": wall,
        "waiting": sum(
            max(0, workers - left) * (later - earlier)
            for left, later, earlier in zip(count(1), times[::-1], times[-2::-1], strict=False)
        ),
        "own": sum(done.took["seconds"] for done in all_done),
        "units": len(all_done),
        "images": sum(sum(done.outcome.given) for done in all_done if done.outcome),
        "workers": workers,
    }


def warm_up(plan: Plan, engine: Engine) -> None:
    """A unit of some length for each slot, so that all workers are there and have their model."""
    units = [unit for unit in plan.units() if unit.attack == "apgd-ce" and not unit.cell.static]
    for unit in units[: engine.slots]:
        engine.submit(Task(unit, plan.settings(unit)))
    for _ in units[: engine.slots]:
        engine.finished()


def lost(one: dict[str, float]) -> float:
    """The seconds of the workers that were neither a unit's nor at the end."""
    return one["wall"] * one["workers"] - one["own"] - one["waiting"]


def summary(name: str, found: list[dict[str, float]]) -> dict[str, Any]:
    """Medians over the rounds."""

    def middle(figure: Callable[[dict[str, float]], float], digits: int) -> float:
        return round(median(figure(one) for one in found), digits)

    return {
        "engine": name,
        "units": int(found[0]["units"]),
        "start, s": middle(lambda one: one["start"], 1),
        "run, s": middle(lambda one: one["wall"], 1),
        "units/s": middle(lambda one: one["units"] / one["wall"], 2),
        "images/s": middle(lambda one: one["images"] / one["wall"], 1),
        "waiting, %": middle(lambda one: 100 * one["waiting"] / one["wall"] / one["workers"], 2),
        "lost, %": middle(lambda one: 100 * lost(one) / one["wall"] / one["workers"], 2),
        "lost, ms per unit": middle(lambda one: 1000 * lost(one) / one["units"], 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {name: [] for name in ENGINES_MEASURED}
    with progress_bar("scaling") as move:
        for number in range(given.rounds):
            for name in list(ENGINES_MEASURED)[:: -1 if number % 2 else 1]:
                move(sum(map(len, found.values())), given.rounds * len(found), name)
                found[name].append(measure(*ENGINES_MEASURED[name]))
    rows = [summary(name, rounds) for name, rounds in found.items()]
    show_table(rows, right=list(rows[0])[1:], title=f"{JOB}, one thread each, {given.rounds} rounds")
    pairs = zip(found["1 worker"], found["2 workers"], strict=True)
    times = round(median(one["wall"] / two["wall"] for one, two in pairs), 2)
    most = max(row["lost, %"] for row in rows)
    print(
        f"\n2 workers do {times} times as much as 1 (at least {SPEED_UP}); {most} % is lost (< {LOST})"
    )
    if given.json:
        content = {"job": JOB, "rounds": found, "engines": rows, "times": times, "lost": most}
        given.json.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
