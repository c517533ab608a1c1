"""EATA (Niu et al., 2022, "Efficient test-time model adaptation without forgetting")."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from dent.declared import Number
from dent.defense.defended import Method, Network, Variables, measure_batch
from dent.defense.dent.descent import entropy, sgd


class Eata(Method):
    """Lower the entropy of the sure and diverse predictions of a batch, the surest first.

    The variables are Delta (1, parameters), added to the scales and shifts, its velocity, and the
    moving average of the predictions that counted. An input counts if its entropy is below the margin
    and its prediction differs from that average; it weighs exp(margin - entropy). BatchNorm layers use
    the statistics of the batch. Every batch starts clean: the average acts from the second update on,
    and the paper's penalty on forgetting, which needs training images, is left out.
    """

    name = "eata"
    independent = False
    per_input = False
    needs = "normalization"

    steps: int = Field(1, description="Number of updates.", ge=0)
    lr: Number = Field(0.00025, description="Learning rate.", gt=0)
    momentum: Number = Field(0.9, description="Momentum.", ge=0, lt=1)
    margin: Number = Field(0.4, description="Largest entropy that counts, in log(classes).", gt=0)
    similarity: Number = Field(
        0.05, description="Largest cosine to the average prediction that counts.", gt=0
    )

    def estimate(self, features: Tensor, mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor]:
        return measure_batch(features)

    def start(self, network: Network, inputs: Tensor) -> Variables:
        delta = network.make_delta(1)
        return delta, torch.zeros_like(delta), delta.new_zeros(1, 1)

    def update(
        self, network: Network, observed: Variables, step: int, variables: Variables, keep_graph: bool
    ) -> Variables:
        (inputs,), (delta, velocity, average) = observed, variables
        logits = network(inputs, delta)
        margin, entropies = self.margin * math.log(logits.shape[1]), entropy(logits)
        predictions = logits.detach().softmax(1).to(average.dtype)
        counts = entropies < margin
        has_average = average.shape[1] > 1
        if has_average:
            cosines = F.cosine_similarity(average.detach(), predictions)
            counts = counts & (cosines.abs() < self.similarity)
        weights = (margin - entropies).exp() * counts / counts.sum().clamp(min=1)
        # The weights are constants of the update, but the exact gradient goes through them: they are
        # what the entropies' gradients are multiplied with.
        (gradient,) = torch.autograd.grad(
            entropies, delta, weights, create_graph=keep_graph, materialize_grads=True
        )
        if not counts.any():  # no input counts: nothing to learn
            return delta.clone(), velocity.clone(), average.clone()
        delta, (velocity,) = sgd(delta, gradient, (velocity,), step, lr=self.lr, momentum=self.momentum)
        new = predictions[counts].mean(0, keepdim=True)
        # The average only decides what counts: it has no gradient.
        return delta, velocity, 0.9 * average.detach() + 0.1 * new if has_average else new
