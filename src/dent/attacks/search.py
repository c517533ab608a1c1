"""The parts that every attack shares: the attacked model, the best points so far, and the result."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from dent.attacks.checks import (
    check_attack,
    check_draws,
    check_labels,
    check_logits,
    check_model,
    refuse_probabilities,
)

Model = Callable[[Tensor], Tensor]
Loss = Callable[[Tensor], Tensor]  # maps logits (N, classes) to one value per input, (N,)


@dataclass(frozen=True)
class AttackResult:
    """The inputs that an attack ends with, and the model's answer to them as one batch."""

    inputs: Tensor  # (N, C, H, W), in the ball and in [0, 1]
    success: Tensor  # (N,) bool: misclassified, or classified as the class that was asked for
    logits: Tensor  # (N, classes) of `inputs`
    queries: int  # inputs that went forward through the model
    gradients: int  # inputs that went backward through the model

    def __repr__(self) -> str:
        kind, broken = type(self).__name__, int(self.success.sum())
        counts = f"queries={self.queries}, gradients={self.gradients}"
        return f"{kind}(n={len(self.success)}, broken={broken}, {counts})"


def join_results(results: Sequence[AttackResult]) -> AttackResult:
    """Concatenate the rows of several batches, each with its answer in its own batch."""
    return AttackResult(
        torch.cat([result.inputs for result in results]),
        torch.cat([result.success for result in results]),
        torch.cat([result.logits for result in results]),
        sum(result.queries for result in results),
        sum(result.gradients for result in results),
    )


class View(Protocol):
    """A substitute for the model's own gradient; see `dent.attacks.adaptive`.

    A call yields one or more tensors of logits for the points. An attack averages the gradients of
    their losses. After a call, `exact` is True if the last logits are the ones that the model itself
    returns for these points. If it is False, they do not tell which points are broken.

    A view that knows the model's own answer, but follows other logits, is exact if it has the answer in
    an attribute `own`.
    """

    exact: bool

    def __call__(self, points: Tensor) -> Iterator[Tensor]: ...


class Answer(NamedTuple):
    """The loss, its gradient and the logits at each point."""

    values: Tensor  # (N,) the loss
    gradient: Tensor
    logits: Tensor
    exact: bool  # True if the logits are the model's own


