"""Bodies of requests become the images that they hold; whatever comes is read or refused."""

from __future__ import annotations

import io
import json
import struct
import sys
import zlib
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
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
    npy,
    png_of,
    refused,
    saved,
)
from hypothesis import example, given
from hypothesis import strategies as st

from dent.serving.inputs import CONTENT_TYPES, Refusal, read_images


def test_a_png_is_its_pixels() -> None:
    images = read_images(saved(BYTES), "image/png", LIMITS)
    assert images.dtype == torch.float32
    assert torch.equal(images, expected(BYTES))


@pytest.mark.parametrize("mode", ["L", "1", "P", "LA", "RGBA", "PA"])
def test_other_pngs_become_rgb(mode: str) -> None:
    image = Image.fromarray(BYTES).convert("L" if mode in ("L", "1", "LA") else "RGB").convert(mode)
    file = io.BytesIO()
    (image if mode != "PA" else image.convert("P")).save(file, "PNG")
    images = read_images(file.getvalue(), "image/png", LIMITS)
    assert torch.equal(images, expected(np.asarray(image.convert("RGB"))))
    if mode in ("L", "1", "LA"):
        assert torch.equal(images[:, 0], images[:, 1])


def test_transparency_is_dropped() -> None:
    alpha = np.zeros((4, 6, 1), np.uint8)
    seen = read_images(saved(np.concatenate([BYTES, alpha], 2)), "image/png", LIMITS)
    assert torch.equal(seen, expected(BYTES))
    palette = Image.fromarray(BYTES).quantize(8)
    file = io.BytesIO()
    palette.save(file, "PNG", transparency=bytes(range(8)))
    seen = read_images(file.getvalue(), "image/png", LIMITS)
    assert torch.equal(seen, expected(np.asarray(palette.convert("RGB"))))


def test_sixteen_bits_lose_the_lower_eight() -> None:
    gray = np.random.default_rng(1).integers(0, 2**16, (4, 6), dtype=np.uint16)
    seen = read_images(saved(gray), "image/png", LIMITS)
    assert torch.equal(seen, expected(np.repeat((gray >> 8).astype(np.uint8)[:, :, None], 3, 2)))
    color = np.random.default_rng(2).integers(0, 2**16, (4, 6, 3), dtype=np.uint16)
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in color)
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 6, 4, 16, 2, 0, 0, 0))
    body = b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    assert torch.equal(read_images(body, "image/png", LIMITS), expected((color >> 8).astype(np.uint8)))


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"mode": "L"}, {"mode": "CMYK"}])
def test_a_jpeg_is_what_pillow_decodes(options: dict[str, Any]) -> None:
    body = saved(BYTES, "JPEG", **options)
    seen = read_images(body, "image/jpeg", LIMITS)
    with Image.open(io.BytesIO(body)) as image:
        assert torch.equal(seen, expected(np.asarray(image.convert("RGB"))))


def test_orientation_is_ignored() -> None:
    turned = Image.Exif()
    turned[0x0112] = 6  # a quarter turn
    for kind in ("PNG", "JPEG"):
        plain, body = saved(BYTES, kind), saved(BYTES, kind, exif=turned)
        seen = read_images(body, f"image/{kind.lower()}", LIMITS)
        assert body != plain
        assert torch.equal(seen, read_images(plain, f"image/{kind.lower()}", LIMITS))


@pytest.mark.parametrize("kind", ["<f4", ">f4", "<f8", ">f8", "<f2", "|u1"])
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("shape", [(3, 4, 6), (1, 3, 4, 6), (3, 3, 4, 6)])
@pytest.mark.parametrize("version", [(1, 0), (2, 0)])
def test_an_array_is_itself(kind: str, order: Any, shape: Any, version: Any) -> None:
    made = np.random.default_rng(3).integers(0, 256, shape).astype(np.uint8)
    array = (made if kind == "|u1" else made / 255).astype(kind)
    body = npy(np.asarray(array, order=order), version=version)
    if array.ndim > 1 and order == "F":
        assert b"'fortran_order': True" in body[:128]
    for content_type in ("application/x-npy", "application/octet-stream"):
        seen = read_images(body, content_type, LIMITS)
        wanted = torch.from_numpy(made / np.float32(255) if kind == "|u1" else array.astype("<f4"))
        assert torch.equal(seen, wanted.view(-1, 3, 4, 6))


def test_a_png_and_its_array_are_the_same() -> None:
    body = npy(BYTES.transpose(2, 0, 1))
    seen = read_images(body, NPY, LIMITS)
    assert torch.equal(seen, read_images(saved(BYTES), "image/png", LIMITS))


@given(st.lists(st.floats(0, 1, width=32), min_size=72, max_size=72), st.booleans())
def test_numbers_come_through_json_exactly(numbers: list[float], several: bool) -> None:
    wanted = torch.tensor(numbers).view(3, 4, 6)
    inputs = [wanted.tolist()] * 2 if several else wanted.tolist()
    seen = read_images(as_json(inputs), "application/json; charset=utf-8", LIMITS)
    assert torch.equal(seen, wanted.expand(2 if several else 1, 3, 4, 6))


