"""Data by name: the shipped sample, arrays of the user's own, what is refused."""

from __future__ import annotations

import io
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dent.data import DATA, Dataset, fetch_data, from_arrays, load_data, open_data
from dent.data.cifar import CIFAR10, CIFAR100, Arrays, Cifar
from dent.data.fetch import locate_sample, read_sample, write_sample
from dent.storage import find_home


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    monkeypatch.setenv("DENT_HOME", str(tmp_path / "home"))


@pytest.fixture
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **settings: object) -> None:
        raise AssertionError("CIFAR was sought")

    monkeypatch.setattr("dent.data.find_cifar", refuse)


# The sample


@pytest.mark.parametrize("cifar", [CIFAR10, CIFAR100], ids=lambda cifar: cifar.name)
def test_sample_is_what_it_was(cifar: Cifar) -> None:
    arrays, source = read_sample(cifar)
    assert arrays.images.shape == (1000, 3, 32, 32)
    assert arrays.images.dtype == np.uint8
    assert arrays.sha256() == cifar.sample_sha256
    assert source == str(locate_sample(cifar))
    assert locate_sample(cifar).stat().st_size < 2_500_000
    counts = np.bincount(arrays.labels)
    assert len(counts) == len(cifar.classes)
    if cifar is CIFAR10:
        assert arrays.labels[:10].tolist() == [3, 8, 8, 0, 6, 6, 1, 6, 3, 1]
        assert counts.tolist() == [103, 89, 100, 103, 90, 86, 112, 102, 106, 109]


def test_the_sample_of_cifar100_shows_its_classes() -> None:
    """Each class has its colors: oranges are orange, and the sea and dolphins are blue."""
    (images, labels), _ = read_sample(CIFAR100)
    red, _, blue = (
        {
            name: float(images[labels == number, channel].mean())
            for number, name in enumerate(CIFAR100.classes)
        }
        for channel in range(3)
    )
    surplus = {name: red[name] - blue[name] for name in CIFAR100.classes}
    ranked = sorted(surplus, key=surplus.__getitem__)
    assert ranked[-1] == "orange"
    assert {"sea", "dolphin", "whale", "cloud"} & set(ranked[:10])


def test_sample_can_be_made_again(tmp_path: Path) -> None:
    (images, labels), source = read_sample(CIFAR10)
    more = Arrays(np.concatenate([images, images[:5]]), np.concatenate([labels, labels[:5]]))
    write_sample(tmp_path / "sample.npz", more)
    assert (tmp_path / "sample.npz").read_bytes() == Path(source).read_bytes()


@pytest.mark.usefixtures("_offline")
@pytest.mark.parametrize("cifar", [CIFAR10, CIFAR100], ids=lambda cifar: cifar.name)
def test_sample_is_used_without_cache_or_network(tmp_path: Path, cifar: Cifar) -> None:
    images, labels = load_data(cifar.name, n=256)
    expected, source = read_sample(cifar)
    assert (images.dtype, labels.dtype) == (torch.float32, torch.int64)
    np.testing.assert_array_equal(
        images.numpy(), expected.images[:256].astype(np.float32) / np.float32(255)
    )
    np.testing.assert_array_equal(labels.numpy(), expected.labels[:256])
    whole = open_data(cifar.name, n=1000)
    assert (whole.source, whole.classes) == (source, cifar.classes)
    assert not (tmp_path / "home").exists()
    for wanted in ({"n": 1001}, {}, {"n": 10, "split": "train"}, {"n": 10, "root": "."}):
        with pytest.raises(AssertionError, match="CIFAR was sought"):
            open_data(cifar.name, **wanted)


def test_altered_sample_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (images, labels), _ = read_sample(CIFAR10)
    images[0, 0, 0, 0] ^= 1
    write_sample(tmp_path / "sample.npz", Arrays(images, labels))
    monkeypatch.setattr("dent.data.fetch.locate_sample", lambda cifar: tmp_path / "sample.npz")
    expected = f"sample.npz is altered: expected sha256 {CIFAR10.sample_sha256}"
    with pytest.raises(ValueError, match=expected):
        load_data("cifar10", n=1)


# Reading


