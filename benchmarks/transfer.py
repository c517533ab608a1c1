"""An attack for `dent evaluate`: submit what breaks the static model, as AutoAttack leaves it.

    cd benchmarks && dent evaluate --model resnet20-at --defense static --defense hedge
        --attack transfer:stop_at_success --n 256

Each image stays at the first point that breaks the static model, as the reference leaves it. Papers have
claimed robustness by such images. `denying updates` of dent submits points of highest loss instead.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dent.attacks import autoattack
from dent.defense import Defended, Dent


def stop_at_success(
    model: torch.nn.Module, inputs: Tensor, labels: Tensor, *, eps: float, norm: str, seed: int
) -> Tensor:
    """Return the points that break the static model of a defense, and natural inputs elsewhere."""
    static = model.model if isinstance(model, Dent | Defended) else model
    result = autoattack(
        static, inputs, labels, eps=eps, norm=norm, attacks=["apgd-ce", "apgd-t"], steps=50, seed=seed
    )
    broken = result.broken.view(-1, *[1] * (inputs.dim() - 1))
    return torch.where(broken, result.inputs, inputs)
