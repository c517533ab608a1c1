"""Decoded data sets in files, with their checksum."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.lib.npyio import NpzFile
from numpy.typing import NDArray

from dent.storage import replace_file


class Arrays(NamedTuple):
    """A decoded data set: images uint8 (N, C, H, W) and labels uint8 (N,)."""

    images: NDArray[np.uint8]
    labels: NDArray[np.uint8]

    def sha256(self) -> str:
        """The checksum of the decoded arrays: bytes of the images, then of the labels.

        >>> Arrays(np.zeros((1, 1, 2, 2), np.uint8), np.zeros(1, np.uint8)).sha256()[:16]
        '8855508aade16ec5'
        """
        digest = hashlib.sha256(np.ascontiguousarray(self.images).data)
        digest.update(np.ascontiguousarray(self.labels).data)
        return digest.hexdigest()


@contextmanager
def opened_npz(path: Path) -> Iterator[NpzFile]:
    """An `.npz` file, never unpickled; what is wrong with it, also as it is read, is a ValueError."""
    try:
        with path.open("rb") as file:  # np.load would leave a broken one open
            members = np.load(file, allow_pickle=False)
            if not isinstance(members, NpzFile):
                raise ValueError("expected an .npz archive, got a single array")
            yield members
    except Exception as error:  # a broken archive raises almost anything
        raise ValueError(f"{path} cannot be read: {error or type(error).__name__}") from error


def write_arrays(path: Path, arrays: Arrays) -> None:
    """Keep `arrays` with their checksum in one `.npz` file."""
    with replace_file(path) as file:
        np.savez(file, images=arrays.images, labels=arrays.labels, sha256=np.array(arrays.sha256()))


def read_arrays(path: Path, sha256: str | None = None) -> Arrays:
    """What `write_arrays` wrote; a ValueError if it is not that any more, to the last byte.

    The checksum must be the one given, or else the one kept in the file.
    """
    with opened_npz(path) as file:
        arrays = Arrays(file["images"], file["labels"])
        expected = sha256 or str(file["sha256"])
    if (got := arrays.sha256()) != expected:
        raise ValueError(f"{path} is altered: expected sha256 {expected} of its arrays, got {got}")
    return arrays
