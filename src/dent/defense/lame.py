"""LAME (Boudiaf et al., 2022, "Parameter-free online test-time adaptation")."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from dent.declared import Number
from dent.defense.defended import Method, Network, Variables

Affinity = Literal["rbf", "knn", "linear"]


class Lame(Method):
    """Change the predictions of a batch so that inputs with similar features get similar ones.

    The assignments z minimize the sum over inputs of KL(z_i || p_i), less strength / 2 times the sum
    over pairs of w_ij z_i z_j, by the fixed point z = softmax(log p + strength W z). No parameter
    changes, and no gradient is used. The variable is what the neighbors add to the logits,
    strength W z, (N, classes or 1); softmax(logits + variable) is the next z.
    """

    name = "lame"
    independent = False

    steps: int = Field(100, description="Number of fixed-point iterations.", ge=0)
    strength: Number = Field(1.0, description="Weight of the affinities; 0 leaves the model.", ge=0)
    affinity: Affinity = Field("rbf", description="Affinity of two inputs, from their features.")
    neighbors: int = Field(5, description="Neighbors of an input, or the one that sets the width.", ge=1)

    @property
    def forwards(self) -> int:
        return 2 if self.steps else 1  # one to adapt, one to predict

    def observe(self, network: Network, inputs: Tensor) -> Variables:
        features, logits = network.read_features(inputs)
        return logits, measure_affinity(features, self.affinity, self.neighbors)

    def start(self, network: Network, inputs: Tensor) -> Variables:
        return (inputs.new_zeros(len(inputs), 1),)

    def update(
        self, network: Network, observed: Variables, step: int, variables: Variables, keep_graph: bool
    ) -> Variables:
        (logits, affinities), (added,) = observed, variables
        assignments = (logits + added).softmax(1)
        return (self.strength * affinities @ assignments,)

    def predict(self, network: Network, inputs: Tensor, variables: Variables) -> Tensor:
        return network(inputs) + variables[0]


def measure_affinity(features: Tensor, kind: Affinity, neighbors: int) -> Tensor:
    """Return the affinities w_ij (N, N) of features (N, d), which are scaled to length 1 first.

    rbf: exp(-d^2 / 2 s^2), where s is the mean distance to the nearest inputs' `neighbors`-th,
    counting the input itself. knn: 1 for the nearest `neighbors`, else 0. linear: the cosine.

    >>> measure_affinity(torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.0, 3.0]]), "knn", 1).argmax(1)
    tensor([1, 0, 0])
    """
    features = F.normalize(features, dim=1)
    cosines = features @ features.T
    if kind == "linear":
        return cosines
    squares = (2 - 2 * cosines).clamp(min=0)
    squares = squares * (1 - torch.eye(len(squares), dtype=squares.dtype, device=squares.device))
    if kind == "knn":
        nearest = (
            squares.detach()
            .fill_diagonal_(torch.inf)
            .topk(min(neighbors, len(squares) - 1), largest=False)
        )
        return torch.zeros_like(squares).scatter(1, nearest.indices, 1.0)
    kth = squares.kthvalue(min(neighbors, len(squares)), dim=1).values
    # The root has no slope at zero, where inputs have equal features.
    distances = torch.where(kth > 0, torch.where(kth > 0, kth, 1.0).sqrt(), 0.0)
    width = distances.mean().clamp(min=torch.finfo(squares.dtype).tiny ** 0.25)
    return torch.exp(-squares / (2 * width**2))
