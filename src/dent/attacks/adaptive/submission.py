"""Batches submitted whole, which of them to keep, and what counts in them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dent.attacks.calls import Calls, Model
from dent.attacks.checks import check_labels
from dent.attacks.result import AttackResult


@dataclass(frozen=True)
class PartResult(AttackResult):
    """An attack on a batch of which only a part counts.

    part: (N,) bool; the adversarial members of a mixed batch, the benign ones of a poisoned batch.
    """

    part: Tensor

    @property
    def accuracy(self) -> float:
        """The share of the part that is still taken for its label."""
        return 1 - float(self.success[self.part].float().mean())


def submitted(model: Model, points: Tensor, labels: Tensor) -> AttackResult:
    """The model's answer to the points, as one batch."""
    result = Calls(model).score(points.detach(), labels.long())
    check_labels(labels, result.logits.shape[1])
    return result


def transferred(model: Model, found: AttackResult, labels: Tensor) -> AttackResult:
    """What was found on another model, submitted to this one; it costs what both cost."""
    result = submitted(model, found.inputs, labels)
    return replace(result, queries=result.queries + found.queries, gradients=found.gradients)


def strongest(results: Iterable[AttackResult], mask: Tensor | None = None) -> AttackResult:
    """The batch in which most (of the masked) are broken, kept whole; it costs what all cost.

    >>> success = torch.tensor([[True, False], [True, True]])
    >>> two = [AttackResult(torch.rand(2, 3), row, torch.rand(2, 2), 20, 10) for row in success]
    >>> kept = strongest(two)
    >>> kept.success, kept.queries
    (tensor([True, True]), 40)
    """
    results = list(results)
    best = max(results, key=lambda one: int((one.success if mask is None else one.success[mask]).sum()))
    return replace(
        best,
        queries=sum(one.queries for one in results),
        gradients=sum(one.gradients for one in results),
    )


def rows_of(result: AttackResult, rows: Tensor) -> AttackResult:
    """Some of its rows, or all in another order."""
    return replace(
        result, inputs=result.inputs[rows], success=result.success[rows], logits=result.logits[rows]
    )


def joined(results: list[AttackResult]) -> AttackResult:
    """The rows of several batches, one after the other, each as it was answered in its batch."""
    return AttackResult(
        torch.cat([result.inputs for result in results]),
        torch.cat([result.success for result in results]),
        torch.cat([result.logits for result in results]),
        sum(result.queries for result in results),
        sum(result.gradients for result in results),
    )
