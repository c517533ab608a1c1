"""Each view has the gradient that it promises, for any defense with `adapt` and `predict`."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any, Generic

import pytest
import torch
import torch.nn.functional as F
from nets import randomized, small
from torch import Tensor, nn

import dent
from dent.attacks import adaptive, apgd, pgd
from dent.attacks.adaptive import Averaged, Direct, DynamicDefense, Lazy, Short, Unrolled
from dent.attacks.adaptive.views import Gradient, State
from dent.attacks.search import AttackedModel, View

EPS = 0.03


class Centered:
    """A dynamic defense with a closed form: each update moves halfway to the batch's mean.

    After k updates the state is (1 - 2^-k) times the mean, which is subtracted from the inputs.
    """

    def __init__(self, linear: nn.Linear, updates: int = 3, gradient: Gradient = "stale") -> None:
        self.linear = linear
        self.updates = updates
        self.gradient = gradient

    def adapt(
        self,
        inputs: Tensor,
        *,
        start: Tensor | None = None,
        steps: int | None = None,
        gradient: Gradient | None = None,
    ) -> Tensor:
        source = inputs if (gradient or self.gradient) == "unrolled" else inputs.detach()
        state = torch.zeros_like(source[0]) if start is None else start
        for _ in range(self.updates if steps is None else steps):
            state = state + (source.mean(0) - state) / 2
        return state

    def predict(self, inputs: Tensor, state: Tensor) -> Tensor:
        logits: Tensor = self.linear((inputs - state).flatten(1))
        return logits

    def __call__(self, inputs: Tensor) -> Tensor:
        return self.predict(inputs, self.adapt(inputs))


class Recorder(Generic[State]):
    """A wrapper that records the calls of a defense."""

    def __init__(self, defense: DynamicDefense[State]) -> None:
        self.defense = defense
        self.adapted: list[Tensor] = []
        self.predicted: list[tuple[Tensor, State]] = []
        self.submitted: list[Tensor] = []

    def adapt(
        self,
        inputs: Tensor,
        *,
        start: State | None = None,
        steps: int | None = None,
        gradient: Gradient | None = None,
    ) -> State:
        self.adapted.append(inputs.detach().clone())
        return self.defense.adapt(inputs, start=start, steps=steps, gradient=gradient)

    def predict(self, inputs: Tensor, state: State) -> Tensor:
        self.predicted.append((inputs.detach().clone(), state))
        return self.defense.predict(inputs, state)

    def __call__(self, inputs: Tensor) -> Tensor:
        self.submitted.append(inputs.detach().clone())
        return self.defense(inputs)


def make_centered(updates: int = 3) -> tuple[Centered, Tensor, Tensor]:
    """Return a `Centered` defense, inputs near its boundaries, and its predictions as labels."""
    defense = Centered(nn.Linear(12, 4).double(), updates)
    inputs = torch.rand(8, 3, 2, 2).double()
    return defense, inputs, defense(inputs).argmax(1)


def make_dent(**settings: Any) -> tuple[dent.Dent, Tensor, Tensor]:
    """Return dent with shared parameters on a small network, inputs, and its predictions as labels."""
    net = randomized(small(nn.BatchNorm2d(8)))
    defense = dent.Dent(net, dent.Settings(**{"steps": 3, "lr": 0.02} | settings))
    inputs = torch.rand(6, 3, 6, 6, dtype=torch.double)
    return defense, inputs, defense(inputs).argmax(1)


def count_broken(defense: Any, batch: Tensor, labels: Tensor) -> int:
    return int((defense(batch).argmax(1) != labels).sum())


def compute_view_gradient(model: Any, view: View, inputs: Tensor, labels: Tensor) -> Tensor:
    """Return the gradient of the cross-entropy that an attack sees through the view."""
    loss = partial(F.cross_entropy, target=labels, reduction="none")
    return AttackedModel(model, through=view, joint=True).differentiate(inputs, loss).gradient


def compute_gradient(logits: Callable[[Tensor], Tensor], inputs: Tensor, labels: Tensor) -> Tensor:
    inputs = inputs.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(F.cross_entropy(logits(inputs), labels, reduction="sum"), inputs)
    return gradient


def compute_logit_gradient(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the gradient of the cross-entropy with respect to the logits."""
    return logits.detach().softmax(1) - F.one_hot(labels, logits.shape[1])


def test_the_gradients_of_a_defense_with_a_closed_form() -> None:
    defense, inputs, labels = make_centered(updates=3)
    weight = defense.linear.weight.detach()
    states = [(1 - 2.0**-k) * inputs.mean(0) for k in range(4)]
    wrong = [compute_logit_gradient(defense.predict(inputs, state), labels) for state in states]
    expected: dict[View, Tensor] = {
        Direct(defense): wrong[3],
        Unrolled(defense): wrong[3] - (1 - 2.0**-3) * wrong[3].mean(0),
        Averaged(defense, 3): torch.stack(wrong).mean(0),
        Short(defense, 2): wrong[2],
        Short(Centered(defense.linear, 3, "unrolled"), 1): wrong[1] - 0.5 * wrong[1].mean(0),
    }
    for view, error in expected.items():
        gradient = compute_view_gradient(defense, view, inputs, labels)
        torch.testing.assert_close(gradient.flatten(1), error @ weight)


