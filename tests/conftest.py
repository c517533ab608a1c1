from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch is loaded

import pytest
import torch
from hypothesis import settings
from nets import randomized
from torch import Tensor, nn

from dent.models import CifarResNet

# The same examples every time, and no judgment on a slow machine.
settings.register_profile("dent", derandomize=True, deadline=None)
settings.load_profile("dent")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def net() -> nn.Module:
    """A residual net in double precision whose predictions are neither sure nor uniform."""
    return randomized(CifarResNet(1))


@pytest.fixture
def images() -> Tensor:
    return torch.rand(5, 3, 12, 12, dtype=torch.double)
