"""Anti-adversary (Alfarra et al., 2022, "Combating adversaries with anti-adversaries")."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from dent.declared import Number
from dent.defense.defended import Method, Network, Variables
from dent.defense.moved_inputs import read_gradient


class AntiAdversary(Method):
    """Move each input toward the class that the model predicts for it, by signs.

    The variables are the offset (N, ...) and the predicted classes (N,), which the first update sets.
    As in the paper, neither the offset nor the moved image is bounded. The sign has no slope: the
    exact gradient of the updates is zero, and the stale gradient is exact.
    """

    name = "anti-adversary"
    independent = True

    steps: int = Field(2, description="Number of updates.", ge=0)
    lr: Number = Field(0.15, description="Size of an update.", gt=0)

    def start(self, network: Network, inputs: Tensor) -> Variables:
        labels = torch.zeros(len(inputs), dtype=torch.long, device=inputs.device)
        return torch.zeros_like(inputs), labels

    def update(
        self, network: Network, observed: Variables, step: int, variables: Variables, keep_graph: bool
    ) -> Variables:
        (inputs,), (offset, labels) = observed, variables
        labels = labels.clone()

        def measure_loss(logits: Tensor) -> Tensor:
            if step == 1:  # the offset is still zero
                labels.copy_(logits.argmax(1))
            return F.cross_entropy(logits, labels, reduction="none")

        gradient = read_gradient(network, measure_loss, inputs + offset)
        return offset - self.lr * gradient.sign(), labels

    def predict(self, network: Network, inputs: Tensor, variables: Variables) -> Tensor:
        return network(inputs + variables[0])
