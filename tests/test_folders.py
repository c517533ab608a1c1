"""Folders of images: labels, streaming, preprocessing as torchvision has it, ImageNet's synsets."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import dent
from dent.data import Dataset, from_arrays, load_data, open_data
from dent.data.cifar import CIFAR10
from dent.data.folder import PREPROCESSING, center_crop, crop288, read_synsets, res256crop224
from dent.evaluation import Evaluation
from dent.evaluation.execute import attack_data
from dent.evaluation.sources import Sources

Image = pytest.importorskip("PIL.Image")


def picture(width: int, height: int, seed: int = 0) -> Any:
    random = np.random.default_rng(seed)
    return Image.fromarray(random.integers(0, 256, (height, width, 3), np.uint8))


def save(path: Path, image: Any, **settings: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, **settings)
    return path


def pixels(image: Any) -> Any:
    return np.asarray(image, dtype=np.float32).transpose(2, 0, 1) / np.float32(255)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three classes of 5, 4 and 1 images of 7 x 5."""
    for index in range(5):
        save(tmp_path / "set" / "bee" / f"{index}.png", picture(7, 5, index))
    for index in range(4):
        save(tmp_path / "set" / "ant" / f"{index}.bmp", picture(7, 5, 10 + index))
    save(tmp_path / "set" / "cat" / "deep" / "er" / "0.PNG", picture(7, 5, 20), format="PNG")
    (tmp_path / "set" / "bee" / "readme.txt").write_text("no image")
    (tmp_path / "set" / "labels.csv").write_text("no class")
    (tmp_path / "set" / ".hidden").mkdir()
    return tmp_path / "set"


def test_image_folder(folder: Path) -> None:
    dataset = open_data(folder)
    assert dataset.classes == ("ant", "bee", "cat")
    assert dataset.labels.tolist() == [0] * 4 + [1] * 5 + [2]
    images, labels = load_data(str(folder))
    assert (images.dtype, images.shape, labels.dtype) == (torch.float32, (10, 3, 5, 7), torch.int64)
    expected = [picture(7, 5, seed) for seed in (10, 11, 12, 13, 0, 1, 2, 3, 4, 20)]
    np.testing.assert_array_equal(images.numpy(), np.stack([pixels(image) for image in expected]))


def test_only_what_is_asked_for_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    open_image = Image.open

    def counting(path: str) -> Any:
        opened.append(Path(path).relative_to(folder).as_posix())
        return open_image(path)

    monkeypatch.setattr(Image, "open", counting)
    dataset = open_data(folder)
    assert opened == ["ant/0.bmp"]  # for the size
    opened.clear()
    dataset.read(torch.tensor([6, 2, 9]))
    assert sorted(opened) == ["ant/2.bmp", "bee/2.png", "cat/deep/er/0.PNG"]
    opened.clear()
    batches = dataset.batches(4)
    next(batches)
    assert len(opened) == 4


def test_n_is_drawn_by_seed_in_order(folder: Path) -> None:
    everything, labels = load_data(folder)
    draws = set()
    for seed in range(20):
        images, drawn = load_data(folder, n=4, seed=seed)
        again, _ = load_data(folder, n=4, seed=seed)
        assert torch.equal(images, again)
        at = [int((everything == image).flatten(1).all(1).nonzero()) for image in images]
        assert at == sorted(set(at))
        assert drawn.tolist() == labels[at].tolist()
        draws.add(tuple(at))
    assert len(draws) > 10
    assert {index for at in draws for index in at} == set(range(10))
    with pytest.raises(ValueError, match="expected n up to 10, the size of .*, got 11"):
        open_data(folder, n=11)


def test_modes_become_rgb(tmp_path: Path) -> None:
    image = picture(6, 6)
    for index, mode in enumerate(["L", "RGBA", "P", "1", "CMYK"]):
        kind = "tif" if mode == "CMYK" else "png"
        save(tmp_path / "a" / f"{index}.{kind}", image.convert(mode))
    images, _ = load_data(tmp_path)
    expected = [pixels(image.convert(mode).convert("RGB")) for mode in ("L", "RGBA", "P", "1", "CMYK")]
    np.testing.assert_array_equal(images.numpy(), np.stack(expected))


def test_exif_orientation_is_ignored(tmp_path: Path) -> None:
    image = picture(9, 4)
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    path = save(tmp_path / "a" / "0.jpg", image, exif=exif)
    with Image.open(path) as stored:
        assert stored.getexif()[0x0112] == 6
    assert load_data(tmp_path)[0].shape == (1, 3, 4, 9)


