"""Turn the body of a request into images, or refuse it.

What a body claims (pixels, shape, type) is checked before anything is decoded or allocated for it. No
pickle is ever read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from io import BytesIO
from itertools import chain
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.lib import format as npy
from torch import Tensor

from dent.serving.settings import Serving

PICTURES = {"image/png": "PNG", "image/jpeg": "JPEG"}
JSON = "application/json"
NPY = "application/x-npy"
BYTES = "application/octet-stream"  # a PNG, a JPEG or an .npy file, which its first bytes tell
FORM = "multipart/form-data"
CONTENT_TYPES = (*PICTURES, NPY, BYTES, JSON, FORM)
SIGNATURES = {b"\x89PNG\r\n\x1a\n": "image/png", b"\xff\xd8\xff": "image/jpeg", b"\x93NUMPY": NPY}

MAX_HEADER = 1000  # characters in the header of an .npy file; an array of numbers needs about 100
# Bytes of a PNG or JPEG: twice what raw pixels need, and room for metadata. Without this limit, reading
# a header of megabytes takes seconds.
BYTES_PER_PIXEL, METADATA_BYTES = 16, 256_000
MAX_SCANS = 100  # in a JPEG: each is a pass over all pixels, and progressive files have about ten
MAX_BOUNDARIES = 1000  # in a form: parts are far fewer, and each false boundary is slow to skip
NO_FORM = "expected a form of several parts, got what cannot be read as one"
NEEDS_EXTRA = "pip install 'dent-defense[serve]'"


class Refusal(Exception):  # noqa: N818 - the answer to a request, not an error of the program
    """Tell a client why its request is not answered: an HTTP status and a reason in one sentence."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(status, reason)
        self.status = status
        self.reason = reason

    def __str__(self) -> str:
        return self.reason


def read_images(body: bytes, content_type: str, serving: Serving) -> Tensor:
    """Return the images of a request as float32 in [0, 1], (N, 3, H, W); raise `Refusal` otherwise.

    A body is a PNG or a JPEG, an array as .npy or as {"inputs": ...} in JSON, or a form with several of
    these. Arrays are (3, H, W) or (N, 3, H, W), of uint8 or of numbers in [0, 1].

    >>> read_images(b'{"inputs": [[[0.5]], [[0.5]], [[1]]]}', "application/json", Serving(size=(1, 1)))
    tensor([[[[0.5000]],
    <BLANKLINE>
             [[0.5000]],
    <BLANKLINE>
             [[1.0000]]]])
    >>> read_images(b"GIF89a", "image/gif", Serving())  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    dent.serving.inputs.Refusal: expected one of image/png, image/jpeg, application/x-npy, ...
    """
    if len(body) > serving.max_body:
        raise Refusal(413, f"expected a body of at most {serving.max_body} bytes, got {len(body)}")
    kind = _parse_media_type(content_type)
    if kind != FORM:
        return _read_file(body, kind, serving)
    images: list[Tensor] = []
    for number, part in enumerate(read_form(body, content_type, serving), 1):
        kind = _parse_media_type(part.content_type) or BYTES
        try:
            images.append(_read_file(bytes(part.content), kind, serving))
        except Refusal as error:
            raise Refusal(error.status, f"part {number} of the form: {error.reason}") from error
        check_count(sum(map(len, images)), serving)
    return torch.cat(images)


def _parse_media_type(content_type: str) -> str:
    return content_type.partition(";")[0].strip().lower()


def _read_file(body: bytes, kind: str, serving: Serving) -> Tensor:
    if kind not in (*PICTURES, JSON, NPY, BYTES):
        got = repr(kind[:100]) if kind else "no content type"
        raise Refusal(415, f"expected one of {', '.join(CONTENT_TYPES)}, got {got}")
    if not body:
        raise Refusal(400, "expected images, got nothing: the body is empty")
    if kind == BYTES:
        kind = next((one for start, one in SIGNATURES.items() if body.startswith(start)), "")
    if kind in PICTURES:
        images = read_picture(body, PICTURES[kind], serving)
    elif kind == NPY:
        images = read_npy(body, serving)
    elif kind == JSON:
        images = read_json(body, serving)
    else:
        raise Refusal(
            415, "expected a PNG, a JPEG or an .npy file, got bytes that begin as none of them"
        )
    return _fit(images, serving.size)


def _fit(images: Tensor, size: tuple[int, int]) -> Tensor:
    """Return floats in [0, 1] of this size: crop to its proportions around the center, then resize."""
    height, width = size
    rows, columns = images.shape[2:]
    if (rows, columns) != (height, width):
        high = min(rows, max(1, round(columns * height / width)))
        wide = min(columns, max(1, round(rows * width / height)))
        top, left = (rows - high) // 2, (columns - wide) // 2
        part = images[:, :, top : top + high, left : left + wide]
        images = F.interpolate(part, (height, width), mode="bilinear", antialias=True)
    return images.float() / 255 if images.dtype == torch.uint8 else images.clamp(0, 1)


# Limits


