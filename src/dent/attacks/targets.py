"""Which classes a targeted attack tries: the likeliest, or those with the nearest boundaries."""

from __future__ import annotations

import torch
from torch import Tensor

from dent.attacks.norms import DUALS, lengths
from dent.attacks.search import AttackedModel, compute_gradient
from dent.names import lookup

MOST_TARGETS = 9  # of the targeted attacks, unless told
FEW_TARGETS = 3  # of the attacks made for adaptation, unless told
# How targets are ranked: by their logits, or by the distance to their boundaries.
ORDERS = {"logits": False, "distance": True}


def select_targets(logits: Tensor, labels: Tensor, count: int | None = None) -> list[Tensor]:
    """Return each input's `count` likeliest classes other than its label; at most nine if it is None."""
    others = logits.shape[1] - 1
    if count is not None and count > others:
        raise ValueError(f"expected at most {others} targets, one for each other class, got {count}")
    ranked = logits.scatter(1, labels[:, None], -torch.inf).argsort(1, descending=True)
    return list(ranked[:, : min(MOST_TARGETS, others) if count is None else count].T)


def rank_targets(
    attacked: AttackedModel,
    inputs: Tensor,
    labels: Tensor,
    logits: Tensor,
    *,
    norm: str,
    count: int | None = None,
    order: str = "logits",
) -> list[Tensor]:
    """Return `count` classes for each input, ranked by `order` (a name of `ORDERS`).

    distance: to first order, the boundary with a class lies at the gap between the label's logit and the
    class's, divided by the dual norm of the gap's gradient (MALT; Melamed et al., 2024). Of the nine
    likeliest classes, or of `count` if that is more, the nearest are returned. The gradient is the
    model's own, so for a defense that adapts it is that of the adapted model.

    logits: the model's answer to the inputs.
    """
    likeliest = select_targets(logits, labels, count)
    if not lookup("order of targets", order, ORDERS) or not len(inputs):
        return likeliest
    candidates = likeliest if len(likeliest) > MOST_TARGETS else select_targets(logits, labels)
    points = inputs.detach().requires_grad_()
    distances = []
    with torch.enable_grad():
        answer = attacked.check(attacked.model(points), points)
        for classes in candidates:
            pair = torch.stack([labels, classes], 1)
            gap = -answer.gather(1, pair).diff(dim=1).squeeze(1)
            slope = lengths(compute_gradient(gap.sum(), points, keep_graph=True), DUALS[norm])
            distances.append(gap.detach() / slope.flatten().clamp(min=1e-12))
            attacked.gradients += len(points)
    nearest = torch.stack(distances).argsort(stable=True, dim=0)[: count or len(candidates)]
    return list(torch.stack(candidates).gather(0, nearest))
