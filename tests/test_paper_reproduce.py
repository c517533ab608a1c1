"""Every table and figure of the paper, run at the smallest scale."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from reproductions import key_of
from runs import snapshot

from dent.evaluation import Evaluation
from dent.evaluation.attacks import find_attack
from dent.evaluation.battle import list_recordings
from dent.evaluation.suites import NATURAL
from dent.paper.cells import JudgedCell
from dent.paper.reproduce import CELLS, estimate_tables, gather, reproduce, select_known
from dent.paper.results import (
    COSTS,
    RESULTS,
    Measurement,
    Reproduction,
    list_works,
    load_reproduction,
    name_folder,
)
from dent.paper.scales import ALONE, find_scale
from dent.paper.tables import MEASURES, tables
from dent.report.paper import list_notes

SMOKE = find_scale("smoke")
TABLES = tables()


@dataclass(frozen=True)
class Ran:
    """A folder in which all tables were run, what came of it, and what was said meanwhile."""

    folder: Path
    found: Reproduction
    said: list[tuple[float, float | None, str]]

    def copy(self, folder: Path, *names: str) -> Path:
        """Another folder, with the cells of these tables."""
        for key in keys(*names):
            shutil.copytree(self.folder / CELLS / key, folder / CELLS / key)
        return folder


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    folder = tmp_path_factory.mktemp("smoke")
    said: list[tuple[float, float | None, str]] = []
    found = reproduce(
        list(TABLES.values()), SMOKE, folder, threads=1, progress=lambda *moved: said.append(moved)
    )
    return Ran(folder, found, said)


def keys(*names: str) -> list[str]:
    return [key_of(work) for work in list_works([TABLES[name] for name in names], SMOKE)]


def units(folder: Path, only: Iterable[str] | None = None) -> dict[str, tuple[bytes | None, int]]:
    """Every file of a finished unit, to the byte, and when it was written."""
    chosen = None if only is None else set(only)
    return {
        name: content
        for name, content in snapshot(folder / CELLS).items()
        if "/units/" in name and content[0] and (chosen is None or name.partition("/")[0] in chosen)
    }


# The numbers


@pytest.mark.parametrize("name", TABLES)
def test_every_number_is_measured(ran: Ran, name: str) -> None:
    for reference, one in ran.found.by_reference(TABLES[name]).items():
        if SMOKE.explain_left_out(name, one.number):
            assert one.missing == "left out at this scale"
            continue
        assert one.missing is None, reference
        assert one.work is not None
        assert one.ours is not None
        if one.number.ask.measure in COSTS:
            assert one.ours > 0
        else:
            assert one.n == expected_n(one), reference
            assert one.judged is not None
            assert set(one.judged.points) <= set(range(4))
    assert ran.found.is_complete([TABLES[name]])


def expected_n(one: Measurement) -> int:
    """All four points; of a mixed batch, those that are adversarial."""
    shares = {"mixed (10 %)": 1, "mixed (25 %)": 1, "mixed (50 %)": 2, "mixed (75 %)": 3}
    shares |= {"mixed (90 %)": 3, "one among (15)": 1}  # natural ones are in every batch
    return shares.get(one.number.ask.measure, 4)


@pytest.mark.parametrize("name", TABLES)
def test_attacks_take_and_never_give(ran: Ran, name: str) -> None:
    """Naturally, under the paper's attacks, in the worst case: always less."""
    compared = 0
    for reference, one in ran.found.by_reference(TABLES[name]).items():
        measured, ask = one.number.ask.measure, one.number.ask
        is_robust = measured == "adversarial" or (
            measured not in MEASURES and find_attack(measured).kind != "scenario"
        )
        is_alone = ask.attack in ALONE  # nothing is run beside, so there is no worst case
        if one.work is None or not is_robust or ask.minus is not None or is_alone:
            assert one.worst is None
            continue
        compared += 1
        assert one.score is not None
        assert one.worst is not None
        natural = ran.found.cells[ran.found.key(one.work)].judged[NATURAL]
        assert one.worst.n == one.score.n
        assert one.judged is not None
        assert one.worst_judged is not None
        for point, correct in one.judged.points.items():
            assert natural[point] >= correct >= one.worst_judged.points[point], reference
    assert compared or name in ("table-6", "table-14", "text-protocol")


def test_what_is_shared_is_one_cell(ran: Ran) -> None:
    everything = keys(*TABLES)
    assert len(everything) == len(set(everything)) < sum(len(keys(name)) for name in TABLES)
    assert {path.name for path in (ran.folder / CELLS).iterdir()} == set(everything)
    assert set(ran.found.cells) == set(everything)


def test_the_figure_of_the_battle_has_a_battle(ran: Ran) -> None:
    battles = [one.battle for one in ran.found.cells.values() if one.battle]
    assert len(battles) == 1
    assert list_recordings(battles[0])


def test_the_file_is_all_of_it(ran: Ran) -> None:
    assert load_reproduction(ran.folder) == ran.found
    assert json.loads((ran.folder / RESULTS).read_text()) == ran.found.to_json()
    assert gather(SMOKE, ran.folder) == ran.found
    assert [table.name for table in ran.found.list_begun()] == list(TABLES)


