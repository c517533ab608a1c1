"""Arrays of numbers from bytes: .npy files and JSON."""

from __future__ import annotations

import json
import math
from io import BytesIO
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.lib import format as npy
from torch import Tensor

from dent.serving.limits import Limits, Refused, check_shape, check_values

MAX_HEADER = 1000  # characters of an .npy header; that of an array of numbers has about 100


def read_npy(body: bytes, limits: Limits) -> Tensor:
    """Images (N, 3, H, W), uint8 or float32, of an .npy file.

    Only its header is read before it is known to be numbers of the right count; arrays of objects,
    which are pickles, never get further. Rows or columns first, and either order of bytes.
    """
    file = BytesIO(body)
    readers = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
    try:
        read = readers[npy.read_magic(file)]
        shape, by_column, dtype = read(file, max_header_size=MAX_HEADER)
    except Exception as error:  # a header is parsed as Python is, and fails in as many ways
        raise Refused(400, "expected an .npy file, got what cannot be read as one") from error
    if dtype != np.uint8 and not (dtype.kind == "f" and dtype.itemsize <= 8):
        raise Refused(422, f"expected an array of uint8 or float, got {str(dtype)[:50]}")
    check_shape(shape, limits)
    count, start = math.prod(shape), file.tell()
    wanted, got = count * dtype.itemsize, len(body) - start
    if wanted != got:
        raise Refused(400, f"expected {wanted} bytes of data in the .npy file, got {got}")
    flat = np.frombuffer(body, dtype, count, start)
    array = flat.reshape(shape, order="F" if by_column else "C").reshape(-1, *shape[-3:])
    if dtype == np.uint8:
        return torch.from_numpy(array.copy(order="C"))
    with np.errstate(invalid="ignore"):  # NaN, which is then the least and the largest
        check_values(float(flat.min()), float(flat.max()))
    return torch.from_numpy(array.astype(np.float32, order="C", copy=True))


def read_json(body: bytes, limits: Limits) -> Tensor:
    """Images (N, 3, H, W), float32, of {"inputs": nested lists of numbers in [0, 1]}."""
    # Each comma can stand for an object of many bytes: counted first, they cannot be too many.
    most = limits.max_images * 3 * math.prod(limits.size)
    if body.count(b",") > most:
        raise Refused(413, f"expected at most {most} numbers as JSON, got more; send files instead")
    try:
        content = json.loads(body)
    except (ValueError, RecursionError) as error:  # also of bytes that are no text, or too many digits
        raise Refused(400, "expected JSON, got what cannot be read as JSON") from error
    if not isinstance(content, dict) or set(content) != {"inputs"}:
        raise Refused(422, 'expected {"inputs": [...]} as JSON, with nothing else in it')
    numbers, shape = _flattened(content["inputs"])
    check_shape(shape, limits)
    if not set(map(type, numbers)) <= {int, float}:
        raise Refused(422, "expected numbers as inputs, got values of another type")
    has_nan = any(one != one for one in numbers)
    check_values(*(math.nan, math.nan) if has_nan else (min(numbers), max(numbers)))
    return torch.tensor(numbers, dtype=torch.float32).view(-1, *shape[-3:])


def _flattened(nested: Any) -> tuple[list[Any], tuple[int, ...]]:
    """What nested lists hold, in order, and their shape."""
    level: list[Any] = [nested]
    shape: list[int] = []
    while any(isinstance(one, list) for one in level):
        lengths = {len(one) if isinstance(one, list) else None for one in level}
        length = lengths.pop()
        if lengths or length is None or len(shape) == 4:
            raise Refused(422, "expected nested lists of one shape, (3, H, W) or (N, 3, H, W)")
        shape.append(length)
        level = list(chain.from_iterable(level))
    return level, tuple(shape)
