"""From the body of a request to images; whatever comes is read or refused, and nothing else happens.

What a body claims (its pixels, its shape, its type) is checked before anything is decoded or allocated
for it. No pickle is read, whatever the body says.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dent.serving.arrays import read_json, read_npy
from dent.serving.forms import read_form
from dent.serving.limits import Limits, Refused, check_count
from dent.serving.pictures import read_picture

__all__ = ["CONTENT_TYPES", "Limits", "Refused", "read_images"]

PICTURES = {"image/png": "PNG", "image/jpeg": "JPEG"}
JSON = "application/json"
NPY = "application/x-npy"
BYTES = "application/octet-stream"  # its first bytes say which of the files it is
FORM = "multipart/form-data"
CONTENT_TYPES = (*PICTURES, NPY, BYTES, JSON, FORM)

SIGNATURES = {b"\x89PNG\r\n\x1a\n": "image/png", b"\xff\xd8\xff": "image/jpeg", b"\x93NUMPY": NPY}


def read_images(body: bytes, content_type: str, limits: Limits) -> Tensor:
    """The images of a request as float32 in [0, 1], (N, 3, H, W), or `Refused`.

    PNG and JPEG as `read_picture` has them; arrays, as .npy or as {"inputs": ...} in JSON, are (3, H, W)
    or (N, 3, H, W), of uint8 or of numbers in [0, 1]. A form holds one or several of these.

    >>> from dent.serving.settings import Serving
    >>> read_images(b'{"inputs": [[[0.5]], [[0.5]], [[1]]]}', "application/json", Serving(size=(1, 1)))
    tensor([[[[0.5000]],
    <BLANKLINE>
             [[0.5000]],
    <BLANKLINE>
             [[1.0000]]]])
    >>> read_images(b"GIF89a", "image/gif", Serving())  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    dent.serving.limits.Refused: expected one of image/png, image/jpeg, application/x-npy, ...
    """
    if len(body) > limits.max_body:
        raise Refused(413, f"expected a body of at most {limits.max_body} bytes, got {len(body)}")
    kind = _kind(content_type)
    if kind != FORM:
        return _read(body, kind, limits)
    found: list[Tensor] = []
    for number, part in enumerate(read_form(body, content_type, limits), 1):
        try:
            found.append(_read(bytes(part.content), _kind(part.content_type) or BYTES, limits))
        except Refused as error:
            raise Refused(error.status, f"part {number} of the form: {error.reason}") from error
        check_count(sum(map(len, found)), limits)
    return torch.cat(found)


def _kind(content_type: str) -> str:
    return content_type.partition(";")[0].strip().lower()


def _read(body: bytes, kind: str, limits: Limits) -> Tensor:
    if kind not in (*PICTURES, JSON, NPY, BYTES):
        got = repr(kind[:100]) if kind else "no content type"
        raise Refused(415, f"expected one of {', '.join(CONTENT_TYPES)}, got {got}")
    if not body:
        raise Refused(400, "expected images, got nothing: the body is empty")
    if kind == BYTES:
        kind = next((one for start, one in SIGNATURES.items() if body.startswith(start)), "")
    if kind in PICTURES:
        return _fitted(read_picture(body, PICTURES[kind], limits), limits.size)
    if kind == NPY:
        return _fitted(read_npy(body, limits), limits.size)
    if kind == JSON:
        return _fitted(read_json(body, limits), limits.size)
    raise Refused(415, "expected a PNG, a JPEG or an .npy file, got bytes that begin as none of them")


def _fitted(images: Tensor, size: tuple[int, int]) -> Tensor:
    """Float in [0, 1], of this size: else the largest central part of its proportions, resized."""
    height, width = size
    rows, columns = images.shape[2:]
    if (rows, columns) != (height, width):
        high = min(rows, max(1, round(columns * height / width)))
        wide = min(columns, max(1, round(rows * width / height)))
        top, left = (rows - high) // 2, (columns - wide) // 2
        part = images[:, :, top : top + high, left : left + wide]
        images = F.interpolate(part, (height, width), mode="bilinear", antialias=True)
    return images.float() / 255 if images.dtype == torch.uint8 else images.clamp(0, 1)
