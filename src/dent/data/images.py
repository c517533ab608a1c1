"""Decoding and cutting images with Pillow, which is an extra, the way torchvision does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Pixels = NDArray[np.uint8]  # (H, W, 3)


def pillow() -> Any:
    """`PIL.Image`, or an ImportError that says how to get it."""
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError("images are decoded by Pillow: pip install 'dent-defense[images]'") from error
    return Image


def decode(path: str, preprocessing: Callable[[Any], Pixels]) -> Pixels:
    """The pixels (H, W, 3) of one file; its EXIF orientation is ignored, as ImageFolder ignores it."""
    image_module = pillow()
    try:
        with image_module.open(path) as image:
            return preprocessing(image.convert("RGB"))
    except Exception as error:  # Pillow's decoders raise almost anything on a broken file
        raise OSError(f"{path} cannot be read as an image: {error}; mend or remove it") from error


def as_it_is(image: Any) -> Pixels:
    """No change; then all images must have one size."""
    return np.asarray(image)


def res256crop224(image: Any) -> Pixels:
    """The shorter side to 256, bilinear with antialiasing, then the central 224 x 224."""
    return center_crop(np.asarray(resize(image, 256)), 224)


def crop288(image: Any) -> Pixels:
    """The central 288 x 288, not resized; black around images that are smaller."""
    return center_crop(np.asarray(image), 288)


PREPROCESSING: dict[str, Callable[[Any], Pixels]] = {
    "res256crop224": res256crop224,
    "crop288": crop288,
    "none": as_it_is,
}


def resize(image: Any, shorter: int) -> Any:
    """A Pillow image with its shorter side resized to `shorter`; the longer one is rounded down."""
    width, height = image.size
    longer = int(shorter * max(width, height) / min(width, height))
    size = (shorter, longer) if width <= height else (longer, shorter)
    return image if size == image.size else image.resize(size, pillow().Resampling.BILINEAR)


def center_crop(pixels: Pixels, size: int) -> Pixels:
    """The central `size` x `size` of (H, W, C), zeros where there is nothing.

    Halves are rounded as torchvision rounds them: to the even neighbor where it cuts; where it pads,
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
