"""The folder of a run: what was asked, and one small file for each finished unit.

Every file is written under another name and renamed, so that nothing half-written is ever read. What
does not belong there, or cannot be read, is named in an error; nothing is mixed, nothing is repaired.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dent.evaluation.units import Cell, Done, Outcome, Unit
from dent.storage import LOCK, replace_file

RUN, UNITS, ERROR = "run.json", "units", ".error"
FORMAT = 2
LEFTOVER = re.compile(r"\..+\.[0-9a-f]{32}\.part")  # of a process that was killed while it wrote


class FullError(OSError):
    """There is no room for a result: the run stops, and goes on when there is."""


@contextmanager
def room(folder: Path) -> Iterator[None]:
    """Where the disk is full, say what that means for the run of the folder."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise FullError(
            f"no room left for the results in {folder}; what was finished is kept. Free some space, and "
            "run the same command again"
        ) from error


class Store:
    """The outcomes of a run by unit."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def begin(self, about: dict[str, Any]) -> None:
        """Write what the run is, or make sure that the folder holds this very run."""
        path = self.folder / RUN
        if path.exists():
            self._check_same(read_run(self.folder), about)
            return
        self.refuse_foreign()
        with room(self.folder), replace_file(path) as file:
            file.write(json.dumps({"format": FORMAT, **about}, indent=2).encode() + b"\n")

    def refuse_foreign(self) -> None:
        """Make sure that a folder without a run has nothing else in it, and that a run's can be written.

        Nothing is touched, so that it can be asked before the folder is locked.
        """
        found = sorted(self._foreign()) if self.folder.is_dir() else []
        # In this order: another process that begins a run here writes run.json before all else.
        if found and not (self.folder / RUN).exists():
            raise ValueError(
                f"{self.folder} is not empty and holds no run ({', '.join(found[:3])}); "
                "choose another folder"
            )
        for path in (self.folder, self.folder / UNITS):
            if path.exists() and not path.is_dir():
                raise NotADirectoryError(
                    f"expected a folder, got the file {path}; choose another folder"
                )
        for path in (self.folder, self.folder / UNITS, *sorted((self.folder / UNITS).glob("*"))):
            if path.is_dir() and not os.access(path, os.W_OK):
                raise PermissionError(
                    f"expected a folder to write to, got {path}; choose another folder"
                )

    def check(self, units: Iterable[Unit], *, tidy: bool = False) -> dict[str, bool]:
        """By file, of the units that were done before: whether it ended well.

        All are read, so that what is damaged is known before any work.

        tidy: remove what processes left that were killed while they wrote. Only for who has the lock:
        another may be writing.
        """
        known = {unit.file: unit for unit in units}
        found: dict[str, bool] = {}
        wrong = []
        folders = {name.partition("/")[0] for name in known}
        leftovers = [path for path in self.folder.glob(".*.part") if LEFTOVER.fullmatch(path.name)]
        for path in sorted((self.folder / UNITS).rglob("*")):
            name = path.relative_to(self.folder / UNITS).as_posix()
            if name in folders and path.is_dir():
                continue
            if LEFTOVER.fullmatch(path.name):
                leftovers.append(path)
            elif (unit := known.get(name.removesuffix(ERROR))) is None:
                wrong.append(f"{path} is no part of this run")
            else:
                try:
                    done = self._read(path, unit)
                except FileNotFoundError:
                    continue  # an error, which another process has just replaced by a success
                except (OSError, ValueError, KeyError, TypeError) as error:
                    wrong.append(f"{path} cannot be read ({type(error).__name__}: {error})")
                else:
                    found[unit.file] = found.get(unit.file, False) or done.error is None
        if wrong:
            raise ValueError("; ".join(wrong[:5]) + ". Move it away and run the same command again")
        for path in leftovers if tidy else ():
            path.unlink(missing_ok=True)
        return found

    def read(self, unit: Unit) -> Done | None:
        """A unit as it ended, if it did."""
        for ending in ("", ERROR):
            with suppress(FileNotFoundError):
                return self._read(self._path(unit, ending), unit)
        return None

    def read_all(self, units: Iterable[Unit]) -> Iterator[Done]:
        """All that ended, one after the other."""
        for unit in units:
            done = self.read(unit)
            if done is not None:
                yield done

    def write(self, done: Done) -> None:
        """Keep how a unit ended; a success takes the place of an error."""
        outcome = None if done.outcome is None else done.outcome.to_json()
        content: dict[str, Any] = {"unit": asdict(done.unit), "took": done.took}
        if outcome is None:
            content |= {"error": done.error}
        else:
            content |= {"outcome": outcome, "sha256": _digest(outcome)}
        path = self._path(done.unit, ERROR if outcome is None else "")
        with room(self.folder), replace_file(path, tidy=False) as file:
            file.write(json.dumps(content).encode() + b"\n")
        if outcome is not None:
            self._path(done.unit, ERROR).unlink(missing_ok=True)

    def _read(self, path: Path, unit: Unit) -> Done:
        content = json.loads(path.read_text(encoding="utf-8"))
        of = content["unit"]
        if Unit(Cell(**of["cell"]), of["batch"], of["attack"]) != unit:
            raise ValueError(f"it holds {of['attack']} of another cell or batch")
        if path.name.endswith(ERROR):
            return Done(unit, error=str(content["error"]), took=content["took"])
        if content["sha256"] != _digest(content["outcome"]):
            raise ValueError("its content is not what was written")
        return Done(unit, Outcome.from_json(content["outcome"]), took=content["took"])

    def _path(self, unit: Unit, ending: str = "") -> Path:
        return self.folder / UNITS / f"{unit.file}{ending}"

    def _foreign(self) -> Iterator[str]:
        for path in self.folder.iterdir():
            if path.name != LOCK and not LEFTOVER.fullmatch(path.name):
                yield path.name

    def _check_same(self, found: dict[str, Any], about: dict[str, Any]) -> None:
        differ = list(
            _differences({key: found.get(key) for key in about}, json.loads(json.dumps(about)))
        )
        if differ:
            # What was asked decides the plan: all cells and attacks would say the same at length.
            shown = [one for one in differ if not one.startswith("plan.")] or differ
            raise ValueError(
                f"{self.folder} holds another run: {'; '.join(shown)}. "
                "Choose another folder, or ask for the same"
            )


def read_run(folder: Path) -> dict[str, Any]:
    """What the run of a folder was asked for."""
    path = folder / RUN
    if not path.exists():
        raise FileNotFoundError(f"expected the folder of a run, got {folder}: it has no {RUN}")
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if (found := content.pop("format")) != FORMAT:
            raise ValueError(f"its format is {found}, expected {FORMAT}")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not of a run ({type(error).__name__}: {error})") from error
    return content


def _digest(outcome: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(outcome, sort_keys=True).encode()).hexdigest()


def _differences(found: Any, asked: Any, at: str = "") -> Iterator[str]:
    if isinstance(found, dict) and isinstance(asked, dict):
        for key in {**found, **asked}:
            yield from _differences(found.get(key), asked.get(key), f"{at}.{key}".strip("."))
    elif found != asked:
        there, here = (
            text if len(text := repr(one)) <= 80 else f"{text[:77]}..." for one in (found, asked)
        )
        yield f"{at} is {there} there, {here} was asked for"
