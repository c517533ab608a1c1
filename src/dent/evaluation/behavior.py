"""What a model does when it is asked: whether it adapts, changes itself, or mixes its inputs."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from dent.attacks.findings import count_backward_passes
from dent.evaluation.digests import digest_model
from dent.seeds import use_seed
from dent.testing import differ


def ask(model: Callable[[Tensor], Any], inputs: Tensor, seed: int = 0) -> Any:
    """Return the model's answer with torch's random numbers from this seed, without a gradient."""
    with use_seed(seed, str(inputs.device)), torch.no_grad():
        return model(inputs)


def is_independent_at_random(model: Callable[[Tensor], Any], inputs: Tensor) -> bool:
    """Return True if no answer of a random model changes when the other inputs do, at the same seed.

    A model that draws more numbers for some inputs than for others is not shown to be independent.
    """
    first = ask(model, inputs)
    for row in range(len(inputs)):
        others = inputs.flip(0) / 2
        others[row] = inputs[row]
        if differ(first[row : row + 1], ask(model, others)[row : row + 1]):
            return False
    return True


def is_dynamic(module: nn.Module, inputs: Tensor) -> bool:
    """Return True if a module computes gradients in a call, or answers otherwise when asked again.

    A copy is asked, so that the module stays as it is.
    """
    copied = _copy(module)
    first = ask(copied, inputs)
    return differ(first, ask(copied, inputs)) or count_backward_passes(copied, inputs) > 0


def start_clean(module: nn.Module, inputs: Tensor) -> nn.Module:
    """Return the module, or `FreshCopies` of it if a call changes the module or its next answer."""
    copied = _copy(module)
    before = digest_model(copied)
    first, again = (ask(copied, inputs) for _ in range(2))
    changes = differ(first, again) or digest_model(copied) != before
    return FreshCopies(module) if changes else module


class FreshCopies(nn.Module):
    """Answer every call by a fresh copy of a module, so that each batch starts from a clean state.

    >>> counter = nn.BatchNorm1d(3)  # in training mode, each call changes it
    >>> logits = FreshCopies(counter)(torch.rand(4, 3))
    >>> int(counter.num_batches_tracked)
    0
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.training = False
        self.independent = getattr(module, "independent", None)

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = deepcopy(self.module)(inputs)
        return logits


def _copy(module: nn.Module) -> nn.Module:
    """Return a copy, or the module itself if it cannot be copied: then a call must not change it."""
    try:
        return deepcopy(module)
    except Exception:
        return module
