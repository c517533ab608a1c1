"""What is answered is what the defended and the static model say when they are called directly."""

from __future__ import annotations

import base64
import copy
import json
import pickle
import re
from typing import Any

import pytest
import torch
from nets import randomized, small
from scipy.stats import entropy
from torch import Tensor, nn

import dent
from dent.defense import defend
from dent.serving.answers import Answer, ModelError, answer_batch
from dent.serving.app import make_page
from dent.serving.inputs import read_images
from dent.serving.settings import Serving

DEFENSES = [
    "dent+solo",
    "dent+",
    "dent:steps=3",
    "dent-nominal:steps=2",
    "static",
    "norm",
    "blur",
    "dent:blur=dynamic,blur_per=sample,affine=off,steps=2",
    "dent:statistics=0.5,steps=2",
]


@pytest.fixture
def model() -> nn.Module:
    return randomized(small(nn.BatchNorm2d(8)))


@pytest.fixture
def inputs() -> Tensor:
    return torch.rand(5, 3, 8, 8, dtype=torch.double)


def said(answer: Answer, side: str) -> Any:
    return answer if side == "defended" else answer.static


def stacked(given: list[Answer], side: str) -> Tensor:
    return torch.tensor([said(one, side).probabilities for one in given], dtype=torch.double)


@pytest.mark.parametrize("text", DEFENSES)
def test_both_models_answer_as_if_called_directly(text: str, model: nn.Module, inputs: Tensor) -> None:
    defended = defend(model, text)
    given = answer_batch(defended, inputs, classes=tuple("abcd"))
    state = defended.adapt(inputs)
    logits, plain = defended.predict(inputs, state), model(inputs).detach()
    for side, wanted in (("defended", logits), ("static", plain)):
        probabilities = wanted.softmax(1)
        assert torch.allclose(stacked(given, side), probabilities, rtol=1e-9, atol=1e-12)
        for answer, row in zip(given, probabilities, strict=True):
            one = said(answer, side)
            assert one.label == row.argmax()
            assert one.name == "abcd"[one.label]
            unsure = answer.entropy_after if side == "defended" else answer.static.entropy
            assert unsure == pytest.approx(entropy(row), abs=1e-9)
    before = state.trace.entropy[0] if defended.settings.steps else [one.entropy_after for one in given]
    for answer, unsure in zip(given, before, strict=True):
        assert answer.entropy_before == pytest.approx(float(unsure), abs=1e-9)
        assert answer.steps == defended.settings.steps
        assert answer.seconds > 0
    if defended.settings.steps:  # they differ, or all this says nothing
        assert not torch.allclose(stacked(given, "defended"), stacked(given, "static"), atol=1e-6)


def test_adaptation_makes_the_answers_surer(model: nn.Module, inputs: Tensor) -> None:
    for answer in answer_batch(defend(model, "dent+solo"), inputs):
        assert answer.entropy_after < answer.entropy_before
        assert answer.entropy_before == pytest.approx(answer.static.entropy)


@pytest.mark.parametrize("text", ["dent+solo", "dent:steps=3", "dent-nominal:steps=3"])
@pytest.mark.parametrize("steps", [0, 1, 2])
def test_fewer_steps_are_those_of_a_defense_with_fewer(
    text: str, steps: int, model: nn.Module, inputs: Tensor
) -> None:
    defended = defend(model, text)
    changed = defended.settings
    shorter = dent.Dent(model, dent.Settings(**vars(changed) | {"steps": steps}))
    given = answer_batch(defended, inputs, steps)
    assert torch.allclose(stacked(given, "defended"), shorter(inputs).softmax(1), rtol=1e-9, atol=1e-12)
    assert {one.steps for one in given} == {steps}
    if steps == 0:
        assert all(one.entropy_before == one.entropy_after for one in given)
    assert {one.steps for one in answer_batch(defended, inputs)} == {changed.steps}


@pytest.mark.parametrize("steps", [-1, 7])
def test_more_steps_than_its_own_are_refused(steps: int, model: nn.Module, inputs: Tensor) -> None:
    with pytest.raises(ValueError, match=f"steps: expected 0 to 6, the defense's own, got {steps}"):
        answer_batch(defend(model, "dent+solo"), inputs, steps)


def test_company_changes_nothing_where_the_defense_is_independent(
    model: nn.Module, inputs: Tensor
) -> None:
    company = torch.cat([torch.zeros(3, 3, 8, 8), torch.ones(2, 3, 8, 8)]).double()
    for text, same in (("dent+solo", True), ("dent+", False)):
        defended = defend(model, text)
        alone = [answer_batch(defended, one[None])[0] for one in inputs]
        together = answer_batch(defended, torch.cat([company, inputs]))[5:]
        close = torch.allclose(stacked(alone, "defended"), stacked(together, "defended"), atol=1e-10)
        assert close == same == defended.settings.independent
        assert torch.allclose(stacked(alone, "static"), stacked(together, "static"), atol=1e-12)


