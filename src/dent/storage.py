"""The per-user folder, and files in it that are whole or not there at all."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO
from uuid import uuid4


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
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to write which becomes `path` only once it is whole.

    Each writer has a temporary name of its own, so that processes may write the same file at once:
    the last to finish wins, and a reader sees one or the other, never a mixture.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
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
