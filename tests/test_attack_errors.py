"""Every attack raises the same errors for invalid inputs, settings, models and answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dent.attacks import (
    AttackResult,
    SuiteResult,
    apgd,
    apgd_targeted,
    autoattack,
    fab,
    fab_targeted,
    pgd,
    square,
)

ATTACKS: dict[str, Callable[..., AttackResult]] = {
    "pgd": pgd,
    "apgd": apgd,
    "apgd_targeted": apgd_targeted,
    "fab": fab,
    "fab_targeted": fab_targeted,
    "square": square,
    "autoattack": autoattack,
}
INPUTS = torch.rand(4, 3, 6, 6, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([0, 1, 2, 3])


@pytest.fixture
def net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 5))


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=list(ATTACKS))
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"inputs": (255 * INPUTS).byte()}, "expected float inputs, got torch.uint8; divide"),
        ({"inputs": 2 * INPUTS}, r"expected inputs in \[0, 1\], got values from"),
        ({"inputs": INPUTS - 0.5}, r"expected inputs in \[0, 1\]"),
        ({"inputs": INPUTS * torch.nan}, r"expected inputs in \[0, 1\]"),
        ({"labels": LABELS[:3]}, "expected a label for each of 4 inputs"),
        ({"labels": LABELS[:, None]}, "expected a label for each of 4 inputs"),
        ({"labels": LABELS.float()}, "expected integer labels"),
        ({"labels": LABELS + 2}, "expected labels from 0 to 4, the model's 5 classes, got 2 to 5"),
        ({"labels": LABELS - 1}, "expected labels from 0 to 4"),
        ({"eps": -0.1}, "expected eps >= 0, got -0.1"),
        ({"eps": float("nan")}, "expected eps >= 0, got nan"),
        ({"eps": 8}, "expected eps up to 1 for linf, .* got 8; did you mean 8/255?"),
        ({"norm": "l3"}, "unknown norm 'l3'.* Expected one of: linf, l2, l1"),
        ({"mask": torch.ones(3, dtype=torch.bool)}, "expected mask as 4 bools"),
        ({"mask": torch.ones(4)}, "expected mask as 4 bools"),
    ],
)
def test_bad_input(
    attack: Callable[..., AttackResult], net: nn.Module, given: Any, message: str
) -> None:
    good: dict[str, Any] = {"inputs": INPUTS, "labels": LABELS, "eps": 0.1, "norm": "linf"}
    with pytest.raises(ValueError, match=message):
        attack(net, **good | given)


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=list(ATTACKS))
@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda logits: logits * torch.nan, "expected finite logits, got NaN or infinity for 4 of 4"),
        (lambda logits: logits / 0, "expected finite logits"),
        (
            lambda logits: logits[:, 0],
            r"expected logits \(4, classes\) from the model, got a tensor \(4,\)",
        ),
        (lambda logits: (logits,), "expected logits .* got tuple"),
        (lambda logits: logits[:2], r"got a tensor \(2, 5\)"),
        (lambda logits: logits[:, :1], "expected logits of two or more classes"),
    ],
)
def test_bad_answers(
    attack: Callable[..., AttackResult],
    net: nn.Module,
    answer: Callable[[Tensor], Any],
    message: str,
) -> None:
    with pytest.raises(ValueError, match=message):
        attack(lambda points: answer(net(points)), INPUTS, LABELS, eps=0.1)


@pytest.mark.parametrize(
    "attack", [one for name, one in ATTACKS.items() if name != "autoattack"], ids=list(ATTACKS)[:-1]
)
def test_probabilities_are_refused(attack: Callable[..., AttackResult], net: nn.Module) -> None:
    with pytest.raises(ValueError, match="expected logits, got probabilities"):
        attack(lambda points: net(points).softmax(1), INPUTS, LABELS, eps=0.1)


@pytest.mark.parametrize("n", [1, 2])
def test_probabilities_of_one_image_are_refused_too(net: nn.Module, n: int) -> None:
    inputs = INPUTS[:1].expand(n, -1, -1, -1)  # two equal rows are no more evidence than one
    with pytest.raises(ValueError, match="expected logits, got probabilities"):
        pgd(lambda points: net(points).softmax(1), inputs, LABELS[:1].expand(n), eps=0.1)


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=list(ATTACKS))
@pytest.mark.parametrize("constant", [False, True])
def test_logits_that_look_like_probabilities_by_chance(
    attack: Callable[..., AttackResult], constant: bool
) -> None:
    """Logits (1, 0, 0) of one image are valid: at other inputs they do not sum to 1."""

    def model(points: Tensor) -> Tensor:
        first = 4 * points[:, 0, 0, :1]
        first = torch.ones_like(first) if constant else first
        return torch.cat([first, torch.zeros(len(points), 2)], 1)

    inputs = torch.full((1, 3, 6, 6), 0.25)
    assert model(inputs).tolist() == [[1, 0, 0]]
    result = attack(model, inputs, torch.tensor([0]), eps=0.01)
    assert result.success.tolist() == [False]
    if isinstance(result, SuiteResult):
        assert "probabilities" not in [finding.name for finding in result.findings]


@pytest.mark.parametrize("attack", [apgd_targeted, fab_targeted])
def test_more_targets_than_classes(attack: Callable[..., AttackResult], net: nn.Module) -> None:
    with pytest.raises(ValueError, match="expected at most 4 targets, one for each other class, got 9"):
        attack(net, INPUTS, LABELS, eps=0.1, targets=9)
    with pytest.raises(ValueError, match="expected targets >= 1, got 0"):
        attack(net, INPUTS, LABELS, eps=0.1, targets=0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"version": "standrad"}, "unknown version 'standrad'; did you mean 'standard'"),
        ({"attacks": ["apgd"]}, "unknown attack 'apgd'"),
        ({"attacks": []}, "expected one attack or more of: apgd-ce"),
        ({"engine": "theirs"}, "unknown engine 'theirs'"),
        ({"joint": True, "batch_size": 2}, "batch_size splits the batch that a joint attack keeps"),
        ({"batch_size": 0}, "expected batch_size >= 1, got 0"),
        ({"steps": -1}, "expected steps >= 0"),
        ({"queries": -1}, "expected queries >= 0"),
        ({"engine": "reference", "mask": LABELS > 0}, "the reference knows no mask"),
    ],
)
def test_bad_settings_of_the_suite(net: nn.Module, settings: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        autoattack(net, INPUTS, LABELS, **{"eps": 0.1} | settings)


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=list(ATTACKS))
def test_an_empty_batch_has_an_empty_result(attack: Callable[..., AttackResult], net: nn.Module) -> None:
    result = attack(net, INPUTS[:0], LABELS[:0], eps=0.1)
    assert result.inputs.shape == (0, 3, 6, 6)
    assert result.success.shape == (0,)


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=list(ATTACKS))
def test_a_model_in_training_mode_is_refused(attack: Callable[..., AttackResult]) -> None:
    net = nn.Sequential(nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(108, 5))
    with pytest.raises(ValueError, match=r"in training mode; call model.eval\(\)"):
        attack(net, INPUTS, LABELS, eps=0.1)
    statistics = net.get_buffer("0.running_mean")
    assert torch.equal(statistics, torch.zeros(3))


def test_dropout_is_refused_in_training_mode_and_taken_on_purpose() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Dropout(), nn.Linear(108, 5))
    with pytest.raises(ValueError, match=r"in training mode; call model.eval\(\)"):
        autoattack(net, INPUTS, LABELS, eps=0.1, version="rand")
    net.eval()
    net[1].train()  # a random defense
    assert len(autoattack(net, INPUTS, LABELS, eps=0.1, version="rand", steps=1).inputs) == len(INPUTS)


def test_an_empty_batch_of_a_random_model(net: nn.Module) -> None:
    assert len(autoattack(net, INPUTS[:0], LABELS[:0], eps=0.1, version="rand").inputs) == 0
