"""What becomes of troubles in a reproduction: what cannot be loaded, is damaged, fails, or is in use."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from reproductions import key_of

from dent.paper import reproduce as module
from dent.paper.claims import judge_claims
from dent.paper.reproduce import CELLS, PAUSE, gather, reproduce
from dent.paper.results import RESULTS, list_works
from dent.paper.scales import LoadedModel, Scale, find_scale
from dent.paper.tables import find_table
from dent.storage import lock_folder

SMOKE = find_scale("smoke")
TABLE = find_table("table-3")
KEYS = [key_of(work) for work in list_works([TABLE], SMOKE)]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which one table was run, of two cells."""
    folder = tmp_path_factory.mktemp("ran")
    assert len(reproduce([TABLE], SMOKE, folder, threads=1).cells) == len(KEYS) == 2
    return folder


@pytest.fixture
def table_3(ran: Path, tmp_path: Path) -> Path:
    """Another folder with the same."""
    shutil.copytree(ran / CELLS, tmp_path / CELLS)
    return tmp_path


def without(*models: str, model: str = "nowhere/checkpoint.pt") -> Scale:
    """The scale, with models of the paper for which nothing can be loaded."""
    return SMOKE.replace(models={**SMOKE.models, **dict.fromkeys(models, LoadedModel(model=model))})


@pytest.mark.parametrize(
    ("model", "why"),
    [("nowhere/checkpoint.pt", "there is no such file"), ("reproductions:broken", "no driver")],
)
def test_a_model_that_cannot_be_loaded(table_3: Path, model: str, why: str) -> None:
    found = reproduce([TABLE], without("trades-26-4", model=model), table_3, threads=1)
    assert len(found.troubles) == 2  # static and dent
    for one in found.by_reference(TABLE).values():
        if one.number.ask.model == "trades-26-4":
            assert one.missing is not None
            assert one.missing.startswith(f"{model} cannot be loaded: ")
            assert why in one.missing
            assert "\n" not in one.missing
        else:
            assert one.missing is None
    assert not found.is_complete([TABLE])
    assert json.loads((table_3 / RESULTS).read_text())["troubles"] == found.troubles


