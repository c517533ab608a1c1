"""What a search has found so far: the best point of every input, and the best whole batch."""

from __future__ import annotations

import torch
from torch import Tensor

from dent.attacks.calls import Calls
from dent.attacks.result import AttackResult


class Found:
    """The best points of a search: a broken input's is one that breaks it, others' that of highest loss.

    `joint` is for models that depend on the batch: no input leaves the search, and the best submission
    of the whole batch is kept too. `mask` (N,) are the inputs that may be perturbed.
    """

    def __init__(self, inputs: Tensor, *, joint: bool = False, mask: Tensor | None = None) -> None:
        n, device = len(inputs), inputs.device
        self.joint = joint
        self.mask = torch.ones(n, dtype=torch.bool, device=device) if mask is None else mask
        self.points = inputs.clone()
        self.values = torch.full((n,), -torch.inf, device=device)
        self.broken = torch.zeros(n, dtype=torch.bool, device=device)
        self.batch: Tensor | None = None
        self.batch_broken = -1

    def open(self) -> Tensor:
        """The indices of the inputs that are still searched for: all of a joint batch."""
        keep = torch.ones_like(self.mask) if self.joint else self.mask & ~self.broken
        return keep.nonzero().squeeze(1)

    def update(self, at: Tensor, points: Tensor, values: Tensor, broken: Tensor) -> Tensor:
        """Take in what the inputs `at` led to; returns which of them stay in the search."""
        values = values.float()
        before, best = self.broken[at], self.values[at]
        better = self.mask[at] & ((broken & ~before) | ((broken == before) & (values > best)))
        chosen = at[better]
        self.points[chosen] = points[better]
        self.values[chosen] = values[better]
        self.broken[chosen] = broken[better]
        if not self.joint:
            return ~broken
        count = int((broken & self.mask).sum())
        if count > self.batch_broken:
            self.batch, self.batch_broken = points.clone(), count
        return torch.ones_like(broken)

    def result(self, calls: Calls, labels: Tensor) -> AttackResult:
        """Submitted as one batch: each input's best point, or the best whole batch if that does more."""
        together = calls.score(self.points, labels)
        if self.batch is not None and self.batch_broken > int((together.success & self.mask).sum()):
            return calls.score(self.batch, labels)
        return together
