"""Measure what lazy attacks save and lose: the defense adapts only at every r-th step of APGD.

    python benchmarks/lazy.py [--steps 100] [--json FILE]

The models are classifiers that others trained (see third_party.py), with the defenses that suit them.
All values of r run in turns on each batch, and the whole defense scores what they submit. With r = 5,
robust accuracy should exceed that of r = 1 by at most a point, in a third of the time or less.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import median
from typing import Any

import environment  # noqa: F401
import third_party

import dent
from dent.attacks.adaptive import lazy
from dent.report.terminal import progress_bar, show_table

BATCH = 128
EVERY = (1, 5)
Cell = tuple[str, int, float, str, dict[str, Any]]
# The model, the number of images, the radius over 255, and the defense.
CELLS: list[Cell] = [
    ("2b2 (eth-sri)", 512, 8, "dent+", {}),
    ("2b2 (eth-sri)", 256, 8, "dent", {"steps": 10}),
    ("2b2 (eth-sri)", 128, 8, "dent", {"steps": 30}),
    ("resnet20 (akamaster)", 128, 1.5, "dent-nominal", {}),
]


def measure(cell: Cell, steps: int, move: Any) -> dict[str, Any]:
    name, n, eps, preset, settings = cell
    model = dent.defend(third_party.MODELS[name](), preset, **settings)
    assert isinstance(model, dent.Dent)
    inputs, labels = dent.load_data("cifar10", n=n)
    seconds: dict[int, list[float]] = {every: [] for every in EVERY}
    standing = dict.fromkeys(EVERY, 0)
    model(inputs[:BATCH])  # warm up
    for number, (images, truth) in enumerate(zip(inputs.split(BATCH), labels.split(BATCH), strict=True)):
        for every in EVERY[:: -1 if number % 2 else 1]:
            move(every)
            started = time.perf_counter()
            result = lazy(model, images, truth, every=every, eps=eps / 255, steps=steps)
            seconds[every].append(time.perf_counter() - started)
            standing[every] += int((~result.success).sum())
    row: dict[str, Any] = {
        "model": name,
        "eps": f"{eps:g}/255",
        "defense": f"{preset}, {model.settings.steps} updates",
        "n": n,
    }
    for every in EVERY:
        row[f"r={every}, accuracy %"] = round(100 * standing[every] / n, 1)
    for every in EVERY:
        row[f"r={every}, s per batch"] = round(median(seconds[every]), 1)
    ratios = [slow / quick for slow, quick in zip(*seconds.values(), strict=True)]
    return row | {"times faster": round(median(ratios), 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    rows = []
    with progress_bar("lazy APGD") as move:
        for number, cell in enumerate(CELLS):
            rows.append(
                measure(
                    cell,
                    given.steps,
                    lambda every, at=number, name=cell[3]: move(at, len(CELLS), f"{name}, r={every}"),
                )
            )
    right = [key for key, value in rows[0].items() if not isinstance(value, str)]
    show_table(rows, right=right, title=f"APGD, {given.steps} steps, batches of {BATCH}")
    if given.json:
        given.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
