"""Energy descent (ET3, 2026, "Energy-guided test-time defense")."""

from __future__ import annotations

import math

import torch
from pydantic import Field
from torch import Tensor

from dent.declared import Number
from dent.defense.defended import Method, Network, Variables
from dent.defense.moved_inputs import keep_in_image, read_gradient


class Energy(Method):
    """Move each input down the energy -logsumexp(logits), by normalized gradients, in an L2 ball.

    The variable is the offset (N, ...). The radius follows the size of the image: it is a multiple of
    the L2 length of a perturbation that changes every value by `eps`. The defaults are the authors'
    for ImageNet at 4/255 (radius 5, steps of 2.5), with the eps of CIFAR-10.
    """

    name = "energy"
    independent = True

    steps: int = Field(5, description="Number of updates.", ge=0)
    eps: Number = Field(8 / 255, description="Linf size of the attacks that it answers.", gt=0)
    radius: Number = Field(
        0.82,
        description="L2 radius of the ball, in lengths of such an attack: eps * sqrt(values).",
        gt=0,
    )
    lr: Number = Field(0.5, description="Length of an update, in radii.", gt=0)
    temperature: Number = Field(1.0, description="Temperature of the energy.", gt=0)

    def measure_energy(self, logits: Tensor) -> Tensor:
        """Return the energy of each prediction, (N,)."""
        return -self.temperature * (logits / self.temperature).logsumexp(1)

    def start(self, network: Network, inputs: Tensor) -> Variables:
        return (torch.zeros_like(inputs),)

    def update(
        self, network: Network, observed: Variables, step: int, variables: Variables, keep_graph: bool
    ) -> Variables:
        (inputs,), (offset,) = observed, variables
        radius = self.radius * self.eps * math.sqrt(inputs[0].numel())
        gradient = read_gradient(network, self.measure_energy, inputs + offset, keep_graph=keep_graph)
        offset = offset - self.lr * radius * gradient / (_measure_length(gradient) + 1e-12)
        offset = keep_in_image(inputs, offset)
        # The ball comes last: what lies between an image and its input is an image, too.
        return (offset * (radius / (_measure_length(offset) + 1e-8)).clamp(max=1),)

    def predict(self, network: Network, inputs: Tensor, variables: Variables) -> Tensor:
        return network(inputs + variables[0])


def _measure_length(values: Tensor) -> Tensor:
    """Return the L2 norm of each input's values, (N, 1, ...)."""
    lengths: Tensor = torch.linalg.vector_norm(values.flatten(1), dim=1)
    return lengths.reshape(-1, *(1,) * (values.dim() - 1))
