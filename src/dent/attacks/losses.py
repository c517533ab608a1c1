"""What attacks increase: one value per input."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

Loss = Callable[[Tensor, Tensor], Tensor]


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """-log p(label), (N,)."""
    return F.cross_entropy(logits, labels, reduction="none")


def margin(logits: Tensor, labels: Tensor) -> Tensor:
    """The best other logit less the label's, (N,): positive where the input is misclassified.

    >>> margin(torch.tensor([[3.0, 1.0, 2.0]]), torch.tensor([0])).item()
    -1.0
    """
    own = F.one_hot(labels, logits.shape[1]).bool()
    others = logits.masked_fill(own, -torch.inf).amax(1)
    return others - logits.gather(1, labels[:, None]).squeeze(1)


LOSSES: dict[str, Loss] = {"ce": cross_entropy, "margin": margin}
