"""The folder of a run: what is damaged or foreign is named and left as it is; names are safe."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from runs import SHORT, evaluated, images, kept, model, snapshot

from dent.evaluation import evaluate, execute, load_results
from dent.evaluation.plan import WHOLE, Unit
from dent.evaluation.sources import Sources
from dent.evaluation.spec import Cell
from dent.evaluation.store import Outcome, Store, UnitResult
from dent.evaluation.suites import SPECIAL, SUITE_NOTES, SUITE_VERSION, find_suite

STATIC: dict[str, Any] = {"defenses": ["static"], "n": 8}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished") / "run"
    evaluated(folder, **STATIC)
    return folder


@pytest.fixture
def run(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A finished run, of which no unit must be done again."""
    monkeypatch.setattr(
        execute, "execute_task", lambda task, _: pytest.fail(f"{task.unit} was attacked")
    )
    return Path(shutil.copytree(finished, tmp_path / "run"))


def refused(folder: Path, message: str, *, error: type[Exception] = ValueError, **settings: Any) -> None:
    """It says why, and nothing has changed."""
    before = snapshot(folder)
    with pytest.raises(error, match=message) as raised:
        evaluated(folder, **STATIC | settings)
    assert "\n" not in str(raised.value)
    assert snapshot(folder) == before


def unit_files(folder: Path) -> list[Path]:
    return sorted((folder / "units").rglob("*.json"))


def flipped(content: bytes) -> bytes:
    at = content.index(b'"correct": "') + len(b'"correct": "')
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


DAMAGE: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "truncated": (lambda content: content[: len(content) // 2], "cannot be read"),
    "last byte": (lambda content: content[:-2], "cannot be read"),
    "empty": (lambda content: b"", "cannot be read"),
    "flipped": (flipped, "its content is not what was written"),
    "no text": (lambda content: b"\xff\xfe" + content, "cannot be read"),
    "no object": (lambda content: b"[]", "cannot be read"),
    "no digest": (lambda content: content.replace(b"sha256", b"sha257"), "cannot be read.*sha256"),
    "renamed cell": (lambda content: content.replace(b"runs:noisy", b"runs:other"), "of another cell"),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_unit_is_named_and_kept(run: Path, how: str) -> None:
    damage, says = DAMAGE[how]
    path = unit_files(run)[2]
    path.write_bytes(damage(path.read_bytes()))
    refused(run, f"{re.escape(str(path))} .*{says}.*Move it away and run the same command again")
    with pytest.raises(ValueError, match=re.escape(str(path))):
        load_results(run)


def test_a_damaged_error_is_named(run: Path) -> None:
    path = unit_files(run)[0]
    path.rename(f"{path}.error")
    refused(run, f"{re.escape(str(path))}.error cannot be read.*'error'")


def test_the_outcome_of_another_unit_is_named(run: Path) -> None:
    first, second = unit_files(run)[1:3]
    shutil.copy2(first, second)
    refused(run, f"{re.escape(str(second))} cannot be read .*it holds apgd-ce of another cell or batch")


def test_what_was_moved_away_is_done_again(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, path = kept(run), unit_files(run)[2]
    path.unlink()
    monkeypatch.undo()
    seen: list[UnitResult] = []
    evaluated(run, on_unit=seen.append, **STATIC)
    assert [done.unit.file for done in seen] == [str(path.relative_to(run / "units"))]
    assert kept(run) == before


@pytest.mark.parametrize(
    "name", ["notes.txt", "CELL/notes.txt", "CELL/00009_natural.json", "other/a.json"]
)
def test_what_is_foreign_is_named(run: Path, name: str) -> None:
    path = run / "units" / name.replace("CELL", unit_files(run)[0].parent.name)
    path.parent.mkdir(exist_ok=True)
    path.write_text("mine")
    refused(run, f"{re.escape(str(path))} is no part of this run")


def test_a_folder_in_the_place_of_a_unit(run: Path) -> None:
    path = unit_files(run)[0]
    path.unlink()
    path.mkdir()
    refused(run, f"{re.escape(str(path))} cannot be read")


def test_a_folder_of_other_things_is_not_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Sources, "model", lambda *_: pytest.fail("a model was loaded"))
    (tmp_path / "thesis.tex").write_text("mine")
    refused(
        tmp_path, f"{tmp_path} is not empty and holds no run \\(thesis.tex\\); choose another folder"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "JSONDecodeError"),
        ('{"format": 1, "asked"', "JSONDecodeError"),
        ("[1]", "TypeError"),
        ('"format"', "AttributeError"),
        ("{}", "KeyError: 'format'"),
    ],
)
def test_a_foreign_description_of_the_run(run: Path, content: str, says: str) -> None:
    (run / "run.json").write_text(content)
    refused(run, f"{run / 'run.json'} is not of a run \\(.*{says}")
    with pytest.raises(ValueError, match=f"{run / 'run.json'} is not of a run \\(.*{says}"):
        load_results(run)


