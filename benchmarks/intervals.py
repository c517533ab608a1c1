"""What 95 % intervals cover, and how often tests find a difference where none is, if batches differ.

The accuracy of a batch is drawn from a beta distribution, and its points from the batch's accuracy. The
correlation is that of two points of a batch; 0 means independent points. For tests, each batch favors
one of two judgments by chance, and on average neither.

    python benchmarks/intervals.py
"""

from __future__ import annotations

import argparse

import numpy as np
from numpy.typing import NDArray

from dent.evaluation.paired import Paired
from dent.evaluation.results import Score
from dent.intervals import student_quantile

RESAMPLES = 1000
Numbers = NDArray[np.float64]


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--runs", type=int, default=4000, help="Number of simulated runs of each case.")
    parser.add_argument("--size", type=int, default=32, help="Number of points in a batch.")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    rng = np.random.default_rng(asked.seed)
    print("coverage of 95 % intervals, in %")
    print("| batches | correlation | accuracy | Wilson | bootstrap | t | ours |")
    print("|---:|---:|---:|---:|---:|---:|---:|")
    for batches in (5, 8, 16):
        for correlation in (0.0, 0.02, 0.1, 0.3):
            for mean in (0.05, 0.4, 0.8):
                found = measure_coverage(rng, batches, asked.size, mean, correlation, asked.runs)
                figures = " | ".join(f"{100 * one:.1f}" for one in found.values())
                print(f"| {batches} | {correlation:g} | {100 * mean:g} % | {figures} |")
    print("\np below 0.05 without a true difference, in %")
    print("| batches | correlation | McNemar | ours |\n|---:|---:|---:|---:|")
    for batches in (5, 6, 8, 16):
        for correlation in (0.0, 0.1, 0.3):
            rates = measure_false_positives(rng, batches, asked.size, correlation, asked.runs)
            figures = " | ".join(f"{100 * one:.1f}" for one in rates.values())
            print(f"| {batches} | {correlation:g} | {figures} |")
    print("\ncoverage of 95 % intervals of a difference, in %")
    print(
        "| batches | correlation | difference | as if independent | ours |\n|---:|---:|---:|---:|---:|"
    )
    for batches in (5, 8, 16, 31):
        for correlation in (0.0, 0.1, 0.3):
            for favor in (0.5, 0.8):
                found = measure_coverage_of_differences(
                    rng, batches, asked.size, favor, correlation, asked.runs
                )
                figures = " | ".join(f"{100 * one:.1f}" for one in found.values())
                points = 30 * (2 * favor - 1)
                print(f"| {batches} | {correlation:g} | {points:g} points | {figures} |")


if __name__ == "__main__":
    main()
