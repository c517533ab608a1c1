"""The losses that attacks increase: one value per input."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from dent.names import lookup

# (at, logits) -> (n,): `at` are the indices in the batch of the inputs that the logits belong to.
IndexedLoss = Callable[[Tensor, Tensor], Tensor]


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return -log p(label), (N,)."""
    return F.cross_entropy(logits, labels, reduction="none")


def margin(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the best other logit minus the label's, (N,). It is positive for misclassified inputs.

    >>> margin(torch.tensor([[3.0, 1.0, 2.0]]), torch.tensor([0])).item()
    -1.0
    """
    others = logits.scatter(1, labels[:, None], -torch.inf).amax(1)
    return others - _gather(logits, labels)


def dlr(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the margin divided by the gap between the first and third logit (Croce and Hein, 2020).

    It does not depend on the scale of the logits. With two classes there is no third logit, and dividing
    by the margin itself would give a constant: there it is the margin.

    >>> dlr(torch.tensor([[3.0, 1.0, 2.0], [30.0, 10.0, 20.0]]), torch.tensor([0, 0]))
    tensor([-0.5000, -0.5000])
    """
    if logits.shape[1] < 3:
        return margin(logits, labels)
    ranked = logits.sort(1, descending=True).values
    return margin(logits, labels) / (ranked[:, 0] - ranked[:, 2] + 1e-12)


def targeted_dlr(logits: Tensor, labels: Tensor, targets: Tensor) -> Tensor:
    """Return the target's logit minus the label's, divided by the gap from the first logit to the mean
    of the third and fourth.

    With three classes the third logit stands for both. With two classes nothing is divided.
    """
    difference = _gather(logits, targets) - _gather(logits, labels)
    if logits.shape[1] < 3:
        return difference
    ranked = logits.sort(1, descending=True).values
    low = (ranked[:, 2] + ranked[:, min(3, logits.shape[1] - 1)]) / 2
    return difference / (ranked[:, 0] - low + 1e-12)


def _gather(logits: Tensor, classes: Tensor) -> Tensor:
    return logits.gather(1, classes[:, None]).squeeze(1)


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "ce": cross_entropy,
    "margin": margin,
    "dlr": dlr,
}


def make_loss(name: str, labels: Tensor, towards: Tensor | None = None) -> IndexedLoss:
    """Return the loss of that name, away from the labels or towards other classes.

    Towards a class, `dlr` is the targeted DLR loss and the others are the negative loss of that class.
    """
    loss, labels = lookup("loss", name, LOSSES), labels.long()
    if towards is None:
        return lambda at, logits: loss(logits, labels[at])
    towards = towards.long()
    if loss is dlr:
        return lambda at, logits: targeted_dlr(logits, labels[at], towards[at])
    return lambda at, logits: -loss(logits, towards[at])
