"""The weights that come with dent are what their cards say."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import dent
from dent.data import from_arrays, open_data
from dent.data.cifar import CIFAR100
from dent.intervals import wilson
from dent.models.shipped import load_shipped, read_cards
from dent.precision import has_bfloat16
from dent.training import Recipe
from dent.training.card import count_correct, train_and_measure

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
from weights import average_runs, measure, measure_statistics, pack, print_table  # noqa: E402

CARDS = read_cards()


def test_the_promised_models_are_there() -> None:
    promised = {"resnet20-nominal", "resnet20-at", "resnet20-at-l2", "resnet20-at-cifar100"}
    assert promised | {"resnet26-4-nominal", "resnet26-4-at"} <= set(CARDS)
    assert sum(file.stat().st_size for file in (ROOT / "src/dent/models/weights").iterdir()) < 40e6


@pytest.mark.parametrize("name", CARDS)
def test_the_card_says_what_was_done(name: str) -> None:
    card = CARDS[name]
    recipe = Recipe(**card.recipe)
    assert recipe.adversarial == ("-at" in name)
    assert card.data["images"] + card.data["held out"] == 50_000
    for one in card.accuracies:
        correct = round(one["n"] * one["percent"] / 100)
        low, high = wilson(correct, one["n"])
        assert (one["low"], one["high"]) == (round(100 * low, 2), round(100 * high, 2))


@pytest.mark.parametrize("name", CARDS)
def test_natural_accuracy_on_the_shipped_images(name: str) -> None:
    (said,) = [one for one in CARDS[name].accuracies if one["what"] == "natural, shipped images"]
    correct = count_correct(dent.load_model(name), open_data(CARDS[name].data["name"], n=1000))
    assert abs(correct - 10 * said["percent"]) <= 2  # the last digit of a logit depends on the machine


def test_the_accuracies_that_were_promised() -> None:
    said = {name: [one["percent"] for one in card.accuracies] for name, card in CARDS.items()}
    assert said["resnet20-nominal"][0] >= 90
    natural, _, robust = said["resnet20-at"]
    assert natural >= 60
    assert robust >= 30
    natural, _, robust = said["resnet20-at-cifar100"]
    assert natural >= 40
    assert robust >= 15
    natural, _, robust = said["resnet26-4-at"]
    assert natural >= 80
    assert robust >= 40
    assert said["resnet26-4-nominal"][0] >= 94
    assert (
        CARDS["resnet20-at"].accuracies[2]["what"].startswith("reference APGD-CE and APGD-T, Linf 8/255")
    )


def test_the_adversarially_trained_model_is_robust_and_the_nominal_one_is_not() -> None:
    inputs, labels = dent.load_data("cifar10", n=200)
    standing = {
        name: int(
            (
                ~dent.attacks.pgd(dent.load_model(name), inputs, labels, eps=8 / 255, steps=10).success
            ).sum()
        )
        for name in ("resnet20-at", "resnet20-nominal")
    }
    assert standing["resnet20-nominal"] == 0
    # A weaker attack than the card's leaves at least as much, up to the noise of 200 images.
    low, _ = wilson(round(2 * CARDS["resnet20-at"].accuracies[2]["percent"]), 200)
    assert standing["resnet20-at"] > 200 * low


def test_the_docs_show_the_cards(capsys: pytest.CaptureFixture[str]) -> None:
    print_table()
    table = capsys.readouterr().out
    assert table in (ROOT / "docs" / "models.md").read_text()
    training = (ROOT / "docs" / "training.md").read_text()
    for name, card in CARDS.items():
        assert card.sha256[:12] in training
        log = (ROOT / "docs" / "logs" / f"{name}.txt").read_text()
        assert log.count("epoch ") == card.recipe["epochs"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of `dent train` with averaged weights, of a few images of CIFAR-100."""
    folder = tmp_path_factory.mktemp("run")
    images, labels = dent.load_data("cifar100", n=100)
    np.savez(folder / "few.npz", images=images, labels=labels, classes=np.array(CIFAR100.classes))
    recipe = Recipe(epochs=1, batch_size=50, hold_out=0, average=0.5)
    train_and_measure("resnet20", recipe, data=str(folder / "few.npz"), out=folder)
    return folder


OPTIONS: dict[str, Any] = {"summary": "of a test", "command": "dent train ...", "data": "cifar100"}


@pytest.mark.parametrize("average", [False, True], ids=["raw", "average"])
@pytest.mark.parametrize("half", [False, True], ids=["float32", "float16"])
def test_packed_weights_are_those_that_were_trained(
    run: Path, tmp_path: Path, average: bool, half: bool
) -> None:
    pack(run, "tiny", **OPTIONS, average=average, half=half, folder=tmp_path)
    card = read_cards(tmp_path)["tiny"]
    assert card.precision == ("float16" if half else "float32")
    assert (card.labels, card.data["name"]) == (list(CIFAR100.classes), "cifar100")
    assert json.loads((tmp_path / "tiny.json").read_text())["averaged"] is average
    packed = load_shipped("tiny", folder=tmp_path)
    trained = dent.load_model(run / f"{'average' if average else 'checkpoint'}.pt")
    assert packed.class_names == trained.class_names == CIFAR100.classes
    for name, value in trained.named_parameters():
        expected = value.half().float() if half else value
        assert torch.equal(packed.get_parameter(name), expected)
    for name, buffer in trained.named_buffers():
        assert torch.equal(packed.get_buffer(name), buffer)
    assert {value.dtype for value in packed.parameters()} == {torch.float32}
    inputs = torch.rand(4, 3, 32, 32)
    torch.testing.assert_close(packed(inputs), trained(inputs), rtol=1e-2, atol=1e-2)
    assert (tmp_path / "tiny.pt").stat().st_size < (0.7e6 if half else 1.3e6)


