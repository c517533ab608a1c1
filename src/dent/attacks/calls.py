"""The model as an attack sees it: what it was asked, and how often."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dent.attacks.result import AttackResult

Model = Callable[[Tensor], Tensor]


class Calls:
    """A model, with a count of the inputs that went forward and backward through it."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.queries = 0
        self.gradients = 0

    def logits(self, points: Tensor) -> Tensor:
        """The answer to the points, without a gradient."""
        self.queries += len(points)
        with torch.no_grad():
            return self.model(points)

    def ascent(self, points: Tensor, loss: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Of each point: its loss (a function of the logits), the gradient of that, and the logits."""
        self.queries += len(points)
        self.gradients += len(points)
        points = points.detach().requires_grad_()
        with torch.enable_grad():
            logits = self.model(points)
            values = loss(logits)
            (gradient,) = torch.autograd.grad(values.sum(), points)
        return values.detach(), gradient, logits.detach()

    def score(self, inputs: Tensor, labels: Tensor, *, targeted: bool = False) -> AttackResult:
        """The result of an attack that ends with these inputs: they are submitted as one batch."""
        logits = self.logits(inputs)
        success = (logits.argmax(1) == labels) == targeted
        return AttackResult(inputs, success, logits, self.queries, self.gradients)
