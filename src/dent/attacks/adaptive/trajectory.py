"""Trajectory minimum: break an input in every state of the adaptation, not only in the last."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, Generic

import torch
from torch import Tensor

from dent.attacks.adaptive.gmsa import Minimum
from dent.attacks.adaptive.views import (
    DynamicDefense,
    GradientAttack,
    State,
    attack_through_view,
    follow_states,
    is_own_answer,
)
from dent.attacks.apgd import apgd
from dent.attacks.checks import Eps, Labels, check_numbers, read_arguments
from dent.attacks.losses import make_loss
from dent.attacks.search import AttackResult, Loss


def trajectory(
    defense: DynamicDefense[State],
    inputs: Tensor,
    labels: Labels,
    *,
    updates: int,
    every: int = 5,
    eps: Eps,
    norm: str = "linf",
    loss: str = "margin",
    attack: GradientAttack = apgd,
    **settings: Any,
) -> AttackResult:
    """Increase each input's lowest loss over the states after 0, 1, ... and `updates` updates.

    A point that only the last state gets wrong is fragile: when the batch moves on, so does that state.
    A point that every state gets wrong stays wrong.

    updates: the number of updates that the defense makes (for dent, `defended.settings.steps`).
    every: the states follow the points only at every so many steps of the attack.
    attack: the gradient attack, which takes a `loss`. settings: its other settings.
    """
    labels, eps = read_arguments(inputs, labels, eps)
    everyone = torch.arange(len(labels), device=labels.device)
    view = Trajectory(defense, updates, every, partial(make_loss(loss, labels), everyone))
    return attack_through_view(
        attack, defense, view, inputs, labels, eps=eps, norm=norm, loss=loss, **settings
    )


class Trajectory(Generic[State]):
    """For each input, the state of the adaptation in which its loss is lowest.

    The states are those after 0, 1, ... and `updates` updates, at the points of every `every`-th call.
    Such a call is exact if the defense makes no more updates: `own` is the answer of the last state.

    loss: from logits to the loss of every input of the batch, which must stay together.
    """

    def __init__(self, defense: DynamicDefense[State], updates: int, every: int, loss: Loss) -> None:
        check_numbers(updates=updates, every=every)
        self.defense = defense
        self.updates = updates
        self.every = every
        self.loss = loss
        self.exact = False
        self.own: Tensor | None = None
        self.extra_queries = 0  # inputs asked without a gradient
        self._lowest: Minimum[State]
        self._has_all_updates: bool | None = None
        self._age = 0

    def __call__(self, points: Tensor) -> Iterator[Tensor]:
        self.exact = False
        if self._age == 0:
            states = list(follow_states(self.defense, points, self.updates))
            self._lowest = Minimum(self.defense, states, self.loss)
            with torch.no_grad():
                self.own = self.defense.predict(points, states[-1])
            if self._has_all_updates is None:
                self._has_all_updates = is_own_answer(self.defense, points, self.own)
            self.exact = self._has_all_updates
        self._age = (self._age + 1) % self.every
        asked = self._lowest.extra_queries
        yield from self._lowest(points)
        self.extra_queries += self._lowest.extra_queries - asked
