"""What 95 % intervals cover, and how often tests find a difference where none is, if batches differ.

The accuracy of a batch is drawn from a beta distribution, and its points from the batch's accuracy. The
correlation is that of two points of a batch; 0 means independent points. For tests, each batch favors
one of two judgments by chance, and on average neither.

    python benchmarks/intervals.py [--json FILE]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dent.evaluation.paired import Paired
from dent.evaluation.results import Score
from dent.intervals import student_quantile
from dent.report.terminal import show_table
from dent.storage import replace_file

RESAMPLES = 1000
Numbers = NDArray[np.float64]
Row = dict[str, float]


def draw_accuracies(
    rng: np.random.Generator, mean: float, correlation: float, shape: tuple[int, int]
) -> Numbers:
    """Return the accuracies of batches, so that two points of a batch have this correlation."""
    if correlation == 0:
        return np.full(shape, mean)
    total = 1 / correlation - 1
    return rng.beta(mean * total, (1 - mean) * total, shape)


def cover(ends: Numbers, mean: float) -> float:
    """Return the share of intervals, (low, high) in columns, that hold the mean."""
    return float(np.mean((ends[:, 0] <= mean + 1e-12) & (mean - 1e-12 <= ends[:, 1])))


def measure_coverage(
    rng: np.random.Generator, batches: int, size: int, mean: float, correlation: float, runs: int
) -> dict[str, float]:
    """Return what each kind of interval covers."""
    correct = rng.binomial(size, draw_accuracies(rng, mean, correlation, (runs, batches)))
    shares = correct / size
    resampled = shares[:, rng.integers(0, batches, (RESAMPLES, batches))].mean(-1)
    center, error = shares.mean(1), shares.std(1, ddof=1) / np.sqrt(batches)
    half = student_quantile(batches - 1) * error
    wilson, ours = [], []
    for row in correct.tolist():
        by_batch = tuple((one, size) for one in row)
        score = Score(sum(row), size * batches, independent=False, by_batch=by_batch)
        ours.append(score.interval)
        wilson.append(Score(score.correct, score.n).interval)
    return {
        "Wilson": cover(np.array(wilson) / 100, mean),
        "bootstrap": cover(np.quantile(resampled, [0.025, 0.975], axis=1).T, mean),
        "t": cover(np.stack([center - half, center + half], 1), mean),
        "ours": cover(np.array(ours) / 100, mean),
    }


def measure_false_positives(
    rng: np.random.Generator, batches: int, size: int, correlation: float, runs: int
) -> dict[str, float]:
    """Return how often p is below 0.05 if there is no true difference."""
    uneven = rng.binomial(size, 0.3, (runs, batches))
    first = rng.binomial(uneven, draw_accuracies(rng, 0.5, correlation, (runs, batches)))
    found = {"McNemar": 0, "ours": 0}
    for one, every in zip(first.tolist(), uneven.tolist(), strict=True):
        by_batch = tuple((size, a, n - a, 0) for a, n in zip(one, every, strict=True))
        pair = Paired(
            size * batches, sum(one), sum(every) - sum(one), 0, independent=False, by_batch=by_batch
        )
        found["McNemar"] += pair.mcnemar < 0.05
        found["ours"] += pair.p is not None and pair.p < 0.05
    return {name: count / runs for name, count in found.items()}


def measure_coverage_of_differences(
    rng: np.random.Generator, batches: int, size: int, favor: float, correlation: float, runs: int
) -> dict[str, float]:
    """Return what intervals of a difference cover: of points that differ, the second favors a share."""
    uneven = rng.binomial(size, 0.3, (runs, batches))
    second = rng.binomial(uneven, draw_accuracies(rng, favor, correlation, (runs, batches)))
    ends: dict[str, list[tuple[float, float] | None]] = {"independent": [], "ours": []}
    for won, every in zip(second.tolist(), uneven.tolist(), strict=True):
        by_batch = tuple((size, n - a, a, 0) for a, n in zip(won, every, strict=True))
        counts = (size * batches, sum(every) - sum(won), sum(won), 0)
        ends["independent"].append(Paired(*counts).interval)
        ends["ours"].append(Paired(*counts, independent=False, by_batch=by_batch).interval)
    true = 0.3 * (2 * favor - 1)
    return {name: cover(np.array(found) / 100, true) for name, found in ends.items()}


def simulate(runs: int, size: int, seed: int) -> dict[str, list[Row]]:
    """Return the shares of every case, in %: one list of rows for each table."""
    rng = np.random.default_rng(seed)

    def describe(found: dict[str, float], **case: float) -> Row:
        return case | {name: 100 * share for name, share in found.items()}

    return {
        "coverage of 95 % intervals": [
            describe(
                measure_coverage(rng, batches, size, mean, correlation, runs),
                batches=batches, correlation=correlation, accuracy=100 * mean,
            )
            for batches in (5, 8, 16)
            for correlation in (0.0, 0.02, 0.1, 0.3)
            for mean in (0.05, 0.4, 0.8)
        ],
        "p below 0.05 without a true difference": [
            describe(
                measure_false_positives(rng, batches, size, correlation, runs),
                batches=batches, correlation=correlation,
            )
            for batches in (5, 6, 8, 16)
            for correlation in (0.0, 0.1, 0.3)
        ],
        "coverage of 95 % intervals of a difference": [
            describe(
                measure_coverage_of_differences(rng, batches, size, favor, correlation, runs),
                batches=batches, correlation=correlation, difference=round(30 * (2 * favor - 1)),
            )
            for batches in (5, 8, 16, 31)
            for correlation in (0.0, 0.1, 0.3)
            for favor in (0.5, 0.8)
        ],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--runs", type=int, default=4000, help="Number of simulated runs of each case.")
    parser.add_argument("--size", type=int, default=32, help="Number of points in a batch.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="File of the results.")
    asked = parser.parse_args()
    tables = simulate(asked.runs, asked.size, asked.seed)
    for title, rows in tables.items():
        print(f"\n{title}, in %")
        cases = ("batches", "correlation", "accuracy", "difference")
        show_table(
            [{key: f"{x:g}" if key in cases else f"{x:.1f}" for key, x in row.items()} for row in rows],
            right=tuple(rows[0]),
        )
    if asked.json:
        with replace_file(asked.json) as file:
            file.write((json.dumps(tables, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