# Splits


def test_splits_of_a_folder(folder: Path, tmp_path: Path) -> None:
    save(tmp_path / "own" / "train" / "a" / "0.png", picture(7, 5, 1))
    save(tmp_path / "own" / "val" / "b" / "0.png", picture(7, 5, 2))
    assert open_data(tmp_path / "own", split="train").classes == ("a",)
    assert open_data(tmp_path / "own").classes == ("b",)
    assert open_data(tmp_path / "own", split="val").source == str(tmp_path / "own" / "val")
    save(tmp_path / "own" / "test" / "c" / "0.png", picture(7, 5, 2))
    assert open_data(tmp_path / "own").classes == ("c",)
    with pytest.raises(ValueError, match="unknown split 'tests'; did you mean 'test'"):
        open_data(tmp_path / "own", split="tests")
    assert len(open_data(folder, split="train")) == 10


def test_missing_split_is_not_taken_for_a_class(tmp_path: Path) -> None:
    save(tmp_path / "train" / "a" / "0.png", picture(7, 5))
    with pytest.raises(
        FileNotFoundError, match="to hold test or val or validation for 'test', got train"
    ):
        open_data(tmp_path)


def test_a_class_may_be_called_train(tmp_path: Path) -> None:
    for name in ("train", "trout"):
        save(tmp_path / name / "0.png", picture(7, 5))
    assert open_data(tmp_path, split="train").classes == ("train", "trout")


# What is refused


def test_missing_and_empty_folders(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="expected a folder of images, got .*nowhere"):
        open_data(f"imagenet:{tmp_path}/nowhere")
    with pytest.raises(FileNotFoundError, match="to hold one sub-folder for each class, got none"):
        open_data(tmp_path)
    save(tmp_path / "a" / "0.png", picture(7, 5))
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "notes.txt").write_text("no image")
    with pytest.raises(FileNotFoundError, match="in every class of .*, got none in b; remove"):
        open_data(tmp_path)


