"""Folders of images, decoded by Pillow as they are read: ImageNet, and others in the same layout."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dent.data.dataset import Dataset, list_some
from dent.names import lookup

Pixels = NDArray[np.uint8]  # (H, W, 3)

EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
# The names of sub-folders for each split. The images of ImageNet's own test set have no labels.
SPLITS = {"train": ("train",), "val": ("val", "validation"), "test": ("test", "val", "validation")}
_SPLIT_NAMES = {name for names in SPLITS.values() for name in names}
_SYNSETS = Path(__file__).with_name("imagenet_synsets.txt")


def open_folder(folder: str | Path, *, split: str = "test", preprocessing: str | None = None) -> Dataset:
    """Return an ImageFolder: each sub-folder is a class, and may have folders of its own.

    Labels number the sub-folders in the order of their names. Hidden folders are left out.
    """
    folder = _find_split(Path(folder), split)
    classes = _list_folders(folder)
    return _open(str(folder), folder, classes, tuple(classes), preprocessing or "none")


def open_imagenet(
    folder: str | Path, *, split: str = "test", preprocessing: str | None = None
) -> Dataset:
    """Return ImageNet, or some of its classes: sub-folders named by synset, with ImageNet's labels."""
    folder = _find_split(Path(folder), split, ("val",) if split == "test" else None)
    found, classes = _list_folders(folder), read_synsets()
    if strange := sorted(set(found) - set(classes)):
        raise ValueError(
            f"expected sub-folders of {folder} to be synsets of ImageNet such as {classes[0]}, got "
            f"{list_some(strange)}; rename them, or give the folder itself as the data set"
        )
    return _open("imagenet", folder, found, classes, preprocessing or "res256crop224")


def read_synsets() -> tuple[str, ...]:
    """Return the 1,000 synsets of ImageNet in the order of its labels.

    >>> len(read_synsets()), read_synsets()[0], read_synsets().index("n15075141")
    (1000, 'n01440764', 999)
    """
    return tuple(_SYNSETS.read_text().split())


def _open(
    name: str, folder: Path, found: list[str], classes: tuple[str, ...], preprocessing: str
) -> Dataset:
    transform = lookup("preprocessing", preprocessing, PREPROCESSING)
    number = {label: index for index, label in enumerate(classes)}
    paths: list[str] = []
    labels: list[int] = []
    empty: list[str] = []
    for label in found:
        images = _list_images(folder / label)
        paths += images
        labels += [number[label]] * len(images)
        if not images:
            empty.append(label)
    if empty:
        raise FileNotFoundError(
            f"expected images ({', '.join(EXTENSIONS)}) in every class of {folder}, got none in "
            f"{list_some(empty)}; remove the folders that are no classes"
        )
    # Decode one now, so that a fault of all images is found before long work starts.
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


def _find_split(folder: Path, split: str, names: tuple[str, ...] | None = None) -> Path:
    names = names or lookup("split", split, SPLITS)
    if not folder.is_dir():
        raise FileNotFoundError(f"expected a folder of images, got {folder}, which is not a folder")
    for name in names:
        # A class may be called "train" too: a split is a folder of folders.
        if (folder / name).is_dir() and any(path.is_dir() for path in (folder / name).iterdir()):
            return folder / name
    inside = _list_folders(folder)
    if inside and set(inside) <= _SPLIT_NAMES:
        raise FileNotFoundError(
            f"expected {folder} to hold {' or '.join(names)} for {split!r}, got {', '.join(inside)}"
        )
    return folder


def _list_folders(folder: Path) -> list[str]:
    found = sorted(path.name for path in folder.iterdir() if path.is_dir() and path.name[0] != ".")
    if not found:
        raise FileNotFoundError(
            f"expected {folder} to hold one sub-folder for each class, got none; the layout is "
            "folder/class/image.png"
        )
    return found


def _list_images(folder: Path) -> list[str]:
    return [
        os.path.join(place, name)
        for place, _, names in sorted(os.walk(folder, followlinks=True))
        for name in sorted(names)
        if name.lower().endswith(EXTENSIONS)
    ]


def import_pillow() -> Any:
    """Return `PIL.Image`. Raise ImportError with the name of the extra if it is missing."""
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError("images are decoded by Pillow: pip install 'dent-defense[images]'") from error
    return Image


def decode(path: str, preprocessing: Callable[[Any], Pixels]) -> Pixels:
    """Return the pixels (H, W, 3) of a file. Its EXIF orientation is ignored, as by ImageFolder."""
    image_module = import_pillow()
    try:
        with image_module.open(path) as image:
            return preprocessing(image.convert("RGB"))
    except Exception as error:  # Pillow's decoders raise almost anything on a broken file
        raise OSError(f"{path} cannot be read as an image: {error}; mend or remove it") from error


def keep_size(image: Any) -> Pixels:
    """Return the pixels unchanged; all images must then have one size."""
    return np.asarray(image)


def res256crop224(image: Any) -> Pixels:
    """Resize the shorter side to 256, bilinear with antialiasing, and crop the central 224 x 224."""
    return center_crop(np.asarray(resize(image, 256)), 224)


def crop288(image: Any) -> Pixels:
    """Crop the central 288 x 288 without resizing; smaller images get a black border."""
    return center_crop(np.asarray(image), 288)


PREPROCESSING: dict[str, Callable[[Any], Pixels]] = {
    "res256crop224": res256crop224,
    "crop288": crop288,
    "none": keep_size,
}


def resize(image: Any, shorter: int) -> Any:
    """Resize a Pillow image so that its shorter side is `shorter`; round the longer one down."""
    width, height = image.size
    longer = int(shorter * max(width, height) / min(width, height))
    size = (shorter, longer) if width <= height else (longer, shorter)
    return image if size == image.size else image.resize(size, import_pillow().Resampling.BILINEAR)


def center_crop(pixels: Pixels, size: int) -> Pixels:
    """Return the central `size` x `size` of (H, W, C), with zeros where the image is smaller.

    Halves are rounded as torchvision rounds them: to the even neighbor where it crops. Where it pads,
    the odd row of zeros comes last.

    >>> center_crop(np.arange(5, dtype=np.uint8).reshape(1, 5, 1), 2)[:, :, 0]
    array([[2, 3],
           [0, 0]], dtype=uint8)
    """
    missing = [max(size - side, 0) for side in pixels.shape[:2]]
    if any(missing):
        around = [(rows // 2, (rows + 1) // 2) for rows in missing]
        pixels = np.pad(pixels, [*around, (0, 0)])
    top, left = (round((side - size) / 2) for side in pixels.shape[:2])
    return pixels[top : top + size, left : left + size]
