"""Any defense can be served; clients share batches only if it is independent."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch
from cells import tiny
from own_defenses import Centered, Inside
from torch import Tensor

import dent
from dent.serving.answers import answer_batch
from dent.serving.replica import Replica, describe_service, load_defense
from dent.serving.settings import Serving


def serve(defense: str, **others: Any) -> Serving:
    asked: dict[str, Any] = {
        "model": "own_defenses:make_net",
        "size": (8, 8),
        "classes": "numbers",
    } | others
    return Serving(defense=defense, **asked)


@pytest.fixture
def images() -> Tensor:
    return torch.rand(5, 3, 8, 8, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("defense", "shared", "steps"),
    [
        ("views", True, 0),
        ("hedge:steps=2", True, 2),
        ("medbn", False, 0),
        ("own_defenses:make", True, 2),
        ("own_defenses:Plain", True, None),
        ("own_defenses:Inside", False, None),
        ("own_defenses:Each", True, None),
        ("own_defenses:Coin", False, None),
        ("own_defenses:UndeclaredCoin", False, None),
        ("own_defenses:SilentCoin", False, None),
        ("own_defenses:SharedCoin", False, None),
    ],
)
def test_clients_share_batches_only_if_no_answer_depends_on_another_image(
    defense: str, shared: bool, steps: int | None
) -> None:
    service = describe_service(serve(defense))
    assert (service.shared, service.steps) == (shared, steps)
    assert service.isolation.startswith("independent:" if shared else "own batches:")
    assert describe_service(serve(defense, shared_batches=True)).shared


@pytest.mark.parametrize(
    ("defense", "message"),
    [
        ("own_defenses:make_lying", "declares independent = True"),
        ("own_defenses:Remembers", "breaks a promise: clean state"),
        ("own_defenses:Drifting", "breaks a promise: clean state"),
        ("own_defenses:ChangesModel", "unchanged model"),
        ("own_defenses:OneRow", "expected a model of images of 8 x 8|breaks a promise: logits"),
        ("own_defenses:make_nothing", "to return a defense"),
        ("own_defenses:make_negative", "expected `updates` of the defense as an integer >= 0, got -2"),
        ("own_defenses:make_true", "expected `updates` of the defense as an integer >= 0, got True"),
        ("own_defenses:missing", "has no 'missing'"),
    ],
)
def test_a_defense_that_would_let_clients_touch_one_another_is_refused(
    defense: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        describe_service(serve(defense))


def test_fewer_updates_under_load_need_a_defense_that_can_make_fewer() -> None:
    assert describe_service(serve("own_defenses:make", shed=4)).steps == 2
    with pytest.raises(ValueError, match="shed: expected a defense that can make fewer updates"):
        describe_service(serve("own_defenses:Plain", shed=4))


@pytest.mark.parametrize("text", ["views", "hedge:steps=2", "memo", "lame"])
def test_answers_of_a_listed_defense_are_those_of_a_call(text: str, images: Tensor) -> None:
    net = tiny()
    defended = dent.defend(net, text)
    answers = answer_batch(defended, images)
    with torch.no_grad():
        logits, plain = defended(images), net(images)
    assert [one.label for one in answers] == logits.argmax(1).tolist()
    assert [one.static.label for one in answers] == plain.argmax(1).tolist()
    assert torch.allclose(
        torch.tensor([one.probabilities for one in answers]), logits.softmax(1), atol=1e-5
    )
    before = torch.tensor([one.entropy_before for one in answers])
    expected = plain if defended.updates else logits  # before its updates, each of them is the model
    assert torch.allclose(before, torch.distributions.Categorical(logits=expected).entropy(), atol=1e-5)


def test_a_replica_answers_with_an_own_defense_and_with_fewer_updates(images: Tensor) -> None:
    asked = serve("own_defenses:make")
    replica = Replica(asked, *load_defense(asked))
    arrays = images.numpy().astype(np.float32)
    (reply,) = asyncio.run(replica.answer(arrays, [5], 1))
    expected = Centered(tiny(), updates=1)(images).argmax(1)
    assert [one.label for one in reply.answers] == expected.tolist()
    assert {one.steps for one in reply.answers} == {1}


def test_a_forward_only_defense_does_not_say_its_updates(images: Tensor) -> None:
    net = tiny()
    answers = answer_batch(Inside(net), images)
    assert [one.label for one in answers] == Inside(net)(images).argmax(1).tolist()
    assert {one.steps for one in answers} == {None}
    with pytest.raises(ValueError, match="steps: expected none"):
        answer_batch(Inside(net), images, 1)