def test_the_mean_of_a_model_with_itself_is_the_model_with_statistics_of_today(
    run: Path, tmp_path: Path
) -> None:
    average_runs(run, str(run / "checkpoint.pt"), tmp_path / "mean", images=100)
    before, after = (dent.load_model(one / "checkpoint.pt") for one in (run, tmp_path / "mean"))
    for name, value in before.named_parameters():
        assert torch.equal(after.get_parameter(name), value)
    pack(tmp_path / "mean", "tiny", **OPTIONS, folder=tmp_path)
    assert load_shipped("tiny", folder=tmp_path).class_names == CIFAR100.classes
    with pytest.raises(
        ValueError, match="expected a model of the architecture resnet20, got resnet26-4"
    ):
        average_runs(run, "resnet26-4-nominal", tmp_path / "other")


def test_the_mean_of_two_models_is_halfway_between_them(run: Path, tmp_path: Path) -> None:
    average_runs(run, "resnet20-at-cifar100", tmp_path, average=True, images=50)
    one, other = dent.load_model(run / "average.pt"), dent.load_model("resnet20-at-cifar100")
    mean = dent.load_model(tmp_path / "average.pt")
    for name, value in mean.named_parameters():
        expected = (one.get_parameter(name) + other.get_parameter(name)) / 2
        torch.testing.assert_close(value, expected)


def test_statistics_are_the_means_over_batches() -> None:
    images, labels = torch.rand(512, 3, 8, 8), torch.arange(512) % 4
    layer = torch.nn.BatchNorm2d(3)
    dataset, recipe = from_arrays(images, labels), Recipe(augment=False)
    measure_statistics(layer, dataset, torch.arange(512), recipe)
    both = images.unflatten(0, (2, 256))
    torch.testing.assert_close(layer.running_mean, both.mean((1, 3, 4)).mean(0))
    variances = both.transpose(1, 2).flatten(2).var(2).mean(0)
    torch.testing.assert_close(layer.running_var, variances)
    assert not layer.training


def test_a_model_of_cifar100_is_measured(run: Path, tmp_path: Path) -> None:
    """All test images may be a file, here of the package's images with their classes in reverse."""
    pack(run, "tiny", **OPTIONS, folder=tmp_path)
    images, labels = dent.load_data("cifar100", n=1000)
    backwards = np.array(CIFAR100.classes[::-1])
    np.savez(tmp_path / "all.npz", images=images, labels=99 - labels, classes=backwards)
    measure("tiny", test_data=str(tmp_path / "all.npz"), folder=tmp_path)
    whole, shipped = read_cards(tmp_path)["tiny"].accuracies
    correct = count_correct(load_shipped("tiny", folder=tmp_path), open_data("cifar100", n=1000))
    assert correct > 0
    assert whole["n"] == shipped["n"] == 1000
    assert whole["percent"] == shipped["percent"] == correct / 10


@pytest.mark.parametrize("bfloat16", [False, True], ids=["float32", "bfloat16"])
def test_a_measurement_under_attack_continues(run: Path, tmp_path: Path, bfloat16: bool) -> None:
    """Batches that are stored are not attacked again, unless they are of other weights."""
    if bfloat16 and not has_bfloat16(torch.device("cpu")):
        pytest.skip("this processor has no bfloat16 instructions")
    pack(run, "tiny", **OPTIONS, folder=tmp_path)
    options: dict[str, Any] = {"eps": 8 / 255, "limit": 4, "batch_size": 2, "bfloat16": bfloat16}
    options |= {"folder": tmp_path, "store": tmp_path / "store", "test_data": str(run / "few.npz")}
    store = tmp_path / "store" / "tiny.json"
    measure("tiny", **options)
    done = json.loads(store.read_text())
    assert len(done["standing"]) == 4
    assert done["standing"][2:] == [False, False]  # an untrained model stands nowhere
    store.write_text(json.dumps(done | {"standing": [True, True]}))
    measure("tiny", **options)
    assert json.loads(store.read_text())["standing"] == [True, True, False, False]
    assert read_cards(tmp_path)["tiny"].accuracies[2]["percent"] == 50
    store.write_text(json.dumps({"asked": done["asked"] | {"sha256": ""}, "standing": [True] * 4}))
    measure("tiny", **options)
    assert json.loads(store.read_text()) == done


@pytest.mark.slow
@pytest.mark.parametrize("name", CARDS)
def test_the_reference_attack_leaves_what_the_card_says(name: str) -> None:
    """The first batch of the card's measurement; the whole is `benchmarks/weights.py measure`."""
    from pyautoattack import AutoAttack

    (said,) = [one for one in CARDS[name].accuracies if one["what"].startswith("reference")]
    norm, radius = said["what"].split(", ")[1].split()
    eps = float(radius.removesuffix("/255")) / (255 if "/" in radius else 1)
    model = dent.load_model(name)
    inputs, labels = dent.load_data(CARDS[name].data["name"], n=250)
    attack = AutoAttack(
        model, norm=norm, eps=eps, version="custom", attacks=["apgd-ce", "apgd-t"], seed=0,
        device="cpu",
    )  # fmt: skip
    points, _ = attack.run_standard_evaluation(inputs, labels, batch_size=250)
    with torch.no_grad():
        standing = int((model(points).argmax(1) == labels).sum())
    low, high = wilson(standing, 250, z=3)
    assert low < said["percent"] / 100 < high
