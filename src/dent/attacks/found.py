"""What a search has found so far: the best point of every input, and the best whole batch."""

from __future__ import annotations

import torch
from torch import Tensor

from dent.attacks.calls import Answer, Calls, Model, View, succeeds
from dent.attacks.checks import check_attack, check_labels, check_model
from dent.attacks.result import AttackResult


def begin(
    model: Model,
    inputs: Tensor,
    labels: Tensor,
    *,
    eps: float,
    norm: str,
    towards: Tensor | None = None,
    through: View | None = None,
    draws: int = 1,
    joint: bool | None = None,
    mask: Tensor | None = None,
    **numbers: float | None,
) -> tuple[Calls, Found, Tensor]:
    """How every attack begins: checks, and the natural inputs are asked for; with their logits.

    What is broken without an attack is found already. Whether the batch is kept together (`joint`) is
    what the model says of itself, if it is not given.
    """
    check_model(model)
    check_attack(inputs, labels, eps=eps, norm=norm, mask=mask, towards=towards, **numbers)
    inputs, labels = inputs.detach(), labels.long()
    joint = depends_on_batch(model) if joint is None else joint
    calls = Calls(model, through=through, draws=draws, joint=joint, mask=mask)
    found = Found(inputs, labels, towards=towards, joint=joint, mask=mask)
    logits = calls.logits(inputs)
    for classes in (labels, towards):
        if classes is not None:
            check_labels(classes, logits.shape[1])
    nothing = torch.full_like(found.values, -torch.inf)
    found.keep(
        torch.arange(len(inputs), device=inputs.device),
        inputs,
        nothing,
        succeeds(logits, labels, towards),
    )
    return calls, found, logits


def depends_on_batch(model: Model) -> bool:
    """Whether the model says that it does (as `dent.Dent` tells by `independent`)."""
    return not getattr(model, "independent", True)


class Found:
    """The best points of a search: a broken input's is one that breaks it, others' that of highest loss.

    `joint` is for models that depend on the batch: no input leaves the search, and the best submission
    of the whole batch is kept too. `mask` (N,) are the inputs that may be perturbed.
    """

    def __init__(
        self,
        inputs: Tensor,
        labels: Tensor,
        *,
        towards: Tensor | None = None,
        joint: bool = False,
        mask: Tensor | None = None,
    ) -> None:
        n, device = len(inputs), inputs.device
        self.labels = labels
        self.towards = towards
        self.joint = joint
        self.mask = torch.ones(n, dtype=torch.bool, device=device) if mask is None else mask
        self.points = inputs.clone()
        precision = torch.promote_types(inputs.dtype, torch.float32)
        self.values = torch.full((n,), -torch.inf, dtype=precision, device=device)
        self.broken = torch.zeros(n, dtype=torch.bool, device=device)
        self.batch: Tensor | None = None
        self.batch_broken = -1
        self.batch_logits: Tensor | None = None  # the model's answer to that batch, if it was kept

    def open(self) -> Tensor:
        """The indices of the inputs that are still searched for: all of a joint batch."""
        keep = torch.ones_like(self.mask) if self.joint else self.mask & ~self.broken
        return keep.nonzero().squeeze(1)

    def update(self, at: Tensor, points: Tensor, answer: Answer) -> Tensor:
        """Take in what the inputs `at` led to; returns which of them stay in the search."""
        towards = None if self.towards is None else self.towards[at]
        broken = succeeds(answer.logits, self.labels[at], towards) & answer.exact
        return self.keep(at, points, answer.values, broken, answer.logits)

    def keep(
        self,
        at: Tensor,
        points: Tensor,
        values: Tensor,
        broken: Tensor,
        logits: Tensor | None = None,
    ) -> Tensor:
        """`update` where the loss and what is broken are known already."""
        values = values.to(self.values.dtype)
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
            self.batch, self.batch_broken, self.batch_logits = points.clone(), count, logits
        return torch.ones_like(broken)

    def result(self, calls: Calls) -> AttackResult:
        """Submitted as one batch: each input's best point, or the best whole batch if that does more."""
        together = calls.score(self.points, self.labels, towards=self.towards)
        if self.batch is not None and self.batch_broken > int((together.success & self.mask).sum()):
            return calls.score(self.batch, self.labels, towards=self.towards, logits=self.batch_logits)
        return together
