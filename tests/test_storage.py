"""A folder that one process keeps for itself."""

from __future__ import annotations

import errno
import fcntl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dent import storage
from dent.storage import lock_folder

# The module imports nothing heavy: run alone, without torch, it lets another process start fast.
HOLD = f"""
import os, pathlib, runpy, subprocess, sys
lock_folder = runpy.run_path({storage.__file__!r})["lock_folder"]
with lock_folder(pathlib.Path(sys.argv[1]), doing="trains"):
"""
WAIT = "print('held', flush=True); sys.stdin.read()"


@contextmanager
def other_process(folder: Path, do: str = WAIT, afterwards: str = "") -> Iterator[subprocess.Popen[str]]:
    """Another process that locks the folder if it can, and what it does then; we close its input."""
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", f"{HOLD}    {do}\n{afterwards}", str(folder)]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        yield process


def says(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_a_second_process_is_refused_until_the_first_is_done(tmp_path: Path) -> None:
    with (
        lock_folder(tmp_path / "new" / "run", doing="evaluates"),
        other_process(tmp_path / "new/run") as other,
    ):
        said, error = other.communicate()
        assert (said, other.returncode) == ("", 1)
        assert (
            f"BusyError: another process trains in {tmp_path / 'new/run'}; "
            "wait for it, or choose another folder" in error
        )
    with other_process(tmp_path / "new/run") as other:
        assert other.communicate() == ("held\n", "")
        assert other.returncode == 0


def test_the_lock_goes_with_a_killed_holder(tmp_path: Path) -> None:
    with other_process(tmp_path) as other:
        assert says(other) == "held"
        with (
            pytest.raises(ValueError, match="another process evaluates in"),
            lock_folder(tmp_path, doing="evaluates"),
        ):
            pass
        other.kill()
    with lock_folder(tmp_path, doing="evaluates"):
        assert [path.name for path in tmp_path.iterdir()] == ["lock"]


def test_an_error_inside_releases_the_lock(tmp_path: Path) -> None:
    with pytest.raises(KeyError), lock_folder(tmp_path, doing="trains"):
        raise KeyError
    with lock_folder(tmp_path, doing="trains"):
        pass


def test_an_error_before_anything_is_written_leaves_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "one"
    with pytest.raises(KeyboardInterrupt), lock_folder(folder, doing="trains"):
        raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())
    folder.mkdir(parents=True)
    (folder / "results").touch()
    with pytest.raises(KeyError), lock_folder(folder, doing="trains"):
        raise KeyError
    assert {path.name for path in folder.iterdir()} == {"lock", "results"}
    (folder / "results").unlink()
    with pytest.raises(KeyError), lock_folder(folder, doing="trains"):
        raise KeyError
    assert [path.name for path in folder.iterdir()] == ["lock"]  # it was there before


def test_a_program_that_a_killed_holder_started_does_not_hold_the_lock(tmp_path: Path) -> None:
    program = "print('started', flush=True); import sys; sys.stdin.read(); print('ended')"
    do = f'subprocess.run([sys.executable, "-c", {program!r}], close_fds=False)'
    with other_process(tmp_path, do) as other:
        assert says(other) == "started"
        other.kill()
        other.wait()
        with lock_folder(tmp_path, doing="trains"):
            pass
        assert other.communicate()[0] == "ended\n"  # only now


def test_a_fork_does_not_keep_the_lock_once_it_is_released(tmp_path: Path) -> None:
    do = "os.fork() or (sys.stdin.read(), print('ended', flush=True), os._exit(0))"
    with other_process(tmp_path, do, "print('released', flush=True)") as other:
        assert says(other) == "released"
        with lock_folder(tmp_path, doing="trains"):
            pass
        assert other.communicate()[0] == "ended\n"  # only now


def test_a_file_of_that_name_is_not_emptied(tmp_path: Path) -> None:
    (tmp_path / "lock").write_text("mine")
    with lock_folder(tmp_path, doing="trains"):
        pass
    assert (tmp_path / "lock").read_text() == "mine"


def test_what_cannot_be_opened_is_said_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "lock").mkdir()
    with pytest.raises(IsADirectoryError, match="lock"), lock_folder(tmp_path, doing="trains"):
        pass
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError), lock_folder(tmp_path / "file" / "run", doing="trains"):
        pass


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOSYS])
def test_a_file_system_without_locks_is_not_taken_for_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(code, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with (
        pytest.raises(
            OSError, match=r"No locks available; choose a folder that can be locked: '.*lock'"
        ),
        lock_folder(tmp_path, doing="trains"),
    ):
        pass