def test_a_run_of_another_version(run: Path) -> None:
    (run / "run.json").write_text('{"format": 1}')
    refused(run, r"run.json is of another version of dent \(format 1, expected 3\); choose another")


def test_a_run_of_another_suite_version(run: Path) -> None:
    content = json.loads((run / "run.json").read_text())
    assert content["suite_version"] == SUITE_VERSION
    assert json.loads((run / "results.json").read_text())["about"]["suite_version"] == SUITE_VERSION
    (run / "run.json").write_text(json.dumps(content | {"suite_version": "2025.3"}))
    refused(run, f"holds a run of suite version 2025.3, expected {SUITE_VERSION}; choose another folder")
    assert load_results(run).complete  # it can still be read


def test_a_description_without_a_plan(run: Path) -> None:
    (run / "run.json").write_text('{"format": 3}')
    refused(run, "holds another run: asked is None there")
    with pytest.raises(ValueError, match=f"{run / 'run.json'} is not of a run \\(KeyError: 'plan'"):
        load_results(run)


@pytest.mark.parametrize(
    ("settings", "keys"),
    [
        ({"seed": 1}, ["asked.seed is 0 there, 1 was asked for"]),
        ({"eps": 0.5}, ["asked.eps is 0.02 there, 0.5 was asked for"]),
        ({"n": 12, "batch_size": 6}, ["asked.n is 8", "asked.batch_size is 4", "data_sha256"]),
        (
            {"defenses": ["static", "dent"]},
            [r"asked.defenses is \['static'\] there, \['static', 'dent'\]"],
        ),
        (
            {"steps": None, "suite": "standard"},
            ["asked.suite is 'quick'", "asked.steps is 2 there, None"],
        ),
    ],
)
def test_another_configuration_is_refused(run: Path, settings: dict[str, Any], keys: list[str]) -> None:
    for key in keys:
        refused(run, f"{run} holds another run: .*{key}.*Choose another folder", **settings)


def test_other_weights_or_images_are_refused(finished: Path, tmp_path: Path) -> None:
    inputs, labels = images(8)
    asked: dict[str, Any] = SHORT | {"defenses": ["static"], "out": tmp_path}
    evaluate({"net": model()}, data=(inputs, labels), **asked)
    before = snapshot(tmp_path)
    other = model()
    next(other.parameters()).data.flatten()[0] += 1e-6
    with pytest.raises(ValueError, match=r"holds another run: models_sha256.net is '\w+' there"):
        evaluate({"net": other}, data=(inputs, labels), **asked)
    inputs[0, 0, 0, 0] = torch.nextafter(inputs[0, 0, 0, 0], torch.tensor(2.0))
    with pytest.raises(ValueError, match=r"holds another run: data_sha256 is '\w+' there"):
        evaluate({"net": model()}, data=(inputs, labels), **asked)
    assert snapshot(tmp_path) == before


def test_what_killed_writers_left_is_removed_by_who_has_the_lock(run: Path) -> None:
    unit = unit_files(run)[0]
    parts = [
        path.with_name(f".{path.name}.{'0a' * 16}.part")
        for path in (unit, run / "run.json", run / "results.json")
    ]
    for part in parts:
        part.write_text("half")
    load_results(run)  # while another process may be writing
    assert all(part.exists() for part in parts)
    refused(run, "holds another run", seed=1)
    mine = run / ".mine.part"
    mine.write_text("mine")
    before = kept(run)
    evaluated(run, **STATIC)
    assert not any(part.exists() for part in parts)
    assert mine.read_text() == "mine"
    assert kept(run) == before


