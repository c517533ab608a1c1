"""`independent` is true exactly where a batch gives what its inputs give alone."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from nets import randomized, small
from torch import nn

import dent

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
        assert same == defended.independent, settings
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