def test_json_has_integers_too_and_other_encodings() -> None:
    body = as_json(torch.ones(3, 4, 6, dtype=torch.int).tolist())
    assert torch.equal(read_images(body, "application/json", LIMITS), torch.ones(1, 3, 4, 6))
    assert read_images(body.decode().encode("utf-16"), "application/json", LIMITS).min() == 1


def test_a_form_has_all_its_files_in_order() -> None:
    arrays = np.random.default_rng(4).random((2, 3, 4, 6), np.float32)
    for kinds in (("image/png", NPY), (None, "application/octet-stream")):
        body = form((kinds[0], saved(BYTES)), (kinds[1], npy(arrays)))
        seen = read_images(body, FORM, LIMITS)
        assert torch.equal(seen, torch.cat([expected(BYTES), torch.from_numpy(arrays)]))
    quoted = read_images(form(("application/json", as_json(arrays.tolist()))), f'{FORM[:-1]}"x"', LIMITS)
    assert torch.equal(quoted, torch.from_numpy(arrays))


def test_what_looks_like_a_boundary_is_data() -> None:
    made = b"\r\n--x\r" + b"\r\n--xx" + b"\n--x--\r\n" + b"\r\n--"
    array = np.frombuffer(made.ljust(72, b"\r"), np.uint8).reshape(3, 4, 6)
    seen = read_images(form(("application/x-npy", npy(array))), FORM, LIMITS)
    assert torch.equal(seen, torch.from_numpy(array / np.float32(255))[None])


@pytest.mark.parametrize("shape", [(8, 12), (40, 20), (9, 50), (1, 1), (3, 6), (4, 1), (100, 100)])
def test_resizing_takes_the_middle_if_asked_for(shape: tuple[int, int]) -> None:
    pixels = np.random.default_rng(5).integers(0, 256, (*shape, 3), dtype=np.uint8)
    seen = read_images(saved(pixels), "image/png", RESIZING)
    assert seen.shape == (1, 3, 4, 6)
    high, wide = min(shape[0], round(shape[1] * 4 / 6) or 1), min(shape[1], round(shape[0] * 6 / 4) or 1)
    top, left = (shape[0] - high) // 2, (shape[1] - wide) // 2
    middle = expected(pixels)[:, :, top : top + high, left : left + wide]
    wanted = F.interpolate(middle, (4, 6), mode="bilinear", antialias=True)
    assert (seen - wanted).abs().max() < 1.5 / 255  # bytes are resized as bytes
    assert torch.equal(read_images(npy(pixels.transpose(2, 0, 1)), "application/x-npy", RESIZING), seen)
    floats = read_images(npy(expected(pixels).numpy()), "application/x-npy", RESIZING)
    assert torch.allclose(floats, wanted, atol=1e-6)
    assert floats.min() >= 0
    assert floats.max() <= 1


@pytest.mark.parametrize(
    ("module", "body", "content_type"),
    [("PIL.PngImagePlugin", saved(BYTES), "image/png"), ("python_multipart.multipart", b"--x", FORM)],
)
def test_without_the_extra_the_error_says_how_to_get_it(
    module: str, body: bytes, content_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=r"pip install 'dent-defense\[serve\]'"):
        read_images(body, content_type, LIMITS)


# Whatever comes

GOOD = npy(np.zeros((3, 4, 6), np.float32))
STARTS = [
    b"",
    saved(BYTES),
    saved(BYTES, "JPEG"),
    GOOD,
    form((None, GOOD)),
    as_json([[[0.5]]]),
    png_of(4, 6),
]


@given(
    start=st.sampled_from(STARTS),
    cut=st.integers(0, 400),
    rest=st.binary(max_size=300),
    content_type=st.one_of(
        st.sampled_from([*CONTENT_TYPES, FORM, "form; boundary=x"]),
        st.text(max_size=30),
        st.just(FORM + '"\\'),
    ),
    resizing=st.booleans(),
)
@example(start=saved(BYTES), cut=400, rest=b"", content_type="image/png", resizing=False)
def test_any_bytes_are_images_or_refused(
    start: bytes, cut: int, rest: bytes, content_type: str, resizing: bool
) -> None:
    try:
        images = read_images(start[:cut] + rest, content_type, RESIZING if resizing else LIMITS)
    except Refusal as error:
        assert error.status in (400, 413, 415, 422)
        assert error.reason
    else:
        assert images.dtype == torch.float32
        assert images.shape[1:] == (3, 4, 6)
        assert 0 <= images.min() <= images.max() <= 1


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
        lambda inner: (
            st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=2)
        ),
        max_leaves=20,
    )
)
def test_any_json_is_refused_or_images(content: Any) -> None:
    for body in (json.dumps(content).encode(), as_json(content)):
        assert refused(body, JSON).status in (400, 413, 422)
