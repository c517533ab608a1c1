"""An exponential moving average of the weights."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn


class Average:
    """A copy of the model whose weights and buffers follow the model's with a fixed decay.

    The first updates use a smaller decay, (1 + t) / (10 + t), so that random weights are soon forgotten.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.followed, self.decay = model, decay
        self.model = copy.deepcopy(model).eval().requires_grad_(False)

    @torch.no_grad()
    def update(self, done: int) -> None:
        """Move the average toward the model; `done` updates of the model came before this one."""
        decay = min(self.decay, (1 + done) / (10 + done))
        values = self.followed.state_dict()
        for name, average in self.model.state_dict().items():
            if average.is_floating_point():
                average.lerp_(values[name], 1 - decay)
            else:
                average.copy_(values[name])

    def state_dict(self) -> dict[str, Any]:
        """Return the averaged weights, as a state dict of the model."""
        return self.model.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from averaged weights."""
        self.model.load_state_dict(state)