def check_shape(shape: tuple[int, ...], serving: Serving) -> None:
    """Refuse shapes that are not (3, H, W) or (N, 3, H, W), too large, or not the model's size."""
    wanted = "expected an array (3, H, W) or (N, 3, H, W)"
    if len(shape) not in (3, 4):
        raise Refusal(422, f"{wanted}, got {len(shape)} dimensions")
    if any(side < 1 for side in shape):
        raise Refusal(422, f"{wanted} that is not empty, got ({_format_sides(shape, ', ')})")
    channels, *sides = shape[-3:]
    if channels != 3:
        hint = "; the channels come first" if shape[-1] == 3 else ""
        raise Refusal(422, f"{wanted}, got ({_format_sides(shape, ', ')}){hint}")
    check_count(shape[0] if len(shape) == 4 else 1, serving)
    got = _format_sides(sides, " x ")
    if math.prod(sides) > serving.max_pixels:
        raise Refusal(413, f"expected at most {serving.max_pixels} pixels in an image, got {got}")
    if tuple(sides) != serving.size and not serving.resize:
        size = _format_sides(serving.size, " x ")
        raise Refusal(422, f"expected height x width of {size}, got {got}; the server does not resize")


def check_count(count: int, serving: Serving) -> None:
    """Refuse too many images."""
    if count > serving.max_images:
        got = _format_sides((count,))
        raise Refusal(422, f"expected at most {serving.max_images} images in a request, got {got}")


def check_range(low: float, high: float) -> None:
    """Refuse numbers outside of [0, 1], given the smallest and the largest, or NaN for both."""
    if low != low or high != high:  # math.isnan fails on integers that are too large for a float
        raise Refusal(422, "expected numbers in [0, 1], got NaN")
    if not (low >= 0 and high <= 1):
        raise Refusal(422, "expected numbers in [0, 1], got others; divide bytes by 255")


def _format_sides(sides: Iterable[int], between: str = "") -> str:
    """Return numbers as text; do not repeat one that may have hundreds of digits."""
    return between.join(str(side) if abs(side) < 10**12 else "a huge number" for side in sides)


# Arrays


def read_npy(body: bytes, serving: Serving) -> Tensor:
    """Return the images of an .npy file, (N, 3, H, W), uint8 or float32.

    Only the header is parsed until it is known to describe numbers, and as many as there are bytes. An
    array of objects, which is a pickle, gets no further. Any memory and byte order is accepted.
    """
    file = BytesIO(body)
    readers = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
    try:
        read = readers[npy.read_magic(file)]
        shape, by_column, dtype = read(file, max_header_size=MAX_HEADER)
    except Exception as error:  # numpy parses a header as Python, which fails in many ways
        raise Refusal(400, "expected an .npy file, got what cannot be read as one") from error
    if dtype != np.uint8 and not (dtype.kind == "f" and dtype.itemsize <= 8):
        raise Refusal(422, f"expected an array of uint8 or float, got {str(dtype)[:50]}")
    check_shape(shape, serving)
    count, start = math.prod(shape), file.tell()
    wanted, got = count * dtype.itemsize, len(body) - start
    if wanted != got:
        raise Refusal(400, f"expected {wanted} bytes of data in the .npy file, got {got}")
    flat = np.frombuffer(body, dtype, count, start)
    array = flat.reshape(shape, order="F" if by_column else "C").reshape(-1, *shape[-3:])
    if dtype == np.uint8:
        return torch.from_numpy(array.copy(order="C"))
    with np.errstate(invalid="ignore"):  # on NaN, which is then both the smallest and the largest
        check_range(float(flat.min()), float(flat.max()))
    return torch.from_numpy(array.astype(np.float32, order="C", copy=True))


def read_json(body: bytes, serving: Serving) -> Tensor:
    """Return the images of {"inputs": nested lists of numbers in [0, 1]}, (N, 3, H, W), float32."""
    # Each comma can stand for an object of many bytes, so count them before anything is parsed.
    most = serving.max_images * 3 * math.prod(serving.size)
    if body.count(b",") > most:
        raise Refusal(413, f"expected at most {most} numbers as JSON, got more; send files instead")
    try:
        content = json.loads(body)
    except (ValueError, RecursionError) as error:  # bytes that are no text and too many digits included
        raise Refusal(400, "expected JSON, got what cannot be read as JSON") from error
    if not isinstance(content, dict) or set(content) != {"inputs"}:
        raise Refusal(422, 'expected {"inputs": [...]} as JSON, with nothing else in it')
    numbers, shape = _flatten(content["inputs"])
    check_shape(shape, serving)
    if not set(map(type, numbers)) <= {int, float}:
        raise Refusal(422, "expected numbers as inputs, got values of another type")
    has_nan = any(one != one for one in numbers)
    check_range(*(math.nan, math.nan) if has_nan else (min(numbers), max(numbers)))
    return torch.tensor(numbers, dtype=torch.float32).view(-1, *shape[-3:])


