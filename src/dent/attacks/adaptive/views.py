"""Gradient attacks on views of a defense: a view decides which gradient of the defense is followed.

`unrolled` follows the exact gradient, `averaged` the mean over all states of the adaptation, `short` the
gradient of a defense with fewer updates, and `lazy` that of a defense that adapts only at some steps.
With any view, success is decided by the answer of the whole defense to the submitted batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Generic, Literal, Protocol, TypeVar

import torch
from torch import Tensor

from dent.attacks.adaptive.submission import pick_strongest, submit
from dent.attacks.apgd import apgd
from dent.attacks.checks import Eps, Labels, check_numbers, read_arguments
from dent.attacks.losses import cross_entropy
from dent.attacks.search import AttackResult, Model, View

State = TypeVar("State")
Gradient = Literal["stale", "unrolled"]
GradientAttack = Callable[
    ..., AttackResult
]  # `pgd`, `apgd`, `apgd_targeted`, or one with their arguments
MakeView = Callable[[Any], View]  # makes a view of a model: `Unrolled`, or `partial(Lazy, every=3)`


class DynamicDefense(Protocol[State]):
    """The part of a defense that these attacks need; `dent.Dent` has it.

    `defense(inputs)` is `defense.predict(inputs, defense.adapt(inputs))`.
    """

    def __call__(self, inputs: Tensor) -> Tensor: ...

    def adapt(
        self,
        inputs: Tensor,
        *,
        start: State | None = None,
        steps: int | None = None,
        gradient: Gradient | None = None,
    ) -> State:
        """Return the state after `steps` updates on the inputs, from the static model or from `start`.

        steps: all updates of the defense if it is None. With 0 the state is that of the static model.
        gradient: "stale", the state is a constant; "unrolled", it has a gradient to the inputs.
        """
        ...

    def predict(self, inputs: Tensor, state: State) -> Tensor:
        """Return the logits of the model as adapted in `state`."""
        ...


def unrolled(
    defense: DynamicDefense[State],
    inputs: Tensor,
    labels: Labels,
    *,
    eps: Eps,
    norm: str = "linf",
    attack: GradientAttack = apgd,
    **settings: Any,
) -> AttackResult:
    """Follow the exact gradient of the defense, through every update.

    A stale gradient does not see how a perturbation changes the updates and, through shared parameters,
    the other inputs of the batch. The exact gradient does.

    attack: the gradient attack. settings: its other settings.
    """
    return attack_through_view(
        attack, defense, Unrolled(defense), inputs, labels, eps=eps, norm=norm, **settings
    )


def averaged(
    defense: DynamicDefense[State],
    inputs: Tensor,
    labels: Labels,
    *,
    updates: int,
    sharpness: float = 0.0,
    eps: Eps,
    norm: str = "linf",
    attack: GradientAttack = apgd,
    **settings: Any,
) -> AttackResult:
    """Follow the mean gradient over all states of the adaptation (Croce et al., 2022).

    The last state alone may give no useful gradient; the mean over all states is smoother.

    updates: the number of updates that the defense makes (for dent, `defended.settings.steps`).
    sharpness: weights of the states are softmax(sharpness * cross-entropy), for each input. With 0 they
    are equal; below 0 the states that withstand the attack best count most. Not for `joint=False`.
    attack: the gradient attack. settings: its other settings.
    """
    labels, eps = read_arguments(inputs, labels, eps)
    weigh = partial(_weigh_states, labels.long(), sharpness) if sharpness else None
    view = Averaged(defense, updates, weigh)
    return attack_through_view(attack, defense, view, inputs, labels, eps=eps, norm=norm, **settings)


def short(
    defense: DynamicDefense[State],
    inputs: Tensor,
    labels: Labels,
    *,
    updates: int,
    eps: Eps,
    norm: str = "linf",
    attack: GradientAttack = apgd,
    **settings: Any,
) -> AttackResult:
    """Attack the defense with only `updates` updates, and submit to the full one (Croce et al., 2022).

    That is cheaper, and its gradient can be better than the one behind all updates.

    attack: the gradient attack. settings: its other settings.
    """
    return attack_through_view(
        attack, defense, Short(defense, updates), inputs, labels, eps=eps, norm=norm, **settings
    )


def lazy(
    defense: DynamicDefense[State],
    inputs: Tensor,
    labels: Labels,
    *,
    every: int = 5,
    eps: Eps,
    norm: str = "linf",
    attack: GradientAttack = apgd,
    **settings: Any,
) -> AttackResult:
    """Let the defense adapt only at every `every`-th step of the attack.

    That allows more steps at the same cost, and the steps in between follow a model that stands still.
    With `every=1` it is the attack itself.

    attack: the gradient attack. settings: its other settings.
    """
    return attack_through_view(
        attack, defense, Lazy(defense, every), inputs, labels, eps=eps, norm=norm, **settings
    )


def attack_through_view(
    attack: GradientAttack,
    model: Model,
    view: View,
    inputs: Tensor,
    labels: Labels,
    *,
    eps: Eps,
    joint: bool = True,
    mask: Tensor | None = None,
    draws: int = 1,
    **settings: Any,
) -> AttackResult:
    """Attack the model through the view.

    draws: number of calls of the view at each step; their gradients are averaged, for a random model.

    If the view's last answer was not the model's own, it is unknown whether the last points break
    the model. Then a joint batch of them is submitted too, and the stronger result is returned.
    """
    labels, eps = read_arguments(inputs, labels, eps)
    check_numbers(draws=draws)
    recorder = _LastPoints(view, draws)
    asked = getattr(view, "extra_queries", 0)
    result = attack(model, inputs, labels, eps=eps, through=recorder, joint=joint, mask=mask, **settings)
    result = replace(result, queries=result.queries + getattr(view, "extra_queries", 0) - asked)
    if recorder.exact or recorder.points is None or not joint:
        return result
    return pick_strongest(model, [result, submit(model, recorder.points, labels)], mask)


class Direct:
    """The model's own gradient, as a view."""

    exact: bool = True

    def __init__(self, model: Model) -> None:
        self.model = model

    def __call__(self, points: Tensor) -> Iterator[Tensor]:
        yield self.model(points)


