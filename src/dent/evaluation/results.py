"""The numbers of an evaluation: accuracies with n and interval, for every model with a defense."""

from __future__ import annotations

import csv
import io
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dent.evaluation.converge import Convergence
from dent.evaluation.paired import JudgedPoints, Paired
from dent.evaluation.spec import Cell
from dent.evaluation.store import explain_full_disk
from dent.intervals import count_effective, explain_few_batches, wilson
from dent.storage import replace_file

COLUMNS = (
    *("model", "defense", "eps", "norm", "what"),
    *("correct", "n", "batches", "percent", "low", "high"),
)


@dataclass(frozen=True)
class Score:
    """The number of correct points among n. Scores are equal if these two numbers are.

    independent: False if an answer depends on the rest of its batch.
    by_batch: these numbers for each batch; None if the batches are not known.

    >>> score = Score(81, 100)
    >>> score.percent, [round(end, 1) for end in score.interval]
    (81.0, [72.2, 87.5])
    >>> batches = ((18, 20), (17, 20), (12, 20), (19, 20), (15, 20))
    >>> [round(end, 1) for end in Score(81, 100, independent=False, by_batch=batches).interval]
    [59.4, 92.5]
    """

    correct: int
    n: int
    independent: bool = field(default=True, compare=False, repr=False)
    by_batch: tuple[tuple[int, int], ...] | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not 0 <= self.correct <= self.n:
            raise ValueError(f"expected 0 to n = {self.n} correct points, got {self.correct}")

    @property
    def percent(self) -> float:
        """Return the accuracy in %; nan without points."""
        return 100 * self.correct / self.n if self.n else math.nan

    @property
    def batches(self) -> int | None:
        """Return the number of batches that hold these points; None if it is not known."""
        return None if self.by_batch is None else len(self.by_batch)

    @property
    def why_no_interval(self) -> str | None:
        """Return why there is no interval, or None if there is one."""
        return explain_few_batches(self.independent, self.batches)

    @property
    def interval(self) -> tuple[float, float] | None:
        """Return the 95 % interval in %, or None if too few batches support one.

        It is Wilson's. If points depend on their batch, it is Wilson's for the number of independent
        points that say as much: see `dent.intervals.count_effective`.
        """
        if self.why_no_interval is not None:
            return None
        n = float(self.n)
        if not self.independent and self.by_batch:
            share = self.correct / n
            correct, sizes = zip(*self.by_batch, strict=True)
            n = count_effective(correct, sizes, variance=share * (1 - share))
        low, high = wilson(n * self.correct / self.n if self.n else 0, n)
        return 100 * low, 100 * high

    def to_json(self) -> dict[str, Any]:
        low, high = self.interval or (None, None)
        figures = {"percent": self.percent if self.n else None, "low": low, "high": high}
        counts = {"correct": self.correct, "n": self.n, "batches": self.batches}
        return counts | figures | {"why_no_interval": self.why_no_interval}


def score_points(judged: JudgedPoints) -> Score:
    """Return how many points are correct, with their batches.

    >>> score_points(JudgedPoints({4: True, 7: False}))
    Score(correct=1, n=2)
    """
    points, batch_of = judged.points, judged.batch_of
    if batch_of is None:
        return Score(sum(points.values()), len(points), judged.independent)
    sizes = Counter(batch_of[point] for point in points)
    right = Counter(batch_of[point] for point, is_right in points.items() if is_right)
    return score_batches(((right[batch], size) for batch, size in sizes.items()), judged.independent)


def score_batches(counts: Iterable[tuple[int, int]], independent: bool) -> Score:
    """Return the score of batches: (correct, n) of each.

    >>> score_batches([(3, 4), (2, 4)], independent=False)
    Score(correct=5, n=8)
    """
    by_batch = tuple(counts)
    correct, n = sum(one for one, _ in by_batch), sum(size for _, size in by_batch)
    return Score(correct, n, independent, by_batch)


@dataclass(frozen=True)
class Cost:
    """The cost of inference, beside the static model's; None where it could not be measured."""

    flops: float | None = None  # for an input
    static_flops: float | None = None
    seconds: float | None = None  # for the first batch, on the machine of the run
    static_seconds: float | None = None
    backward_passes: float | None = None  # in a call

    @property
    def times_flops(self) -> float | None:
        """Return the operations in multiples of the static model's.

        >>> Cost(flops=26.0, static_flops=2.0).times_flops
        13.0
        """
        return _divide(self.flops, self.static_flops)

    @property
    def times_seconds(self) -> float | None:
        return _divide(self.seconds, self.static_seconds)

    def to_json(self) -> dict[str, Any]:
        return vars(self) | {"times_flops": self.times_flops, "times_seconds": self.times_seconds}


