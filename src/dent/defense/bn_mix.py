"""Statistics mixed by sample size (Schneider et al., 2020, "Improving robustness ... by covariate
shift adaptation").
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from dent.declared import Number
from dent.defense.defended import Method, measure_batch


class BnMix(Method):
    """Mix the BatchNorm statistics of training with those of the batch, by sample size.

    A batch of n inputs counts n / (n + prior). There is nothing to adapt: no variable, and no update.
    A gradient goes through the statistics.
    """

    name = "bn-mix"
    independent = False
    per_input = False
    needs = "batch-norm"

    prior: Number = Field(16.0, description="Number of inputs that training counts for.", ge=0)

    def estimate(self, features: Tensor, mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor]:
        share = len(features) / (len(features) + self.prior)
        test_mean, test_var = measure_batch(features)
        return torch.lerp(mean, test_mean, share), torch.lerp(var, test_var, share)
