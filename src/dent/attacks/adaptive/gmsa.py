"""FPA and GMSA (Chen et al., 2022): rounds of attack and adaptation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Generic

import torch
from torch import Tensor

from dent.attacks.adaptive.submission import pick_strongest, submit
from dent.attacks.adaptive.views import DynamicDefense, State
from dent.attacks.apgd import run_apgd
from dent.attacks.checks import Eps, Labels, check_attack, check_numbers, check_start, read_arguments
from dent.attacks.losses import make_loss
from dent.attacks.norms import project, unsqueeze_like
from dent.attacks.search import AttackedModel, AttackResult, BestPoints, Loss
from dent.attacks.targets import rank_targets
from dent.names import lookup
from dent.seeds import make_generator


def gmsa(
    defense: DynamicDefense[State],
    inputs: Tensor,
    labels: Labels,
    *,
    eps: Eps,
    norm: str = "linf",
    over: str = "minimum",
    rounds: int = 10,
    loss: str = "margin",
    steps: int = 100,
    restarts: int = 1,
    targets: int = 0,
    start: Tensor | None = None,
    mask: Tensor | None = None,
    seed: int = 0,
) -> AttackResult:
    """Attack a growing set of models (greedy model space attack).

    The first model is the static one. Each round finds the batch of highest loss on the models so far,
    submits it, and adds the defense as adapted to it. The batch that breaks most, of all rounds and the
    natural inputs, is returned whole. The authors use PGD with 5 restarts and 9 targets; we use APGD.

    over: how the losses of the models are combined, a name of `OVER`.
    targets: the number of classes that each round also attacks towards: those whose boundaries are
    nearest to the inputs, on the adapted model.
    start: points to begin from. Then the first model is the defense as adapted to them, and each round
    begins at the last round's points, with half the first step.
    """
    make_view = lookup("combination of models", over, OVER)
    check_numbers(targets=targets or None)
    labels, eps = read_arguments(inputs, labels, eps)
    check_attack(
        inputs, labels, eps=eps, norm=norm, mask=mask, rounds=rounds, steps=steps, restarts=restarts
    )
    inputs, labels = inputs.detach(), labels.long()
    everyone = torch.arange(len(labels), device=labels.device)
    results = [submit(defense, inputs, labels)]
    towards: list[Tensor | None] = [None]
    if targets:
        towards += rank_targets(
            AttackedModel(defense), inputs, labels, results[0].logits,
            norm=norm, count=targets, order="distance",
        )  # fmt: skip
    losses = [make_loss(loss, labels, classes) for classes in towards]
    states = []
    if start is None:
        states.append(defense.adapt(inputs, steps=0, gradient="stale"))
    else:
        check_start(start, inputs)
        points = project(start.detach().to(inputs), inputs, eps=eps, norm=norm)
        if mask is not None:
            points = torch.where(unsqueeze_like(mask, points), points, inputs)
        results.append(submit(defense, points, labels))
    for number in range(rounds):
        last = results[-1].inputs
        if number > 0 or start is not None:
            states.append(defense.adapt(last, gradient="stale"))
        attacked = AttackedModel(defense, joint=True, mask=mask)
        best = BestPoints(inputs, labels, joint=True, mask=mask)
        for restart in range(restarts):
            for rank, loss_at in enumerate(losses):
                view = make_view(defense, states, partial(loss_at, everyone))
                attacked.through = view
                run_apgd(
                    attacked, best, inputs, loss_at, eps=eps, norm=norm, steps=steps,
                    start=None if start is None or restart else last,
                    step_size=None if start is None or restart else eps,
                    random=make_generator(seed, number, restart, rank),
                )  # fmt: skip
                attacked.queries += view.extra_queries
        results.append(attacked.submit(best.points, labels))
    return pick_strongest(defense, results, mask)


def fpa(defense: DynamicDefense[State], inputs: Tensor, labels: Labels, **settings: Any) -> AttackResult:
    """Attack the model as adapted to the last round's points (fixed point attack); see `gmsa`."""
    return gmsa(defense, inputs, labels, over="last", **settings)


def gmsa_avg(
    defense: DynamicDefense[State], inputs: Tensor, labels: Labels, **settings: Any
) -> AttackResult:
    """Increase the average loss over the static and all adapted models so far; see `gmsa`."""
    return gmsa(defense, inputs, labels, over="average", **settings)


def gmsa_min(
    defense: DynamicDefense[State], inputs: Tensor, labels: Labels, **settings: Any
) -> AttackResult:
    """Increase each input's lowest loss over the static and all adapted models so far; see `gmsa`."""
    return gmsa(defense, inputs, labels, over="minimum", **settings)


class Average(Generic[State]):
    """All models, one after the other: the gradients of their losses are averaged."""

    exact: bool = False
    extra_queries: int = 0

    def __init__(self, defense: DynamicDefense[State], states: list[State], loss: Loss) -> None:
        self.defense = defense
        self.states = states

    def __call__(self, points: Tensor) -> Iterator[Tensor]:
        for state in self.states:
            yield self.defense.predict(points, state)


class Minimum(Generic[State]):
    """For each input, the model on which its loss is lowest.

    The lowest models are found without a gradient. Then each of them answers with a gradient for its own
    inputs, next to constant answers for the other inputs. So every answer has the lowest losses, their
    gradients add up to the gradient of these losses (up to a factor), and only one graph is alive.
    """

    exact: bool = False

    def __init__(self, defense: DynamicDefense[State], states: list[State], loss: Loss) -> None:
        self.defense = defense
        self.states = states
        self.loss = loss
        self.extra_queries = 0  # inputs asked without a gradient

    def __call__(self, points: Tensor) -> Iterator[Tensor]:
        with torch.no_grad():
            answers = torch.stack([self.defense.predict(points, state) for state in self.states])
            lowest = torch.stack([self.loss(logits) for logits in answers]).argmin(0)
            logits = answers[lowest, torch.arange(len(points), device=points.device)]
        self.extra_queries += len(self.states) * len(points)
        for index in lowest.unique().tolist():
            answer = self.defense.predict(points, self.states[index])
            yield torch.where((lowest == index)[:, None], answer, logits)


def _view_last(defense: DynamicDefense[State], states: list[State], loss: Loss) -> Average[State]:
    return Average(defense, states[-1:], loss)


# How the losses of several models are combined.
OVER: dict[str, Callable[..., Average[Any] | Minimum[Any]]] = {
    "last": _view_last,
    "average": Average,
    "minimum": Minimum,
}
