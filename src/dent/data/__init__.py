"""Data sets as float tensors in [0, 1], (N, C, H, W), with labels. Normalization is the model's."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dent.data.cifar import CIFAR10, CIFAR100, Cifar
from dent.data.dataset import Dataset, from_arrays, open_function, open_npz
from dent.data.fetch import SAMPLE_SIZE, Progress, find_cifar, read_sample
from dent.data.folder import PREPROCESSING, open_folder, open_imagenet
from dent.names import lookup

__all__ = [
    "DATA",
    "PREPROCESSING",
    "Dataset",
    "Progress",
    "Split",
    "fetch_data",
    "from_arrays",
    "load_data",
    "open_data",
    "take_first",
]

DATA = {
    "cifar10": "CIFAR-10: 50,000 train and 10,000 test images; the first 1,000 of test are shipped",
    "cifar100": "CIFAR-100, by its 100 fine labels: 50,000 train and 10,000 test images; 1,000 of test "
    "are shipped",
    "imagenet": "ImageNet's folders, as root or after a colon: imagenet:/path/to/val or ...#crop288",
    "FOLDER": "images of your own, folder/class/image.png (ImageFolder)",
    "FILE.npz": "images and labels of your own, uint8, or float in [0, 1]",
    "PACKAGE.MODULE:FUNCTION": "a function of your own that returns (images, labels) or a Dataset",
}

_CIFARS = {"cifar10": CIFAR10, "cifar100": CIFAR100}


def open_data(
    name: str | Path,
    *,
    n: int | None = None,
    split: str = "test",
    seed: int = 0,
    root: str | Path | None = None,
    preprocessing: str | None = None,
    progress: Progress | None = None,
) -> Dataset:
    """Return a data set by name (see `DATA`). Its images are read only when they are needed.

    n: number of images (default: all). They are the first n, as RobustBench counts them. Folders are
    sorted by class, so n of their images are drawn by `seed`, and kept in order.
    split: "train" or "test". In a folder it is the sub-folder of that name (for "test" also "val"). A
    folder without such sub-folders and an .npz file are one set for all splits.
    root: folder of cifar10, cifar100 or imagenet. Without it, up to 1,000 test images of CIFAR are
    those in the package. All others are searched for as `dent.data.fetch.find_cifar` says.
    preprocessing: how to crop the images of a folder, see `PREPROCESSING` (default for imagenet:
    "res256crop224").
    progress: function that is called with the amount done, the total or None, and what is being done.

    >>> dataset = open_data("cifar10", n=1000)
    >>> len(dataset), dataset.classes[dataset.labels[0]], dataset.read(torch.tensor([7, 0])).shape
    (1000, 'cat', torch.Size([2, 3, 32, 32]))
    """
    _check_n(n)
    name = str(name)
    if re.match("imagenet[:#]", name) and preprocessing is None:
        name, _, crop = name.partition("#")
        preprocessing = crop or None
    path = Path(name).expanduser()
    kind = "imagenet" if name.startswith("imagenet:") else name
    if root is not None and kind not in (*_CIFARS, "imagenet"):
        raise ValueError(
            f"root is for cifar10, cifar100 and imagenet, got {name!r}; give the path itself"
        )

    if kind == "imagenet":
        folder = _choose_imagenet(name, root)
        return _draw(open_imagenet(folder, split=split, preprocessing=preprocessing), n, seed)
    if kind not in _CIFARS and path.is_dir():
        return _draw(open_folder(path, split=split, preprocessing=preprocessing), n, seed)
    if ("/" in name or name.endswith(".npz")) and not path.exists():
        raise FileNotFoundError(f"expected a folder of images or an .npz file, got {name}: not there")
    if preprocessing not in (None, "none"):
        raise ValueError(f"preprocessing is for folders of images, got {preprocessing!r} with {name!r}")
    if kind in _CIFARS:
        return take_first(_open_cifar(_CIFARS[kind], n, split, root, progress), n)
    if name.endswith(".npz"):
        return take_first(open_npz(path), n)
    if re.fullmatch(r"[\w.]+:[\w.]+", name):
        return take_first(open_function(name, split=split), n)
    raise ValueError(f"{name} is a place-holder: {lookup('data set', name, DATA)}")


def load_data(
    name: str | Path,
    *,
    n: int | None = None,
    split: str = "test",
    seed: int = 0,
    root: str | Path | None = None,
    preprocessing: str | None = None,
    progress: Progress | None = None,
) -> tuple[Tensor, Tensor]:
    """Return images, float32 in [0, 1], (N, C, H, W), and labels, int64 (N,). See `open_data`.

    >>> inputs, labels = load_data("cifar10", n=256)
    >>> inputs.shape, labels[:3]
    (torch.Size([256, 3, 32, 32]), tensor([3, 8, 8]))
    """
    dataset = open_data(
        name, n=n, split=split, seed=seed, root=root, preprocessing=preprocessing, progress=progress
    )
    images, done = torch.empty(0), 0
    for batch, _ in dataset.batches(256):
        if done == 0:
            images = batch.new_empty(len(dataset), *batch.shape[1:])
        images[done : done + len(batch)] = batch
        done += len(batch)
        if progress:
            progress(done, len(dataset), f"reading {dataset.name}")
    return images, dataset.labels


@dataclass(frozen=True)
class Split:
    """A split that was found: where, its number of images and classes, the sha256 of its arrays."""

    name: str
    split: str
    source: str
    n: int
    classes: int
    sha256: str | None


def fetch_data(
    name: str, *, root: str | Path | None = None, progress: Progress | None = None
) -> tuple[Split, ...]:
    """Find or download each split of a data set, and return where it is (`dent data`)."""
    if name not in _CIFARS:
        dataset = open_data(name, root=root, progress=progress)
        return (Split(name, "test", dataset.source, len(dataset), len(dataset.classes), None),)
    cifar, splits = _CIFARS[name], []
    for split in cifar.files:
        arrays, source = find_cifar(cifar, split, root=root, progress=progress)
        classes = len(cifar.classes)
        splits.append(Split(name, split, source, len(arrays.labels), classes, arrays.sha256()))
    return tuple(splits)


def _open_cifar(
    cifar: Cifar, n: int | None, split: str, root: str | Path | None, progress: Progress | None
) -> Dataset:
    lookup("split", split, cifar.files)
    if cifar.sample_sha256 and split == "test" and root is None and n is not None and n <= SAMPLE_SIZE:
        arrays, source = read_sample(cifar)
    else:
        arrays, source = find_cifar(cifar, split, root=root, progress=progress)
    images, labels = map(torch.from_numpy, arrays)
    return from_arrays(images, labels, classes=cifar.classes, name=cifar.name, source=source)


def _choose_imagenet(name: str, root: str | Path | None) -> Path:
    folder = name.partition(":")[2]
    if bool(folder) == (root is not None):
        raise ValueError(
            f"expected one folder of ImageNet, as root or as imagenet:/path/to/val, got {name!r} and "
            f"root={root!r}"
        )
    return Path(folder or str(root)).expanduser()


def _check_n(n: int | None) -> None:
    if n is not None and (isinstance(n, bool) or not isinstance(n, int) or n < 1):
        raise ValueError(f"expected n as a whole number from 1, or None for all, got {n!r}")


def take_first(dataset: Dataset, n: int | None) -> Dataset:
    """Return the first n images, or all if n is None."""
    _check_n(n)
    return dataset if n is None else dataset.subset(torch.arange(_check_enough(dataset, n)))


def _draw(dataset: Dataset, n: int | None, seed: int) -> Dataset:
    if n is None:
        return dataset
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(dataset), generator=generator)
    return dataset.subset(order[: _check_enough(dataset, n)].sort()[0])


def _check_enough(dataset: Dataset, n: int) -> int:
    if n > len(dataset):
        raise ValueError(f"expected n up to {len(dataset)}, the size of {dataset.name}, got {n}")
    return n