class AttackedModel:
    """A model, with a count of the inputs that went forward and backward through it.

    through: the view to take gradients of, instead of the model.
    draws: the number of calls that are averaged into one answer of a random model (expectation over
    transformations, Athalye et al., 2018). All draws are one call if the inputs are independent of one
    another (`joint=False`) and the model draws anew for each input.
    mask: in a joint batch, the inputs whose losses are increased. The losses of the other inputs can
    have a gradient to the masked inputs too, but the adversary does not want to increase them.
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
        self._is_first_answer = True
        self._draws_in_one_call = False if joint or draws == 1 else None  # None: not known yet

    def predict(self, points: Tensor) -> Tensor:
        """Return the logits of the points, without a gradient."""
        with torch.no_grad():
            return torch.cat(list(self._draw(points))).mean(0)

    def evaluate(self, points: Tensor, loss: Loss) -> Answer:
        """Return the loss of each point, with an empty gradient."""
        logits = self.predict(points)
        return Answer(loss(logits), torch.zeros(()), logits, True)

    def differentiate(self, points: Tensor, loss: Loss) -> Answer:
        """Return the loss of each point and its gradient."""
        points = points.detach().requires_grad_()
        parts = []
        with torch.enable_grad():
            # Go backward after each answer, so that only one graph is alive at a time.
            for answers in self._ask_view(points) if self.through else self._draw(points):
                values = torch.stack([loss(logits) for logits in answers])
                increased = values if self.mask is None else values[:, self.mask]
                gradient = compute_gradient(increased.sum() / len(values), points)
                self.gradients += values.numel()
                parts.append((values.detach(), gradient, answers.detach()))
        losses, gradients, logits = zip(*parts, strict=True)
        exact = self.through is None or self.through.exact
        own = getattr(self.through, "own", None)
        answer = logits[-1][-1] if self.through else torch.cat(logits).mean(0)
        answer = answer if own is None or not exact else own
        gradient = gradients[0] if len(parts) == 1 else torch.stack(gradients).mean(0)
        return Answer(torch.cat(losses).mean(0), gradient, answer, exact)

    def submit(
        self,
        inputs: Tensor,
        labels: Tensor,
        *,
        towards: Tensor | None = None,
        logits: Tensor | None = None,
    ) -> AttackResult:
        """Submit the inputs as one batch and return the result of the attack.

        logits: the model's answer to this very batch, if it was submitted before.
        """
        logits = self.predict(inputs) if logits is None else logits
        return AttackResult(
            inputs, is_broken(logits, labels, towards), logits, self.queries, self.gradients
        )

    def check(self, logits: Tensor, points: Tensor) -> Tensor:
        """Count an answer to the points, and return it if it is valid."""
        self.queries += len(points)
        check_logits(logits, points)
        if self._is_first_answer and len(points):
            self._is_first_answer = False
            refuse_probabilities(self.model, points, logits)
        return logits

    def _draw(self, points: Tensor) -> Iterator[Tensor]:
        """Yield answers of the model, (k, N, classes), k draws at a time."""
        if self._draws_in_one_call is None:
            self._draws_in_one_call = self._draws_per_input(points)
        if self._draws_in_one_call:
            copies = points.repeat(self.draws, *[1] * (points.dim() - 1))
            yield self.check(self.model(copies), copies).unflatten(0, (self.draws, -1))
        else:
            for _ in range(self.draws):
                yield self.check(self.model(points), points)[None]

    def _ask_view(self, points: Tensor) -> Iterator[Tensor]:
        assert self.through
        for logits in self.through(points):
            yield self.check(logits, points)[None]

    def _draws_per_input(self, points: Tensor) -> bool:
        """Return True if one call gives two copies of an input different answers."""
        if not len(points):
            return False
        with torch.no_grad():
            first, second = self.check(self.model(points[[0, 0]]), points[[0, 0]])
        return not torch.equal(first, second)


class BestPoints:
    """The best point of every input so far, and the best whole batch.

    The best point of a broken input is one that breaks it. Of the others, it is the point of highest
    loss. `joint` is for models that depend on the batch: every input stays in the search, and the best
    submission of the whole batch is remembered too.

    mask: (N,) bool, the inputs that the adversary may perturb.
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
        self.batch_logits: Tensor | None = None  # the model's answer to that batch, if it is known

    def list_open(self) -> Tensor:
        """Return the indices of the inputs that are still searched: all inputs of a joint batch."""
        is_open = torch.ones_like(self.mask) if self.joint else self.mask & ~self.broken
        return is_open.nonzero().squeeze(1)

    def update(self, at: Tensor, points: Tensor, answer: Answer) -> Tensor:
        """Record the answer to points of the inputs `at`. Return which of them stay in the search."""
        towards = None if self.towards is None else self.towards[at]
        broken = is_broken(answer.logits, self.labels[at], towards) & answer.exact
        return self.record(at, points, answer.values, broken, answer.logits)

    def record(
        self,
        at: Tensor,
        points: Tensor,
        values: Tensor,
        broken: Tensor,
        logits: Tensor | None = None,
    ) -> Tensor:
        """Do what `update` does, for a known loss and known broken points."""
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

    def submit(self, attacked: AttackedModel) -> AttackResult:
        """Submit every input's best point as one batch, or the best whole batch if it breaks more."""
        together = attacked.submit(self.points, self.labels, towards=self.towards)
        if self.batch is not None and self.batch_broken > int((together.success & self.mask).sum()):
            return attacked.submit(
                self.batch, self.labels, towards=self.towards, logits=self.batch_logits
            )
        return together


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
) -> tuple[AttackedModel, BestPoints, Tensor]:
    """Check the arguments of an attack and ask the model for the natural inputs.

    Return the model, the best points (inputs that are misclassified without an attack are broken
    already) and the natural logits. If `joint` is None, the model's `independent` decides.
    """
    check_model(model)
    check_attack(inputs, labels, eps=eps, norm=norm, mask=mask, towards=towards, **numbers)
    inputs, labels = inputs.detach(), labels.long()
    joint = depends_on_batch(model) if joint is None else joint
    attacked = AttackedModel(model, through=through, draws=draws, joint=joint, mask=mask)
    best = BestPoints(inputs, labels, towards=towards, joint=joint, mask=mask)
    logits = attacked.predict(inputs)
    for classes in (labels, towards):
        if classes is not None:
            check_labels(classes, logits.shape[1])
    everyone = torch.arange(len(inputs), device=inputs.device)
    lowest = torch.full_like(best.values, -torch.inf)
    best.record(everyone, inputs, lowest, is_broken(logits, labels, towards))
    return attacked, best, logits


def depends_on_batch(model: Model) -> bool:
    """Return True if the model declares `independent = False`."""
    return getattr(model, "independent", None) is False


def declares_independence(model: Model) -> bool:
    """Return True if the model declares `independent = True`; it may not say."""
    return getattr(model, "independent", None) is True


def is_broken(logits: Tensor, labels: Tensor, towards: Tensor | None = None) -> Tensor:
    """Return which inputs are misclassified, or classified as the class `towards` if it is given."""
    predictions = logits.argmax(1)
    return predictions != labels if towards is None else predictions == towards


def compute_gradient(value: Tensor, points: Tensor, *, keep_graph: bool = False) -> Tensor:
    """Return the gradient of a scalar at the points, and zero where there is none or it is not finite.

    AutoAttack reports zero gradients as a finding.
    """
    gradient = None
    if value.requires_grad:
        (gradient,) = torch.autograd.grad(value, points, retain_graph=keep_graph, allow_unused=True)
    return torch.zeros_like(points) if gradient is None else gradient.nan_to_num(0, 0, 0)
