"""The sample that ships with the package: the first 1,000 test images of CIFAR-10, with labels."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np

from dent.data.cache import Arrays, read_arrays
from dent.storage import replace_file

SAMPLE = Path(__file__).with_name("cifar10-test-1000.npz")
SAMPLE_SIZE = 1000
SAMPLE_SHA256 = "2c7f1e2769a741f695dfd5f74aa4a4ef08a7d20b9ec8576214dabab76c75c784"


def read_sample() -> Arrays:
    """The shipped images and labels, verified.

    >>> read_sample().images.shape, read_sample().labels[:10].tolist()
    ((1000, 3, 32, 32), [3, 8, 8, 0, 6, 6, 1, 6, 3, 1])
    """
    return read_arrays(SAMPLE, SAMPLE_SHA256)


def write_sample(path: Path, test: Arrays) -> None:
    """Make the sample out of the whole test set: the same bytes each time.

    LZMA is the smallest of what `np.load` reads, by a sixth below deflate.
    """
    arrays = {"images": test.images[:SAMPLE_SIZE], "labels": test.labels[:SAMPLE_SIZE]}
    with replace_file(path) as file, zipfile.ZipFile(file, "w") as archive:
        for key, array in arrays.items():
            entry = zipfile.ZipInfo(f"{key}.npy")  # dated 1980, whatever the day
            entry.compress_type = zipfile.ZIP_LZMA
            with archive.open(entry, "w") as member:
                np.lib.format.write_array(member, np.ascontiguousarray(array), allow_pickle=False)
