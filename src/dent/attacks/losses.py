"""What attacks increase: one value per input."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from dent.names import lookup

Loss = Callable[[Tensor, Tensor], Tensor]
# Of the indices of inputs in their batch, and their logits.
LossAt = Callable[[Tensor, Tensor], Tensor]


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """-log p(label), (N,)."""
    return F.cross_entropy(logits, labels, reduction="none")


def margin(logits: Tensor, labels: Tensor) -> Tensor:
    """The best other logit less the label's, (N,): positive where the input is misclassified.

    >>> margin(torch.tensor([[3.0, 1.0, 2.0]]), torch.tensor([0])).item()
    -1.0
    """
    others = logits.scatter(1, labels[:, None], -torch.inf).amax(1)
    return others - _of(logits, labels)


def dlr(logits: Tensor, labels: Tensor) -> Tensor:
    """The margin over the distance between the first and the third logit (Croce and Hein, 2020).

    It does not change with the scale of the logits. With two classes nothing but the margin itself is
    left to divide by, and the quotient would be constant: there it is the margin.

    >>> dlr(torch.tensor([[3.0, 1.0, 2.0], [30.0, 10.0, 20.0]]), torch.tensor([0, 0]))
    tensor([-0.5000, -0.5000])
    """
    if logits.shape[1] < 3:
        return margin(logits, labels)
    ranked = logits.sort(1, descending=True).values
    return margin(logits, labels) / (ranked[:, 0] - ranked[:, 2] + 1e-12)


def targeted_dlr(logits: Tensor, labels: Tensor, targets: Tensor) -> Tensor:
    """The target's logit less the label's, over the distance of the first from the third and fourth.

    With three classes there is no fourth, and the third stands for both; with two, nothing is divided.
    """
    difference = _of(logits, targets) - _of(logits, labels)
    if logits.shape[1] < 3:
        return difference
    ranked = logits.sort(1, descending=True).values
    low = (ranked[:, 2] + ranked[:, min(3, logits.shape[1] - 1)]) / 2
    return difference / (ranked[:, 0] - low + 1e-12)


def _of(logits: Tensor, classes: Tensor) -> Tensor:
    return logits.gather(1, classes[:, None]).squeeze(1)


LOSSES: dict[str, Loss] = {"ce": cross_entropy, "margin": margin, "dlr": dlr}


def loss_of(name: str, labels: Tensor, towards: Tensor | None = None) -> LossAt:
    """The loss by its name: away from the labels, or towards other classes.

    Towards a class, `dlr` is the targeted one, and the others are those of the class, negative.
    """
    loss, labels = lookup("loss", name, LOSSES), labels.long()
    if towards is None:
        return lambda at, logits: loss(logits, labels[at])
    if loss is dlr:
        return lambda at, logits: targeted_dlr(logits, labels[at], towards[at])
    return lambda at, logits: -loss(logits, towards[at])
