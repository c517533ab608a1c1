"""What an evaluation found: accuracies with n and interval, for every model with a defense."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from dent.evaluation.paired import Paired
from dent.evaluation.units import Cell
from dent.intervals import wilson

COLUMNS = ("model", "defense", "eps", "norm", "what", "correct", "n", "percent", "low", "high")


@dataclass(frozen=True)
class Score:
    """So many of n points are correct.

    >>> score = Score(81, 100)
    >>> score.percent, round(score.low, 1), round(score.high, 1)
    (81.0, 72.2, 87.5)
    """

    correct: int
    n: int

    def __post_init__(self) -> None:
        if not 0 <= self.correct <= self.n:
            raise ValueError(f"expected 0 to n = {self.n} correct points, got {self.correct}")

    @property
    def percent(self) -> float:
        """nan without points."""
        return 100 * self.correct / self.n if self.n else math.nan

    @property
    def low(self) -> float:
        """Where Wilson's 95 % interval begins, in %."""
        return 100 * wilson(self.correct, self.n)[0]

    @property
    def high(self) -> float:
        return 100 * wilson(self.correct, self.n)[1]

    def to_json(self) -> dict[str, Any]:
        figures = {"percent": self.percent if self.n else None, "low": self.low, "high": self.high}
        return {"correct": self.correct, "n": self.n} | figures


@dataclass(frozen=True)
class Cost:
    """What inference costs, beside the static model; None where it could not be measured."""

    flops: float | None = None  # for an input
    static_flops: float | None = None
    seconds: float | None = None  # for a batch, on the machine of the run
    static_seconds: float | None = None

    @property
    def times_flops(self) -> float | None:
        """In forwards of the static model.

        >>> Cost(flops=26.0, static_flops=2.0).times_flops
        13.0
        """
        return _times(self.flops, self.static_flops)

    @property
    def times_seconds(self) -> float | None:
        return _times(self.seconds, self.static_seconds)

    def to_json(self) -> dict[str, Any]:
        return vars(self) | {"times_flops": self.times_flops, "times_seconds": self.times_seconds}


@dataclass(frozen=True)
class CellResult:
    """All that was found for a model with a defense, in a ball.

    Of a run that is not complete, each score is over the batches of which all that it needs is there.
    """

    cell: Cell
    natural: Score
    attacks: dict[str, Score]  # under each, in order; `cumulative` says what that means
    cumulative: bool  # later attacks saw only what stood: a score is what stands after all up to it
    worst: Score  # every attack leaves them correct, and they are without one
    submitted: Score  # of each batch, under the one attack that leaves fewest correct
    direct: Score  # the worst case without the attacks made for adaptation
    protocol: Score | None = None  # the reference AutoAttack, batches of its own making
    gap: float | None = None  # claimed minus worst, in percentage points, on the points of both
    scenarios: dict[str, Score] = field(default_factory=dict)  # other batches, or a part of them
    alone: dict[str, int] | None = None  # points of `worst` that no other attack breaks
    cost: Cost | None = None
    findings: tuple[dict[str, Any], ...] = ()  # name, message, figures
    versus_static: Paired | None = None  # the worst case beside that of the static model, which is first
    missing: tuple[str, ...] = ()  # units that failed, with the error, or were not done
    kinds: dict[str, str] = field(default_factory=dict)  # of the attacks: direct or adaptive
    independent: bool = True  # no answer depends on the rest of its batch
    batch_of: dict[int, int] = field(default_factory=dict, repr=False)  # of every point that was judged
    battle: dict[str, Any] | None = field(default=None, repr=False)  # as `record_battle` has it
    points: dict[int, bool] = field(default_factory=dict, repr=False)  # in the worst case, by index
    points_natural: dict[int, bool] = field(default_factory=dict, repr=False)

    @property
    def claimed(self) -> Score | None:
        """What one would say it is worth: by the paper's protocol, else by direct attacks."""
        if self.protocol is not None:
            return self.protocol
        return self.direct if "direct" in self.kinds.values() else None

    @property
    def batches(self) -> int:
        """Return the number of batches that hold the points of the worst case."""
        return len({self.batch_of[point] for point in self.points})

    def scores(self) -> Iterator[tuple[str, Score]]:
        """Every score with its name, one after the other."""
        yield "natural", self.natural
        yield from self.attacks.items()
        yield from self.scenarios.items()
        if self.protocol is not None:
            yield "paper's protocol", self.protocol
        yield "without adaptive", self.direct
        yield "worst case", self.worst
        yield "submitted worst case", self.submitted

    def to_json(self, *, points: bool = False) -> dict[str, Any]:
        """As `Results.to_json` has it."""
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
            "batches": self.batches,
            **{name: score.to_json() for name, score in scores.items()},
            "protocol": self.protocol.to_json() if self.protocol else None,
            "gap": self.gap,
            "versus_static": self.versus_static.to_json() if self.versus_static else None,
            "attacks": attacks,
            "scenarios": {name: score.to_json() for name, score in self.scenarios.items()},
            "cost": self.cost.to_json() if self.cost else None,
            "findings": list(self.findings),
            "missing": list(self.missing),
        }
        if points:
            both = {"worst": self.points, "natural": self.points_natural}
            content["points"] = {
                name: {"index": list(bits), "correct": "".join("01"[bit] for bit in bits.values())}
                for name, bits in both.items()
            }
        return content


