"""The per-user folder, files that are whole or not there at all, and folders for one process alone."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO
from uuid import uuid4

try:
    import fcntl
except ImportError:  # no such locks on Windows
    fcntl = None  # type: ignore[assignment]

LOCK = "lock"


def dent_home() -> Path:
    """The per-user folder: `$DENT_HOME`, or `dent` in the folder that the platform has for caches."""
    if home := os.environ.get("DENT_HOME"):
        return Path(home).expanduser()
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "dent"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "dent"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dent"


@contextmanager
def replacing(path: Path, *, tidy: bool = True) -> Iterator[BinaryIO]:
    """A file to write which becomes `path` only once it is whole.

    Each writer has a temporary name of its own, so that processes may write the same file at once:
    the last to finish wins, and a reader sees one or the other, never a mixture.

    tidy: remove what killed processes left of this file; where files are many, that takes its time.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if tidy:
        _remove_leftovers(path)
    temporary = path.with_name(f".{path.name}.{uuid4().hex}.part")
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _remove_leftovers(path: Path) -> None:
    # Of processes that were killed while they wrote. A day old: nobody writes them any more.
    for leftover in path.parent.glob(f".{path.name}.*.part"):
        with suppress(FileNotFoundError):  # another process removed it first
            if time.time() - leftover.stat().st_mtime > 24 * 3600:
                leftover.unlink()


class BusyError(ValueError):
    """Another process has the folder."""


@contextmanager
def locked(folder: Path, *, doing: str) -> Iterator[None]:
    """Keep a folder for this process; where another has it, say that it is `doing` something there.

    The lock goes with its holder, even one that is killed, unless that left forks of itself behind;
    programs that it started do not count. The file `lock` stays, and means nothing by itself.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as name, locked(Path(name), doing="trains"):  # doctest: +ELLIPSIS
    ...     with locked(Path(name), doing="trains"):
    ...         pass
    Traceback (most recent call last):
    ...
    dent.storage.BusyError: another process trains in ...; wait for it, or choose another folder
    """
    folder.mkdir(parents=True, exist_ok=True)
    if fcntl is None:
        yield
        return
    with (folder / LOCK).open("a") as file:  # "w" would empty a file of that name that is not ours
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise BusyError(
                f"another process {doing} in {folder}; wait for it, or choose another folder"
            ) from error
        except OSError as error:
            raise OSError(
                error.errno, f"{error.strerror}; choose a folder that can be locked", file.name
            ) from error
        try:
            yield
        finally:
            # Closing is not enough where a fork has the file open as well.
            fcntl.flock(file, fcntl.LOCK_UN)