@pytest.mark.parametrize(
    "settings", [{}, {"statistics": "test"}, {"affine": "sample", "optimizer": "adamod"}], ids=str
)
def test_the_gradients_of_dent(settings: dict[str, Any]) -> None:
    defense, inputs, labels = make_dent(**settings)

    def after(steps: int) -> Callable[[Tensor], Tensor]:
        return lambda points: defense.predict(points, defense.adapt(points.detach(), steps=steps))

    by_steps = [compute_gradient(after(steps), inputs, labels) for steps in range(4)]
    through = compute_gradient(lambda points: defense(points, gradient="unrolled"), inputs, labels)
    assert not torch.allclose(through, by_steps[3], rtol=1e-2)
    expected: dict[View, Tensor] = {
        Unrolled(defense): through,
        Averaged(defense, 3): torch.stack(by_steps).mean(0),
        Short(defense, 2): by_steps[2],
        Lazy(defense): by_steps[3],
    }
    for view, gradient in expected.items():
        torch.testing.assert_close(compute_view_gradient(defense, view, inputs, labels), gradient)


def test_averages_of_an_unrolled_defense_take_its_states_as_constants() -> None:
    stale, inputs, labels = make_dent()
    unrolled = dent.Dent(stale.model, stale.settings.replace(gradient="unrolled"))
    for view in (Averaged, Lazy):
        gradients = [
            compute_view_gradient(one, view(one, 3), inputs, labels) for one in (stale, unrolled)
        ]
        torch.testing.assert_close(*gradients)


def test_views_are_exact_where_no_update_is_left_out() -> None:
    tasks: list[tuple[DynamicDefense[Any], Tensor, Tensor]] = [
        make_centered(updates=3),
        make_dent(steps=3),
    ]
    for defense, inputs, labels in tasks:
        views: list[tuple[View, bool]] = [
            (Direct(defense), True),
            (Unrolled(defense), True),
            (Averaged(defense, 3), True),
            (Averaged(defense, 2), False),
            (Short(defense, 3), True),
            (Short(defense, 2), False),
        ]
        for view, exact in views:
            compute_view_gradient(defense, view, inputs, labels)
            assert view.exact == exact, view


@pytest.mark.parametrize("attack", [apgd, pgd])
def test_lazy_at_every_step_is_the_attack_itself(attack: Any) -> None:
    defense, inputs, labels = make_dent(statistics="test")
    plain = attack(defense, inputs, labels, eps=EPS, steps=6, joint=True)
    lazy = adaptive.lazy(defense, inputs, labels, every=1, eps=EPS, steps=6, attack=attack)
    assert torch.equal(lazy.inputs, plain.inputs)
    assert torch.equal(lazy.logits, plain.logits)
    assert not torch.equal(plain.inputs, inputs)
    if attack is apgd:  # its last point is one that it has asked for before
        assert (lazy.queries, lazy.gradients) == (plain.queries, plain.gradients)


@pytest.mark.parametrize("every", [1, 3, 4, 100])
def test_lazy_adapts_at_every_so_many_calls(every: int) -> None:
    defense, inputs, labels = make_dent(steps=1)
    recorder = Recorder(defense)
    adaptive.lazy(recorder, inputs, labels, every=every, eps=EPS, steps=10)
    asked = [points for points, _ in recorder.predicted]
    assert len(asked) == 11
    assert len(recorder.adapted) == math.ceil(11 / every)
    for adapted, points in zip(recorder.adapted, asked[::every], strict=True):
        assert torch.equal(adapted, points)


def test_lazy_adapts_when_inputs_leave() -> None:
    defense, inputs, labels = make_dent(affine="sample", reduction="sum", steps=1)
    assert defense.settings.independent
    recorder = Recorder(defense)
    result = adaptive.lazy(recorder, inputs, labels, every=5, eps=EPS, steps=20, joint=False)
    counts = [len(points) for points, _ in recorder.predicted]
    changes = sum(one != other for one, other in pairwise(counts))
    assert changes > 0
    assert {len(points) for points in recorder.adapted} == set(counts)
    assert result.success.any()


def test_the_last_points_are_submitted_where_the_view_does_not_know_what_they_do() -> None:
    defense, inputs, labels = make_dent(statistics="test")
    for attack, exact in (
        (partial(adaptive.lazy, every=4), False),
        (partial(adaptive.lazy, every=5), True),
        (partial(adaptive.short, updates=1), False),
        (partial(adaptive.averaged, updates=3), True),
    ):
        recorder = Recorder(defense)
        result = attack(recorder, inputs, labels, eps=EPS, steps=10)
        last, _ = recorder.predicted[-1]
        alike = [torch.equal(batch, last) for batch in recorder.submitted]
        assert alike[-1] == (not exact)
        most = max(count_broken(defense, batch, labels) for batch in recorder.submitted)
        assert int(result.success.sum()) == most


def test_the_exact_gradient_breaks_what_a_stale_one_cannot() -> None:
    """The defense subtracts common changes of all inputs, and the stale gradient changes all alike.

    The difference of the logits is 12 (x - mean) + bias for images of one gray x: 0.25 for the last
    one. If it goes down by eps while the others go up, that falls by 18 eps.
    """
    linear = nn.Linear(12, 2).double()
    linear.weight.data = torch.stack([torch.ones(12), -torch.ones(12)]).double() / 2
    linear.bias.data = torch.tensor([0.43, 0.0]).double()
    inputs = torch.tensor([0.5, 0.5, 0.5, 0.48]).double()[:, None, None, None].expand(4, 3, 2, 2)
    labels, defense = torch.zeros(4, dtype=torch.long), Centered(linear, updates=40)
    torch.testing.assert_close(defense(inputs).diff(dim=1)[3].item(), -0.25)
    for eps, breaks in ((0.015, True), (0.013, False)):
        stale = apgd(defense, inputs, labels, eps=eps, steps=20, joint=True)
        exact = adaptive.unrolled(defense, inputs, labels, eps=eps, steps=20)
        assert not stale.success.any()
        assert exact.success.tolist() == [False, False, False, breaks]
