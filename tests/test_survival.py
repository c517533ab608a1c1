"""A run survives: kills at any moment, and a second one at the same time."""

from __future__ import annotations

import io
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import answer, evaluated, kept, python

from dent.evaluation import execute
from dent.evaluation.execute import Task, execute_task
from dent.evaluation.sources import Sources
from dent.evaluation.store import UnitResult

SETTINGS: dict[str, dict[str, Any]] = {
    "quick": {"suite": "quick"},
    "standard": {"suite": "standard"},
    "converging": {"attacks": ["apgd-ce", "fpa:rounds=2"], "converge": True},
}
STARTS = "starts"
REPORTS = ("report.md", "results.json", "results.csv")
SLOWLY = 0.004  # a file system that takes its time, so that many of the moments are in the middle of it


@dataclass(frozen=True)
class Moment:
    """To die at: after so many events of a kind, at once by itself, or by another after a while."""

    event: str
    count: int = 1
    wait: float | None = None


def moments(seed: int) -> list[Moment]:
    """Twenty. Three are before any work, the last four where the reports are written."""
    draw = random.Random(seed)
    early = [Moment("begun", wait=wait) for wait in (None, *(draw.uniform(0, 0.05) for _ in "12"))]
    exact = [
        Moment(kind, draw.randint(1, 4)) for kind in ("unit", "half", "written", "synced", "renamed")
    ]
    anywhere = [Moment("", draw.randint(1, 24), draw.uniform(0, 0.03)) for _ in range(8)]
    first = early + exact + anywhere
    draw.shuffle(first)
    late = [Moment(f"{kind} {name}") for kind in ("synced", "renamed") for name in REPORTS]
    return first + draw.sample(late, 4)


class Halting(io.BufferedWriter):
    """A file that is written in two halves."""

    event: Callable[[str], None]

    def write(self, content: Any) -> int:
        half = len(bytes(content)) // 2
        super().write(bytes(content)[:half])
        self.flush()
        self.event("half")
        time.sleep(SLOWLY)
        return half + super().write(bytes(content)[half:])


def attempt(folder: Path, name: str, event: Callable[[str], None]) -> None:
    """A run which says what it does: a unit that starts, and each step to the file of its outcome."""
    fsync, replace, path_open = os.fsync, os.replace, Path.open

    def performed(task: Task, sources: Sources) -> UnitResult:
        again = (folder / "units" / task.unit.file).exists()
        with (folder.parent / STARTS).open("a") as file:
            file.write(f"{os.getpid()} {task.unit.file} {again}\n")
        event("unit")
        return execute_task(task, sources)

    def opened(path: Path, mode: str = "r", *rest: Any, **options: Any) -> Any:
        if mode not in ("xb", "wb"):
            return path_open(path, mode, *rest, **options)
        file = Halting(io.FileIO(path, mode))
        file.event = event
        return file

    def synced(descriptor: int) -> None:
        time.sleep(SLOWLY)
        event("written")
        fsync(descriptor)

    def replaced(old: Path, new: Path) -> None:
        event(f"synced {new.name}")
        time.sleep(SLOWLY)
        replace(old, new)
        event(f"renamed {new.name}")

    execute.__dict__["execute_task"] = performed
    os.fsync, os.replace, Path.open = synced, replaced, opened  # type: ignore[assignment,method-assign]
    event("begun")
    evaluated(folder, **SETTINGS[name])


def die_at(moment: Moment, said: int) -> Callable[[str], None]:
    left = moment.count

    def event(what: str) -> None:
        nonlocal left
        os.write(said, f"{what}\n".encode())
        left -= what.startswith(moment.event)
        if left == 0 and moment.wait is None:
            os.kill(os.getpid(), signal.SIGKILL)

    return event