class Breaking(nn.Module):
    """A model that fails on white images."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor) -> Tensor:
        white = (inputs == 1).flatten(1).all(1)
        logits: Tensor = self.model(inputs)
        return logits.masked_fill(white[:, None], torch.nan)


@pytest.mark.parametrize("text", ["dent+solo", "static", "dent-nominal:steps=1,blur=off"])
def test_logits_that_are_not_finite_are_the_servers_fault(
    text: str, model: nn.Module, inputs: Tensor
) -> None:
    defended = defend(Breaking(model), text)
    assert len(answer_batch(defended, inputs)) == 5
    with pytest.raises(ModelError, match="the model cannot answer: .* finite logits, got NaN") as error:
        answer_batch(defended, torch.cat([inputs, torch.ones(1, 3, 8, 8)]))
    assert str(pickle.loads(pickle.dumps(error.value))) == str(error.value)
    assert len(answer_batch(defended, inputs)) == 5  # nothing of it is left behind


def test_a_model_that_breaks_in_adaptation_only_fails_too(model: nn.Module, inputs: Tensor) -> None:
    defended = dent.defend(model.float(), "dent", steps=2, lr=1e38)
    assert torch.isfinite(model(inputs.float())).all()
    with pytest.raises(ModelError, match="finite logits"):
        answer_batch(defended, inputs.float())
    assert len(answer_batch(defended, inputs.float(), 0)) == 5


def test_images_that_the_model_cannot_take_fail(inputs: Tensor) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(400, 2))
    with pytest.raises(ModelError, match="the model cannot answer"):
        answer_batch(dent.defend(model, "dent", steps=1), inputs.float())


def test_names_must_be_as_many_as_classes(model: nn.Module, inputs: Tensor) -> None:
    defended = defend(model, "dent+solo")
    with pytest.raises(ValueError, match="expected names for the 4 classes of the model, got 2"):
        answer_batch(defended, inputs, classes=("cat", "dog"))
    answer = answer_batch(defended, inputs)[0]
    assert answer.name == str(answer.label)


def test_the_json_of_an_answer(model: nn.Module, inputs: Tensor) -> None:
    given = answer_batch(defend(model, "dent+solo"), inputs, 2, classes=tuple("abcd"))
    read = [json.loads(one.model_dump_json(by_alias=True)) for one in given]
    for answer, content in zip(given, read, strict=True):
        plain = answer.static
        assert content == {
            "class": answer.label,
            "name": answer.name,
            "probabilities": list(answer.probabilities),
            "entropy_before": answer.entropy_before,
            "entropy_after": answer.entropy_after,
            "steps": 2,
            "static": {
                "class": plain.label,
                "name": plain.name,
                "probabilities": list(plain.probabilities),
                "entropy": plain.entropy,
            },
            "seconds": answer.seconds,
        }
        assert sum(content["probabilities"]) == pytest.approx(1)


@pytest.mark.parametrize(("text", "forwards"), [("dent+solo", 7), ("static", 1), ("blur", 2)])
def test_the_static_answer_costs_a_forward_only_where_it_must(
    text: str, forwards: int, model: nn.Module, inputs: Tensor
) -> None:
    calls: list[Any] = []
    model[0].register_forward_hook(lambda *_: calls.append(1))  # type: ignore[index]
    defended = defend(model, text)
    answer_batch(defended, inputs)
    assert len(calls) == forwards


def test_the_static_answer_is_of_the_model_that_is_given(model: nn.Module, inputs: Tensor) -> None:
    """A defense may hold another one, here in training mode, where a call would change it."""
    for text in ("blur", "dent+solo"):
        other = randomized(small(nn.BatchNorm2d(8)), seed=1).train()
        before = copy.deepcopy(other.state_dict())
        defended = defend(other, text)
        given = answer_batch(defended, inputs, static=model)
        wanted = model(inputs).detach().softmax(1)
        assert torch.allclose(stacked(given, "static"), wanted, rtol=1e-9, atol=1e-12)
        assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items())


def test_the_examples_of_the_page_are_what_it_says() -> None:
    pytest.importorskip("PIL.Image", reason="needs Pillow")
    serving = Serving()
    page = make_page(serving)
    found = re.search(r'id="examples">(.*?)</script>', page, re.DOTALL)
    assert found
    examples = json.loads(found[1])
    bodies = [base64.b64decode(one["png"]) for one in examples]
    images = torch.cat([read_images(body, "image/png", serving) for body in bodies])
    natural, labels = dent.load_data("cifar10", n=60)
    for at, number in enumerate((48, 2, 19)):
        assert torch.equal(images[2 * at], natural[number])
        assert 7 / 255 < (images[2 * at + 1] - natural[number]).abs().max() < 8.001 / 255
        assert examples[2 * at]["name"] == serving.classes[labels[number]]
    defended = defend(dent.load_model(serving.model), serving.defense)
    given = answer_batch(defended, images, classes=serving.classes)
    names = [one["name"] for one in examples]
    notes = [one["note"] for one in examples]
    assert notes == ["natural", "attacked"] * 3
    # It helps, it does not help, and it is not needed.
    static = [one.static.name == name for one, name in zip(given, names, strict=True)]
    with_it = [one.name == name for one, name in zip(given, names, strict=True)]
    assert static == [True, False, True, False, True, True]
    assert with_it == [True, True, True, False, True, True]


def test_nothing_that_is_served_can_end_a_script_of_the_page() -> None:
    page = make_page(Serving(model="</script><script>alert(1)</script>", classes=("a", "</script>")))
    assert page.count("</script>") == make_page(Serving()).count("</script>")
    found = re.search(r'id="about">(.*?)</script>', page)
    assert found
    assert json.loads(found[1])["classes"] == ["a", "</script>"]
