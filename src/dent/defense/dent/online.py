"""Continual adaptation: each batch starts from the state of the last one (tent, Wang et al., 2021)."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor, nn

from dent.defense.dent.method import Dent
from dent.defense.dent.settings import Settings
from dent.defense.dent.state import State


class Online(nn.Module):
    """A defense that carries its adaptation from call to call, until `reset()`.

    Calls from several threads wait for one another, because the order of the batches matters.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    >>> online = Online(Dent(model, Settings(steps=1, continual=True)))
    >>> _ = online(torch.rand(16, 4)), online(torch.rand(16, 4))
    >>> online.state.steps
    2
    >>> online.reset()
    >>> online.state is None
    True
    """

    independent = False  # an answer depends on the batches before it

    def __init__(self, dent: Dent) -> None:
        super().__init__()
        self.dent = dent
        self.settings: Settings = dent.settings
        self.state: State | None = None
        self.training = False
        self._lock = threading.Lock()

    def forward(self, inputs: Tensor) -> Tensor:
        """Adapt from where the last batch ended. Predict before or after, as the settings say."""
        with self._lock:
            before, after = self.state, self.adapt(inputs)
            self.state = after
        if self.settings.predict == "after":
            return self.predict(inputs, after)
        if len(after.trace.logits) and not (inputs.requires_grad and torch.is_grad_enabled()):
            return after.trace.logits[0]  # what the first update saw
        return self.predict(inputs, before or self.dent.adapt(inputs, steps=0))

    def adapt(self, inputs: Tensor) -> State:
        """Return the state that the next call would reach, without keeping it."""
        return self.dent.adapt(inputs, start=self.state, gradient="stale")

    def predict(self, inputs: Tensor, state: State) -> Tensor:
        """Return logits, as `Dent.predict` does."""
        return self.dent.predict(inputs, state)

    def reset(self) -> None:
        """Forget: the next call starts from the model's own parameters."""
        with self._lock:
            self.state = None

    def train(self, mode: bool = True) -> Online:
        """Set the flag that attack libraries look at, as `Dent.train` does."""
        self.training = mode
        return self

    def __repr__(self) -> str:
        carried = self.state.steps if self.state else 0
        return f"Online({carried} updates carried by {self.dent!r})"

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state | {"_lock": threading.Lock()})  # type: ignore[no-untyped-call]