def killed(folder: Path, name: str, moment: Moment) -> tuple[str, int] | None:
    """A run that is killed: the last that it said, and its process. None if it came to its end."""
    heard, said = os.pipe()
    if (pid := os.fork()) == 0:
        os.close(heard)
        try:
            attempt(folder, name, die_at(moment, said))
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    os.close(said)
    with open(heard) as lines:
        known, left = [], moment.count
        for line in lines:
            known.append(line.strip())
            left -= line.startswith(moment.event)
            if left == 0 and moment.wait is not None:
                time.sleep(moment.wait)
                os.kill(pid, signal.SIGKILL)
    status = os.waitpid(pid, 0)[1]
    if os.WIFEXITED(status):
        if os.WEXITSTATUS(status):
            raise RuntimeError("the run failed by itself")
        return None
    return known[-1], pid


def last_started(folder: Path, pid: int) -> list[str]:
    """The unit that a process was in, if it came that far."""
    path = folder.parent / STARTS
    lines = path.read_text().splitlines() if path.exists() else []
    return [line.split()[1] for line in lines if line.startswith(f"{pid} ")][-1:]


def kill_often(folder: Path, name: str) -> dict[str, Any]:
    """Kill a run at every moment, then let it finish; in a process of its own, which forks."""
    torch.set_num_threads(1)  # no threads, which a fork would lose
    places, lost = [], []
    for moment in moments(seed=0):
        found = killed(folder, name, moment) or killed(folder, name, Moment("begun"))
        assert found
        places.append(found[0])
        lost += [
            unit for unit in last_started(folder, found[1]) if not (folder / "units" / unit).exists()
        ]
    complete = killed(folder, name, Moment("never")) is None
    return {"places": places, "lost": lost, "complete": complete}


KILL_OFTEN = """
import json, sys
from pathlib import Path
from test_survival import kill_often
print(json.dumps(kill_often(Path(sys.argv[1]), sys.argv[2])))
"""


@pytest.mark.parametrize("name", SETTINGS)
def test_a_kill_at_any_moment_changes_nothing(tmp_path: Path, name: str) -> None:
    with python(KILL_OFTEN, tmp_path / "killed", name) as process:
        assert evaluated(tmp_path / "unbroken", **SETTINGS[name]).complete
        found = answer(process)
    assert found["complete"]
    unbroken = kept(tmp_path / "unbroken")
    assert kept(tmp_path / "killed") == unbroken
    assert any("x2" in file for file in unbroken) is (name == "converging")
    assert not list((tmp_path / "killed").rglob("*.part"))

    # The moments were of every kind.
    assert len(found["places"]) == 20
    kinds = {place.split()[0] for place in found["places"]}
    assert kinds == {"begun", "unit", "half", "written", "synced", "renamed"}
    assert sum(place.endswith(REPORTS) for place in found["places"]) >= 4
    # Of a unit, all starts but one ended in a kill before it had a file; none came after that.
    starts = [line.split() for line in (tmp_path / STARTS).read_text().splitlines()]
    assert {again for *_, again in starts} == {"False"}
    units = [name.removeprefix("units/") for name in unbroken if name.startswith("units/")]
    assert found["lost"]
    assert Counter(unit for _, unit, _ in starts) == Counter(units) + Counter(found["lost"])


WAITING = """
import sys, time
from pathlib import Path
from runs import evaluated
from dent.evaluation import execute

here, execute_task = Path(sys.argv[1]), execute.execute_task

def waiting(*given):
    (here / "working").touch()
    for _ in range(10_000):
        if (here / "go").exists():
            break
        time.sleep(0.01)
    return execute_task(*given)

execute.execute_task = waiting
evaluated(here / "run")
print("true")
"""


def test_the_same_run_twice_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with python(WAITING, tmp_path) as process:
        while not (tmp_path / "working").exists() and process.poll() is None:
            time.sleep(0.01)
        with monkeypatch.context() as patched:
            patched.setattr(Sources, "model", lambda *_: pytest.fail("a model was loaded"))
            says = f"another process evaluates in {tmp_path / 'run'}; wait for it"
            with pytest.raises(ValueError, match=says):
                evaluated(tmp_path / "run")
        (tmp_path / "go").touch()
        assert answer(process)
    first = kept(tmp_path / "run")
    results = evaluated(
        tmp_path / "run", on_unit=lambda done: pytest.fail(f"{done.unit} was done again")
    )
    assert results.complete
    assert kept(tmp_path / "run") == first
    evaluated(tmp_path / "alone")
    assert kept(tmp_path / "alone") == first