def test_every_value_is_divided_exactly() -> None:
    images = np.arange(256, dtype=np.uint8).reshape(1, 1, 16, 16)
    got = from_arrays(images, [0]).tensors()[0].numpy().ravel()
    np.testing.assert_array_equal(got, np.arange(256, dtype=np.float32) / np.float32(255))
    assert (got[0], got[255]) == (0, 1)


def test_reads_any_order_and_subset() -> None:
    dataset = open_data("cifar10", n=50)
    images, labels = dataset.tensors()
    at = torch.tensor([7, 3, 3, 49])
    assert torch.equal(dataset.read(at), images[at])
    part = dataset.subset(torch.tensor([9, 4]))
    assert torch.equal(part.tensors()[0], images[[9, 4]])
    assert torch.equal(part.labels, labels[[9, 4]])
    assert torch.equal(torch.cat([batch for batch, _ in dataset.batches(16)]), images)


def test_what_was_read_is_the_readers_own() -> None:
    dataset = open_data("cifar10", n=5)
    dataset.tensors()[0].zero_()
    assert dataset.tensors()[0].max() > 0.5


def test_reading_reports_progress() -> None:
    steps: list[tuple[int, int | None, str]] = []
    load_data("cifar10", n=600, progress=lambda *step: steps.append(step))
    assert steps == [(done, 600, "reading cifar10") for done in (256, 512, 600)]


# Arrays of the user's own


def save(path: Path, **arrays: Any) -> Path:
    np.savez(path, **arrays)
    return path


IMAGES = np.random.default_rng(0).integers(0, 256, (4, 3, 8, 6), np.uint8)
LABELS = np.array([2, 0, 1, 2])
FLOATS = IMAGES.astype(np.float32) / np.float32(255)


@pytest.mark.parametrize(
    "keys", [("images", "labels"), ("inputs", "labels"), ("data", "labels"), ("x", "y")]
)
@pytest.mark.parametrize("layout", ["first", "last"])
@pytest.mark.parametrize("dtype", [np.uint8, np.float32, np.float64])
def test_npz(keys: tuple[str, str], layout: str, dtype: type, tmp_path: Path) -> None:
    images = IMAGES if dtype is np.uint8 else FLOATS.astype(dtype)
    images = images if layout == "first" else images.transpose(0, 2, 3, 1)
    path = save(tmp_path / "own.npz", **dict(zip(keys, (images, LABELS.astype(np.uint16)), strict=True)))
    got, labels = load_data(path)
    assert (got.dtype, labels.dtype) == (torch.float32, torch.int64)
    assert got.is_contiguous()
    np.testing.assert_array_equal(got.numpy(), FLOATS)
    assert labels.tolist() == LABELS.tolist()
    first, labels = load_data(str(path), n=2)
    np.testing.assert_array_equal(first.numpy(), FLOATS[:2])


def test_npz_of_one_channel_and_with_classes(tmp_path: Path) -> None:
    path = save(tmp_path / "own.npz", images=IMAGES[:, :1], labels=LABELS, classes=["a", "b", "c", "d"])
    dataset = open_data(path)
    assert dataset.tensors()[0].shape == (4, 1, 8, 6)
    assert dataset.classes == ("a", "b", "c", "d")
    assert dataset.source == str(path)
    assert open_data(save(tmp_path / "b.npz", images=IMAGES, labels=LABELS)).classes == ("0", "1", "2")


def changed(value: float) -> Any:
    images = FLOATS.copy()
    images[2, 1, 3, 4] = value
    return images