def test_progress_is_of_all_cells_together(ran: Ran) -> None:
    opened = [text for done, total, text in ran.said if total is None]
    assert len(opened) == len(set(opened)) == 5  # three models and two data sets, each once
    moved = [(done, total) for done, total, _ in ran.said if total is not None]
    assert {total for _, total in moved} == {moved[-1][1]}
    assert all(total is not None and 0 <= done <= total for done, total in moved)
    assert moved[-1][0] > 0.9 * (moved[-1][1] or 0)


# Again, and in parts


def test_the_same_call_again_does_nothing(ran: Ran) -> None:
    before, chosen = units(ran.folder), [TABLES["table-3"], TABLES["table-14"]]
    again = reproduce(chosen, SMOKE, ran.folder, threads=1)
    assert units(ran.folder) == before
    assert again.to_json() == ran.found.to_json()


def test_what_one_table_has_another_does_not_do_again(ran: Ran, tmp_path: Path) -> None:
    shared, new = (set(keys("table-3")) & set(keys("table-7")), set(keys("table-7", "table-3")))
    assert shared
    assert new > set(keys("table-3"))
    ran.copy(tmp_path, "table-3")
    before = units(tmp_path)
    found = reproduce([TABLES["table-7"]], SMOKE, tmp_path, threads=1)
    assert units(tmp_path, keys("table-3")) == before
    assert set(found.cells) == new
    # Alone or among others, first or last: the same points.
    for key in new:
        assert found.cells[key].judged == ran.found.cells[key].judged
    begun = {table.name for table in found.list_begun()}
    assert {"table-3", "table-7"} <= begun
    assert "table-2" not in begun


def test_another_seed_is_other_work(ran: Ran, tmp_path: Path) -> None:
    ran.copy(tmp_path, "table-3")
    assert gather(SMOKE, tmp_path).cells
    assert not gather(SMOKE, tmp_path, seed=1).cells


# Continuing from stored results, on a machine that has no folder of the run


def test_stored_results_are_not_measured_again(ran: Ran, tmp_path: Path) -> None:
    chosen = [TABLES["table-10"]]
    known = select_known(load_reproduction(ran.folder), chosen, SMOKE)
    assert set(known) == set(ran.found.cells)  # the other tables of the store are kept too
    assert estimate_tables(chosen, SMOKE, known=known) == []
    assert len(estimate_tables(chosen, SMOKE, seed=1, known=known)) == len(keys("table-10"))
    found = reproduce(chosen, SMOKE, tmp_path, threads=1, known=known)
    assert not (tmp_path / CELLS).exists()
    assert found.is_complete(chosen)
    assert found.by_reference(chosen[0]) == ran.found.by_reference(chosen[0])
    assert load_reproduction(tmp_path).cells == known


def test_a_search_in_float32_is_also_good_for_mixed_precision(ran: Ran) -> None:
    chosen, mixed = [TABLES["table-10"]], SMOKE.replace(mixed_precision=True)
    stored = load_reproduction(ran.folder)
    known = select_known(stored, chosen, mixed)
    assert not set(known) & set(stored.cells)  # under the names of the other work
    assert {id(cell) for cell in known.values()} == {id(cell) for cell in stored.cells.values()}
    together = Reproduction(mixed, known)
    assert not any("bfloat16" in str(note) for note in list_notes(together, chosen[0]))
    first = next(iter(known))
    searched = replace(known[first], asked=known[first].asked | {"mixed_precision": True})
    together.cells[first] = searched
    said = [note for table in TABLES.values() for note in list_notes(together, table)]
    assert any("evaluations searched in bfloat16" in str(note) for note in said)
    with pytest.raises(ValueError, match="to start from"):
        select_known(Reproduction(mixed, {first: searched}), chosen, SMOKE)
    # Stored again, it is still known by what it was asked.
    del together.cells[first]
    assert set(select_known(together, chosen, SMOKE)) == set(stored.cells) - {_name_in_float32(searched)}


def _name_in_float32(cell: JudgedCell) -> str:
    return name_folder(Evaluation(**(cell.asked | {"mixed_precision": False})))


def test_stored_results_of_other_weights_or_with_gaps_are_measured_again(ran: Ran) -> None:
    chosen = [TABLES["table-4"]]
    first, second, *_ = keys("table-4")
    stored = load_reproduction(ran.folder)
    stored.cells[first] = replace(stored.cells[first], weights="0" * 64)
    stored.cells[second] = replace(stored.cells[second], missing=("apgd-ce of batch 0",))
    third = keys("table-4")[2]
    stored.cells[third] = replace(stored.cells[third], versions={"suite": "2001.1"})
    assert set(select_known(stored, chosen, SMOKE)) == set(stored.cells) - {first, second, third}
    with pytest.raises(
        ValueError, match="at scale smoke with the weights of today to start from, got 0"
    ):
        select_known(Reproduction(SMOKE, {}), chosen, SMOKE)
