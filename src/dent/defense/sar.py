"""SAR (Niu et al., 2023, "Towards stable test-time adaptation in dynamic wild world")."""

from __future__ import annotations

import math

import torch
from pydantic import Field
from torch import Tensor

from dent.declared import Number
from dent.defense.defended import Method, Network, Variables, measure_batch
from dent.defense.dent.descent import entropy, sgd


class Sar(Method):
    """Lower the entropy of the sure predictions of a batch, in a flat region (sharpness-aware).

    The variables are Delta (1, parameters), added to the scales and shifts, and its velocity. An update
    takes two gradients: the first leads to the worst point of a ball around Delta, the second, taken
    there, moves Delta. Inputs whose entropy exceeds the margin count in neither. BatchNorm layers use
    the statistics of the batch. Every batch starts clean, so the paper's recovery is never needed; all
    normalization layers adapt, while the paper leaves out those of the last stage.
    """

    name = "sar"
    independent = False
    per_input = False
    needs = "normalization"

    steps: int = Field(1, description="Number of updates.", ge=0)
    lr: Number = Field(0.00025, description="Learning rate.", gt=0)
    momentum: Number = Field(0.9, description="Momentum.", ge=0, lt=1)
    margin: Number = Field(0.4, description="Largest entropy that counts, in log(classes).", gt=0)
    rho: Number = Field(0.05, description="Radius of the ball around Delta.", ge=0)

    @property
    def forwards(self) -> int:
        return 4 * self.steps + 1

    def estimate(self, features: Tensor, mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor]:
        return measure_batch(features)

    def start(self, network: Network, inputs: Tensor) -> Variables:
        delta = network.make_delta(1)
        return delta, torch.zeros_like(delta)

    def update(
        self, network: Network, observed: Variables, step: int, variables: Variables, keep_graph: bool
    ) -> Variables:
        (inputs,), (delta, velocity) = observed, variables
        logits = network(inputs, delta)
        margin, entropies = self.margin * math.log(logits.shape[1]), entropy(logits)
        counts = entropies < margin
        (gradient,) = torch.autograd.grad(
            mean_where(entropies, counts), delta, create_graph=keep_graph, materialize_grads=True
        )
        worst = delta + self.rho * gradient / (torch.linalg.vector_norm(gradient) + 1e-12)
        worst = worst if keep_graph else worst.detach().requires_grad_()
        entropies = entropy(network(inputs, worst))
        counts = counts & (entropies < margin)
        (gradient,) = torch.autograd.grad(
            mean_where(entropies, counts), worst, create_graph=keep_graph, materialize_grads=True
        )
        if not counts.any():  # no input is sure: nothing to learn
            return delta.clone(), velocity.clone()
        delta, (velocity,) = sgd(delta, gradient, (velocity,), step, lr=self.lr, momentum=self.momentum)
        return delta, velocity


def mean_where(values: Tensor, counts: Tensor) -> Tensor:
    """Return the mean of the values that count, or 0 if none does.

    >>> mean_where(torch.tensor([1.0, 2.0, 9.0]), torch.tensor([True, True, False]))
    tensor(1.5000)
    """
    return (values * counts).sum() / counts.sum().clamp(min=1)