@pytest.mark.parametrize("kind", ["png", "jpg", "bmp", "tif", "webp"])
def test_broken_images_are_named(kind: str, folder: Path) -> None:
    path = save(folder / "cat" / f"1.{kind}", picture(7, 5))
    dataset = open_data(folder)
    whole = path.read_bytes()
    for data in (whole[: len(whole) // 2], b"", b"<html>404</html>"):
        path.write_bytes(data)
        assert dataset.read(torch.arange(9)).shape == (9, 3, 5, 7)
        with pytest.raises(OSError, match=f"{path} cannot be read as an image.* mend or remove it"):
            dataset.tensors()


def test_other_size_is_named(folder: Path) -> None:
    path = save(folder / "cat" / "0.png", picture(5, 7))
    dataset = open_data(folder)
    assert dataset.read(torch.arange(9)).shape == (9, 3, 5, 7)
    with pytest.raises(ValueError, match=f"expected images of one size, 7 x 5 as .*, got 5 x 7: {path}"):
        dataset.tensors()
    assert load_data(folder, preprocessing="crop288")[0].shape == (11, 3, 288, 288)


def test_unknown_preprocessing(folder: Path) -> None:
    with pytest.raises(ValueError, match="unknown preprocessing 'crop28'; did you mean 'crop288'"):
        open_data(folder, preprocessing="crop28")


def test_without_pillow_the_extra_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ImportError, match=r"pip install 'dent-defense\[images\]'"):
        open_data(folder)


# Preprocessing, against sizes and offsets computed by hand


@pytest.mark.parametrize(
    ("size", "resized", "corner"),
    [
        ((500, 375), (341, 256), (58, 16)),  # 256 * 500 / 375 = 341.3; (341 - 224) / 2 = 58.5, to even
        ((375, 500), (256, 341), (16, 58)),
        ((300, 451), (256, 384), (16, 80)),  # 384.9, rounded down
        ((333, 337), (256, 259), (16, 18)),  # (259 - 224) / 2 = 17.5, to even
        ((100, 100), (256, 256), (16, 16)),
        ((256, 300), (256, 300), (16, 38)),
    ],
)
def test_res256crop224(size: Any, resized: Any, corner: Any) -> None:
    image = picture(*size)
    left, top = corner
    bilinear = image.resize(resized, Image.Resampling.BILINEAR)
    expected = bilinear.crop((left, top, left + 224, top + 224))
    np.testing.assert_array_equal(res256crop224(image), np.asarray(expected))


def test_resizing_averages() -> None:
    """Antialiasing: of stripes one pixel wide, reduced four times, their mean is left."""
    stripes = np.zeros((1024, 1024, 3), np.uint8)
    stripes[:, ::2] = 200
    assert np.abs(res256crop224(Image.fromarray(stripes)).astype(int) - 100).max() <= 2


def test_crop288() -> None:
    image = picture(301, 101)
    got = crop288(image)
    assert got.shape == (288, 288, 3)
    # (301 - 288) / 2 = 6.5, to even; 288 - 101 = 187 black rows, 93 above and 94 below.
    np.testing.assert_array_equal(got[93 : 93 + 101], np.asarray(image)[:, 6 : 6 + 288])
    assert not got[:93].any()
    assert not got[93 + 101 :].any()


@pytest.mark.parametrize("height", range(1, 9))
@pytest.mark.parametrize("width", range(1, 9))
def test_center_crop_as_torchvision_defines_it(height: int, width: int) -> None:
    """Pad what is missing, the smaller half first; then cut at half of the rest, rounded to even."""
    size, rows = 4, np.arange(1, height * width + 1, dtype=np.uint8).reshape(height, width, 1)
    canvas = np.zeros((max(height, size), max(width, size), 1), np.uint8)
    top, left = (size - height) // 2 if height < size else 0, (size - width) // 2 if width < size else 0
    canvas[top : top + height, left : left + width] = rows
    top, left = round((canvas.shape[0] - size) / 2), round((canvas.shape[1] - size) / 2)
    np.testing.assert_array_equal(center_crop(rows, size), canvas[top : top + size, left : left + size])


# Classes by name


MISSING = ("bird", "horse")


@pytest.fixture
def animals(tmp_path: Path) -> Path:
    """The first two shipped images of 8 of CIFAR-10's classes."""
    images, labels = load_data("cifar10", n=100)
    for number, name in enumerate(CIFAR10.classes):
        for at in (labels == number).nonzero()[:2, 0].tolist() if name not in MISSING else ():
            array = images[at].mul(255).round().byte().permute(1, 2, 0).numpy()
            save(tmp_path / "eight" / name / f"{at}.png", Image.fromarray(array))
    return tmp_path / "eight"


def attack(model: Any, data: Any, **settings: Any) -> int:
    """The number of images that the model classifies as labeled, by way of an evaluation."""
    results = dent.evaluate(model, ["static"], data=data, attacks=["pgd:steps=1"], n=None, **settings)
    return results.cells[0].natural.correct


def expect_correct(model: torch.nn.Module, folder: Path) -> int:
    """The same by the labels of the files' own names."""
    inputs = load_data(folder)[0]
    right = [CIFAR10.classes.index(name) for name in sorted(set(CIFAR10.classes) - set(MISSING))]
    labels = torch.tensor(right).repeat_interleave(2)
    return int((model(inputs).argmax(1) == labels).sum())


def test_a_folder_gets_the_labels_that_the_model_has_for_its_classes(animals: Path) -> None:
    model = dent.load_model("resnet20-nominal")
    expected = expect_correct(model, animals)
    assert expected >= 13
    assert attack("resnet20-nominal", str(animals)) == expected
    assert attack({"mine": model}, str(animals)) == expected


def test_classes_of_a_model_without_names_are_not_guessed(animals: Path) -> None:
    model = dent.load_model("resnet20-nominal")
    expected = expect_correct(model, animals)
    model.class_names = None  # type: ignore[assignment]
    refused = "expected 10 classes in .*eight, as many as .* outputs, got 8"
    with pytest.raises(ValueError, match=refused):
        attack({"mine": model}, str(animals))
    evaluation = Evaluation(models="mine", defenses="static", data=str(animals), n=None)
    with pytest.raises(ValueError, match=refused):
        attack_data(Sources(evaluation, {"mine": model}), "pgd", {"steps": 1})
    model.class_names = list(CIFAR10.classes)  # type: ignore[assignment]
    assert attack({"mine": model}, str(animals)) == expected


def test_a_class_that_the_model_does_not_have_is_refused(animals: Path) -> None:
    (animals / "cat").rename(animals / "tiger")
    with pytest.raises(ValueError, match=r"that the model knows \(airplane, .*got tiger; rename"):
        attack("resnet20-nominal", str(animals))


def test_models_with_other_classes_are_evaluated_apart(animals: Path) -> None:
    models = {name: dent.load_model("resnet20-nominal") for name in ("one", "two")}
    models["two"].class_names = CIFAR10.classes[::-1]  # type: ignore[assignment]
    with pytest.raises(ValueError, match="models with the same classes, got others in one and two"):
        attack(models, str(animals))


def named(*classes: str) -> Dataset:
    return from_arrays(torch.zeros(2, 3, 4, 4), [0, 1], classes=classes)


def test_matching_by_name() -> None:
    assert named("Sweet pepper", "can").match_classes(
        ("can", "sea", "sweet_pepper"), owner="it"
    ).labels.tolist() == [2, 0]
    numbered = from_arrays(torch.zeros(2, 3, 4, 4), [0, 1])
    assert numbered.match_classes(("a", "b", "c"), owner="it") is numbered
    numbered.check_outputs(3, owner="it")
    with pytest.warns(UserWarning, match="it knows no class of arrays by its name .* in their order"):
        assert named("x", "y").match_classes(("a", "b"), owner="it").labels.tolist() == [0, 1]
    with pytest.raises(ValueError, match="got x, y; rename or remove them"):
        named("x", "y").match_classes(("a", "b", "c"), owner="it")


# ImageNet


def test_synsets_are_sorted() -> None:
    assert len(set(read_synsets())) == 1000
    assert list(read_synsets()) == sorted(read_synsets())
    # Known indices: tench, goldfinch, tabby cat, toilet tissue.
    assert [read_synsets().index(s) for s in ("n01440764", "n01531178", "n02123045", "n15075141")] == [
        0,
        11,
        281,
        999,
    ]


@pytest.fixture
def imagenet(tmp_path: Path) -> Path:
    save(tmp_path / "in" / "val" / "n02123045" / "b.JPEG", picture(300, 400), format="JPEG")
    save(tmp_path / "in" / "val" / "n01531178" / "a.JPEG", picture(400, 300), format="JPEG")
    save(tmp_path / "in" / "train" / "n15075141" / "c.JPEG", picture(256, 256), format="JPEG")
    return tmp_path / "in"


def test_imagenet_labels_by_synset(imagenet: Path) -> None:
    for dataset in (
        open_data("imagenet", root=imagenet),
        open_data(f"imagenet:{imagenet}"),
        open_data(f"imagenet:{imagenet / 'val'}"),
    ):
        assert dataset.labels.tolist() == [11, 281]
        assert dataset.classes == read_synsets()
        assert dataset.read(torch.tensor([1])).shape == (1, 3, 224, 224)
    assert open_data("imagenet", root=imagenet, split="train").labels.tolist() == [999]
    images, _ = load_data("imagenet", root=imagenet, n=1, preprocessing="crop288")
    assert torch.equal(load_data(f"imagenet:{imagenet}#crop288", n=1)[0], images)
    assert torch.equal(load_data("imagenet#crop288", root=imagenet, n=1)[0], images)
    with pytest.raises(ValueError, match="unknown preprocessing 'crop2'"):
        open_data(f"imagenet:{imagenet}#crop2")
    assert images.shape == (1, 3, 288, 288)
    with Image.open(imagenet / "val" / "n01531178" / "a.JPEG") as image:
        expected = PREPROCESSING["res256crop224"](image.convert("RGB"))
    got = open_data("imagenet", root=imagenet).read(torch.tensor([0]))[0]
    np.testing.assert_array_equal(got.numpy(), pixels(expected))


def test_imagenet_refuses_other_folders(imagenet: Path) -> None:
    for name in ("cats", "n00000000"):
        save(imagenet / "val" / name / "0.png", picture(7, 5))
    with pytest.raises(ValueError, match="synsets of ImageNet such as n01440764, got cats, n00000000"):
        open_data("imagenet", root=imagenet)


def test_imagenet_needs_one_folder(imagenet: Path) -> None:
    with pytest.raises(
        ValueError, match="expected one folder of ImageNet, as root or as imagenet:/path/to/val"
    ):
        open_data("imagenet")
    with pytest.raises(ValueError, match="expected one folder of ImageNet"):
        open_data(f"imagenet:{imagenet}", root=imagenet)
