"""A disk that is full, a folder that cannot be written: said at once, and nothing is lost."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from runs import answer, evaluated, kept, python, snapshot

from dent.evaluation.sources import Sources
from dent.evaluation.store import FullError, UnitResult

STATIC: dict[str, Any] = {"defenses": ["static"], "n": 8}
UNITS = 9  # four of each batch, and what is to be known about the cell
SAYS = (
    "no room left for the results in {}; what was finished is kept. Free some space, and run the same "
    "command again"
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("whole")
    evaluated(folder, **STATIC)
    found = kept(folder)
    assert sum(name.startswith("units/") for name in found) == UNITS
    return found


def failing_at(count: int, code: int) -> Callable[[int], None]:
    """An fsync that fails from the count-th file on: what was written has not reached the disk."""
    fsync, calls = os.fsync, 0

    def synced(descriptor: int) -> None:
        nonlocal calls
        calls += 1
        if calls >= count:
            raise OSError(code, os.strerror(code))
        fsync(descriptor)

    return synced


# The first file is run.json, the last three are the reports.
@pytest.mark.parametrize("count", [1, 2, 7, UNITS + 1, UNITS + 2, UNITS + 3, UNITS + 4])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: dict[str, Any], count: int, code: int
) -> None:
    first: list[UnitResult] = []
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", failing_at(count, code))
        with pytest.raises(FullError) as raised:
            evaluated(tmp_path, on_unit=first.append, **STATIC)
    assert str(raised.value) == SAYS.format(tmp_path)
    finished = min(max(count - 2, 0), UNITS)
    assert len(first) == finished
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not [path for path in files if path.name.endswith(".part")]
    begun = 2 * (count > 1)  # run.json and the lock, which does not outlast a run that never began
    assert len(files) == begun + finished + max(count - UNITS - 2, 0)
    second: list[UnitResult] = []
    assert evaluated(tmp_path, on_unit=second.append, **STATIC).complete
    assert len(second) == UNITS - finished
    assert not {done.unit for done in first} & {done.unit for done in second}
    assert kept(tmp_path) == whole


def test_another_fault_of_the_disk_is_said_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", failing_at(3, errno.EIO))
    with pytest.raises(OSError, match="Input/output error") as raised:
        evaluated(tmp_path, **STATIC)
    assert not isinstance(raised.value, FullError)


@contextmanager
def little_disk(folder: Path, kilobytes: int) -> Iterator[Path]:
    """A disk of so many pages of four kilobytes, one for each small file."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(folder)]
    try:
        made = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("there is no `mount` here")
    if made.returncode:
        pytest.skip(f"no disk can be made here: {made.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def fill(disk: Path, *, leave: int = 0) -> Path:
    """Fill what is free, but for so many kilobytes."""
    free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
    (disk / "filler").write_bytes(b"\0" * (free - leave * 1024))
    return disk / "filler"


def full(out: Path) -> list[UnitResult]:
    """A run that finds no room: what it did before."""
    seen: list[UnitResult] = []
    with pytest.raises(FullError) as raised:
        evaluated(out, on_unit=seen.append, **STATIC)
    assert str(raised.value) == SAYS.format(out)
    assert not list(out.rglob("*.part"))
    return seen


def test_a_disk_that_is_really_full(tmp_path: Path, whole: dict[str, Any]) -> None:
    with little_disk(tmp_path / "disk", 256) as disk:
        out = disk / "run"
        filler = fill(disk)
        assert full(out) == []  # no room for run.json
        assert not (out / "run.json").exists()
        filler.unlink()
        filler = fill(disk, leave=28)
        some = full(out)
        assert 0 < len(some) < UNITS
        filler.unlink()
        rest: list[UnitResult] = []
        results = evaluated(out, on_unit=rest.append, **STATIC)
        assert results.complete
        assert len(some) + len(rest) == len({done.unit for done in some + rest}) == UNITS
        assert kept(out) == whole
        for name in ("report.md", "results.json", "results.csv"):
            (out / name).unlink()
        filler = fill(disk)
        assert full(out) == []  # no room for the reports
        filler.unlink()
        evaluated(out, on_unit=lambda done: pytest.fail(f"{done.unit} was done again"), **STATIC)
        assert kept(out) == whole


@pytest.mark.parametrize("name", ["file", "file/run"])
def test_a_file_where_a_folder_should_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(Sources, "model", lambda *_: pytest.fail("a model was loaded"))
    (tmp_path / "file").write_text("mine")
    with pytest.raises(NotADirectoryError, match=str(tmp_path / name)):
        evaluated(tmp_path / name, **STATIC)
    assert (tmp_path / "file").read_text() == "mine"


def test_units_that_are_no_folder(tmp_path: Path) -> None:
    evaluated(tmp_path / "old", **STATIC)
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "run.json").write_bytes((tmp_path / "old" / "run.json").read_bytes())
    (tmp_path / "new" / "units").write_text("mine")
    before = snapshot(tmp_path / "new")
    with pytest.raises(NotADirectoryError, match=f"got the file {tmp_path / 'new' / 'units'}; choose"):
        evaluated(tmp_path / "new", **STATIC)
    assert snapshot(tmp_path / "new") == before


READ_ONLY = """
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from test_full_disk import said_of_read_only
with TemporaryDirectory() as folder:
    print(json.dumps(said_of_read_only(Path(folder))))
"""
NOBODY = 65534


def said_of_read_only(folder: Path) -> dict[str, str]:
    """What a user hears for whom permissions mean something, of places that are read-only."""
    run, said = folder / "run", {}
    evaluated(run, **STATIC)
    missing = next((run / "units").glob("*/*_fpa.json"))
    missing.unlink()
    (folder / "empty").mkdir()
    if os.getuid() == 0:
        for path in (folder, *folder.rglob("*")):
            os.chown(path, NOBODY, NOBODY)
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    places = {"above": (folder, folder / "new" / "run"), "empty": (folder / "empty", folder / "empty")}
    places |= {"run": (run, run), "units": (run / "units", run), "cell": (missing.parent, run)}
    for name, (place, out) in places.items():
        place.chmod(0o555)
        before = snapshot(folder)
        try:
            evaluated(out, on_unit=lambda done: pytest.fail(f"{done.unit} was done"), **STATIC)
        except PermissionError as error:
            said[name] = str(error).replace(str(folder), "FOLDER")
        assert snapshot(folder) == before
        place.chmod(0o755)
    assert evaluated(run, **STATIC).complete
    return said


def test_what_cannot_be_written_is_said_before_any_work() -> None:
    with python(READ_ONLY) as process:
        said = answer(process)
    cell = said["cell"].split("/")[-1].split(";")[0]
    assert said == {
        "above": "[Errno 13] Permission denied: 'FOLDER/new'",
        "empty": "expected a folder to write to, got FOLDER/empty; choose another folder",
        "run": "expected a folder to write to, got FOLDER/run; choose another folder",
        "units": "expected a folder to write to, got FOLDER/run/units; choose another folder",
        "cell": f"expected a folder to write to, got FOLDER/run/units/{cell}; choose another folder",
    }