def test_too_few_images_are_the_trouble_of_who_wants_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same data set may do for one table and not for another."""
    ran = []
    monkeypatch.setattr(module, "run_evaluation", lambda sources, folder, **how: ran.append(folder.name))
    models = {name: one.replace(data="runs:images") for name, one in SMOKE.models.items()}  # it has 64
    few, many = (
        SMOKE.replace(models=models, tables={"table-2": SMOKE.tables["table-2"].replace(n=n)})
        for n in (64, 65)
    )
    chosen = [TABLE, find_table("table-2")]
    assert reproduce(chosen, few, tmp_path).troubles == {}
    assert len(ran) == 4
    troubles = reproduce(chosen, many, tmp_path).troubles
    assert set(troubles) == {key_of(work) for work in list_works(chosen[1:], many)}
    assert all(why.startswith("runs:images cannot be loaded: ") for why in troubles.values())


def test_nothing_to_load_is_an_error_before_any_work(tmp_path: Path) -> None:
    scale = without(*SMOKE.models)
    with pytest.raises(ValueError, match="nothing of this can be loaded: .*nowhere/checkpoint.pt"):
        reproduce([TABLE], scale, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_without_the_reference_the_rest_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise ImportError("no pyautoattack")

    monkeypatch.setattr("dent.evaluation.plan.import_reference", refuse)
    monkeypatch.setattr(module, "run_evaluation", lambda sources, folder, **how: None)
    protocol = find_table("text-protocol")
    troubles = reproduce([TABLE, protocol], SMOKE, tmp_path).troubles
    assert set(troubles) == {key_of(work) for work in list_works([protocol], SMOKE)}
    assert all("pip install 'dent-defense[reference]'" in why for why in troubles.values())


def damage_foreign(cell: Path) -> None:
    shutil.rmtree(cell)
    cell.mkdir()
    (cell / "notes.txt").write_text("mine")


def damage_unit(cell: Path) -> None:
    next((cell / "units").rglob("*.json")).write_text("{")


def damage_run(cell: Path) -> None:
    (cell / "run.json").write_text("{}")


@pytest.mark.parametrize("damage", [damage_foreign, damage_unit, damage_run])
def test_a_damaged_cell_does_not_stop_the_others(table_3: Path, damage: Callable[[Path], None]) -> None:
    bad, good = KEYS
    damage(table_3 / CELLS / bad)
    (table_3 / CELLS / good / "results.json").unlink()
    found = reproduce([TABLE], SMOKE, table_3, threads=1)
    assert list(found.troubles) == [bad]
    assert str(table_3 / CELLS / bad) in found.troubles[bad]
    assert (table_3 / CELLS / good / "results.json").exists()
    missing = {one.missing for one in found.by_reference(TABLE).values()}
    assert missing == {None, found.troubles[bad]}
    assert good in gather(SMOKE, table_3).cells  # also where nothing is run


def test_an_error_while_running_does_not_stop_the_others(
    table_3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad, good = KEYS
    done = []

    def run(sources: object, folder: Path, **how: object) -> None:
        if folder.name == bad:
            raise RuntimeError("CUDA is out of\nmemory")
        done.append(folder.name)

    monkeypatch.setattr(module, "run_evaluation", run)
    found = reproduce([TABLE], SMOKE, table_3)
    assert done == [good]
    assert found.troubles == {bad: "CUDA is out of memory"}


def test_a_full_disk_stops_it(table_3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(sources: object, folder: Path, **how: object) -> None:
        raise OSError(28, "no room")

    monkeypatch.setattr(module, "run_evaluation", run)
    with pytest.raises(OSError, match="no room"):
        reproduce([TABLE], SMOKE, table_3)


def test_what_another_process_does_is_waited_for(table_3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    busy, free = KEYS
    for key in (busy, free):  # to see when they are run
        (table_3 / CELLS / key / "results.json").unlink()
    other = lock_folder(table_3 / CELLS / busy, doing="evaluates")
    waited: list[float] = []
    said: list[str] = []

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        assert not (table_3 / CELLS / busy / "results.json").exists()
        assert (table_3 / CELLS / free / "results.json").exists()
        if len(waited) == 2:
            other.__exit__(None, None, None)

    monkeypatch.setattr(module, "time", SimpleNamespace(sleep=sleep))
    other.__enter__()
    found = reproduce(
        [TABLE], SMOKE, table_3, threads=1, progress=lambda done, of, text: said.append(text)
    )
    assert waited == [PAUSE, PAUSE]
    assert "waiting for another process" in said
    assert (table_3 / CELLS / busy / "results.json").exists()
    assert found.is_complete([TABLE])


def test_a_run_that_was_stopped_is_gathered_as_far_as_it_is(table_3: Path) -> None:
    first, second = KEYS
    for path in (table_3 / CELLS / first / "units").rglob("*.json"):
        if "natural" not in path.name:
            path.unlink()
    found = gather(SMOKE, table_3)
    numbers = found.by_reference(TABLE)
    assert len(found.cells) == 2
    assert any(one.missing and "not done" in one.missing for one in numbers.values())
    for one in numbers.values():
        assert one.work is not None
        is_there = found.key(one.work) == second or one.number.ask.measure == "natural"
        assert (one.missing is None) == is_there
    assert not found.is_complete([TABLE])


def test_an_empty_folder_has_nothing(tmp_path: Path) -> None:
    found = gather(SMOKE, tmp_path / "none")
    assert (found.cells, found.list_begun(), found.troubles) == ({}, [], {})
    assert not (tmp_path / "none").exists()
    assert {one.verdict for one in judge_claims(found)} == {"cannot be told"}
