"""MEMO (Zhang et al., 2022, "MEMO: test time robustness via adaptation and augmentation")."""

from __future__ import annotations

import math

import torch
from pydantic import Field
from torch import Tensor

from dent.declared import Number
from dent.defense.defended import Method, Network, Variables
from dent.defense.views import Directions, Padding, make_views


class Memo(Method):
    """Lower, for each input alone, the entropy of its mean prediction over views, by gradient descent.

    The variable is Delta (N, parameters), which is added to the scales and shifts of the normalization
    layers. The paper adapts all weights to random AugMix views; here each input of a batch has a Delta
    of its own, and the views are fixed, so that the answer is the same in every batch and call. An
    update keeps the activations of all views: memory grows with their number.
    """

    name = "memo"
    independent = True
    needs = "normalization"

    steps: int = Field(1, description="Number of updates.", ge=0)
    lr: Number = Field(0.005, description="Learning rate.", gt=0)
    mirror: bool = Field(True, description="Add the mirror image of every view.")
    shifts: int = Field(0, description="Add views shifted by so many pixels; 0 adds none.", ge=0)
    directions: Directions = Field("straight", description="Directions of the four shifts.")
    padding: Padding = Field("zero", description="What a shift moves in: zeros, or the edge repeated.")

    @property
    def forwards(self) -> int:
        views = (5 if self.shifts else 1) * (2 if self.mirror else 1)
        return 2 * self.steps * views + 1

    def start(self, network: Network, inputs: Tensor) -> Variables:
        return (network.make_delta(len(inputs)),)

    def update(
        self, network: Network, observed: Variables, step: int, variables: Variables, keep_graph: bool
    ) -> Variables:
        (inputs,), (delta,) = observed, variables
        views = make_views(
            inputs,
            mirror=self.mirror,
            shifts=self.shifts,
            directions=self.directions,
            padding=self.padding,
        )
        entropies = measure_mean_entropy(torch.stack([network(view, delta) for view in views]))
        (gradient,) = torch.autograd.grad(entropies.sum(), delta, create_graph=keep_graph)
        return (delta - self.lr * gradient,)


def measure_mean_entropy(logits: Tensor) -> Tensor:
    """Return the entropy of the mean prediction over views, from logits (V, N, C) to (N,), in nats.

    >>> round(measure_mean_entropy(torch.tensor([[[9e9, 0.0]], [[0.0, 9e9]]])).exp().item(), 6)
    2.0
    """
    exact = torch.promote_types(logits.dtype, torch.float32)
    log_mean = logits.to(exact).log_softmax(2).logsumexp(0) - math.log(len(logits))
    return -(log_mean.exp() * log_mean).sum(1)
