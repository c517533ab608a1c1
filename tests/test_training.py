"""Training minimizes what it says, and adversarial training makes models robust."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import toys
from scipy.special import log_softmax, rel_entr, softmax
from torch import Tensor, nn

import dent
from dent.attacks import pgd
from dent.data import open_data
from dent.data.dataset import Dataset
from dent.models import find_class_names
from dent.training import RECIPES, Recipe, Step, make_recipe, train
from dent.training.card import train_and_measure
from dent.training.loop import Average, crop_and_flip, draw_crops, resize, split_images
from dent.training.losses import attack_batch, compute_loss, draw_offsets, freeze

QUICK: dict[str, Any] = {"epochs": 20, "batch_size": 64, "hold_out": 128, "augment": False}
ATTACK: dict[str, Any] = {"eps": toys.EPS, "attack_steps": 5, "step_size": 0.04}


@pytest.fixture
def dataset() -> Dataset:
    return open_data("toys:features", split="train")


def robust_accuracy(model: nn.Module) -> float:
    inputs, labels = toys.features("test")
    result = pgd(model, inputs, labels, eps=toys.EPS, steps=20)
    return 1 - float(result.success.float().mean())


def worst_case(model: nn.Module) -> float:
    """The accuracy of a linear model under its worst input, which has a closed form.

    Values at the border of [0, 1] cannot all move by eps, so this is a lower bound; here a tight one.
    """
    inputs, labels = toys.features("test")
    weight = model.get_parameter("1.weight").detach()
    away = (weight[1 - labels] - weight[labels]).view_as(inputs)
    worst = model((inputs + toys.EPS * away.sign()).clamp(0, 1))
    return float((worst.argmax(1) == labels).float().mean())


@pytest.mark.parametrize(
    "settings",
    [{"method": "at"}, {"method": "at", "attack_steps": 1, "step_size": 0.125}, {"method": "trades"}],
    ids=["at", "fast-at", "trades"],
)
def test_adversarial_training_raises_robust_accuracy(
    dataset: Dataset, tmp_path: Path, settings: dict[str, Any]
) -> None:
    beta = {"beta": 6.0} if settings["method"] == "trades" else {}
    nominal = train("toys:linear", dataset, Recipe(**QUICK), out=tmp_path / "nominal")
    adversarial = train(
        "toys:linear", dataset, Recipe(**QUICK | ATTACK | settings | beta), out=tmp_path / "adversarial"
    )
    assert robust_accuracy(nominal.model) == pytest.approx(worst_case(nominal.model), abs=0.01)
    assert worst_case(nominal.model) < 0.5
    assert worst_case(adversarial.model) > 0.8
    assert nominal.history[-1].natural > 0.88
    assert nominal.history[-1].robust is None
    assert adversarial.history[-1].robust == pytest.approx(worst_case(adversarial.model), abs=0.08)


def test_one_update_is_that_of_torch(dataset: Dataset, tmp_path: Path) -> None:
    recipe = Recipe(epochs=1, batch_size=1024, hold_out=0, augment=False, seed=3)
    trained = train("toys:convolutional", dataset, recipe, out=tmp_path)
    torch.manual_seed(3)
    model = toys.convolutional()
    optimizer = torch.optim.SGD(
        model.parameters(), recipe.lr_at(0.5), momentum=0.9, weight_decay=5e-4, nesterov=True
    )
    inputs, labels = dataset.tensors()
    loss = F.cross_entropy(model(inputs), labels)
    loss.backward()
    optimizer.step()
    assert trained.history[0].loss == pytest.approx(loss.item(), rel=1e-5)
    for ours, theirs in zip(trained.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_the_loss_of_trades_is_its_formula() -> None:
    model = toys.convolutional().double()
    inputs, points = torch.rand(2, 6, 1, 4, 8).double()
    labels = torch.tensor([0, 1, 1, 0, 1, 0])
    loss, logits = compute_loss(model, inputs, points, labels, beta=6.0)
    natural, moved = (model(images).detach().numpy() for images in (inputs, points))
    expected = -log_softmax(natural, 1)[np.arange(6), labels.numpy()].mean()
    expected += 6 * rel_entr(softmax(natural, 1), softmax(moved, 1)).sum(1).mean()
    assert loss.item() == pytest.approx(expected)
    np.testing.assert_allclose(logits.detach().numpy(), moved)


@pytest.mark.parametrize("recipe", ["at", "at-l2", "trades", "trades-l2", "fast-at", "fast-at-l2"])
def test_the_attack_in_training_stays_in_the_ball_and_hurts(recipe: str) -> None:
    model, settings = toys.normalized(), make_recipe(recipe)
    inputs, labels = toys.features()
    inputs, labels = inputs[:64], labels[:64]
    generator = torch.Generator().manual_seed(0)
    offsets = draw_offsets(inputs.shape, recipe=settings, generator=generator)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    points = attack_batch(model, inputs, labels, (inputs + offsets).clamp(0, 1), recipe=settings)
    difference = (points - inputs).flatten(1)
    length = difference.abs().amax(1) if settings.norm == "linf" else difference.norm(dim=1)
    assert (length <= settings.eps + 1e-6).all()
    assert points.min() >= 0
    assert points.max() <= 1
    with freeze(model), torch.no_grad():
        losses = [F.cross_entropy(model(images), labels) for images in (inputs, points)]
        if settings.method == "at":
            assert losses[1] > losses[0]
    assert model.training
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_crops_are_those_of_a_loop() -> None:
    images = torch.rand(40, 3, 9, 7)
    crops = draw_crops(40, generator=torch.Generator().manual_seed(1))
    for image, (top, left, flip), cropped in zip(
        images, crops.tolist(), crop_and_flip(images, crops), strict=True
    ):
        expected = F.pad(image, (4, 4, 4, 4))[:, top : top + 9, left : left + 7]
        assert torch.equal(cropped, expected.flip(2) if flip else expected)
    assert crops[:, :2].min() == 0
    assert crops[:, :2].max() == 8
    assert set(crops[:, 2].tolist()) == {0, 1}


def test_the_schedules() -> None:
    cosine = Recipe(lr=0.3)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.3)
    theirs = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    for step in range(10):
        assert cosine.lr_at(step / 10) == pytest.approx(optimizer.param_groups[0]["lr"])
        optimizer.step()
        theirs.step()
    # That of Wong et al.: up to the peak after two fifths, and down to zero.
    for progress in np.linspace(0, 1, 21):
        expected = np.interp(progress, [0, 0.4, 1], [0, 0.2, 0])
        assert RECIPES["fast-at"].lr_at(float(progress)) == pytest.approx(expected, abs=1e-9)


def test_the_paper_recipes() -> None:
    nominal = RECIPES["nominal"]
    assert (nominal.epochs, nominal.batch_size, nominal.lr) == (200, 128, 0.1)
    assert (nominal.momentum, nominal.weight_decay, nominal.schedule) == (0.9, 5e-4, "cosine")
    for name in ("at", "trades"):
        recipe, l2 = RECIPES[name], RECIPES[f"{name}-l2"]
        assert (recipe.eps, recipe.attack_steps, recipe.step_size) == (8 / 255, 10, 2 / 255)
        assert (l2.norm, l2.eps, l2.attack_steps, l2.step_size) == ("l2", 0.5, 10, 0.1)
    assert RECIPES["trades"].beta == 6
    assert RECIPES["fast-at"].attack_steps == 1


@pytest.mark.parametrize(
    ("settings", "messages"),
    [
        ({"epochs": 0, "lr": -1.0}, ["2 wrong settings", "epochs: expected an integer >= 1", "lr:"]),
        ({"method": "at"}, ["eps: expected > 0 with method at", "attack_steps", "step_size"]),
        ({"eps": 0.1}, ["eps: expected 0 with method nominal"]),
        ({"beta": 1.0}, ["beta: belongs to method trades, and method is nominal"]),
        ({"warmup": 1.0}, ["warmup: expected a number >= 0 and < 1"]),
        ({"norm": "l1"}, ["norm: expected one of linf, l2, got 'l1'"]),
    ],
)
def test_recipes_that_are_refused(settings: dict[str, Any], messages: list[str]) -> None:
    with pytest.raises(ValueError, match="wrong setting") as caught:
        Recipe(**settings)
    for message in messages:
        assert message in str(caught.value)


def test_unknown_recipes_and_settings_are_named() -> None:
    with pytest.raises(ValueError, match="did you mean 'trades'"):
        make_recipe("trade")
    with pytest.raises(TypeError, match="did you mean 'epochs'"):
        make_recipe("at", epoch=3)


def test_a_batch_larger_than_the_data_is_refused(dataset: Dataset, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least one batch of 1000 images, got 1024 less 128"):
        train("toys:linear", dataset, Recipe(batch_size=1000, hold_out=128), out=tmp_path / "run")
    assert not (tmp_path / "run" / "checkpoint.pt").exists()


def test_a_function_of_the_user_does_its_own_normalization(dataset: Dataset, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="toys:linear does its own normalization"):
        train("toys:linear", dataset, Recipe(**QUICK), out=tmp_path, mean=0.5, std=0.5)


def test_held_out_images_are_not_trained_on(dataset: Dataset, tmp_path: Path) -> None:
    seen: list[Tensor] = []

    def read(indices: Tensor) -> Tensor:
        seen.append(indices)
        return dataset.read(indices)

    watched = Dataset("spied", dataset.labels, read, dataset.classes)
    recipe = Recipe(**QUICK | {"epochs": 2})
    train("toys:linear", watched, recipe, out=tmp_path)
    trained_on, held_out = split_images(dataset, recipe)
    assert set(trained_on.tolist()) | set(held_out.tolist()) == set(range(1024))
    trained = {index for indices in seen if len(indices) == 64 for index in indices.tolist()}
    assert trained == set(trained_on.tolist())


def test_progress_says_where_it_is(dataset: Dataset, tmp_path: Path) -> None:
    steps: list[Step] = []
    train("toys:linear", dataset, Recipe(**QUICK), out=tmp_path, on_step=steps.append)
    assert [step.done for step in steps][-1] == steps[-1].total == 20 * 14
    assert [step.epoch for step in steps] == sorted(step.epoch for step in steps)
    assert all(0 <= step.accuracy <= 1 for step in steps)


def test_a_checkpoint_is_a_model(tmp_path: Path) -> None:
    images = torch.rand(64, 3, 32, 32)
    data = Dataset("random", torch.arange(64) % 10, images.__getitem__, tuple("abcdefghij"))
    recipe = Recipe(epochs=1, batch_size=32, hold_out=0)
    trained = train("resnet20", data, recipe, out=tmp_path, mean=0.4, std=0.2)
    loaded = dent.load_model(trained.checkpoint)
    with torch.no_grad():
        torch.testing.assert_close(loaded(images), trained.model(images))


def test_mixed_precision_trains(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # oneDNN's bfloat16 kernels die of an illegal instruction on some CPUs without bfloat16.
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True}, raising=False)
    recipe = Recipe(**QUICK | ATTACK | {"method": "at"})
    half = train("toys:linear", dataset, recipe, out=tmp_path, mixed_precision=True)
    assert worst_case(half.model) > 0.8
    assert all(parameter.dtype == torch.float32 for parameter in half.model.parameters())


def test_compiled_training_is_the_same_to_rounding(dataset: Dataset, tmp_path: Path) -> None:
    recipe = Recipe(**QUICK | {"epochs": 1})
    plain, compiled = (
        train("toys:convolutional", dataset, recipe, out=tmp_path / str(flag), compile=flag)
        for flag in (False, True)
    )
    for ours, theirs in zip(plain.model.parameters(), compiled.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


def test_the_average_is_a_weighted_sum_of_all_weights_so_far() -> None:
    model, decay, updates = nn.Linear(3, 2), 0.8, 30
    average = Average(model, decay)
    weights = [model.weight.detach().clone()]
    for done in range(updates):
        with torch.no_grad():
            model.weight.copy_(torch.randn(2, 3))
        average.update(done)
        weights.append(model.weight.detach().clone())
    decays = [1.0, *(min(decay, (1 + done) / (10 + done)) for done in range(updates))]
    shares = [(1 - decays[i] if i else 1.0) * math.prod(decays[i + 1 :]) for i in range(updates + 1)]
    assert sum(shares) == pytest.approx(1)
    expected = torch.stack([share * one for share, one in zip(shares, weights, strict=True)]).sum(0)
    torch.testing.assert_close(average.model.get_parameter("weight"), expected)


def test_averaged_weights_are_saved_and_watched_beside_the_raw_ones(
    dataset: Dataset, tmp_path: Path
) -> None:
    recipe = Recipe(**QUICK | ATTACK | {"method": "at", "epochs": 3, "average": 0.9})
    trained = train("toys:pooled", dataset, recipe, out=tmp_path)
    raw, average = (
        dent.load_model("toys:pooled", weights=tmp_path / f"{name}.pt")
        for name in ("checkpoint", "average")
    )
    assert not torch.equal(raw.get_parameter("5.weight"), average.get_parameter("5.weight"))
    inputs, labels = dataset.subset(split_images(dataset, recipe)[1]).tensors()
    for model, natural in (
        (raw, trained.history[-1].natural),
        (average, trained.history[-1].average_natural),
    ):
        assert natural == pytest.approx(float((model(inputs).argmax(1) == labels).float().mean()))
    assert trained.history[-1].average_robust is not None


def test_images_grow_to_their_full_size(dataset: Dataset, tmp_path: Path) -> None:
    widths: list[int] = []
    recipe = Recipe(**QUICK | {"epochs": 4, "resize_from": 4, "resize_until": 0.5})

    class Spy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = toys.pooled()

        def forward(self, inputs: Tensor) -> Tensor:
            if self.training:
                assert inputs.shape[2] * 2 == inputs.shape[3]
                widths.append(inputs.shape[3])
            return self.net(inputs)  # type: ignore[no-any-return]

    toys.spy = Spy  # type: ignore[attr-defined]
    train("toys:spy", dataset, recipe, out=tmp_path)
    assert widths == [4] * 28 + [8] * 28


def test_resizing_takes_means() -> None:
    images = torch.rand(2, 3, 8, 16)
    expected = images.reshape(2, 3, 4, 2, 8, 2).mean((3, 5))
    torch.testing.assert_close(resize(images, 8), expected)


def test_fine_tuning_begins_from_the_weights_and_their_normalization(tmp_path: Path) -> None:
    images = torch.rand(64, 3, 32, 32)
    data = Dataset("random", torch.arange(64) % 10, images.__getitem__, tuple("abcdefghij"))
    recipe = Recipe(epochs=1, batch_size=32, hold_out=0)
    first = train("resnet20", data, recipe, out=tmp_path / "first", mean=0.4, std=0.2)
    still = recipe.replace(lr=0.0)
    for start in (first.checkpoint, "resnet20-at"):
        tuned = train("resnet20", data, still, out=tmp_path / Path(start).stem, start=start)
        source = dent.load_model(start)
        for name, value in source.named_parameters():
            assert torch.equal(tuned.model.get_parameter(name), value)
        assert torch.equal(tuned.model.get_buffer("mean"), source.get_buffer("mean"))
        loaded = dent.load_model(tuned.checkpoint)
        assert torch.equal(loaded.get_buffer("mean"), source.get_buffer("mean"))


def save_images(path: Path, classes: list[str], labels: list[int]) -> str:
    """Images whose class is their brightness: 0.2 for cats, 0.8 for dogs."""
    light = torch.tensor([{"cat": 0.2, "dog": 0.8, "elk": 0.5}[classes[label]] for label in labels])
    images = light.view(-1, 1, 1, 1).expand(-1, 3, 32, 32)
    np.savez(path, images=images, labels=labels, classes=np.array(classes))
    return str(path)


def test_classes_are_matched_by_name(tmp_path: Path) -> None:
    data = save_images(tmp_path / "train.npz", ["cat", "dog"], [0, 1] * 32)
    tests = save_images(tmp_path / "test.npz", ["dog", "cat"], [0, 1] * 16)
    recipe = Recipe(epochs=6, batch_size=16, hold_out=0, augment=False, lr=0.05)
    card = train_and_measure("resnet20", recipe, data=data, test_data=tests, out=tmp_path / "run")
    assert card is not None
    assert card["accuracies"][0]["percent"] == 100
    checkpoint = tmp_path / "run" / "checkpoint.pt"
    assert (
        find_class_names(checkpoint) == find_class_names(dent.load_model(checkpoint)) == ("cat", "dog")
    )
    # Begun from the checkpoint, data in another order have its labels.
    still = recipe.replace(lr=0.0, epochs=1)
    tuned = train_and_measure(
        "resnet20", still, data=tests, test_data=data, start=checkpoint, out=tmp_path / "tuned"
    )
    assert tuned is not None
    assert tuned["accuracies"][0]["percent"] == 100
    assert find_class_names(tmp_path / "tuned" / "checkpoint.pt") == ("cat", "dog")


def test_test_images_of_other_classes_are_refused_before_training(tmp_path: Path) -> None:
    data = save_images(tmp_path / "train.npz", ["cat", "dog"], [0, 1] * 32)
    tests = save_images(tmp_path / "test.npz", ["cat", "elk"], [0, 1] * 16)
    with pytest.raises(ValueError, match="classes that training on .* knows .*, got elk; rename"):
        train_and_measure("resnet20", Recipe(), data=data, test_data=tests, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_weights_that_do_not_fit_are_named(dataset: Dataset, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="resnet20-at does not fit Sequential; missing"):
        train("toys:pooled", dataset, Recipe(**QUICK), out=tmp_path, start="resnet20-at")
