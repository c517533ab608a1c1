"""Evaluate a defense under an attack of your own. This one takes random steps and keeps what helps.

python examples/own_attack.py
cd examples && dent evaluate --model resnet20-at --attack quick --attack own_attack:walk:steps=20
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

import dent
from dent.report.terminal import show_results


def walk(
    model: Callable[[Tensor], Tensor], inputs: Tensor, labels: Tensor, *,
    eps: float, norm: str, steps: int = 10, seed: int = 0,
) -> Tensor:  # fmt: skip
    random, best = torch.Generator().manual_seed(seed), inputs
    highest = torch.full(labels.shape, -torch.inf)
    for _ in range(steps):
        signs = torch.randint(-1, 2, inputs.shape, generator=random)
        points = (inputs + (best - inputs + eps * signs).clamp(-eps, eps)).clamp(0, 1)  # for linf
        with torch.no_grad():
            losses = F.cross_entropy(model(points), labels, reduction="none")
        best = torch.where((losses > highest)[:, None, None, None], points, best)
        highest = torch.maximum(highest, losses)
    return best  # in the ball and in [0, 1], or the run stops


if __name__ == "__main__":
    model = dent.load_model("resnet20-at")
    attacks = [walk, "apgd-ce", "denying updates:attacks=(apgd-ce)"]
    show_results(dent.evaluate(model, ["static", "dent+"], attacks=attacks, n=16, steps=5))
