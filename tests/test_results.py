"""Results as values: intervals, JSON, CSV, data frames."""

from __future__ import annotations

import csv
import io
import json
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_up import MadeUp, cut, example, summary
from scipy import stats

from dent.evaluation.results import COLUMNS, Cost, Score
from dent.evaluation.spec import Cell
from dent.evaluation.suites import NATURAL

SCORES = ("natural", "direct", "worst", "submitted", "protocol")


@given(st.integers(1, 10_000), st.floats(0, 1))
def test_score_has_scipys_wilson_interval(n: int, share: float) -> None:
    score = Score(round(share * n), n)
    expected = stats.binomtest(score.correct, n).proportion_ci(method="wilson")
    assert score.interval == pytest.approx((100 * expected.low, 100 * expected.high), abs=1e-6)
    assert score.interval is not None
    assert score.interval[0] - 1e-9 <= score.percent <= score.interval[1] + 1e-9


def test_score_of_no_points() -> None:
    score = Score(0, 0)
    assert math.isnan(score.percent)
    assert score.interval == (0.0, 100.0)
    nothing = {"batches": None, "percent": None, "low": 0.0, "high": 100.0, "why_no_interval": None}
    assert score.to_json() == {"correct": 0, "n": 0} | nothing


@pytest.mark.parametrize(("correct", "n"), [(-1, 3), (4, 3), (1, 0)])
def test_scores_that_cannot_be_are_refused(correct: int, n: int) -> None:
    with pytest.raises(ValueError, match=f"expected 0 to n = {n} correct points, got {correct}"):
        Score(correct, n)


def test_cost_without_measurements() -> None:
    assert Cost().times_flops is Cost(flops=1.0, static_flops=0.0).times_flops is None
    assert Cost(seconds=0.6, static_seconds=0.2).times_seconds == pytest.approx(3.0)


def test_json_has_everything_with_n_and_interval() -> None:
    results = example()
    content = json.loads(json.dumps(results.to_json(), allow_nan=False))
    assert content["complete"] is True
    assert content["about"]["data"] == "digits"
    for row, cell in zip(content["cells"], results.cells, strict=True):
        assert [row[key] for key in ("model", "defense", "eps", "norm")] == [*vars(cell.cell).values()][
            :4
        ]
        for name in SCORES:
            score = getattr(cell, name)
            figures = (score.correct, score.n, 5, score.percent, *score.interval, None)
            assert tuple(row[name].values()) == figures
        for name, score in cell.attacks.items():
            assert row["attacks"][name]["percent"] == score.percent
            assert row["attacks"][name]["kind"] == cell.kinds[name]
            assert row["attacks"][name]["alone"] == (cell.alone[name] if cell.alone else None)
        assert list(row["attacks"]) == list(cell.attacks)
        gap = row["protocol"]["percent"] - row["worst"]["percent"]
        assert row["gap"] == (None if cell.cell.static else pytest.approx(gap))
        assert row["cumulative"] is cell.cumulative is cell.cell.static
        assert row["cost"]["times_flops"] == (1.0 if cell.cell.static else 13.0)
        assert len(row["findings"]) == len(cell.findings)
        assert "points" not in row
    static, dent = content["cells"][:2]
    assert static["versus_static"] is None
    assert dent["versus_static"]["difference"] == pytest.approx(
        dent["worst"]["percent"] - static["worst"]["percent"]
    )
    assert dent["scenarios"]["mixed (50 %)"]["n"] == 80


def test_json_of_points_can_be_read_back() -> None:
    results = example()
    for row, cell in zip(results.to_json(points=True)["cells"], results.cells, strict=True):
        kept = row["points"]["worst"]
        read = {index: bit == "1" for index, bit in zip(kept["index"], kept["correct"], strict=True)}
        assert read == cell.points
        assert row["points"]["natural"]["correct"].count("1") == cell.natural.correct


def test_json_of_a_run_that_has_just_begun_has_no_nan() -> None:
    made = MadeUp(cut(4, 2), {NATURAL: np.ones(4, bool)}, failed=frozenset({(NATURAL, 0), (NATURAL, 1)}))
    results = summary(made, folder=Path("runs/x"), lr=math.nan, sizes=(1, 2))
    content = json.loads(json.dumps(results.to_json(), allow_nan=False))
    assert content["complete"] is results.complete is False
    assert content["cells"][0]["worst"]["percent"] is None
    assert content["about"] == {"folder": str(Path("runs/x")), "lr": None, "sizes": [1, 2]}
    assert len(content["cells"][0]["missing"]) == 2


def test_a_data_frame_has_a_row_for_every_score(monkeypatch: pytest.MonkeyPatch) -> None:
    fake, made = ModuleType("pandas"), {}

    def frame(rows: list[dict[str, Any]], columns: list[str]) -> list[dict[str, Any]]:
        made["columns"] = columns
        return rows

    fake.DataFrame = frame  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pandas", fake)
    results = example()
    rows = results.to_dataframe()
    assert made["columns"] == list(COLUMNS)
    assert len(rows) == sum(len(dict(cell.scores())) for cell in results.cells)
    assert {tuple(row) for row in rows} == {COLUMNS}
    found = [row for row in rows if row["what"] == "worst case" and row["defense"] == "static"]
    assert [(row["n"], row["percent"]) for row in found] == [(200, results.cells[0].worst.percent)]


def test_pandas_itself() -> None:
    pytest.importorskip("pandas")
    results = example()
    frame = results.to_dataframe()
    assert list(frame.columns) == list(COLUMNS)
    assert frame[frame.what == "natural"].percent.tolist() == [
        one.natural.percent for one in results.cells
    ]


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match=r"pip install 'dent-defense\[pandas\]'"):
        example().to_dataframe()


def test_csv_can_be_read_back() -> None:
    results = example()
    read = list(csv.DictReader(io.StringIO(results.to_csv())))
    expected = [(cell.cell, what, score) for cell in results.cells for what, score in cell.scores()]
    assert len(read) == len(expected)
    for row, (cell, what, score) in zip(read, expected, strict=True):
        assert Cell(row["model"], row["defense"], float(row["eps"]), row["norm"]) == cell
        assert (row["what"], Score(int(row["correct"]), int(row["n"]))) == (what, score)
        assert float(row["percent"]) == score.percent
    dent = [row["what"] for row in read if row["defense"] == "dent+"]
    assert dent[: len(dent) // 2] == [
        "natural", "apgd-ce", "square", "denying", "fpa", "mixed (50 %)",
        "paper's protocol", "without adaptive", "worst case", "submitted worst case",
    ]  # fmt: skip