@dataclass(frozen=True)
class MajorityScores:
    """Accuracies of a random defense if a point counts as correct when most submissions of it are."""

    natural: Score
    direct: Score
    worst: Score

    def to_json(self) -> dict[str, Any]:
        return {name: score.to_json() for name, score in vars(self).items()}


@dataclass(frozen=True)
class MissingUnit:
    """A unit without a result: it failed with an error, or was not done (error is None)."""

    unit: str
    error: str | None = None

    def __str__(self) -> str:
        return f"{self.unit}: {self.error or 'not done'}"


@dataclass(frozen=True)
class CellResult:
    """The numbers of a model with a defense, in a ball.

    If the run is not complete, each score is over the batches that have all units that it needs.
    """

    cell: Cell
    natural: Score
    attacks: dict[str, Score]  # under each attack, in order; see `cumulative`
    cumulative: bool  # later attacks saw only what stood: a score is what stands after all up to it
    worst: Score  # points that are correct naturally and under every attack
    submitted: Score  # for each batch, under the one attack that leaves the fewest points correct
    direct: Score  # the worst case without the attacks made for adaptation
    verdicts: dict[str, dict[int, bool]] = field(repr=False)  # by index; see `score.collect_points`
    protocol: Score | None = None  # the reference AutoAttack, which makes its own batches
    gap: float | None = None  # claimed minus worst, in percentage points; None for a static model
    scenarios: dict[str, Score] = field(default_factory=dict)  # other batches, or a part of them
    alone: dict[str, int] | None = None  # number of points that no other attack breaks
    convergence: Convergence | None = None  # of the worst case; None without attacks
    cost: Cost | None = None
    findings: tuple[dict[str, Any], ...] = ()  # name, message, figures
    # The worst case, and the natural accuracy (second), beside those of the static model (first).
    versus_static: Paired | None = None
    natural_versus_static: Paired | None = None
    missing: tuple[MissingUnit, ...] = ()
    not_run: dict[str, str] = field(default_factory=dict)  # attacks that cannot be run, and why
    kinds: dict[str, str] = field(default_factory=dict)  # direct or adaptive, for each attack
    independent: bool = True  # no answer depends on the rest of its batch
    majority: MajorityScores | None = None  # of a random defense; the other scores are of one submission
    batch_of: dict[int, int] = field(default_factory=dict, repr=False)  # batch of each point
    battle: dict[str, Any] | None = field(default=None, repr=False)  # see `record_battle`

    @property
    def claimed(self) -> Score | None:
        """Return what a paper would report: by the paper's protocol, else under direct attacks.

        Every attack on a static model is direct, because it does not adapt.
        """
        if self.protocol is not None:
            return self.protocol
        if self.cell.static:
            return self.worst if self.attacks else None
        return self.direct if "direct" in self.kinds.values() else None

    @property
    def is_attacked(self) -> bool:
        """Return True if the run has attacks; the suite `none` has not."""
        return bool(self.kinds) or self.protocol is not None

    @property
    def is_fully_attacked(self) -> bool:
        """Return True if the defense allowed every attack of the suite that suits it."""
        return not self.not_run

    @property
    def points(self) -> dict[int, bool]:
        """Return which points are correct in the worst case, by index."""
        return self.verdicts["worst"]

    @property
    def batches(self) -> int:
        """Return the number of batches that hold the points of the worst case."""
        return len({self.batch_of[point] for point in self.points})

    @property
    def judged(self) -> JudgedPoints:
        """Return the points of the worst case, with their batches."""
        return JudgedPoints(self.points, self.independent, self.batch_of)

    @property
    def judged_natural(self) -> JudgedPoints:
        """Return the natural points, with their batches."""
        return JudgedPoints(self.verdicts["natural"], self.independent, self.batch_of)

    def scores(self) -> Iterator[tuple[str, Score]]:
        """Yield every score with its name."""
        yield "natural", self.natural
        yield from self.attacks.items()
        yield from self.scenarios.items()
        if self.protocol is not None:
            yield "paper's protocol", self.protocol
        yield "without adaptive", self.direct
        yield "worst case", self.worst
        yield "submitted worst case", self.submitted
        if self.majority is not None:
            yield "natural by majority", self.majority.natural
            yield "without adaptive by majority", self.majority.direct
            yield "worst case by majority", self.majority.worst

    def to_json(self, *, points: bool = False) -> dict[str, Any]:
        """Return plain values: see `Results.to_json`."""
        scores = {"natural": self.natural, "direct": self.direct, "worst": self.worst}
        scores |= {"submitted": self.submitted}
        attacks = {
            name: score.to_json()
            | {"kind": self.kinds.get(name), "alone": None if self.alone is None else self.alone[name]}
            for name, score in self.attacks.items()
        }
        content = {
            **asdict(self.cell),
            "cumulative": self.cumulative,
            "independent": self.independent,
            "randomized": self.majority is not None,
            "majority": self.majority.to_json() if self.majority else None,
            "batches": self.batches,
            **{name: score.to_json() for name, score in scores.items()},
            "protocol": self.protocol.to_json() if self.protocol else None,
            "gap": self.gap,
            "versus_static": self.versus_static.to_json() if self.versus_static else None,
            "natural_versus_static": (
                self.natural_versus_static.to_json() if self.natural_versus_static else None
            ),
            "attacks": attacks,
            "scenarios": {name: score.to_json() for name, score in self.scenarios.items()},
            "convergence": self.convergence.to_json() if self.convergence else None,
            "cost": self.cost.to_json() if self.cost else None,
            "findings": list(self.findings),
            "missing": [str(one) for one in self.missing],
            "not_run": self.not_run,
        }
        if points:
            both = [(name, self.verdicts[name]) for name in ("worst", "natural")]
            content["points"] = {
                name: {"index": list(bits), "correct": "".join("01"[bit] for bit in bits.values())}
                for name, bits in both
            }
        return content


