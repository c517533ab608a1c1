"""Send images to a server that was started with `dent serve`; this needs nothing but Python.

    python examples/serve_client.py [--url http://127.0.0.1:8000] [IMAGE.png ...]

Without images, it sends two small ones that it makes itself. If the server needs a token, set the
environment variable DENT_TOKEN. If the server is busy, it waits as long as the server says.
"""

from __future__ import annotations

import argparse
import json
import os
import struct
import time
import zlib
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen
from uuid import uuid4

TRIES = 5


def predict(url: str, images: dict[str, bytes]) -> list[dict[str, Any]]:
    """Return the server's answer for each image, in order."""
    boundary = uuid4().hex
    head = f'--{boundary}\r\nContent-Disposition: form-data; name="image"; filename="it"\r\n\r\n'
    parts = b"".join(head.encode() + content + b"\r\n" for content in images.values())
    headers = {"Content-Type": f"multipart/form-data; boundary={boundary}"}
    if token := os.environ.get("DENT_TOKEN"):
        headers["Authorization"] = f"Bearer {token}"
    request = Request(f"{url}/predict", parts + f"--{boundary}--\r\n".encode(), headers)
    for tries_left in reversed(range(TRIES)):
        try:
            with urlopen(request, timeout=120) as response:
                answers: list[dict[str, Any]] = json.load(response)["answers"]
                return answers
        except HTTPError as error:
            if error.code not in (429, 503) or not tries_left:
                raise SystemExit(f"{error.code}: {json.load(error)['detail']}") from None
            time.sleep(float(error.headers.get("Retry-After", 1)))
    raise AssertionError("unreachable")


def make_png(red: int, green: int, blue: int, side: int = 32) -> bytes:
    """Return a PNG of one color."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        check = zlib.crc32(kind + content)
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", check)

    rows = (b"\0" + bytes((red, green, blue)) * side) * side
    head = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        [chunk(b"IHDR", head), chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b"")]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("images", nargs="*", type=Path, help="PNG or JPEG")
    args = parser.parse_args()
    images = {path.name: path.read_bytes() for path in args.images} or {
        "sky": make_png(90, 160, 250),
        "grass": make_png(40, 140, 30),
    }
    for name, answer in zip(images, predict(args.url.rstrip("/"), images), strict=True):
        print(
            f"{name}: {answer['name']} ({max(answer['probabilities']):.0%}); without the defense "
            f"{answer['static']['name']} ({max(answer['static']['probabilities']):.0%}); entropy "
            f"{answer['entropy_before']:.2f} to {answer['entropy_after']:.2f} nats in {answer['steps']} "
            f"steps, {1000 * answer['seconds']:.0f} ms"
        )


if __name__ == "__main__":
    main()