REFUSED_ARRAYS = {
    "too few labels": (IMAGES, LABELS[:3], r"expected 4 labels, one for each image, got \(3,\)"),
    "labels (N, 1)": (IMAGES, LABELS[:, None], r"expected 4 labels, one for each image, got \(4, 1\)"),
    "negative label": (IMAGES, LABELS - 1, "expected labels from 0, got -1"),
    "float labels": (IMAGES, LABELS / 1, "expected whole numbers as labels, got torch.float64"),
    "bool labels": (IMAGES, LABELS > 0, "expected whole numbers as labels, got torch.bool"),
    "text labels": (IMAGES, np.array(list("abca")), "expected numbers as labels"),
    "NaN": (changed(np.nan), LABELS, "expected finite images"),
    "infinity": (changed(np.inf), LABELS, "expected finite images"),
    "above 1": (changed(1.001), LABELS, r"expected images in \[0, 1\], got 0 to 1.001"),
    "below 0": (changed(-0.5), LABELS, r"expected images in \[0, 1\], got -0.5 to 1; normalization"),
    "0 to 255": (FLOATS * 255, LABELS, r"expected images in \[0, 1\], got 0 to 255"),
    "int64": (
        IMAGES.astype(np.int64),
        LABELS,
        "expected images as uint8, or float in .*, got torch.int64",
    ),
    "ambiguous": (
        IMAGES[..., :3],
        LABELS,
        r"1 or 3 channels either first or last, got both in \(4, 3, 8, 3\)",
    ),
    "two channels": (
        IMAGES[:, :2],
        LABELS,
        r"expected 1 or 3 channels, first or last, got images \(4, 2",
    ),
    "3-D": (IMAGES[:, 0], LABELS, r"expected images \(N, C, H, W\) or \(N, H, W, C\), got \(4, 8, 6\)"),
    "none": (IMAGES[:0], LABELS[:0], r"expected images .* got \(0, 3, 8, 6\)"),
}


@pytest.mark.parametrize("case", REFUSED_ARRAYS)
def test_refused_arrays(case: str, tmp_path: Path) -> None:
    images, labels, message = REFUSED_ARRAYS[case]
    path = save(tmp_path / "own.npz", images=images, labels=labels)
    with pytest.raises(ValueError, match=message) as error:
        open_data(path)
    assert str(error.value).startswith(f"{path}: ")
    with pytest.raises(ValueError, match=message):
        from_arrays(images, labels)


def test_label_beyond_the_classes(tmp_path: Path) -> None:
    path = save(tmp_path / "own.npz", images=IMAGES, labels=LABELS, classes=["a", "b"])
    with pytest.raises(ValueError, match="expected labels from 0 to 1, as many as classes, got 2"):
        open_data(path)


class Code:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.mkdir, (self.marker,)


def npz_bytes() -> bytes:
    with io.BytesIO() as buffer:
        np.savez(buffer, images=IMAGES, labels=LABELS)
        return buffer.getvalue()


def npz_with_flipped_pixel() -> bytes:
    data = bytearray(npz_bytes())
    data[400] ^= 1
    return bytes(data)


def other_zip() -> bytes:
    with io.BytesIO() as buffer:
        with zipfile.ZipFile(buffer, "w") as archive:
            archive.writestr("readme.txt", "no arrays")
        return buffer.getvalue()


def npy_bytes() -> bytes:
    with io.BytesIO() as buffer:
        np.save(buffer, IMAGES)
        return buffer.getvalue()


BROKEN_FILES = {
    "cut off": (npz_bytes()[:-300], "cannot be read"),
    "altered": (npz_with_flipped_pixel(), "cannot be read: .*CRC"),
    "empty": (b"", "cannot be read"),
    "text": (b"images and labels", "cannot be read"),
    "npy": (npy_bytes(), "expected an .npz archive, got a single array"),
    "zip": (other_zip(), "expected images and labels or .* x and y, got readme.txt"),
}


@pytest.mark.parametrize("case", BROKEN_FILES)
def test_broken_npz(case: str, tmp_path: Path) -> None:
    data, message = BROKEN_FILES[case]
    (tmp_path / "own.npz").write_bytes(data)
    with pytest.raises(ValueError, match=message) as error:
        open_data(tmp_path / "own.npz")
    assert str(tmp_path / "own.npz") in str(error.value)


