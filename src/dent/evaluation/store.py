"""The folder of a run: what was asked, and one small file for each finished unit.

Every file is written under a temporary name and renamed, so that nothing half-written is ever read. A
file that does not belong there, or cannot be read, is named in an error; nothing is mixed or repaired.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dent.evaluation.plan import Unit
from dent.evaluation.spec import Cell
from dent.storage import LOCK, replace_file

RUN, UNITS, ERROR = "run.json", "units", ".error"
FORMAT = 3
LEFTOVER = re.compile(r"\..+\.[0-9a-f]{32}\.part")  # of a process that was killed while it wrote


_BITS = ("correct", "given", "majority")  # of an outcome, a bit for each point


@dataclass(frozen=True)
class Outcome:
    """What a unit measured. Points are indices of the data set, so that runs can be paired.

    In a chain, an attack gets only what the attacks before it left standing. The other points have
    `given` False; they are broken already, and not `correct`. `majority` is empty unless the defense is
    random.
    """

    points: tuple[int, ...] = ()  # the points that count
    correct: tuple[bool, ...] = ()  # which of them the model got right, in the batch as submitted
    given: tuple[bool, ...] = ()  # which of them were attacked
    queries: int = 0  # forwards of the model, in inputs
    gradients: int = 0  # backwards
    largest: float = 0.0  # largest perturbation, in the norm of the cell
    figures: dict[str, float] = field(default_factory=dict)  # of `ABOUT`: the cost
    findings: tuple[dict[str, Any], ...] = ()  # of `ABOUT`: name, message, figures
    battle: dict[str, Any] = field(default_factory=dict)  # of `BATTLE`: see `record_battle`
    majority: tuple[bool, ...] = ()  # of a random defense: points right in most of the submissions

    def to_json(self) -> dict[str, Any]:
        """Return plain values, with a digit for each point: small, and readable.

        >>> Outcome((7, 9), (True, False), (True, True)).to_json()["correct"]
        '10'
        """
        bits = {key: "".join("01"[one] for one in getattr(self, key)) for key in _BITS}
        return asdict(self) | {"points": list(self.points), "findings": list(self.findings)} | bits

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Outcome:
        """Return the outcome that `to_json` wrote; raise ValueError, KeyError or TypeError for others.

        >>> outcome = Outcome((7, 9), (True, False), (True, True), queries=3)
        >>> Outcome.from_json(outcome.to_json()) == outcome
        True
        """
        bits = {}
        for key in _BITS:
            if not isinstance(content[key], str) or set(content[key]) - set("01"):
                raise ValueError(f"expected {key} as digits 0 and 1, got {content[key]!r}")
            bits[key] = tuple(one == "1" for one in content[key])
        points = tuple(int(one) for one in content["points"])
        lengths = [len(bits[key]) for key in _BITS if key != "majority" or bits[key]]
        if set(lengths) != {len(points)}:
            raise ValueError(f"expected a digit for each of {len(points)} points")
        findings = tuple(content["findings"])
        return cls(**(content | bits | {"points": points, "findings": findings}))


@dataclass(frozen=True)
class UnitResult:
    """A unit with its outcome, or with the error that ended it."""

    unit: Unit
    outcome: Outcome | None = None
    error: str | None = None
    took: dict[str, float] = field(default_factory=dict)  # seconds, which vary from run to run


class FullError(OSError):
    """The disk is full: the run stops, and goes on once there is room."""


@contextmanager
def explain_full_disk(folder: Path) -> Iterator[None]:
    """Raise FullError, which says what to do, if the disk is full."""
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
    """The results of a run's units, one file each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def begin(self, about: dict[str, Any]) -> None:
        """Write what the run is, or raise ValueError if the folder holds another run."""
        path = self.folder / RUN
        if path.exists():
            self._check_same(read_run(self.folder), about)
            return
        self.refuse_foreign()
        with explain_full_disk(self.folder), replace_file(path) as file:
            file.write(json.dumps({"format": FORMAT, **about}, indent=2).encode() + b"\n")

    def refuse_foreign(self) -> None:
        """Raise an error if the folder holds something else than a run, or cannot be written.

        Change nothing, so that it can be called before the folder is locked.
        """
        foreign = sorted(self._list_foreign()) if self.folder.is_dir() else []
        # In this order: another process that begins a run here writes run.json before all else.
        if foreign and not (self.folder / RUN).exists():
            raise ValueError(
                f"{self.folder} is not empty and holds no run ({', '.join(foreign[:3])}); "
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

    def read(
        self, units: Iterable[Unit], *, others: Iterable[Unit] = (), tidy: bool = False
    ) -> Iterator[UnitResult]:
        """Yield the result of every unit that has one; raise ValueError at the end if files are wrong.

        A unit whose second attempt was killed may have both an error and an outcome.

        others: further units of this run, whose files may be there too and are not read.
        tidy: remove files that killed processes left. Only for the process that has the lock: another
            may be writing.
        """
        known = {unit.file: unit for unit in units}
        expected = known.keys() | {unit.file for unit in others}
        folders = {name.partition("/")[0] for name in expected}
        leftovers = [path for path in self.folder.glob(".*.part") if LEFTOVER.fullmatch(path.name)]
        wrong = []
        for path in sorted((self.folder / UNITS).rglob("*")):
            name = path.relative_to(self.folder / UNITS).as_posix()
            if name in folders and path.is_dir():
                continue
            if LEFTOVER.fullmatch(path.name):
                leftovers.append(path)
            elif name.removesuffix(ERROR) not in expected:
                wrong.append(f"{path} is no part of this run")
            elif unit := known.get(name.removesuffix(ERROR)):
                try:
                    result = self._read_file(path, unit)
                except FileNotFoundError:
                    continue  # an error, which another process has just replaced by an outcome
                except (OSError, ValueError, KeyError, TypeError) as error:
                    wrong.append(f"{path} cannot be read ({type(error).__name__}: {error})")
                else:
                    yield result
        if wrong:
            raise ValueError("; ".join(wrong[:5]) + ". Move it away and run the same command again")
        for path in leftovers if tidy else ():
            path.unlink(missing_ok=True)

    def write(self, result: UnitResult) -> None:
        """Write the result of a unit; an outcome replaces an error."""
        outcome = None if result.outcome is None else result.outcome.to_json()
        content: dict[str, Any] = {"unit": asdict(result.unit), "took": result.took}
        if outcome is None:
            content |= {"error": result.error}
        else:
            content |= {"outcome": outcome, "sha256": _digest(outcome)}
        path = self.folder / UNITS / result.unit.file
        error = path.with_name(f"{path.name}{ERROR}")
        with (
            explain_full_disk(self.folder),
            replace_file(error if outcome is None else path, tidy=False) as file,
        ):
            file.write(json.dumps(content).encode() + b"\n")
        if outcome is not None:
            error.unlink(missing_ok=True)

    def _read_file(self, path: Path, unit: Unit) -> UnitResult:
        content = json.loads(path.read_text(encoding="utf-8"))
        of = content["unit"]
        if Unit(Cell(**of["cell"]), of["batch"], of["attack"]) != unit:
            raise ValueError(f"it holds {of['attack']} of another cell or batch")
        if path.name.endswith(ERROR):
            return UnitResult(unit, error=str(content["error"]), took=content["took"])
        if content["sha256"] != _digest(content["outcome"]):
            raise ValueError("its content is not what was written")
        return UnitResult(unit, Outcome.from_json(content["outcome"]), took=content["took"])

    def _list_foreign(self) -> Iterator[str]:
        for path in self.folder.iterdir():
            if path.name != LOCK and not LEFTOVER.fullmatch(path.name):
                yield path.name

    def _check_same(self, there: dict[str, Any], about: dict[str, Any]) -> None:
        began, now = (one.get("suite_version") for one in (there, about))
        if None not in (began, now) and began != now:
            raise ValueError(
                f"{self.folder} holds a run of suite version {began}, expected {now}; choose another "
                "folder, or resume the run with the version of dent that began it"
            )
        differ = list(
            _differences({key: there.get(key) for key in about}, json.loads(json.dumps(about)))
        )
        if differ:
            # What was asked decides the plan: all cells and attacks would say the same at length.
            shown = [one for one in differ if not one.startswith("plan.")] or differ
            raise ValueError(
                f"{self.folder} holds another run: {'; '.join(shown)}. "
                "Choose another folder, or ask for the same"
            )


def read_run(folder: Path) -> dict[str, Any]:
    """Return what the run of a folder was asked for."""
    path = folder / RUN
    if not path.exists():
        raise FileNotFoundError(f"expected the folder of a run, got {folder}: it has no {RUN}")
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        version = content.pop("format")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not of a run ({type(error).__name__}: {error})") from error
    if version != FORMAT:
        raise ValueError(
            f"{path} is of another version of dent (format {version!r}, expected {FORMAT}); choose "
            "another folder, or read it with that version"
        )
    return content


def _digest(outcome: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(outcome, sort_keys=True).encode()).hexdigest()


def _differences(there: Any, asked: Any, at: str = "") -> Iterator[str]:
    if isinstance(there, dict) and isinstance(asked, dict):
        for key in {**there, **asked}:
            yield from _differences(there.get(key), asked.get(key), f"{at}.{key}".strip("."))
    elif there != asked:
        old, new = (
            text if len(text := repr(one)) <= 80 else f"{text[:77]}..." for one in (there, asked)
        )
        yield f"{at} is {old} there, {new} was asked for"