@dataclass(frozen=True)
class Results:
    """The results of a run."""

    cells: tuple[CellResult, ...]
    about: dict[str, Any] = field(default_factory=dict)  # what was asked: data, n, suite, seed, ...
    folder: Path | None = None

    @property
    def complete(self) -> bool:
        """Whether every unit was done."""
        return not any(cell.missing for cell in self.cells)

    def without_folder(self) -> Results:
        """The same, of a run of which nothing is kept."""
        return replace(self, folder=None)

    def to_json(self, *, points: bool = False) -> dict[str, Any]:
        """All of it as plain values for `json.dumps`; numbers that are not known are None.

        `about` is what was asked, `complete` whether all of it was done, `cells` a list of: `model`,
        `defense`, `eps`, `norm`; the scores `natural`, `direct`, `worst`, `submitted` and `protocol`;
        `attacks` and `scenarios`, scores by name; `cumulative`; `independent`; `batches`; `gap`;
        `versus_static`; `cost`; `findings`; `missing`. Every score has `correct`, `n`, `percent`, `low`
        and `high`; that of an attack has its `kind`, and with `alone` the number of points that it
        alone breaks. `p` is None where too few batches support one, and `why_no_p` says so.

        points: also which points are correct, a digit for each index, in the worst case and naturally.
        """
        cells = [_plain(cell.to_json(points=points)) for cell in self.cells]
        return {"about": _plain(self.about), "complete": self.complete, "cells": cells}

    def to_dataframe(self) -> Any:
        """A pandas DataFrame with a row for every cell and score (extra `pandas`)."""
        try:
            import pandas  # type: ignore[import-not-found,import-untyped,unused-ignore]
        except ImportError as error:
            raise ImportError("pandas is missing: pip install 'dent-defense[pandas]'") from error
        return pandas.DataFrame(self.rows(), columns=list(COLUMNS))

    def rows(self) -> list[dict[str, Any]]:
        """Return one row for every cell and score, with the keys `COLUMNS`.

        The percentage of no points is None.
        """
        made = []
        for cell in self.cells:
            place = asdict(cell.cell)
            made += [{**place, "what": what, **score.to_json()} for what, score in cell.scores()]
        return made

    def to_csv(self) -> str:
        """Return the rows as CSV, for a spreadsheet."""
        file = io.StringIO()
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.rows())
        return file.getvalue()


def _times(cost: float | None, static: float | None) -> float | None:
    return cost / static if cost is not None and static else None


def _plain(value: Any) -> Any:
    """What JSON has a form for."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return str(value) if isinstance(value, Path) else value
