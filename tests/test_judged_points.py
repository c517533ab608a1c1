"""Which points are correct: the same that every score counts, and that the files of a run say."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_up import KINDS, MadeUp, made_up, summary, tallies
from runs import evaluated

from dent.evaluation import Results, load_results
from dent.evaluation.attacks import find_attack
from dent.evaluation.plan import WHOLE, Unit
from dent.evaluation.results import CellResult, Score
from dent.evaluation.score import collect_points
from dent.evaluation.spec import Cell
from dent.evaluation.store import Outcome, UnitResult
from dent.evaluation.suites import ABOUT, BATTLE, NATURAL, PROTOCOL

Points = dict[int, bool]


def scores(cell: CellResult) -> dict[str, Score]:
    """Every score of a cell that is of points: `submitted` is of batches."""
    found = {NATURAL: cell.natural, "direct": cell.direct, "worst": cell.worst}
    found |= cell.attacks | cell.scenarios
    return found | ({"protocol": cell.protocol} if cell.protocol else {})


def counted(points: Points) -> Score:
    return Score(sum(points.values()), len(points))


def drawn(draw: st.DrawFn, points: list[int]) -> Outcome:
    correct = draw(st.lists(st.booleans(), min_size=len(points), max_size=len(points)))
    return Outcome(tuple(points), tuple(correct), (True,) * len(points))


@st.composite
def extras(draw: st.DrawFn, made: MadeUp) -> list[UnitResult]:
    """A scenario on parts of some batches, and the paper's protocol, or not."""
    found = []
    for batch, points in enumerate(made.batches):
        if draw(st.booleans()):
            part = drawn(draw, list(points)[: draw(st.integers(1, len(points)))])
            found.append(UnitResult(Unit(made.cell, batch, "mixed (50 %)"), part))
    if draw(st.booleans()):
        everyone = drawn(draw, [point for batch in made.batches for point in batch])
        found.append(UnitResult(Unit(made.cell, WHOLE, PROTOCOL), everyone))
    return found


@given(made_up(), st.data())
def test_points_are_what_the_scores_count(made: MadeUp, data: st.DataObject) -> None:
    extra = data.draw(extras(made))
    (result,) = summary(made, extra=extra).cells
    found = collect_points(tallies(made, extra=extra)[made.cell])
    assert {name: counted(points) for name, points in found.items()} == scores(result)
    assert (found["worst"], found[NATURAL]) == (result.points, result.judged_natural.points)
    assert set(found["worst"]) <= set(found["direct"]) <= set(found[NATURAL])


@given(made_up(), st.data())
def test_points_are_what_was_made_up(made: MadeUp, data: st.DataObject) -> None:
    extra = data.draw(extras(made))
    found = collect_points(tallies(made, extra=extra)[made.cell])
    every = list(made.survives)

    def left(names: list[str]) -> Points:
        """Of the batches in which none of these failed."""
        return {
            point: all(bool(made.survives[name][point]) for name in names)
            for point in made.complete(names)
        }

    direct = [name for name in every if KINDS.get(name, "direct") == "direct"]
    expected = {
        name: left(every[: every.index(name) + 1] if made.cumulative else [name]) for name in every
    }
    for done in extra:
        assert done.outcome
        name = "protocol" if done.unit.attack == PROTOCOL else done.unit.attack
        bits = zip(done.outcome.points, done.outcome.correct, strict=True)
        expected.setdefault(name, {}).update(bits)
    assert found == expected | {"direct": left(direct), "worst": left(every)}


def test_scenarios_of_which_nothing_is_done_have_no_points() -> None:
    made = MadeUp([[0, 1]], {NATURAL: np.ones(2, bool)})
    failed = UnitResult(Unit(made.cell, 0, "mixed (50 %)"), error="RuntimeError: no memory")
    found = collect_points(tallies(made, extra=[failed])[made.cell])
    assert found["mixed (50 %)"] == {}
    assert summary(made, extra=[failed]).cells[0].scenarios == {}