def test_a_run_can_begin_where_one_was_killed_before_it_began(tmp_path: Path) -> None:
    (tmp_path / "lock").touch()
    (tmp_path / f".run.json.{'0a' * 16}.part").write_text("{")
    assert evaluated(tmp_path, **STATIC).complete
    assert not list(tmp_path.glob(".*"))


def test_an_error_that_outlived_its_success_means_nothing(run: Path) -> None:
    """As where a process is killed between writing a success and removing the error."""
    path = unit_files(run)[0]
    content = json.loads(path.read_text())
    error = {"unit": content["unit"], "took": {}, "error": "RuntimeError: no memory"}
    Path(f"{path}.error").write_text(json.dumps(error))
    assert evaluated(run, **STATIC).complete
    assert load_results(run).complete


names = st.text(max_size=200)
cells = st.builds(Cell, names, names, st.floats(0, allow_infinity=False), names)
numbers = st.integers(0, 10**6)
figures = st.dictionaries(names, st.floats(allow_nan=False))
plain = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, st.floats(allow_nan=False), names),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(names, inner, max_size=3)),
    max_leaves=6,
)
findings = st.fixed_dictionaries({"name": names, "message": names, "figures": figures})


@st.composite
def outcomes(draw: st.DrawFn) -> Outcome:
    points = tuple(draw(st.lists(numbers, max_size=30)))
    bits = st.lists(st.booleans(), min_size=len(points), max_size=len(points)).map(tuple)
    return Outcome(
        points, draw(bits), draw(bits), draw(numbers), draw(numbers),
        draw(st.floats(0, allow_nan=False)), draw(figures), tuple(draw(st.lists(findings, max_size=2))),
        draw(st.dictionaries(names, plain, max_size=3)),
    )  # fmt: skip


@given(outcome=outcomes())
def test_an_outcome_comes_back_as_it_was(outcome: Outcome) -> None:
    assert Outcome.from_json(json.loads(json.dumps(outcome.to_json()))) == outcome


@settings(max_examples=20)
@given(outcome=outcomes(), cell=cells, batch=st.integers(-1, 10**6))
def test_a_success_takes_the_place_of_an_error(outcome: Outcome, cell: Cell, batch: int) -> None:
    unit = Unit(cell, batch, "mixed (10 %)")
    error = UnitResult(unit, error="RuntimeError: no memory")
    with TemporaryDirectory() as folder:
        store = Store(Path(folder))
        assert [*store.read([unit])] == []
        for done in (error, UnitResult(unit, outcome, took={"seconds": 0.5})):
            store.write(done)
            assert [*store.read([unit])] == [done]
        assert [path for path in (Path(folder) / "units").rglob("*") if path.is_file()] == [
            Path(folder) / "units" / unit.file
        ]


@given(cell=cells)
def test_the_name_of_a_cell_is_safe(cell: Cell) -> None:
    assert re.fullmatch(r"[A-Za-z0-9.+=_-]{1,80}_[0-9a-f]{8}", cell.slug)


alike = st.text("a_ /", max_size=3)  # much of which is one and the same in the readable part
similar = st.builds(Cell, alike, alike, st.sampled_from([0.1, 0.2]), alike)


@given(first=similar, second=similar)
def test_every_cell_has_a_name_of_its_own(first: Cell, second: Cell) -> None:
    assert (first == second) == (first.slug == second.slug)


def test_every_unit_of_every_suite_has_a_file_and_a_seed_of_its_own() -> None:
    every = [find_suite(name, norm) for name in SUITE_NOTES for norm in ("linf", "l2", "l1")]
    attacks = {*SPECIAL, *(attack for suite in every for attack in suite)}
    cell, other = Cell("net", "dent+", 0.1, "linf"), Cell("net", "dent_", 0.1, "linf")
    units = [Unit(c, b, a) for c in (cell, other) for b in (WHOLE, 0, 1, 123456) for a in attacks]
    assert len({unit.file.lower() for unit in units}) == len(units)  # also where case is not kept
    assert len({unit.seed(0) for unit in units}) == len(units)
    assert all(re.fullmatch(r"[A-Za-z0-9.+=_-]+/[A-Za-z0-9.+=_-]+\.json", unit.file) for unit in units)
