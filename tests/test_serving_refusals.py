"""What is wrong with a request is refused with a status and a reason, and costs nothing."""

from __future__ import annotations

import io
import json
import pickle
import struct
import tracemalloc
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from bodies import (
    BYTES,
    FORM,
    JSON,
    LIMITS,
    NPY,
    RESIZING,
    Image,
    as_json,
    chunk,
    expected,
    form,
    header_of,
    npy,
    png_of,
    refused,
    saved,
)

from dent.serving.inputs import CONTENT_TYPES, read_images
from dent.serving.settings import Serving

GOOD = npy(np.zeros((3, 4, 6), np.float32))


def one_number(value: Any) -> list[Any]:
    nested: list[Any] = np.zeros((3, 4, 6)).tolist()
    nested[2][3][5] = value
    return nested


def with_number(value: float, kind: str = "<f4") -> bytes:
    array = np.zeros((3, 4, 6), kind)
    array[2, 3, 5] = value
    return npy(array)


WRONG: dict[str, tuple[int, str, bytes, str]] = {
    # name: status, part of the reason, body, content type
    "no type": (415, "got no content type", b"", ""),
    "gif": (415, "got 'image/gif'", b"GIF89a", "image/gif"),
    "long type": (415, "got 'aaa", b"", "a" * 10**6),
    "bytes": (415, "begin as none of them", b"GIF89a", "application/octet-stream"),
    "text": (415, "got 'text/plain'", GOOD, "text/plain; charset=image/png"),
    "empty": (400, "body is empty", b"", "image/png"),
    "no png": (400, "no PNG", b"hello", "image/png"),
    "jpeg as png": (400, "no PNG", saved(BYTES, "JPEG"), "image/png"),
    "png as jpeg": (400, "no JPEG", saved(BYTES), "image/jpeg"),
    "cut png": (400, "cut off", saved(BYTES)[:-30], "image/png"),
    "cut jpeg": (400, "cut off", saved(BYTES, "JPEG")[:-30], "image/jpeg"),
    "flipped bit": (400, "damaged", saved(BYTES)[:60] + b"!" + saved(BYTES)[61:], "image/png"),
    "size": (422, "height x width of 4 x 6, got 6 x 4;", saved(BYTES.transpose(1, 0, 2)), "image/png"),
    "pixels": (413, "at most 10000 pixels in an image, got 101 x 100", png_of(101, 100), "image/png"),
    "10,000": (413, "got 10000 x 10000", png_of(10_000, 10_000), "image/png"),
    "bomb": (413, "got 60000 x 60000", png_of(60_000, 60_000), "image/png"),
    "between": (413, "got 10000 x 12000", png_of(10_000, 12_000), "image/png"),
    "body": (413, "at most 200000 bytes, got 200001", b"\0" * 200_001, "image/png"),
    "not npy": (400, "expected an .npy file", b"PK\x03\x04", NPY),
    "npy version": (400, "expected an .npy file", b"\x93NUMPY\x03\x00" + GOOD[8:], NPY),
    "npy header": (400, "expected an .npy file", header_of("(", ""), NPY),
    "npy deep": (400, "expected an .npy file", header_of("(" * 400), NPY),
    "npy minus": (400, "expected an .npy file", header_of("-" * 900 + "1"), NPY),
    "npy long": (400, "expected an .npy file", header_of(" " * 1000 + "(3, 4, 6)"), NPY),
    "npy call": (400, "expected an .npy file", header_of("exit()"), NPY),
    "npy cut": (400, "expected 288 bytes of data in the .npy file, got 287", GOOD[:-1], NPY),
    "npy more": (400, "expected 288 bytes of data in the .npy file, got 289", GOOD + b"\0", NPY),
    "npy huge": (413, "got 10000 x 10000", header_of("(3, 10000, 10000)"), NPY),
    "npy beyond": (413, "got a huge number x 6", header_of(f"(3, {10**300}, 6)"), NPY),
    "npy negative": (422, "not empty, got (3, -4, -6)", header_of("(3, -4, -6)"), NPY),
    "npy none": (422, "not empty, got (0, 3, 4, 6)", header_of("(0, 3, 4, 6)"), NPY),
    "npy flat": (422, "got 1 dimensions", header_of("(72,)"), NPY),
    "npy last": (422, "got (4, 6, 3); the channels come first", header_of("(4, 6, 3)"), NPY),
    "npy gray": (422, "got (1, 4, 6)", header_of("(1, 4, 6)"), NPY),
    "npy many": (422, "at most 3 images in a request, got 4", header_of("(4, 3, 4, 6)"), NPY),
    "npy too many": (422, "got a huge number", header_of(f"({10**300}, 3, 4, 6)"), NPY),
    "npy int": (422, "got int64", npy(np.zeros((3, 4, 6), np.int64)), NPY),
    "npy bool": (422, "got bool", npy(np.zeros((3, 4, 6), bool)), NPY),
    "npy complex": (422, "got complex128", npy(np.zeros((3, 4, 6), complex)), NPY),
    "npy long float": (422, "float128", header_of("(3, 4, 6)", "'<f16'"), NPY),
    "npy fields": (422, "got [('a', 'u1')]", header_of("(3, 4, 6)", "[('a', '|u1')]"), NPY),
    "npy rows": (422, "uint8 or float", header_of("(3, 4)", "('|u1', (6,))"), NPY),
    "npy object": (422, "got object", header_of("(3, 4, 6)", "'|O'"), NPY),
    "npy nan": (422, "got NaN", with_number(np.nan), NPY),
    "npy half nan": (422, "got NaN", with_number(np.nan, "<f2"), NPY),
    "npy inf": (422, "in [0, 1], got others", with_number(np.inf), NPY),
    "npy above": (422, "in [0, 1], got others", with_number(1 + 2**-52, "<f8"), NPY),
    "npy below": (422, "in [0, 1], got others", with_number(-1e-40), NPY),
    "json": (400, "expected JSON", b"{", JSON),
    "json text": (400, "expected JSON", b'{"inputs": "\xff\xfe"}', JSON),
    "json deep": (400, "expected JSON", b"[" * 100_000, JSON),
    "json digits": (400, "expected JSON", as_json(0)[:-2] + b"1" * 5000 + b"}", JSON),
    "json list": (422, 'expected {"inputs": [...]}', b"[0]", JSON),
    "json key": (422, 'expected {"inputs": [...]}', b'{"images": []}', JSON),
    "json more": (422, 'expected {"inputs": [...]}', b'{"inputs": [], "steps": 3}', JSON),
    "json number": (422, "got 0 dimensions", as_json(0.5), JSON),
    "json null": (422, "got 0 dimensions", as_json(None), JSON),
    "json empty": (422, "got 1 dimensions", as_json([]), JSON),
    "json no images": (422, "got 2 dimensions", as_json([[]]), JSON),
    "json ragged": (422, "of one shape", as_json([[[0.0] * 6] * 3, [[0.0] * 6] * 4]), JSON),
    "json mixed": (422, "of one shape", as_json([[0.0], 0.0]), JSON),
    "json 5": (422, "of one shape", as_json([[one_number(0)]]), JSON),
    "json 100": (422, "of one shape", as_json(json.loads("[" * 100 + "]" * 100)), JSON),
    "json words": (422, "another type", as_json(one_number("0.5")), JSON),
    "json bool": (422, "another type", as_json(one_number(True)), JSON),
    "json nothing": (422, "another type", as_json(one_number(None)), JSON),
    "json object": (422, "another type", as_json(one_number({})), JSON),
    "json nan": (422, "got NaN", as_json(one_number(float("nan"))), JSON),
    "json inf": (422, "got others", as_json(one_number(float("inf"))), JSON),
    "json huge": (422, "got others", as_json(one_number(10**400)), JSON),
    "json 255": (422, "divide bytes by 255", as_json(one_number(255)), JSON),
    "json many": (422, "at most 3 images", as_json(np.zeros((4, 3, 1, 1)).tolist()), JSON),
    "json commas": (413, "at most 216 numbers as JSON", b"[" + b"{}," * 217 + b"{}]", JSON),
    "no boundary": (400, "with its boundary", form(("image/png", b"")), "multipart/form-data"),
    "long boundary": (400, "as one", b"", f"multipart/form-data; boundary={'x' * 500}"),
    "no form": (400, "cannot be read as one", b"hello", FORM),
    "cut form": (400, "it is cut off", form(("image/png", saved(BYTES)), end=b""), FORM),
    "no parts": (422, "expected files in the form, got none", b"--x--\r\n", FORM),
    "empty part": (400, "part 1 of the form: expected images, got", form(("image/png", b"")), FORM),
    "boundaries": (400, "all over it", form((None, b"\r\n--x\n" * 1001)), FORM),
    "field": (415, "part 2 of the form", form(("image/png", saved(BYTES)), (None, b"3")), FORM),
    "nested": (415, "part 1 of the form", form((FORM, b"")), FORM),
    "parts": (422, "at most 3 images in a request, got 4", form(*[(None, GOOD)] * 4), FORM),
    "arrays": (
        422, "at most 3 images in a request, got 4",
        form(*[(None, npy(np.zeros((2, 3, 4, 6), np.uint8)))] * 2), FORM,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", list(WRONG))
def test_what_is_wrong_is_refused_with_the_reason(name: str) -> None:
    status, reason, body, content_type = WRONG[name]
    error = refused(body, content_type)
    assert (error.status, str(error)) == (status, error.reason)
    assert reason in error.reason
    assert len(error.reason) < 300
    assert "0x" not in error.reason  # the address of an object is nobody's business
    if status in (400, 415) and "cut" not in name:
        assert refused(body, content_type, RESIZING).status == status


def test_no_pickle_is_ever_read(monkeypatch: pytest.MonkeyPatch) -> None:
    class Trap:
        def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
            return pytest.fail, ("a pickle was read",)

    array = np.empty((3, 4, 6), object)
    array[:] = Trap()
    body = npy(array, allow_pickle=True)
    with pytest.raises(pytest.fail.Exception):
        np.load(io.BytesIO(body), allow_pickle=True)
    assert refused(body, NPY).status == 422
    assert refused(body, "application/octet-stream").status == 422
    bare = pickle.dumps(Trap())
    assert [refused(bare, kind).status for kind in CONTENT_TYPES[:-1]] == [400, 400, 400, 415, 400]


# What is claimed costs nothing

CLAIMS = {
    "png": (png_of(10_000, 10_000), "image/png"),
    "jpeg": (b"", "image/jpeg"),
    "npy": (header_of("(3, 10000, 10000)") + b"\0" * 100, NPY),
    "floats": (header_of("(1, 3, 10000, 10000)", "'<f8'"), "application/octet-stream"),
    "json": (b'{"inputs": [' + b"[]," * 60_000 + b"[]]}", JSON),
}


@pytest.mark.parametrize("resizing", [False, True])
@pytest.mark.parametrize("claim", list(CLAIMS))
def test_ten_thousand_by_ten_thousand_is_refused_in_no_memory(
    claim: str, resizing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from PIL import ImageFile

    body, content_type = CLAIMS[claim]
    if claim == "jpeg":
        body = saved(BYTES, "JPEG")
        at = body.index(b"\xff\xc0") + 5  # the sizes, in the header of the frame
        body = body[:at] + struct.pack(">HH", 10_000, 10_000) + body[at + 4 :]

    def decoded(*_: Any) -> None:
        pytest.fail("decoded what is too large")

    monkeypatch.setattr(ImageFile.ImageFile, "load", decoded)
    limits = RESIZING if resizing else LIMITS
    refused(body, content_type, limits)  # what is imported by the first
    tracemalloc.start()
    try:
        assert refused(body, content_type, limits).status == 413
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 200_000


def test_a_text_that_unpacks_to_a_thousand_times_its_size_is_refused() -> None:
    text = b"key\0\0" + zlib.compress(b"\0" * 50_000_000, 9)
    body = png_of(4, 6, chunk(b"zTXt", text), rows=b"\0" * 4 * 19)
    assert len(body) < 100_000
    tracemalloc.start()
    try:
        assert refused(body, "image/png").status == 400
        assert tracemalloc.get_traced_memory()[1] < 5_000_000
    finally:
        tracemalloc.stop()


def test_pixels_that_unpack_to_more_than_the_size_says_are_not_unpacked() -> None:
    body = png_of(4, 6, rows=b"\0" * 20_000_000)
    tracemalloc.start()
    try:
        assert torch.equal(read_images(body, "image/png", LIMITS), torch.zeros(1, 3, 4, 6))
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


def test_a_file_far_larger_than_its_pixels_is_refused() -> None:
    roomy = Serving(size=(4, 6), max_body=10**7)
    most = 256_000 + 16 * 24
    picture = saved(BYTES)
    for more in (0, 1):
        padded = picture[:33] + chunk(b"prVt", b"\0" * (most - len(picture) - 12 + more)) + picture[33:]
        assert len(padded) == most + more
        if more:
            assert refused(padded, "image/png", roomy).status == 413
        else:
            assert torch.equal(read_images(padded, "image/png", roomy), expected(BYTES))


def test_a_jpeg_of_very_many_scans_is_refused() -> None:
    body = saved(BYTES, "JPEG", progressive=True)
    last = body.rindex(b"\xff\xda")
    scans = body[:last] + body[last:-2] * 200 + body[-2:]
    with Image.open(io.BytesIO(scans)) as image:
        image.load()  # which Pillow decodes, scan by scan
    error = refused(scans, "image/jpeg")
    assert (error.status, "scans" in error.reason) == (413, True)
