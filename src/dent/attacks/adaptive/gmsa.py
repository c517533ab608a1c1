"""FPA and GMSA (Chen et al., 2022): rounds of attack and adaptation, as a game."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Generic

import torch
from torch import Tensor

from dent.attacks.adaptive.protocol import DynamicDefense, State
from dent.attacks.adaptive.submission import strongest, submitted
from dent.attacks.apgd import likeliest, search
from dent.attacks.calls import Calls, Loss
from dent.attacks.checks import check_attack, check_numbers
from dent.attacks.found import Found
from dent.attacks.losses import loss_of
from dent.attacks.result import AttackResult
from dent.names import lookup
from dent.seeds import generator


def fpa(
    defense: DynamicDefense[State],
    inputs: Tensor,
    labels: Tensor,
    *,
    eps: float,
    norm: str = "linf",
    **settings: Any,
) -> AttackResult:
    """Fixed point attack: climb the model as adapted to the last round's points; as `gmsa`."""
    return gmsa(defense, inputs, labels, eps=eps, norm=norm, over="last", **settings)


def gmsa_avg(
    defense: DynamicDefense[State],
    inputs: Tensor,
    labels: Tensor,
    *,
    eps: float,
    norm: str = "linf",
    **settings: Any,
) -> AttackResult:
    """Climb the average loss over the static model and all adapted so far; as `gmsa`."""
    return gmsa(defense, inputs, labels, eps=eps, norm=norm, over="average", **settings)


def gmsa_min(
    defense: DynamicDefense[State],
    inputs: Tensor,
    labels: Tensor,
    *,
    eps: float,
    norm: str = "linf",
    **settings: Any,
) -> AttackResult:
    """Climb each input's lowest loss over the static model and all adapted so far; as `gmsa`."""
    return gmsa(defense, inputs, labels, eps=eps, norm=norm, over="minimum", **settings)


def gmsa(
    defense: DynamicDefense[State],
    inputs: Tensor,
    labels: Tensor,
    *,
    eps: float,
    norm: str = "linf",
    over: str = "minimum",
    rounds: int = 10,
    loss: str = "margin",
    steps: int = 100,
    restarts: int = 1,
    targets: int = 0,
    mask: Tensor | None = None,
    seed: int = 0,
) -> AttackResult:
    """Greedy model space attack: in each round, attack the models so far; what it leads to joins them.

    The batch of a round is what has the highest loss on these models; it is submitted, and the defense
    as adapted to it is the next model. Of all rounds, and of the natural inputs, the batch that breaks
    most is kept whole. The authors attack by PGD with 5 restarts and 9 targets, we by APGD.

    over: how the losses of the models become one, a name of `OVER`.
    targets: how many of the likeliest other classes are targets of further runs in each round.
    """
    view = lookup("combination of models", over, OVER)
    check_numbers(targets=targets or None)
    check_attack(
        inputs, labels, eps=eps, norm=norm, mask=mask, rounds=rounds, steps=steps, restarts=restarts
    )
    inputs, labels = inputs.detach(), labels.long()
    everyone = torch.arange(len(labels), device=labels.device)
    results = [submitted(defense, inputs, labels)]
    towards = [None, *likeliest(results[0].logits, labels, targets)]
    values = [loss_of(loss, labels, classes) for classes in towards]
    states = [defense.adapt(inputs, steps=0, gradient="stale")]
    for number in range(rounds):
        if number > 0:
            states.append(defense.adapt(results[-1].inputs, gradient="stale"))
        calls = Calls(defense, joint=True, mask=mask)
        found = Found(inputs, labels, joint=True, mask=mask)
        for restart in range(restarts):
            for rank, value in enumerate(values):
                models = view(defense, states, partial(value, everyone))
                calls.through = models
                random = generator(seed, number, restart, rank)
                search(calls, found, inputs, value, eps=eps, norm=norm, steps=steps, random=random)
                calls.queries += models.looks
        results.append(calls.score(found.points, labels))
    return strongest(results, mask)


class Average(Generic[State]):
    """All the models, one after the other: the gradients of their losses are averaged."""

    exact: bool = False
    looks: int = 0

    def __init__(self, defense: DynamicDefense[State], states: list[State], loss: Loss) -> None:
        self.defense = defense
        self.states = states

    def __call__(self, points: Tensor) -> Iterator[Tensor]:
        for state in self.states:
            yield self.defense.predict(points, state)


class Minimum(Generic[State]):
    """For each input, the model on which its loss is lowest.

    The lowest are found without a gradient. Then each model that is the lowest of some inputs answers
    with one, to these, and the answers to the others stand beside as constants: so all answers have the
    lowest losses, together they have their gradient (to a factor), and no two graphs are alive at once.
    """

    exact: bool = False

    def __init__(self, defense: DynamicDefense[State], states: list[State], loss: Loss) -> None:
        self.defense = defense
        self.states = states
        self.loss = loss
        self.looks = 0  # at inputs, without a gradient

    def __call__(self, points: Tensor) -> Iterator[Tensor]:
        with torch.no_grad():
            answers = torch.stack([self.defense.predict(points, state) for state in self.states])
            lowest = torch.stack([self.loss(logits) for logits in answers]).argmin(0)
            logits = answers[lowest, torch.arange(len(points), device=points.device)]
        self.looks += len(self.states) * len(points)
        for index in lowest.unique().tolist():
            answer = self.defense.predict(points, self.states[index])
            yield torch.where((lowest == index)[:, None], answer, logits)


def _last(defense: DynamicDefense[State], states: list[State], loss: Loss) -> Average[State]:
    return Average(defense, states[-1:], loss)


# How many models become one.
OVER: dict[str, Callable[..., Average[Any] | Minimum[Any]]] = {
    "last": _last,
    "average": Average,
    "minimum": Minimum,
}
