"""The model as an attack sees it: what it was asked, how often, and which gradient is climbed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from dent.attacks.checks import check_answer, check_draws
from dent.attacks.result import AttackResult

Model = Callable[[Tensor], Tensor]
Loss = Callable[[Tensor], Tensor]  # from logits (N, classes) to one value each


class View(Protocol):
    """A way to climb a model that is not its own gradient: see `dent.attacks.adaptive`.

    A call yields logits of the points, one tensor after the other; the gradients of their losses are
    averaged. `exact` says of the last call whether its last logits were those that the model itself
    gives for these points; if not, they say nothing about what is broken.
    """

    exact: bool

    def __call__(self, points: Tensor) -> Iterator[Tensor]: ...


class Answer(NamedTuple):
    """What came back for each point."""

    values: Tensor  # the loss
    gradient: Tensor
    logits: Tensor
    exact: bool  # whether the logits are the model's own


class Calls:
    """A model, with a count of the inputs that went forward and backward through it.

    through: what is climbed, where that is not the model.
    draws: how often a random model is asked for one answer, the mean of all (expectation over
    transformations, Athalye et al., 2018). They go into one call where inputs do not depend on one
    another (`joint=False`) and the model draws for each input anew.
    mask: whose losses are climbed, in a joint batch. The others may have a gradient to the masked inputs
    too, where all share statistics or parameters, but it is not what the adversary wants.
    """

    def __init__(
        self,
        model: Model,
        *,
        through: View | None = None,
        draws: int = 1,
        joint: bool = False,
        mask: Tensor | None = None,
    ) -> None:
        check_draws(draws, through is not None)
        self.model = model
        self.through = through
        self.draws = draws
        self.queries = 0
        self.gradients = 0
        self.mask = mask if joint else None
        self._answered = False
        self._in_one_call = False if joint or draws == 1 else None

    def logits(self, points: Tensor) -> Tensor:
        """The answer to the points, without a gradient."""
        with torch.no_grad():
            return torch.cat(list(self._drawn(points))).mean(0)

    def ascent(self, points: Tensor, loss: Loss) -> Answer:
        """The loss of each point (a function of the logits), and the gradient of that."""
        points = points.detach().requires_grad_()
        parts = []
        with torch.enable_grad():
            # One backward after each answer, so that no more than one graph is alive.
            for answers in self._viewed(points) if self.through else self._drawn(points):
                values = torch.stack([loss(logits) for logits in answers])
                climbed = values if self.mask is None else values[:, self.mask]
                gradient = gradient_of(climbed.sum() / len(values), points)
                self.gradients += values.numel()
                parts.append((values.detach(), gradient, answers.detach()))
        losses, gradients, logits = zip(*parts, strict=True)
        exact = self.through is None or self.through.exact
        answer = logits[-1][-1] if self.through else torch.cat(logits).mean(0)
        gradient = gradients[0] if len(parts) == 1 else torch.stack(gradients).mean(0)
        return Answer(torch.cat(losses).mean(0), gradient, answer, exact)

    def value(self, points: Tensor, loss: Loss) -> Answer:
        """The loss of each point, without a gradient (that of the answer is zero)."""
        logits = self.logits(points)
        return Answer(loss(logits), torch.zeros(()), logits, True)

    def score(
        self,
        inputs: Tensor,
        labels: Tensor,
        *,
        towards: Tensor | None = None,
        logits: Tensor | None = None,
    ) -> AttackResult:
        """The result of an attack that ends with these inputs: they are submitted as one batch.

        logits: the model's answer to this very batch, if it was submitted before.
        """
        logits = self.logits(inputs) if logits is None else logits
        return AttackResult(
            inputs, succeeds(logits, labels, towards), logits, self.queries, self.gradients
        )

    def _drawn(self, points: Tensor) -> Iterator[Tensor]:
        """Answers of the model (k, N, classes), k at a time."""
        if self._in_one_call is None:
            self._in_one_call = self._draws_for_each_input(points)
        if self._in_one_call:
            copies = points.repeat(self.draws, *[1] * (points.dim() - 1))
            yield self._checked(self.model(copies), copies).unflatten(0, (self.draws, -1))
        else:
            for _ in range(self.draws):
                yield self._checked(self.model(points), points)[None]

    def _viewed(self, points: Tensor) -> Iterator[Tensor]:
        assert self.through
        for logits in self.through(points):
            yield self._checked(logits, points)[None]

    def _checked(self, logits: Tensor, points: Tensor) -> Tensor:
        self.queries += len(points)
        check_answer(logits, points, first=not self._answered)
        self._answered = True
        return logits

    def _draws_for_each_input(self, points: Tensor) -> bool:
        """Whether one call gives two copies of an input different answers."""
        with torch.no_grad():
            first, second = self._checked(self.model(points[[0, 0]]), points[[0, 0]])
        return not torch.equal(first, second)


def gradient_of(value: Tensor, points: Tensor, *, keep_graph: bool = False) -> Tensor:
    """The gradient; zero where the model gives none (the findings of a suite speak of that)."""
    gradient = None
    if value.requires_grad:
        (gradient,) = torch.autograd.grad(value, points, retain_graph=keep_graph, allow_unused=True)
    return torch.zeros_like(points) if gradient is None else gradient.nan_to_num(0, 0, 0)


def succeeds(logits: Tensor, labels: Tensor, towards: Tensor | None = None) -> Tensor:
    """Which inputs are broken: not taken for their label, or (driven towards a class) taken for that."""
    predictions = logits.argmax(1)
    return predictions != labels if towards is None else predictions == towards
