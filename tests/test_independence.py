"""`independent` is True only where a batch gives what its inputs give alone, and None where unknown."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from nets import randomized, small
from torch import Tensor, nn

import dent
from dent.defense import Defense, is_independent
from dent.models import CifarResNet, Normalized, PerImageNormalized, PreActResNet18, ResNet50, WideResNet

CHOICES: dict[str, tuple[Any, ...]] = {
    "affine": ("off", "batch", "sample"),
    "statistics": ("train", "test", 0.5),
    "blur": ("off", "static", "dynamic"),
    "blur_per": ("batch", "sample"),
    "objective": ("entropy", "information-maximization"),
    "reduction": ("mean", "sum"),
    "steps": (0, 2),
}


@pytest.mark.parametrize("optimizer", ["adam", "adamod", "sgd"])
def test_over_all_combinations(optimizer: str) -> None:
    net = randomized(small(nn.BatchNorm2d(8)))
    net.independent = True  # type: ignore[assignment]
    images = torch.rand(3, 3, 6, 6, dtype=torch.double)
    seen = {True: 0, False: 0}
    for values in product(*CHOICES.values()):
        settings = dict(zip(CHOICES, values, strict=True))
        try:
            defended = dent.defend(net, "static", optimizer=optimizer, lr=0.05, **settings)
        except ValueError as error:
            assert "updates of nothing" in str(error)
            continue
        alone = torch.cat([defended(image[None]) for image in images])
        same = torch.allclose(defended(images), alone, rtol=0, atol=1e-10)
        assert same is defended.independent, settings
        seen[same] += 1
    assert seen[True] > 10
    assert seen[False] > 50


def test_batch_norm_without_statistics_of_training_is_never_independent() -> None:
    net = randomized(small(nn.BatchNorm2d(8, track_running_stats=False)))
    images = torch.rand(3, 3, 6, 6, dtype=torch.double)
    defended = dent.defend(net, "static")
    alone = torch.cat([defended(image[None]) for image in images])
    assert not torch.allclose(defended(images), alone)
    assert not defended.independent


def test_continual_adaptation_is_never_independent() -> None:
    net = small(nn.GroupNorm(2, 8))
    assert not dent.defend(net, "dent", continual=True).independent


class Centered(nn.Module):
    """Depends on its batch, and no layer shows it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = small(nn.BatchNorm2d(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x - x.mean(0))  # type: ignore[no-any-return]


@pytest.mark.parametrize("preset", ["static", "blur", "dent+solo"])
def test_what_a_model_does_not_say_is_unknown(preset: str) -> None:
    images = torch.rand(3, 3, 6, 6, dtype=torch.double)
    for net, expected in ((Centered(), False), (small(nn.BatchNorm2d(8)), True)):
        defended: Defense[dent.State] = dent.defend(randomized(net), preset)
        assert defended.independent is None
        assert is_independent(defended, images) is expected
        for declared in (True, False):
            net.independent = declared  # type: ignore[assignment]
            assert defended.independent is declared


def test_dent_plus_solo_is_dent_plus_on_each_input_alone() -> None:
    solo = dent.PRESETS["dent+solo"]
    assert solo.independent
    net = small(nn.BatchNorm2d(8))
    assert dent.defend(net, "dent+:objective=entropy,reduction=sum").settings == solo
    assert not dent.PRESETS["dent+"].independent


@pytest.mark.parametrize(
    "net",
    [
        Normalized(CifarResNet(1), 0.5, 0.25),
        PerImageNormalized(WideResNet(10, 1)),
        PreActResNet18(),
        ResNet50(classes=10),
    ],
    ids=lambda net: type(net).__name__,
)
def test_our_models_say_that_they_are_independent_and_are(net: nn.Module) -> None:
    assert dent.defend(net, "static").independent is True
    assert is_independent(net.eval(), torch.rand(3, 3, 32, 32))
    assert dent.defend(Normalized(Centered(), 0.5, 0.25), "static").independent is None


def test_nothing_is_claimed_that_cannot_be_compared() -> None:
    assert not is_independent(torch.rand_like, torch.rand(3, 4))
    assert not is_independent(lambda x: (x, x), torch.rand(3, 4))  # type: ignore[arg-type, return-value]
    assert not is_independent(lambda x: x * torch.nan, torch.rand(3, 4))