def _flatten(nested: Any) -> tuple[list[Any], tuple[int, ...]]:
    """Return the values of nested lists, in order, and the shape."""
    level: list[Any] = [nested]
    shape: list[int] = []
    while any(isinstance(one, list) for one in level):
        lengths = {len(one) if isinstance(one, list) else None for one in level}
        length = lengths.pop()
        if lengths or length is None or len(shape) == 4:
            raise Refusal(422, "expected nested lists of one shape, (3, H, W) or (N, 3, H, W)")
        shape.append(length)
        level = list(chain.from_iterable(level))
    return level, tuple(shape)


# Pictures


def read_picture(body: bytes, kind: str, serving: Serving) -> Tensor:
    """Return the image of a file of one kind, "PNG" or "JPEG", as (1, 3, H, W), uint8.

    The size is read from the header and checked before anything is decoded. The image becomes RGB of
    eight bits: gray is repeated, palettes are looked up, transparency is dropped, sixteen bits lose
    their lower eight. Orientation (EXIF) and color profiles are ignored.
    """
    try:
        from PIL.JpegImagePlugin import JpegImageFile
        from PIL.PngImagePlugin import PngImageFile
    except ImportError as error:
        raise ImportError(f"serving reads images by Pillow: {NEEDS_EXTRA}") from error
    most = METADATA_BYTES + BYTES_PER_PIXEL * math.prod(serving.size)
    if len(body) > most and not serving.resize:
        raise Refusal(413, f"expected a {kind} of at most {most} bytes for its size, got {len(body)}")
    if kind == "JPEG" and body.count(b"\xff\xda") > MAX_SCANS:
        raise Refusal(413, f"expected a JPEG of at most {MAX_SCANS} scans, got more")
    # Not Image.open, which would guess the kind, and warn about sizes by a global setting.
    open_picture: Any = {"PNG": PngImageFile, "JPEG": JpegImageFile}[kind]
    try:
        with open_picture(BytesIO(body)) as image:
            check_shape((3, image.height, image.width), serving)
            pixels = _decode_rgb(image)
    except Refusal:
        raise
    except Exception as error:  # Pillow's decoders raise almost anything on a broken file
        raise Refusal(
            400, f"expected a {kind}, got a file that is cut off, damaged or no {kind}"
        ) from error
    return torch.from_numpy(pixels.transpose(2, 0, 1).copy())[None]


def _decode_rgb(image: Any) -> np.ndarray[Any, np.dtype[np.uint8]]:
    image.load()
    if image.mode.startswith("I"):  # sixteen bits of gray, which convert() would clip at 255
        gray = (np.asarray(image) >> 8).astype(np.uint8)
        return np.repeat(gray[:, :, None], 3, axis=2)
    image.info.pop("transparency", None)  # convert() would warn that it drops this
    return np.asarray(image.convert("RGB"))


# Forms


@dataclass
class Part:
    """A part of a form: the content type that it gives, if any, and its bytes."""

    content_type: str = ""
    content: bytearray = field(default_factory=bytearray)


def read_form(body: bytes, content_type: str, serving: Serving) -> list[Part]:
    """Return the parts of a form: at least one, and no more than `max_images`.

    python-multipart returns the bytes of a part unchanged. The standard library's `email` would read
    them as text, with an object for every line: hundreds of megabytes for ten megabytes of line ends.
    """
    try:
        from python_multipart.exceptions import FormParserError
        from python_multipart.multipart import MultipartParser, parse_options_header
    except ImportError as error:
        raise ImportError(f"serving reads forms by python-multipart: {NEEDS_EXTRA}") from error
    _, options = parse_options_header(content_type.encode("latin-1", "replace"))
    if not (boundary := options.get(b"boundary")):
        raise Refusal(400, "expected multipart/form-data with its boundary, got none")
    if body.count(b"\r\n--" + boundary) > MAX_BOUNDARIES:
        raise Refusal(400, f"{NO_FORM}: its boundary is all over it")
    parts: list[Part] = []
    name, value = bytearray(), bytearray()  # of the header that is being parsed
    has_ended = False

    def begin_part() -> None:
        check_count(len(parts) + 1, serving)
        parts.append(Part())

    def end_header() -> None:
        if name.lower() == b"content-type":
            parts[-1].content_type = value.decode("latin-1")
        name.clear()
        value.clear()

    def end_form() -> None:
        nonlocal has_ended
        has_ended = True

    try:
        parser = MultipartParser(
            boundary,
            {
                "on_part_begin": begin_part,
                "on_header_field": lambda data, start, end: name.extend(data[start:end]),
                "on_header_value": lambda data, start, end: value.extend(data[start:end]),
                "on_header_end": end_header,
                "on_part_data": lambda data, start, end: parts[-1].content.extend(data[start:end]),
                "on_end": end_form,
            },
        )
        parser.write(body)
    except FormParserError as error:
        raise Refusal(400, NO_FORM) from error
    if not has_ended:
        raise Refusal(400, f"{NO_FORM}: it is cut off")
    if not parts:
        raise Refusal(422, "expected files in the form, got none")
    return parts
