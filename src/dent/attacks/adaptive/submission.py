"""Batches submitted whole, and the choice between them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from torch import Tensor

from dent.attacks.checks import check_labels
from dent.attacks.search import AttackedModel, AttackResult, Model


@dataclass(frozen=True)
class PartResult(AttackResult):
    """The result for a batch in which only some members count.

    part: (N,) bool; the adversarial members of a mixed batch, the benign ones of a poisoned batch.
    """

    part: Tensor

    @property
    def accuracy(self) -> float:
        """Return the share of the part that is classified correctly."""
        return 1 - float(self.success[self.part].float().mean())


def submit(model: Model, points: Tensor, labels: Tensor) -> AttackResult:
    """Return the model's answer to the points as one batch."""
    result = AttackedModel(model).submit(points.detach(), labels.long())
    check_labels(labels, result.logits.shape[1])
    return result


def pick_strongest(results: Iterable[AttackResult], mask: Tensor | None = None) -> AttackResult:
    """Return the whole batch in which most inputs (of the mask) are broken, at the cost of all batches.

    >>> import torch
    >>> success = torch.tensor([[True, False], [True, True]])
    >>> two = [AttackResult(torch.rand(2, 3), row, torch.rand(2, 2), 20, 10) for row in success]
    >>> best = pick_strongest(two)
    >>> best.success, best.queries
    (tensor([True, True]), 40)
    """
    results = list(results)
    best = max(results, key=lambda one: int((one.success if mask is None else one.success[mask]).sum()))
    return replace(
        best,
        queries=sum(one.queries for one in results),
        gradients=sum(one.gradients for one in results),
    )


def select_rows(result: AttackResult, rows: Tensor) -> AttackResult:
    """Return the result for some rows, or for all rows in another order."""
    return replace(
        result, inputs=result.inputs[rows], success=result.success[rows], logits=result.logits[rows]
    )