def test_npz_without_labels(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected images and labels or .*, got images, y"):
        open_data(save(tmp_path / "own.npz", images=IMAGES, y=LABELS))


def test_npz_of_objects_is_refused_and_not_run(tmp_path: Path) -> None:
    objects = np.array([Code(tmp_path / "ran")], dtype=object)
    path = save(tmp_path / "own.npz", images=objects, labels=LABELS)
    with pytest.raises(ValueError, match="Object arrays cannot be loaded"):
        open_data(path)
    assert not (tmp_path / "ran").exists()


def test_arrays_are_copied() -> None:
    images, labels = FLOATS.copy(), LABELS.copy()
    dataset = from_arrays(images, labels)
    images[:] = 0
    labels[:] = 9
    np.testing.assert_array_equal(dataset.tensors()[0].numpy(), FLOATS)
    assert dataset.labels.tolist() == LABELS.tolist()


# A function of the user's own

OWN = """
import numpy, torch
from dent.data import Dataset

def tensors():
    return torch.full((2, 3, 4, 4), 0.25), torch.tensor([1, 0])

def arrays(split):
    return numpy.full((2, 4, 4, 3), {"train": 51, "test": 102}[split], numpy.uint8), [0, 1]

def dataset():
    return Dataset("mine", torch.arange(3), torch.rand(3, 3, 4, 4).__getitem__, ("a", "b", "c"))

def wrong():
    return torch.rand(2, 3, 4, 4)

def unequal():
    return torch.rand(2, 3, 4, 4), [1]
"""


@pytest.fixture
def _own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "own_data.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("own_data", None)


@pytest.mark.usefixtures("_own_module")
def test_function() -> None:
    images, labels = load_data("own_data:tensors")
    assert torch.equal(images, torch.full((2, 3, 4, 4), 0.25))
    assert labels.tolist() == [1, 0]
    assert float(load_data("own_data:arrays", split="train")[0].max()) == np.float32(0.2)
    assert float(load_data("own_data:arrays")[0].max()) == np.float32(0.4)
    dataset = open_data("own_data:dataset", n=2)
    assert isinstance(dataset, Dataset)
    assert (dataset.name, len(dataset), dataset.classes) == ("mine", 2, ("a", "b", "c"))
    with pytest.raises(
        ValueError, match=r"own_data:wrong to return \(images, labels\) or a Dataset, got Tensor"
    ):
        load_data("own_data:wrong")
    with pytest.raises(ValueError, match="own_data:unequal: expected 2 labels"):
        load_data("own_data:unequal")
    with pytest.raises(ValueError, match="did you mean 'tensors'"):
        load_data("own_data:tensor")


# Names, and what does not go together


def test_unknown_names(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match="unknown data set 'cifr10'; did you mean 'cifar10' or 'cifar100'"
    ):
        load_data("cifr10")
    with pytest.raises(
        FileNotFoundError, match="a folder of images or an .npz file, got .*/nothing: not there"
    ):
        load_data(tmp_path / "nothing")
    with pytest.raises(FileNotFoundError, match="got nothing.npz: not there"):
        load_data("nothing.npz")
    with pytest.raises(ValueError, match="FOLDER is a place-holder"):
        load_data("FOLDER")
    assert list(DATA)[:3] == ["cifar10", "cifar100", "imagenet"]


@pytest.mark.parametrize("n", [0, -1, 1.5, True, "10"])
def test_n_is_a_positive_number(n: Any) -> None:
    with pytest.raises(ValueError, match="expected n as a whole number from 1, or None for all, got"):
        load_data("cifar10", n=n)


def test_n_beyond_the_set(tmp_path: Path) -> None:
    path = save(tmp_path / "own.npz", images=IMAGES, labels=LABELS)
    with pytest.raises(ValueError, match=f"expected n up to 4, the size of {path}, got 5"):
        load_data(path, n=5)


def test_contradictions(tmp_path: Path) -> None:
    path = save(tmp_path / "own.npz", images=IMAGES, labels=LABELS)
    with pytest.raises(ValueError, match="root is for cifar10, cifar100 and imagenet"):
        load_data(path, root=tmp_path)
    with pytest.raises(
        ValueError, match="preprocessing is for folders of images, got 'crop288' with 'cifar10'"
    ):
        load_data("cifar10", n=1, preprocessing="crop288")


def test_fetch_of_an_own_set(tmp_path: Path) -> None:
    path = save(tmp_path / "own.npz", images=IMAGES, labels=LABELS)
    (found,) = fetch_data(str(path))
    assert (found.source, found.n, found.classes, found.sha256) == (str(path), 4, 3, None)


@pytest.mark.skipif(sys.platform != "linux", reason="other platforms have other folders")
def test_the_per_user_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert find_home() == tmp_path / "home"
    monkeypatch.delenv("DENT_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert find_home() == tmp_path / "xdg" / "dent"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert find_home() == Path.home() / ".cache" / "dent"
