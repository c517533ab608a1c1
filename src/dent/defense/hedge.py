"""Hedge defense (Wu et al., 2021, "Attacking adversarial attacks as a defense")."""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from dent.declared import Number
from dent.defense.defended import Method, Network, Variables
from dent.defense.moved_inputs import keep_in_image, read_gradient


def sum_cross_entropies(logits: Tensor) -> Tensor:
    """Return the sum over all classes of the cross-entropy, (N,).

    >>> sum_cross_entropies(torch.zeros(1, 2)).exp()
    tensor([4.])
    """
    return -logits.log_softmax(1).sum(1)


class Hedge(Method):
    """Move each input up the sum of the cross-entropies to all classes, by signs, in an Linf ball.

    The idea is that the wrong class, which an attack has just reached, loses more than the right one.
    The variable is the offset (N, ...). The first update begins at a random point of the ball. The
    noise is one image, drawn from the seed and added to every input, so an input gets the same start
    alone and in any batch. The sign has no slope: the exact gradient of the updates is that of the
    bounds alone.
    """

    name = "hedge"
    independent = True

    steps: int = Field(20, description="Number of updates.", ge=0)
    eps: Number = Field(8 / 255, description="Linf radius of the ball.", gt=0)
    lr: Number = Field(4 / 255, description="Size of an update.", gt=0)
    seed: int = Field(0, description="Seed of the start.", ge=0)
    random_start: bool = Field(True, description="Start at a random point of the ball.")

    def start(self, network: Network, inputs: Tensor) -> Variables:
        return (torch.zeros_like(inputs),)

    def update(
        self, network: Network, observed: Variables, step: int, variables: Variables, keep_graph: bool
    ) -> Variables:
        (inputs,), (offset,) = observed, variables
        if step == 1 and self.random_start:
            offset = offset + self.eps * self._draw_noise(inputs)
        gradient = read_gradient(network, sum_cross_entropies, inputs + offset)
        offset = (offset + self.lr * gradient.sign()).clamp(-self.eps, self.eps)
        return (keep_in_image(inputs, offset),)

    def predict(self, network: Network, inputs: Tensor, variables: Variables) -> Tensor:
        return network(inputs + variables[0])

    def _draw_noise(self, inputs: Tensor) -> Tensor:
        """Return uniform noise in [-1, 1], one for all inputs, the same on every device."""
        generator = torch.Generator().manual_seed(self.seed)
        noise = 2 * torch.rand(inputs.shape[1:], generator=generator, dtype=torch.float64) - 1
        return noise.to(inputs)
