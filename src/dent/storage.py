"""The per-user folder, files that are either whole or absent, and folders with one owner at a time."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import BinaryIO
from uuid import uuid4

from filelock import FileLock, Timeout
from platformdirs import user_cache_path

LOCK = "lock"  # file that `lock_folder` leaves in a folder
STALE_SECONDS = 24 * 3600  # nobody still writes a temporary file of this age


def find_home() -> Path:
    """Return the per-user folder: `$DENT_HOME`, else `dent` in the platform's folder for caches."""
    if home := os.environ.get("DENT_HOME"):
        return Path(home).expanduser()
    return user_cache_path("dent", appauthor=False, opinion=False)


@contextmanager
def replace_file(path: Path, *, tidy: bool = True) -> Iterator[BinaryIO]:
    """Open a file for writing that becomes `path` only when the block ends without an error.

    Every writer uses its own temporary name, so several processes may write the same file at once:
    the last one wins, and a reader sees one version or the other, never a mixture.

    tidy: remove what killed processes left of this file. Pass False where a folder has many files,
    because finding the leftovers lists the folder.
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
    for leftover in path.parent.glob(f".{path.name}.*.part"):
        with suppress(FileNotFoundError):  # another process removed it first
            if time.time() - leftover.stat().st_mtime > STALE_SECONDS:
                leftover.unlink()


class BusyError(ValueError):
    """Another process owns the folder."""


@contextmanager
def lock_folder(folder: Path, *, doing: str) -> Iterator[None]:
    """Own a folder while the block runs. Raise BusyError at once if another process owns it.

    `doing` says what the owner does there, for the error message. The operating system frees the lock
    when its owner ends, even by a kill, unless the owner left forks of itself running; programs that
    it started do not count. The file `lock` stays in the folder and means nothing by itself. If the
    block fails before it writes anything, the folder is left as it was.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as name, lock_folder(Path(name), doing="trains"):  # doctest: +ELLIPSIS
    ...     with lock_folder(Path(name), doing="trains"):
    ...         pass
    Traceback (most recent call last):
    ...
    dent.storage.BusyError: another process trains in ...; wait for it, or choose another folder
    """
    made = [one for one in (folder, *folder.parents) if not one.exists()]
    is_new = not (folder / LOCK).exists()
    folder.mkdir(parents=True, exist_ok=True)
    # A soft lock, which is only a file that exists, would outlive a killed owner.
    lock = FileLock(folder / LOCK, blocking=False, fallback_to_soft=False)
    try:
        lock.acquire()
    except Timeout as error:
        raise BusyError(
            f"another process {doing} in {folder}; wait for it, or choose another folder"
        ) from error
    except OSError as error:
        raise OSError(
            error.errno, f"{error.strerror}; choose a folder that can be locked", str(folder / LOCK)
        ) from error
    try:
        yield
    except BaseException:
        with suppress(OSError):  # Windows removes no open file, and others may write meanwhile
            if is_new and os.listdir(folder) == [LOCK]:
                (folder / LOCK).unlink()  # before the release: who has opened it sees that it is gone
                for one in made:
                    one.rmdir()
        raise
    finally:
        lock.release()


def check_file(path: Path) -> None:
    """Raise OSError, with what to do, if a file cannot be written; write nothing that stays."""
    if path.is_dir():
        raise IsADirectoryError(f"expected a file to write, got the folder {path}; add a name")
    nearest = next(one for one in path.absolute().parents if one.exists())
    try:
        with TemporaryFile(dir=nearest):
            pass
    except OSError as error:
        raise type(error)(
            f"expected a file to write, got {path}: {nearest} takes none ({error.strerror}); choose "
            "another folder"
        ) from error
