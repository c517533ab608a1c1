"""Bodies of requests, good ones and bad ones, to the byte."""

from __future__ import annotations

import io
import json
import struct
import zlib
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from dent.serving.inputs import Refusal, read_images
from dent.serving.settings import Serving

Image = pytest.importorskip("PIL.Image", reason="needs Pillow")
pytest.importorskip("python_multipart", reason="needs python-multipart")
LIMITS = Serving(size=(4, 6), max_images=3, max_body=200_000, max_pixels=10_000)
RESIZING = Serving(size=(4, 6), max_images=3, max_body=200_000, max_pixels=10_000, resize=True)
BYTES = np.random.default_rng(0).integers(0, 256, (4, 6, 3), dtype=np.uint8)
FORM = "multipart/form-data; boundary=x"
NPY, JSON = "application/x-npy", "application/json"


def expected(pixels: NDArray[np.uint8]) -> Tensor:
    """(H, W, 3) as the model sees it."""
    return torch.from_numpy(pixels.transpose(2, 0, 1) / np.float32(255))[None]


def saved(pixels: NDArray[Any], kind: str = "PNG", mode: str | None = None, **options: Any) -> bytes:
    file = io.BytesIO()
    image = Image.fromarray(pixels)
    (image.convert(mode) if mode else image).save(file, kind, **options)
    return file.getvalue()


def npy(array: NDArray[Any], **options: Any) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array(file, array, **options)
    return file.getvalue()


def as_json(inputs: Any) -> bytes:
    return json.dumps({"inputs": inputs}).encode()


def form(*parts: tuple[str | None, bytes], end: bytes = b"--x--\r\n") -> bytes:
    lines = b""
    for kind, content in parts:
        lines += b'--x\r\nContent-Disposition: form-data; name="a"; filename="b"\r\n'
        lines += f"Content-Type: {kind}\r\n".encode() if kind else b""
        lines += b"\r\n" + content + b"\r\n"
    return lines + end


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png_of(height: int, width: int, *chunks: bytes, rows: bytes = b"") -> bytes:
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    body = b"".join(chunks) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + header + body


def header_of(shape: str, descr: str = "'|u1'") -> bytes:
    text = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}}}\n".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text


def refused(body: bytes, content_type: str, limits: Any = LIMITS) -> Refusal:
    with pytest.raises(Refusal) as error:
        read_images(body, content_type, limits)
    return error.value