# Runs. An adaptive attack comes before a direct one, so that a chain takes points from it.
SCENARIOS = ("mixed (50 %)", "sorted labels")
ASKED: dict[str, Any] = {
    "attacks": ["apgd-ce", "denying updates:attacks=apgd-ce", "square", *SCENARIOS],
    "n": 10,
    "protocol": True,
    "eps": 0.01,
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("judged") / "run"
    assert evaluated(folder, **ASKED).complete
    return folder


def recounted(folder: Path) -> dict[Cell, dict[str, Points]]:
    """By reading the files of the units, and nothing of the library's own counting."""
    plan = json.loads((folder / "run.json").read_text())["plan"]
    files: dict[Cell, dict[str, list[dict[str, Any]]]] = {}
    for path in (folder / "units").rglob("*.json"):
        content = json.loads(path.read_text())
        cell, attack = Cell(**content["unit"]["cell"]), content["unit"]["attack"]
        files.setdefault(cell, {}).setdefault(attack, []).append(content["outcome"])
    cells = {
        Cell(*(row[key] for key in ("model", "defense", "eps", "norm"))): row for row in plan["cells"]
    }
    return {
        cell: recounted_cell(row | {"exhaustive": plan["exhaustive"]}, files.get(cell, {}))
        for cell, row in cells.items()
    }


def recounted_cell(row: dict[str, Any], files: dict[str, list[dict[str, Any]]]) -> dict[str, Points]:
    def bits(name: str, key: str = "correct") -> Points:
        pairs = [zip(one["points"], one[key], strict=True) for one in files.get(name, [])]
        return {point: bit == "1" for pair in pairs for point, bit in pair}

    def left(names: list[str]) -> Points:
        each = [bits(name) for name in names]
        return {p: all(one[p] for one in each) for p in each[0] if all(p in one for one in each)}

    def unbroken(names: list[str]) -> Points:
        """By these attacks themselves: what they were not given, they did not break."""
        each = [(bits(name), bits(name, "given")) for name in names]
        return {p: all(right[p] or not given[p] for right, given in each) for p in left(names)}

    attacks = [name for name in row["attacks"] if name not in (ABOUT, BATTLE, PROTOCOL)]
    judging = [name for name in attacks if name == NATURAL or find_attack(name).kind != "scenario"]
    direct = [name for name in judging if name == NATURAL or find_attack(name).kind == "direct"]
    chain = row["independent"] and not row["exhaustive"]
    found = {name: left(judging[: judging.index(name) + 1] if chain else [name]) for name in judging}
    found |= {name: bits(name) for name in attacks if name not in judging}
    found |= {"protocol": bits(PROTOCOL)} if PROTOCOL in files else {}
    return found | {"direct": unbroken(direct), "worst": left(judging)}


def load_points(folder: Path) -> dict[Cell, dict[str, Points]]:
    return {cell.cell: cell.verdicts for cell in load_results(folder).cells}


def agree(folder: Path) -> Results:
    """What the files say, what is loaded and what is scored are the same."""
    loaded, results = load_points(folder), load_results(folder)
    assert loaded == recounted(folder)
    assert list(loaded) == [cell.cell for cell in results.cells]
    for cell in results.cells:
        points = {name: one for name, one in loaded[cell.cell].items() if one or name not in SCENARIOS}
        assert {name: counted(one) for name, one in points.items()} == scores(cell)
        assert points["worst"] == cell.points
    return results


def test_a_run_is_what_its_files_say(finished: Path) -> None:
    static, dent = agree(finished).cells
    assert (static.cumulative, dent.cumulative) == (True, False)
    assert (static.worst.n, dent.worst.n) == (10, 10)
    assert static.scenarios == {}
    assert dent.scenarios["sorted labels"].n == 10
    assert static.direct.correct > static.worst.correct or dent.direct.correct > dent.worst.correct
    assert dent.battle is not None
    assert static.battle is None


@pytest.mark.parametrize("stop", [0, 1, 4, 9, 15, 20])
def test_a_run_that_was_stopped_is_what_its_files_say(tmp_path: Path, stop: int) -> None:
    done: list[UnitResult] = []

    def enough(one: UnitResult) -> None:
        done.append(one)
        if len(done) == stop:
            raise KeyboardInterrupt

    if stop:
        with pytest.raises(KeyboardInterrupt):
            evaluated(tmp_path / "run", on_unit=enough, **ASKED)
    else:
        evaluated(tmp_path / "run", **ASKED)
        shutil.rmtree(tmp_path / "run" / "units")
    results = agree(tmp_path / "run")
    assert not results.complete
    judged = load_points(tmp_path / "run")
    assert sum(bool(points) for cell in judged.values() for points in cell.values()) >= bool(stop)


@pytest.mark.parametrize(
    "name", ["00000_natural", "00001_apgd-ce", "00000_sorted_labels", "00000_battle"]
)
def test_a_unit_that_failed_is_no_part_of_it(finished: Path, tmp_path: Path, name: str) -> None:
    folder = Path(shutil.copytree(finished, tmp_path / "run"))
    whole = load_points(folder)
    paths = list((folder / "units").glob(f"*/{name}.json"))
    assert paths
    for path in paths:
        content = json.loads(path.read_text())
        error = {"unit": content["unit"], "took": {}, "error": "RuntimeError: no memory"}
        path.with_name(f"{path.name}.error").write_text(json.dumps(error))
        path.unlink()
    assert not agree(folder).complete
    found = load_points(folder)
    for cell, judged in found.items():
        for what, points in judged.items():
            assert points.items() <= whole[cell][what].items()  # fewer, and none that differs
    assert (found == whole) == (name == "00000_battle")


def test_points_of_what_is_no_run_or_damaged(finished: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="expected the folder of a run"):
        load_points(tmp_path)
    folder = Path(shutil.copytree(finished, tmp_path / "run"))
    path = next((folder / "units").glob("*/*_square.json"))
    path.write_text("{}")
    with pytest.raises(ValueError, match=f"{path.name} cannot be read"):
        load_points(folder)
