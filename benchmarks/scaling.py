"""Measure how an evaluation scales: this process, one Ray worker and two, with one thread each.

    python benchmarks/scaling.py [--rounds 3] [--json FILE]

Each runs the same evaluation in turn: static and dent+ on resnet20-at, suite `quick` with few steps. The
start of Ray, of its workers and of their models is timed apart. So is the end, when one worker waits
for the other, which takes as long for many units as for few. Lost time is the rest of the workers' time
minus the time of the units themselves: store and engine. Two workers should do 1.8 times as much as one,
and less than 3 % should be lost.
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

from dent.evaluation import Evaluation
from dent.evaluation.execute import Engine, Task
from dent.evaluation.pipeline import describe_run, run_units, start_engine
from dent.evaluation.plan import Plan, make_plan
from dent.evaluation.score import summarize
from dent.evaluation.sources import Sources
from dent.evaluation.store import Store
from dent.evaluation.tally import make_tallies
from dent.report.terminal import progress_bar, show_table

JOB: dict[str, Any] = {
    "models": "resnet20-at", "defenses": ["static", "dent+"], "n": 128, "batch_size": 16, "steps": 2,
}  # fmt: skip
ENGINES_MEASURED = {"this process": ("here", 1), "1 worker": ("ray", 1), "2 workers": ("ray", 2)}
SPEED_UP, LOST = 1.8, 3.0


def measure(engine: str, workers: int) -> dict[str, float]:
    """Return the seconds of the start, of the run, and of its units by themselves."""
    sources = Sources(Evaluation(**JOB))
    plan = make_plan(sources)
    about = describe_run(sources, plan)
    started = time.perf_counter()
    with (
        TemporaryDirectory() as folder,
        start_engine(engine, sources, threads=1, workers=workers, address=None) as working,
    ):
        warm_up(plan, working)
        began = time.perf_counter()
        store, tallies = Store(Path(folder)), make_tallies(plan)
        store.begin(about)
        results, times = [], []
        for result in run_units(plan, tallies, working, set(plan.units())):
            store.write(result)
            results.append(result)
            times.append(time.perf_counter())
        summarize(tallies, about).write(Path(folder))
        wall = time.perf_counter() - began
    if failed := [result for result in results if result.outcome is None]:
        raise RuntimeError(f"{failed[0].unit} failed: {failed[0].error}")
    return {
        "start": began - started,
        "wall": wall,
        "waiting": sum(
            max(0, workers - left) * (later - earlier)
            for left, later, earlier in zip(count(1), times[::-1], times[-2::-1], strict=False)
        ),
        "own": sum(result.took["seconds"] for result in results),
        "units": len(results),
        "images": sum(sum(result.outcome.given) for result in results if result.outcome),
        "workers": workers,
    }


def warm_up(plan: Plan, engine: Engine) -> None:
    """Run a unit of some length in each slot, so that all workers are there and have their model."""
    units = [unit for unit in plan.units() if unit.attack == "apgd-ce" and not unit.cell.static]
    for unit in units[: engine.slots]:
        engine.submit(Task(unit, plan.options(unit)))
    for _ in units[: engine.slots]:
        engine.wait()


def count_lost(one: dict[str, float]) -> float:
    """Return the seconds of the workers that were neither spent in a unit nor waiting at the end."""
    return one["wall"] * one["workers"] - one["own"] - one["waiting"]


def summarize_rounds(name: str, found: list[dict[str, float]]) -> dict[str, Any]:
    """Return medians over the rounds."""

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
        "lost, %": middle(lambda one: 100 * count_lost(one) / one["wall"] / one["workers"], 2),
        "lost, ms per unit": middle(lambda one: 1000 * count_lost(one) / one["units"], 1),
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
    rows = [summarize_rounds(name, rounds) for name, rounds in found.items()]
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
