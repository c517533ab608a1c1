"""Models and images of one's own in an evaluation, and what is refused before any attack."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from cells import labeled, outcomes, sources_of, tiny, units_of_kind
from nets import randomized, small
from torch import Tensor, nn

from dent.data import Dataset, from_arrays
from dent.evaluation import Evaluation, evaluate
from dent.evaluation.plan import check_needs, make_plan


def data_of(n: int = 8) -> tuple[Tensor, Tensor]:
    return labeled(tiny(), n)


QUICKLY: dict[str, Any] = {"steps": 1, "batch_size": 4, "eps": 0.01}


def test_models_and_images_in_memory() -> None:
    net = tiny()
    images, labels = data_of()
    named = evaluate({"net": net}, ["static"], data=(images, labels), **QUICKLY)
    alone = evaluate(net, "static", data=from_arrays(images, labels), **QUICKLY)
    assert [cell.cell.model for cell in (*named.cells, *alone.cells)] == ["net", "Sequential"]
    assert named.cells[0].natural == alone.cells[0].natural
    assert named.cells[0].natural.n == 8
    arrays = evaluate(net, "static", data=(images.numpy(), labels.tolist()), **QUICKLY)  # type: ignore[arg-type]
    assert arrays.cells[0].points == alone.cells[0].points
    many = evaluate({"a": net, "b": net}, ["static", "norm"], data=(images, labels), **QUICKLY)
    assert [(one.cell.model, one.cell.defense) for one in many.cells] == [
        (model, defense) for model in "ab" for defense in ("static", "norm")
    ]


@pytest.mark.parametrize("in_memory", [data_of(150), from_arrays(*data_of(150))], ids=["pair", "set"])
def test_of_images_in_memory_all_count_unless_n_is_given(in_memory: Any) -> None:
    asked: dict[str, Any] = {"steps": 0, "batch_size": 64, "eps": 0.0}
    assert evaluate(tiny(), "static", data=in_memory, **asked).cells[0].natural.n == 150
    first = evaluate(tiny(), "static", data=in_memory, n=5, **asked)
    assert sorted(first.cells[0].points) == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="expected n up to 150, .* got 151"):
        evaluate(tiny(), "static", data=in_memory, n=151, **asked)


class Answers(nn.Module):
    """A net of which something else is made than logits."""

    def __init__(self, change: Any) -> None:
        super().__init__()
        self.net, self.change = tiny(), change

    def forward(self, inputs: Tensor) -> Any:
        return self.change(self.net(inputs))


def outside() -> Dataset:
    images, labels = data_of()
    return Dataset("shifted", labels, lambda at: images[at] + (at == 7)[:, None, None, None], ())


BAD: dict[str, tuple[Any, Any, str]] = {
    "labels out of range": (None, lambda x, y: (x, y + 3), "expected labels from 0 to 3"),
    "negative labels": (None, lambda x, y: (x, y - 5), "expected labels from 0"),
    "too few labels": (None, lambda x, y: (x, y[:-1]), "expected 8 labels"),
    "images outside": (None, lambda x, y: (x * 2, y), r"expected images in \[0, 1\]"),
    "nan": (None, lambda x, y: (x / (x > 0.1) * 0 + x, y), "expected finite images"),
    "one image outside": (None, lambda x, y: outside(), r"shifted: expected images in \[0, 1\]"),
    "no images": (None, lambda x, y: Dataset("none", y[:0], x.__getitem__, ()), "got none in none"),
    "probabilities": (lambda logits: logits.softmax(1), None, "got probabilities"),
    "not finite": (lambda logits: logits / 0, None, "finite logits"),
    "shape": (lambda logits: logits[:, 0], None, r"logits \(2, classes\)"),
    "one class": (lambda logits: logits[:, :1], None, "two or more classes"),
    "no tensor": (lambda logits: [logits], None, "got list"),
}


@pytest.mark.parametrize("defense", ["static", "dent"])
@pytest.mark.parametrize("bad", list(BAD))
def test_bad_input_is_refused_before_any_attack(
    bad: str, defense: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    change, data, message = BAD[bad]
    monkeypatch.setattr(
        "dent.evaluation.execute.execute_task", lambda *_: pytest.fail("something was done")
    )
    images, labels = data_of()
    net = Answers(change) if change else tiny()
    with pytest.raises(ValueError, match=message):
        evaluate(
            {"net": net}, [defense], out=tmp_path / "run",
            data=data(images, labels) if data else (images, labels), **QUICKLY,
        )  # fmt: skip
    assert not (tmp_path / "run" / "units").exists()


def test_a_model_in_training_mode_is_refused_and_stays_as_it_was() -> None:
    net = tiny().train()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    for defense in ("static", "dent"):
        with pytest.raises(ValueError, match=r"training mode; call model.eval\(\)"):
            evaluate(net, defense, data=data_of(), **QUICKLY)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_a_device_that_is_not_there_is_refused() -> None:
    for device in ("quantum", "cuda:99"):
        with pytest.raises(ValueError, match=f"expected a device that this machine has, got '{device}'"):
            make_plan(sources_of(tiny(), data_of(), "static", device=device))
    with pytest.raises(ValueError, match="expected a device that this machine has, got 'quantum'"):
        check_needs(Evaluation(mixed_precision=True, device="quantum"))


class Together(nn.Module):
    """A model that sees its batch by itself."""

    independent = False
    sizes: ClassVar[list[int]] = []

    def __init__(self) -> None:
        super().__init__()
        self.net = tiny()

    def forward(self, inputs: Tensor) -> Tensor:
        Together.sizes.append(len(inputs))
        logits: Tensor = self.net(0.5 + inputs - inputs.mean(0))
        return logits


@pytest.mark.parametrize("norm", ["linf", "l1"])
def test_a_model_that_sees_its_batch_by_itself_is_attacked_in_whole_batches(norm: str) -> None:
    """One that says so, and one without statistics of training."""
    own = randomized(small(nn.BatchNorm2d(8, track_running_stats=False))).float()
    for net in (Together(), own):
        sources = sources_of(net, labeled(tiny(), 10), "static", suite="standard", norm=norm)
        plan = make_plan(sources)
        assert not any(map(plan.is_chained, plan.cells))
        for unit in units_of_kind(plan, "direct"):
            Together.sizes.clear()
            outcome = outcomes(plan, sources, [unit])[unit]
            assert all(outcome.given)
            assert set(Together.sizes) <= {plan.sizes[unit.batch]}


def test_a_model_that_sees_its_batch_is_attacked_as_a_whole_though_it_does_not_say_so() -> None:
    class Centered(nn.Module):
        def forward(self, inputs: Tensor) -> Tensor:
            flat = inputs.flatten(1)[:, :4]
            return 20 * (flat - flat.mean(0))

    class Plain(nn.Module):
        def forward(self, inputs: Tensor) -> Tensor:
            return 20 * inputs.flatten(1)[:, :4]

    pixels = torch.rand(4, 3, 8, 8)
    data = pixels, torch.tensor([0, 1, 2, 3])
    for net, independent in ((Centered(), False), (Plain(), True)):
        sources = sources_of(net, data, "static")
        (cell,) = sources.evaluation.cells()
        assert sources.subject(cell).independent is independent
        assert make_plan(sources).is_chained(cell) is independent


def test_zero_is_all_images_in_memory_too() -> None:
    net = tiny()
    (cell,) = evaluate(net, "static", data=labeled(net, 5), n=0, **QUICKLY).cells
    assert cell.natural.n == 5
