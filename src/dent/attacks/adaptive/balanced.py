"""Balanced targets: wrong classes for a batch, each for as many inputs.

Information maximization, and any other term for diversity, rewards a batch whose mean prediction is
uniform. If every class receives as many inputs, the batch has that while every answer is wrong.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dent.attacks.adaptive.submission import pick_strongest, submit, transfer
from dent.attacks.adaptive.views import DynamicDefense, State, lazy
from dent.attacks.apgd import apgd
from dent.attacks.checks import Eps, Labels, check_attack, read_arguments
from dent.attacks.search import AttackResult, Model, is_broken


def balanced(
    defense: DynamicDefense[State],
    static: Model,
    inputs: Tensor,
    labels: Labels,
    *,
    eps: Eps,
    norm: str = "linf",
    loss: str = "ce",
    steps: int = 100,
    every: int = 5,
    rounds: int = 3,
    mask: Tensor | None = None,
    seed: int = 0,
) -> AttackResult:
    """Move the batch to wrong classes that are assigned evenly, by `lazy` APGD on the defense.

    The first points are those of highest loss on the static model. Each round assigns the classes by
    the log-probabilities that were reached (`assign_evenly`) and continues at the last points, with half
    the first step. The batch that breaks most, of all rounds and the natural inputs, is returned whole.
    Any wrong class is a success.
    """
    labels, eps = read_arguments(inputs, labels, eps)
    check_attack(inputs, labels, eps=eps, norm=norm, mask=mask, steps=steps, every=every, rounds=rounds)
    inputs, labels = inputs.detach(), labels.long()
    attacked = torch.ones_like(labels, dtype=torch.bool) if mask is None else mask
    threat: dict[str, Any] = {
        "eps": eps, "norm": norm, "loss": loss, "steps": steps, "mask": mask, "seed": seed
    }  # fmt: skip
    first = apgd(static, inputs, labels, joint=True, **threat)
    results = [submit(defense, inputs, labels), transfer(defense, first, labels)]
    for _ in range(rounds):
        last, classes = results[-1], labels.clone()
        reached = last.logits.double().log_softmax(1)
        classes[attacked] = assign_evenly(reached[attacked], labels[attacked])
        result = lazy(
            defense, inputs, labels, every=every, towards=classes, start=last.inputs,
            step_size=eps or None, **threat,
        )  # fmt: skip
        results.append(replace(result, success=is_broken(result.logits, labels)))
    return pick_strongest(defense, results, mask)


def assign_evenly(scores: Tensor, labels: Tensor) -> Tensor:
    """Return a wrong class for each input, (N,), of the highest total score, with even use of classes.

    No class is used more often than it must: ceil(N / classes) times, or more if an input's label is so
    frequent that the other classes would not suffice. (By Hall's theorem they then do.)

    scores: (N, classes).

    >>> assign_evenly(torch.tensor([[0.0, 9.0, 1.0], [0.0, 8.0, 2.0]]), torch.tensor([0, 0]))
    tensor([1, 2])
    """
    count, classes = scores.shape
    if not count:
        return labels.clone()
    most = int(labels.bincount().max())
    capacity = max(-(-count // classes), -(-most // (classes - 1)))
    costs = -scores.detach().double().cpu().scatter(1, labels.cpu()[:, None], -torch.inf)
    return solve_assignment(costs, capacity).to(labels.device)


def solve_assignment(costs: Tensor, capacity: int = 1) -> Tensor:
    """Return the column of each row, (rows,), of the lowest total cost; a column takes `capacity` rows.

    Rows are inserted one after the other along shortest augmenting paths (Jonker and Volgenant, 1987).
    With prices v of the columns, reduced costs are costs[i, j] - v[j], and each row has one of its
    cheapest columns; an insertion moves rows to other columns until one has room.

    costs: (rows, columns), float64; infinity where a row must not go. There must be an assignment.

    >>> solve_assignment(torch.tensor([[1.0, 2.0], [1.0, 5.0]]).double())
    tensor([1, 0])
    """
    rows, columns = costs.shape
    chosen = torch.full((rows,), -1)
    prices, used = costs.new_zeros(columns), torch.zeros(columns, dtype=torch.long)
    for new in range(rows):
        # Dijkstra over columns: `far` is the price of reaching each, `via` the row that moves there.
        far, via = costs[new] - prices, torch.full((columns,), new)
        far = far - far.min()
        seen = torch.zeros(columns, dtype=torch.bool)
        while True:
            column = int(far.masked_fill(seen, torch.inf).argmin())
            if not far[column].isfinite():
                raise ValueError(f"expected an assignment of {rows} rows with capacity {capacity}")
            if used[column] < capacity:
                break
            seen[column] = True
            movers = (chosen == column).nonzero().squeeze(1)
            reduced = costs[movers] - prices
            ahead, mover = (far[column] + reduced - reduced[:, column, None]).min(0)
            closer = (ahead < far) & ~seen
            far, via = torch.where(closer, ahead, far), torch.where(closer, movers[mover], via)
        prices = prices - torch.where(seen, far[column] - far, 0)
        used[column] += 1
        while column >= 0:  # move the rows of the path, from its end
            row = int(via[column])
            chosen[row], column = column, int(chosen[row])
    return chosen
