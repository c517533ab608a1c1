"""Batches submitted whole, and the choice between them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dent.attacks.checks import check_labels
from dent.attacks.norms import unsqueeze_like
from dent.attacks.search import AttackedModel, AttackResult, Model, declares_independence


@dataclass(frozen=True, repr=False)
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


def transfer(defense: Model, result: AttackResult, labels: Tensor) -> AttackResult:
    """Submit the result of an attack on another model to the defense, and add up the costs of both."""
    own = submit(defense, result.inputs, labels)
    return replace(own, queries=own.queries + result.queries, gradients=result.gradients)


def pick_strongest(
    model: Model, results: Iterable[AttackResult], mask: Tensor | None = None
) -> AttackResult:
    """Return the whole batch in which most inputs (of the mask) are broken, at the cost of all batches.

    If the model declares `independent = True`, no answer depends on the batch. Then every input that it
    leaves standing comes from a batch that breaks it, if there is one.

    >>> import torch
    >>> success = torch.tensor([[True, False], [True, True]])
    >>> two = [AttackResult(torch.rand(2, 3), row, torch.rand(2, 2), 20, 10) for row in success]
    >>> best = pick_strongest(torch.nn.Linear(3, 2), two)
    >>> best.success, best.queries
    (tensor([True, True]), 40)
    """
    results = list(results)
    best = max(results, key=lambda one: int((one.success if mask is None else one.success[mask]).sum()))
    for other in results if declares_independence(model) else ():
        best = _take_rows(best, other, other.success & ~best.success)
    return replace(
        best,
        queries=sum(one.queries for one in results),
        gradients=sum(one.gradients for one in results),
    )


def _take_rows(result: AttackResult, other: AttackResult, rows: Tensor) -> AttackResult:
    """Return the result with some rows of another one."""
    return replace(
        result,
        inputs=torch.where(unsqueeze_like(rows, result.inputs), other.inputs, result.inputs),
        success=torch.where(rows, other.success, result.success),
        logits=torch.where(rows[:, None], other.logits, result.logits),
    )


def select_rows(result: AttackResult, rows: Tensor) -> AttackResult:
    """Return the result for some rows, or for all rows in another order."""
    return replace(
        result, inputs=result.inputs[rows], success=result.success[rows], logits=result.logits[rows]
    )
