"""Images from PNG and JPEG files, with Pillow, which is part of the extra."""

from __future__ import annotations

import math
from io import BytesIO
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dent.serving.limits import Limits, Refused, check_shape

# Bytes of a file: twice what raw pixels could need, and some for what it says of itself. Reading a
# header of megabytes takes seconds.
PER_PIXEL, BESIDES = 16, 256_000
MAX_SCANS = 100  # of a JPEG; each is a pass over all pixels, and progressive files have about ten


def read_picture(body: bytes, kind: str, limits: Limits) -> Tensor:
    """The image (1, 3, H, W), uint8, of a file of one kind, "PNG" or "JPEG".

    Its size comes from its header and is checked before anything is decoded. RGB of eight bits: gray is
    repeated, palettes are looked up, transparency is dropped, sixteen bits lose their lower eight.
    Orientation (EXIF) and color profiles are ignored.
    """
    readers = _readers()
    most = BESIDES + PER_PIXEL * math.prod(limits.size)
    if len(body) > most and not limits.resize:
        raise Refused(413, f"expected a {kind} of at most {most} bytes for its size, got {len(body)}")
    if kind == "JPEG" and body.count(b"\xff\xda") > MAX_SCANS:
        raise Refused(413, f"expected a JPEG of at most {MAX_SCANS} scans, got more")
    try:
        # Not Image.open, which would also guess, and warn of sizes by a global setting.
        with readers[kind](BytesIO(body)) as image:
            check_shape((3, image.height, image.width), limits)
            pixels = _rgb(image)
    except Refused:
        raise
    except Exception as error:  # Pillow's decoders raise almost anything on a broken file
        raise Refused(
            400, f"expected a {kind}, got a file that is cut off, damaged or no {kind}"
        ) from error
    return torch.from_numpy(pixels.transpose(2, 0, 1).copy())[None]


def _readers() -> dict[str, Any]:
    try:
        from PIL.JpegImagePlugin import JpegImageFile
        from PIL.PngImagePlugin import PngImageFile
    except ImportError as error:
        raise ImportError("serving reads images by Pillow: pip install 'dent-defense[serve]'") from error
    return {"PNG": PngImageFile, "JPEG": JpegImageFile}


def _rgb(image: Any) -> NDArray[np.uint8]:
    image.load()
    if image.mode.startswith("I"):  # sixteen bits of gray, which convert() would cut off at 255
        gray = (np.asarray(image) >> 8).astype(np.uint8)
        return np.repeat(gray[:, :, None], 3, axis=2)
    image.info.pop("transparency", None)  # else convert() warns of what it drops
    return np.asarray(image.convert("RGB"))
