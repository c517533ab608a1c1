"""The Square attack (Andriushchenko et al., 2020): random squares, kept where they help; no gradient.

A proposal that is rejected leaves the point where it was. So the proposals of several queries are asked
for in one call, all from the same point, and the first that helps is taken: the walk is the same as one
query after the other, with fewer and larger calls.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dent.attacks.calls import Calls, Model, succeeds
from dent.attacks.found import Found, begin
from dent.attacks.losses import margin
from dent.attacks.norms import like
from dent.attacks.proposals import PROPOSALS, Proposals
from dent.attacks.result import AttackResult

FIXED = 1 / 32  # what a call costs beyond its rows, in parts of what one with all `rows` costs
MEMORY = 0.9  # how much of what was accepted still counts after one more call


def square(
    model: Model,
    inputs: Tensor,
    labels: Tensor,
    *,
    eps: float,
    norm: str = "linf",
    queries: int = 5000,
    restarts: int = 1,
    share: float = 0.8,
    rows: int | None = None,
    joint: bool | None = None,
    mask: Tensor | None = None,
    seed: int = 0,
) -> AttackResult:
    """Change one random square after the other, and keep each change that lowers the margin.

    The squares begin with the `share` of the image's area, and get smaller. Where an input's output does
    not depend on the others, broken inputs leave; with `joint=True` every query is a submission of the
    whole batch. Inputs that were not broken end at their point of lowest margin.

    queries: proposals for each input, after the start.
    rows: so many inputs in one call make good use of the device; if not given, 128 on a CPU and 512
    elsewhere. It changes the speed, not the walk.
    mask: (N,) which inputs may be perturbed.

    >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 3))
    >>> inputs, labels = torch.full((2, 1, 2, 2), 0.5), torch.tensor([0, 1])
    >>> result = square(model, inputs, labels, eps=0.1, queries=10)
    >>> bool(((result.inputs - inputs).abs() <= 0.1 + 1e-6).all()), result.gradients
    (True, 0)
    """
    if inputs.dim() != 4:
        raise ValueError(f"expected images (N, C, H, W), got inputs {tuple(inputs.shape)}")
    calls, found, _ = begin(
        model, inputs, labels, eps=eps, norm=norm, queries=queries, restarts=restarts,
        share=share, rows=rows, joint=joint, mask=mask,
    )  # fmt: skip
    rows = rows or (128 if inputs.device.type == "cpu" else 512)
    for restart in range(restarts if eps > 0 else 0):
        if finished(found):
            break
        proposals = PROPOSALS[norm](
            inputs.detach(), eps=eps, norm=norm, share=share, queries=queries, seeds=(seed, restart)
        )
        if found.joint:
            walk_together(calls, found, proposals)
        else:
            walk(calls, found, proposals, rows=rows)
    return found.result(calls)


def walk(calls: Calls, found: Found, proposals: Proposals, *, rows: int) -> None:
    """All queries for the inputs that are still open, each input at its own query."""
    at, points = found.open(), proposals.start()
    value, broken = ask(calls, found, at, points[at])
    found.keep(at, points[at], value, broken)
    values = value.new_full(found.mask.shape, -torch.inf).index_copy(0, at, value)
    made = torch.zeros_like(found.labels)  # how many queries of each input are done
    accepted, tried = 1.0, 1.0
    while len(at := found.open()) and len(at := at[made[at] < proposals.queries]):
        block = block_size(rows, len(at), accepted / tried)
        query = made[at, None] + torch.arange(block, device=at.device)
        row, column = (query < proposals.queries).nonzero(as_tuple=True)
        asked = at[row]
        ahead = proposals.propose(asked, query[row, column], points)
        value, broken = ask(calls, found, asked, ahead)
        better = broken | (value > values[asked])
        first = torch.full_like(at, block).scatter_reduce(0, row[better], column[better], "amin")
        taken = (better & (column == first[row])).nonzero().squeeze(1)  # one of an input, at most
        if len(taken):
            who, ahead, value = asked[taken], ahead[taken], value[taken]
            points[who], values[who] = ahead, value
            found.keep(who, ahead, value, broken[taken])
        accepted = MEMORY * accepted + len(taken)
        tried = MEMORY * tried + int((column <= first[row]).sum())
        made[at] += (first + 1).clamp(max=block)


def block_size(rows: int, inputs: int, rate: float) -> int:
    """How many proposals of each input go into one call, when this rate of them is accepted.

    What follows an accepted one is for nothing: k of each of n inputs settle (1 - (1 - rate)^k) / rate
    queries of each. They cost n k rows, and what a call costs, c. So k is best near the root of
    2 c / (n rate), unless that is far beyond the first accepted one.
    """
    cheapest = math.sqrt(2 * FIXED * rows / (inputs * rate))
    return max(min(round(min(cheapest, 2 / rate - 1)), rows // inputs), 1)


def walk_together(calls: Calls, found: Found, proposals: Proposals) -> None:
    """All queries, each of them for the whole batch in one call; each input goes by its own margin."""
    at, inputs = found.open(), proposals.inputs
    moves = like(found.mask, inputs)
    points = torch.where(moves, proposals.start(), inputs)
    values, broken = ask(calls, found, at, points)
    found.keep(at, points, values, broken)
    for number in range(proposals.queries):
        if finished(found):
            return
        ahead = torch.where(moves, proposals.propose(at, torch.full_like(at, number), points), inputs)
        value, breaks = ask(calls, found, at, ahead)
        found.keep(at, ahead, value, breaks)
        better = (value > values) | (breaks & ~broken)
        points = torch.where(like(better, points), ahead, points)
        values, broken = torch.where(better, value, values), torch.where(better, breaks, broken)


def finished(found: Found) -> bool:
    """Whether all that may be perturbed are broken; of a joint batch, by one submission."""
    if found.joint:
        return found.batch_broken == int(found.mask.sum())
    return not len(found.open())


def ask(calls: Calls, found: Found, at: Tensor, points: Tensor) -> tuple[Tensor, Tensor]:
    """The loss of points of the inputs `at`, and which points are misclassified."""
    logits, labels = calls.logits(points), found.labels[at]
    return margin(logits, labels), succeeds(logits, labels)