@dataclass(frozen=True)
class Results:
    """The results of a run."""

    cells: tuple[CellResult, ...]
    about: dict[str, Any] = field(default_factory=dict)  # what was asked, plan, digests, versions
    folder: Path | None = None  # None if the run was not kept

    @property
    def complete(self) -> bool:
        """Return True if every unit was done."""
        return not any(cell.missing for cell in self.cells)

    def to_json(self, *, points: bool = False) -> dict[str, Any]:
        """Return all numbers as plain values for `json.dumps`; unknown numbers are None.

        `about` is what was asked, `complete` is True if all of it was done, `cells` is a list of:
        `model`, `defense`, `eps`, `norm`; the scores `natural`, `direct`, `worst`, `submitted` and
        `protocol`; `attacks` and `scenarios`, scores by name; `cumulative`; `independent`;
        `randomized`; `majority`, the scores `natural`, `direct` and `worst` by majority; `batches`;
        `gap`; `versus_static` and `natural_versus_static`; `convergence`; `cost`; `findings`; `missing`;
        `not_run`, the attacks that the defense does not allow, each with the reason.

        A score has `correct`, `n`, `batches`, `percent`, `low` and `high`; that of an attack also has
        its `kind`, and as `alone` the number of points that it alone breaks. `convergence` has
        `converged`, the number of `doublings`, what the last of them changed (`change`, a number of
        points), the most points that one attack breaks `alone`, and the `trace` of the worst case over
        the cost of the attacks. A comparison has `p`, and `p_corrected` by Holm for all `comparisons` of
        the run. `low`, `high` and `p` are None where too few batches support them; `why_no_interval` and
        `why_no_p` say so.

        points: also return the verdicts, a digit for each index, in the worst case and naturally.
        """
        cells = [to_plain(cell.to_json(points=points)) for cell in self.cells]
        return {"about": to_plain(self.about), "complete": self.complete, "cells": cells}

    def rows(self) -> list[dict[str, Any]]:
        """Return one row for every cell and score, with the keys `COLUMNS`."""
        rows = (
            {**asdict(cell.cell), "what": what, **score.to_json()}
            for cell in self.cells
            for what, score in cell.scores()
        )
        return [{name: row[name] for name in COLUMNS} for row in rows]

    def to_dataframe(self) -> Any:
        """Return the rows as a pandas DataFrame (extra `pandas`)."""
        try:
            import pandas  # type: ignore[import-not-found,import-untyped,unused-ignore]
        except ImportError as error:
            raise ImportError("pandas is missing: pip install 'dent-defense[pandas]'") from error
        return pandas.DataFrame(self.rows(), columns=list(COLUMNS))

    def to_csv(self) -> str:
        """Return the rows as CSV."""
        file = io.StringIO()
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.rows())
        return file.getvalue()

    def write(self, folder: Path) -> None:
        """Write results.json and results.csv."""
        texts = {
            "results.json": json.dumps(self.to_json(), indent=2) + "\n",
            "results.csv": self.to_csv(),
        }
        for name, text in texts.items():
            with explain_full_disk(folder), replace_file(folder / name) as file:
                file.write(text.encode())


def _divide(cost: float | None, static: float | None) -> float | None:
    return cost / static if cost is not None and static else None


def to_plain(value: Any) -> Any:
    """Return a value that JSON can hold; nan becomes None."""
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [to_plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return str(value) if isinstance(value, Path) else value