class Unrolled(Generic[State]):
    """The defense with the gradient through its updates."""

    exact: bool = True

    def __init__(self, defense: DynamicDefense[State]) -> None:
        self.defense = defense

    def __call__(self, points: Tensor) -> Iterator[Tensor]:
        yield self.defense.predict(points, self.defense.adapt(points, gradient="unrolled"))


class Averaged(Generic[State]):
    """The defense after 0, 1, ... and `updates` updates, each state a constant.

    It is exact if the defense makes no more updates; the first call finds out.

    weigh: from the logits of all states (states, N, classes) to the weight of each state for each input
    (states, N), which sum to 1 over the states. The states count alike if it is None.
    """

    def __init__(
        self,
        defense: DynamicDefense[State],
        updates: int,
        weigh: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        check_numbers(updates=updates)
        self.defense = defense
        self.updates = updates
        self.weigh = weigh
        self.extra_queries = 0  # inputs asked without a gradient
        self.exact = False
        self._is_checked = False

    def __call__(self, points: Tensor) -> Iterator[Tensor]:
        states: Iterable[State] = follow_states(self.defense, points, self.updates)
        weights = None
        if self.weigh is not None:
            states = list(states)
            with torch.no_grad():
                answers = torch.stack([self.defense.predict(points, state) for state in states])
            self.extra_queries += len(states) * len(points)
            weights = self.weigh(answers) * len(states)
        for number, state in enumerate(states):
            logits = self.defense.predict(points, state)
            yield logits if weights is None else scale_gradient(logits, weights[number])
        if not self._is_checked:
            self.exact, self._is_checked = is_own_answer(self.defense, points, logits), True


def follow_states(defense: DynamicDefense[State], points: Tensor, updates: int) -> Iterator[State]:
    """Yield the states after 0, 1, ... and `updates` updates on the points, as constants."""
    points = points.detach()
    state = defense.adapt(points, steps=0, gradient="stale")
    yield state
    for _ in range(updates):
        state = defense.adapt(points, start=state, steps=1, gradient="stale")
        yield state


def scale_gradient(logits: Tensor, factors: Tensor) -> Tensor:
    """Return the same logits (N, classes), with the gradient of each row multiplied by its factor."""
    still = logits.detach()
    return still + factors[:, None] * (logits - still)


def _weigh_states(labels: Tensor, sharpness: float, answers: Tensor) -> Tensor:
    losses = torch.stack([cross_entropy(logits, labels) for logits in answers])
    return (sharpness * losses).softmax(0)


class Short(Generic[State]):
    """The defense with fewer updates.

    It is exact if the defense makes no more updates; the first call finds out.
    """

    def __init__(self, defense: DynamicDefense[State], updates: int) -> None:
        check_numbers(updates=updates)
        self.defense = defense
        self.updates = updates
        self.exact = False
        self._is_checked = False

    def __call__(self, points: Tensor) -> Iterator[Tensor]:
        state = self.defense.adapt(points, steps=self.updates)
        logits = self.defense.predict(points, state)
        yield logits
        if not self._is_checked:
            self.exact, self._is_checked = is_own_answer(self.defense, points, logits), True


class Lazy(Generic[State]):
    """The defense, adapted at every `every`-th call and frozen in between.

    It is exact at the calls that adapt. It also adapts when the number of points changes, since a state
    can have a row per point. (Inputs only ever leave a search: the same number means the same inputs.)
    """

    def __init__(self, defense: DynamicDefense[State], every: int = 5) -> None:
        check_numbers(every=every)
        self.defense = defense
        self.every = every
        self.exact = False
        self._state: State  # of the last adaptation, to `_count` points, `_age` calls ago
        self._count = -1
        self._age = 0

    def __call__(self, points: Tensor) -> Iterator[Tensor]:
        self.exact = self._age == 0 or self._count != len(points)
        if self.exact:
            self._state = self.defense.adapt(points.detach(), gradient="stale")
            self._count, self._age = len(points), 0
        self._age = (self._age + 1) % self.every
        yield self.defense.predict(points, self._state)


class _LastPoints:
    """A view that is asked `draws` times in each call, and remembers the points of its last call."""

    def __init__(self, view: View, draws: int = 1) -> None:
        self.view = view
        self.draws = draws
        self.exact = view.exact
        self.own: Tensor | None = None
        self.points: Tensor | None = None

    def __call__(self, points: Tensor) -> Iterator[Tensor]:
        self.points = points.detach().clone()
        for _ in range(self.draws):
            yield from self.view(points)
        self.exact, self.own = self.view.exact, getattr(self.view, "own", None)


def is_own_answer(defense: Model, points: Tensor, logits: Tensor) -> bool:
    """Return True if the defense itself gives these logits, so that no update was left out."""
    with torch.no_grad():
        return torch.allclose(defense(points.detach()), logits.detach(), rtol=1e-4, atol=1e-5)
