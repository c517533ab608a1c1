"""MedBN (Park et al., 2024, "Robust test-time adaptation against malicious test samples")."""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from dent.declared import Number
from dent.defense.defended import Method


class MedBn(Method):
    """Normalize with the median of each channel over the batch, and the mean square distance from it.

    A minority of inputs cannot move a median far. There is nothing to adapt: no variable, and no
    update. A gradient goes through the statistics.
    """

    name = "medbn"
    independent = False
    per_input = False
    needs = "batch-norm"

    share: Number = Field(1.0, description="Weight of the batch beside training.", ge=0, le=1)

    def estimate(self, features: Tensor, mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor]:
        values = features.transpose(0, 1).flatten(1)
        median = values.median(1).values
        spread = (values - median[:, None]).square().mean(1)
        return torch.lerp(mean, median, self.share), torch.lerp(var, spread, self.share)
