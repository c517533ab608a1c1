"""Folders of images, decoded as they are read: ImageNet, and the user's own in the same layout."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dent.data.dataset import Dataset
from dent.data.images import PREPROCESSING, decode
from dent.names import lookup

EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
# Under which name a folder may hold a split. The images of ImageNet's own test set have no labels.
SPLITS = {"train": ("train",), "val": ("val", "validation"), "test": ("test", "val", "validation")}
_SPLIT_NAMES = {name for names in SPLITS.values() for name in names}
_SYNSETS = Path(__file__).with_name("imagenet_synsets.txt")


def synsets() -> tuple[str, ...]:
    """The 1,000 synsets of ImageNet in the order of its labels.

    >>> len(synsets()), synsets()[0], synsets().index("n15075141")
    (1000, 'n01440764', 999)
    """
    return tuple(_SYNSETS.read_text().split())


def open_folder(
    folder: str | Path, *, split: str = "test", preprocessing: str | None = None, name: str = ""
) -> Dataset:
    """An ImageFolder: one sub-folder for each class, whose images may lie in folders of their own.

    Labels number the sorted names of the sub-folders. Hidden folders are left out.
    """
    folder = _of_split(Path(folder), split)
    classes = _sub_folders(folder)
    return _open(name or str(folder), folder, classes, tuple(classes), preprocessing or "none")


def open_imagenet(
    folder: str | Path, *, split: str = "test", preprocessing: str | None = None
) -> Dataset:
    """ImageNet, or some of its classes: sub-folders named by synset, which give ImageNet's labels."""
    folder = _of_split(Path(folder), split, ("val",) if split == "test" else None)
    found, classes = _sub_folders(folder), synsets()
    if strange := sorted(set(found) - set(classes)):
        raise ValueError(
            f"expected sub-folders of {folder} to be synsets of ImageNet such as {classes[0]}, got "
            f"{_some(strange)}; rename them, or give the folder itself as the data set"
        )
    return _open("imagenet", folder, found, classes, preprocessing or "res256crop224")


def _open(
    name: str, folder: Path, found: list[str], classes: tuple[str, ...], preprocessing: str
) -> Dataset:
    transform = lookup("preprocessing", preprocessing, PREPROCESSING)
    number = {label: index for index, label in enumerate(classes)}
    paths: list[str] = []
    labels: list[int] = []
    empty: list[str] = []
    for label in found:
        images = _images_below(folder / label)
        paths += images
        labels += [number[label]] * len(images)
        if not images:
            empty.append(label)
    if empty:
        raise FileNotFoundError(
            f"expected images ({', '.join(EXTENSIONS)}) in every class of {folder}, got none in "
            f"{_some(empty)}; remove the folders that are no classes"
        )
    # Read now, so that what is wrong with all images is said before long work starts.
    height, width, channels = decode(paths[0], transform).shape

    def read_one(path: str) -> Tensor:
        pixels = decode(path, transform)
        if pixels.shape != (height, width, channels):
            raise ValueError(
                f"expected images of one size, {width} x {height} as {paths[0]}, got "
                f"{pixels.shape[1]} x {pixels.shape[0]}: {path}; resize it, or give preprocessing "
                f"({', '.join(PREPROCESSING)})"
            )
        return torch.from_numpy(np.array(pixels.transpose(2, 0, 1)))

    def read(indices: Tensor) -> Tensor:
        images = torch.empty(len(indices), channels, height, width)
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            chosen = (paths[index] for index in indices.tolist())
            for image, pixels in zip(images, pool.map(read_one, chosen), strict=True):
                image.copy_(pixels)
        return images.div_(255)

    return Dataset(name, torch.tensor(labels), read, classes, str(folder))


def _of_split(folder: Path, split: str, names: tuple[str, ...] | None = None) -> Path:
    names = names or lookup("split", split, SPLITS)
    if not folder.is_dir():
        raise FileNotFoundError(f"expected a folder of images, got {folder}, which is not a folder")
    for name in names:
        # A class may be called "train" too: a split is a folder of folders.
        if (folder / name).is_dir() and any(path.is_dir() for path in (folder / name).iterdir()):
            return folder / name
    inside = _sub_folders(folder)
    if inside and set(inside) <= _SPLIT_NAMES:
        raise FileNotFoundError(
            f"expected {folder} to hold {' or '.join(names)} for {split!r}, got {', '.join(inside)}"
        )
    return folder


def _sub_folders(folder: Path) -> list[str]:
    found = sorted(path.name for path in folder.iterdir() if path.is_dir() and path.name[0] != ".")
    if not found:
        raise FileNotFoundError(
            f"expected {folder} to hold one sub-folder for each class, got none; the layout is "
            "folder/class/image.png"
        )
    return found


def _images_below(folder: Path) -> list[str]:
    return [
        os.path.join(place, name)
        for place, _, names in sorted(os.walk(folder, followlinks=True))
        for name in sorted(names)
        if name.lower().endswith(EXTENSIONS)
    ]


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
