"""Paired differences: the exact test, the interval, and comparisons of runs."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_up import MadeUp, cut, example, summary
from scipy import stats

from dent.evaluation.compare import ComparedCells, compare_runs
from dent.evaluation.paired import JudgedPoints, Paired, pair_points
from dent.evaluation.results import Results
from dent.evaluation.spec import Cell
from dent.evaluation.suites import NATURAL
from dent.report.comparisons import comparison_table
from dent.report.evaluation import results_markdown, results_text
from dent.report.format import format_p
from dent.report.terminal import show_comparison
from dent.report.text import table_text

counts = st.integers(0, 60)


def ends(pair: Paired) -> tuple[float, float]:
    assert pair.interval is not None
    return pair.interval


@given(counts, counts, counts, counts)
def test_p_is_scipys_binomial_test(neither: int, first: int, second: int, both: int) -> None:
    found = Paired(neither + first + second + both, first, second, both)
    expected = stats.binomtest(first, first + second).pvalue if first + second else 1.0
    assert found.p == pytest.approx(expected, rel=1e-9)


def test_p_of_very_many_points_is_exact() -> None:
    assert Paired(50_000, 12_000, 12_500, 9_000).p == pytest.approx(
        stats.binomtest(12_000, 24_500).pvalue, rel=1e-9
    )
    assert Paired(4000, 0, 4000, 0).p == 0.0  # 2 / 2 ** 4000, and no overflow


@given(counts, counts, counts, counts)
def test_interval_is_walds_with_half_a_point_more_everywhere(
    neither: int, first: int, second: int, both: int
) -> None:
    found = Paired(neither + first + second + both, first, second, both)
    differences = np.array([0.0, -1.0, 1.0, 0.0])  # of a point of each sort
    weights = np.array([neither, first, second, both]) + 0.5
    mean = np.average(differences, weights=weights)
    error = math.sqrt(np.average((differences - mean) ** 2, weights=weights) / weights.sum())
    half = stats.norm.ppf(0.975) * error
    low, high = ends(found)
    assert low == pytest.approx(max(-100, 100 * (mean - half)), abs=1e-9)
    assert high == pytest.approx(min(100, 100 * (mean + half)), abs=1e-9)
    if found.n:
        assert low <= found.difference <= high


@given(counts, counts, counts, counts)
def test_the_other_way_round(neither: int, first: int, second: int, both: int) -> None:
    n = neither + first + second + both
    one, other = Paired(n, first, second, both), Paired(n, second, first, both)
    assert one.p == other.p
    assert ends(one)[0] == pytest.approx(-ends(other)[1], abs=1e-9)
    if n:
        assert one.difference == pytest.approx(-other.difference)
        assert one.difference == pytest.approx(one.second - one.first)


@pytest.mark.parametrize("n", [20, 50])
def test_the_interval_covers_the_truth_in_95_of_100(n: int) -> None:
    """Over all that n points can say, weighted by how likely it is: no sampling error."""
    coverages = []
    shares = [(0.05, 0.05), (0.1, 0.2), (0.05, 0.4), (0.3, 0.3), (0.02, 0.15)]
    for share_first, share_second in shares:
        truth, covered = 100 * (share_second - share_first), 0.0
        rest = 1 - share_first - share_second
        for first in range(n + 1):
            second = np.arange(n - first + 1)
            likely = np.atleast_1d(
                stats.multinomial.pmf(
                    np.stack([np.full_like(second, first), second, n - first - second], 1),
                    n,
                    [share_first, share_second, rest],
                )
            ).tolist()
            within = [Paired(n, first, int(one), 0) for one in second]
            covered += sum(
                chance
                for chance, pair in zip(likely, within, strict=True)
                if ends(pair)[0] <= truth <= ends(pair)[1]
            )
        coverages.append(covered)
    assert min(coverages) > 0.935
    assert 0.945 < np.mean(coverages) < 0.985


@given(
    st.dictionaries(st.integers(0, 20), st.booleans()),
    st.dictionaries(st.integers(0, 20), st.booleans()),
)
def test_pairs_are_the_points_of_both(first: dict[int, bool], second: dict[int, bool]) -> None:
    pairs = [(first[point], second[point]) for point in range(21) if point in first and point in second]
    assert pair_points(JudgedPoints(first), JudgedPoints(second)) == Paired(
        len(pairs), pairs.count((True, False)), pairs.count((False, True)), pairs.count((True, True))
    )


def test_no_points_say_nothing() -> None:
    found = pair_points(JudgedPoints({1: True}), JudgedPoints({2: True}))
    assert found.p == 1.0
    assert math.isnan(found.difference)
    assert found.to_json()["difference"] is None
    assert found.to_json()["low"] is None


def test_counts_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="expected counts >= 0 of 3 points"):
        Paired(3, 2, 2, 0)


# Two runs


def run(*defenses: str, seed: int = 0, **about: Any) -> Results:
    rng, made = np.random.default_rng(seed), []
    for defense in defenses:
        natural = rng.random(40) < 0.8
        survives = {NATURAL: natural, "apgd-ce": natural & (rng.random(40) < 0.6)}
        made.append(MadeUp(cut(40, 10), survives, Cell("net", defense, 0.7, "l2")))
    return summary(*made, **about)


def test_equal_cells_are_paired_point_by_point() -> None:
    first, second = run("static", "dent+", seed=0), run("dent", "dent+", seed=1)
    rows = compare_runs(first, second)
    assert [(row.first.defense, row.second.defense, row.what) for row in rows] == [
        ("dent+", "dent+", "natural"),
        ("dent+", "dent+", "worst case"),
    ]
    one, other = first.cells[1], second.cells[1]
    assert rows[0].paired.first == pytest.approx(one.natural.percent)
    assert rows[1].paired.second == pytest.approx(other.worst.percent)
    together = sum(one.points[point] and other.points[point] for point in range(40))
    assert rows[1].paired.both == together


def test_the_only_cells_of_a_model_and_ball_are_paired() -> None:
    rows = compare_runs(run("static"), run("dent+"))
    assert (
        rows[1].to_json().items()
        >= {"first_defense": "static", "second_defense": "dent+", "n": 40}.items()
    )
    first, second = run("static"), run("dent", "dent+")
    with pytest.raises(ValueError, match="a cell in common") as caught:
        compare_runs(first, second)
    assert all(str(one.cell) in str(caught.value) for one in (*first.cells, *second.cells))
    with pytest.raises(ValueError, match="a cell in common"):
        compare_runs(second, first)


@pytest.mark.parametrize("size", [40, 10, 8])
def test_one_batch_gives_no_p_and_the_tables_say_why(size: int) -> None:
    """The static model's points are independent; those of a defense that sees its batch are not."""
    rng, made = np.random.default_rng(0), []
    for defense in ("static", "dent+"):
        natural = rng.random(40) < 0.8
        survives = {NATURAL: natural, "apgd-ce": natural & (rng.random(40) < 0.6)}
        cell = Cell("net", defense, 0.7, "l2")
        made.append(MadeUp(cut(40, size), survives, cell, cumulative=cell.static))
    results = summary(*made)
    static, dent = results.cells
    assert (static.batches, dent.batches) == (40 // size, 40 // size)
    versus = dent.versus_static
    assert versus is not None
    assert versus.batches == 40 // size
    assert (versus.p is None) is (size != 8)
    why = f"intervals and p need 5 batches or more, got {40 // size}"
    says = f"no interval, no p: images of one batch are not independent: {why}."
    alone = [replace(results, cells=(cell,)) for cell in results.cells]
    pairs = [
        compare_runs(alone[0], alone[1]),
        compare_runs(alone[1], alone[0]),
        compare_runs(alone[1], alone[1]),
    ]
    for rows in pairs:
        assert [row.paired.p is None for row in rows] == [size != 8] * 2
        assert [row.paired.interval is None for row in rows] == [size != 8] * 2
        assert (says in table_text(comparison_table(rows), 200)) is (size != 8)
    assert all(row.paired.p == 1.0 for row in compare_runs(alone[0], alone[0]))
    assert (says in results_text(results, 200)) is (says in results_markdown(results)) is (size != 8)
    assert ("(p" in results_text(results, 200)) is (size == 8)


def test_other_data_are_refused() -> None:
    with pytest.raises(ValueError, match="expected two runs on the same data, got digits .sha256 a"):
        compare_runs(
            run("static", data="digits", data_sha256="a"), run("static", data="faces", data_sha256="b")
        )


@pytest.mark.parametrize("second", ["2026.1", "2026.2", None])
def test_runs_of_other_suite_versions_say_so(second: str | None) -> None:
    about: dict[str, Any] = {} if second is None else {"suite_version": second}
    rows = compare_runs(run("static", suite_version="2026.1"), run("static", **about))
    says = f"suite versions: 2026.1 in the first run, {second or 'unknown'} in the second"
    assert (says in table_text(comparison_table(rows), 200)) is (second != "2026.1")
    versions = {"first_suite_version": "2026.1", "second_suite_version": second}
    assert all(row.to_json().items() >= versions.items() for row in rows)


def test_runs_without_points_in_common_are_refused() -> None:
    results = example()
    verdicts: dict[str, dict[int, bool]] = {"natural": {}, "worst": {}}
    none = replace(results, cells=tuple(replace(one, verdicts=verdicts) for one in results.cells))
    with pytest.raises(ValueError, match="same images"):
        compare_runs(results, none)
    rows: list[ComparedCells] = compare_runs(results, results)
    assert {row.paired.difference for row in rows} == {0.0}
    assert len(rows) == 2 * len(results.cells)


def test_comparisons_in_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    results = example()
    static = replace(results, cells=results.cells[:1])
    dent = replace(results, cells=results.cells[2:3])
    found = compare_runs(static, dent)
    show_comparison(found)
    lines = capsys.readouterr().out.splitlines()
    assert lines == table_text(comparison_table(found)).splitlines()
    assert lines[3] == "net-a, static and dent+, linf 8/255"
    worst = found[1].paired
    assert worst.p is not None
    assert worst.p_corrected is not None
    assert re.split(r" {2,}", lines[5].strip()) == [
        "worst case",
        f"{static.cells[0].worst.percent:.1f}",
        f"{dent.cells[0].worst.percent:.1f}",
        f"{worst.difference:+.1f}",
        "{:+.1f} to {:+.1f}".format(*ends(worst)),
        format_p(worst.p),
        format_p(worst.p_corrected),
        "200",
        "5",
    ]
