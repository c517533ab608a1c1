"""Chained attacks, trajectory minima, weighted averages, few updates and balanced targets."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from scipy.optimize import linear_sum_assignment
from test_adaptive import Recorder, compute_view_gradient, count_broken, make_centered, make_dent
from torch import Tensor

from dent.attacks import AttackResult, adaptive, apgd
from dent.attacks.adaptive import Averaged, Trajectory, assign_evenly
from dent.attacks.adaptive.balanced import solve_assignment
from dent.attacks.adaptive.submission import pick_strongest
from dent.attacks.losses import margin
from dent.attacks.search import AttackedModel

SETTINGS: dict[str, Any] = {"eps": 0.03, "steps": 4, "seed": 5}


def make_static(defense: Any) -> Any:
    return lambda points: defense.predict(points, defense.adapt(points, steps=0))


def test_a_chain_begins_each_stage_at_the_strongest_batch_so_far() -> None:
    defense, inputs, labels = make_dent(statistics="test", lr=0.1)
    static = make_static(defense)
    recorder = Recorder(defense)
    result = adaptive.chained(
        recorder, static, inputs, labels, every=2, rounds=2, loss="margin", **SETTINGS
    )
    first = apgd(static, inputs, labels, joint=True, loss="margin", **SETTINGS).inputs
    assert torch.equal(recorder.submitted[0], inputs)
    torch.testing.assert_close(recorder.submitted[1], first)
    torch.testing.assert_close(recorder.adapted[0], first)  # lazy starts there
    asked = [points for points, _ in recorder.predicted]
    torch.testing.assert_close(asked[0], first)
    assert float((asked[1] - asked[0]).abs().max()) <= 0.03 + 1e-9  # half of the usual first step
    counts = [count_broken(defense, batch, labels) for batch in recorder.submitted]
    assert int(result.success.sum()) >= max(counts)


def test_fpa_from_a_start_attacks_the_model_as_adapted_to_it() -> None:
    defense, inputs, labels = make_dent(statistics="test")
    start = (inputs + 0.02).clamp(0, 1)
    recorder = Recorder(defense)
    result = adaptive.fpa(recorder, inputs, labels, rounds=2, start=start, **SETTINGS)
    natural, given, *rounds = recorder.submitted
    assert torch.equal(natural, inputs)
    torch.testing.assert_close(given, start)
    for seen, batch in zip(recorder.adapted, [start, rounds[0]], strict=True):
        torch.testing.assert_close(seen, batch)
    torch.testing.assert_close(recorder.predicted[0][0], start)
    counts = [count_broken(defense, batch, labels) for batch in recorder.submitted]
    assert int(result.success.sum()) == max(counts)


def test_the_trajectory_s_gradient_is_that_of_each_input_s_lowest_state() -> None:
    """An independent loop: every state from scratch, the minimum by autograd."""
    defense, inputs, labels = make_dent(statistics="test", lr=0.3)
    labels = (labels + torch.arange(len(labels)) % 2) % 4  # the updates confirm the right ones only
    loss = partial(margin, labels=labels)
    points = inputs.clone().requires_grad_()
    losses = torch.stack(
        [loss(defense.predict(points, defense.adapt(inputs, steps=steps))) for steps in range(4)]
    )
    lowest, where = losses.min(0)
    assert len(where.unique()) > 1
    (gradient,) = torch.autograd.grad(lowest.sum(), points)
    view = Trajectory(defense, 3, 1, loss)
    answer = AttackedModel(defense, through=view, joint=True).differentiate(inputs, loss)
    torch.testing.assert_close(answer.values, lowest.detach())
    torch.testing.assert_close(
        F.normalize(answer.gradient.flatten(1)), F.normalize(gradient.flatten(1)), rtol=1e-5, atol=1e-9
    )


@pytest.mark.parametrize("every", [1, 3])
def test_a_trajectory_is_refreshed_at_every_so_many_steps(every: int) -> None:
    defense, inputs, labels = make_centered(updates=2)
    recorder = Recorder(defense)
    result = adaptive.trajectory(
        recorder, inputs, labels, updates=2, every=every, **SETTINGS | {"steps": 5}
    )
    assert len(recorder.adapted) == 3 * -(-6 // every)  # states after 0, 1 and 2 updates
    counts = [count_broken(defense, points, labels) for points in recorder.adapted[::3]]
    assert int(result.success.sum()) >= max(counts)  # where the states follow, it knows what breaks
    torch.testing.assert_close(result.logits, defense(result.inputs))


def test_a_trajectory_of_one_state_is_an_attack_on_the_static_model() -> None:
    defense, inputs, labels = make_dent()
    alone = apgd(make_static(defense), inputs, labels, joint=True, loss="margin", **SETTINGS)
    recorder = Recorder(defense)
    adaptive.trajectory(recorder, inputs, labels, updates=0, every=100, **SETTINGS)
    assert any(torch.allclose(batch, alone.inputs) for batch in recorder.submitted)


@pytest.mark.parametrize("sharpness", [0.0, 2.0, -2.0, 100.0])
def test_weighted_averages_by_a_plain_sum(sharpness: float) -> None:
    defense, inputs, labels = make_dent(statistics="test", lr=0.3)

    def weigh(answers: Tensor) -> Tensor:
        losses = [F.cross_entropy(logits, labels, reduction="none") for logits in answers]
        return (sharpness * torch.stack(losses)).softmax(0)

    points = inputs.clone().requires_grad_()
    logits = [defense.predict(points, defense.adapt(inputs, steps=steps)) for steps in range(4)]
    losses = torch.stack([F.cross_entropy(one, labels, reduction="none") for one in logits])
    weights = (sharpness * losses.detach()).softmax(0)
    (expected,) = torch.autograd.grad((weights * losses).sum(), points)
    view = Averaged(defense, 3, weigh)
    torch.testing.assert_close(compute_view_gradient(defense, view, inputs, labels), expected)
    assert view.exact
    if sharpness == 0:
        plain = compute_view_gradient(defense, Averaged(defense, 3), inputs, labels)
        torch.testing.assert_close(plain, expected)


def test_denying_most_updates_searches_behind_few_updates() -> None:
    defense, inputs, labels = make_dent(statistics="test", steps=4)
    recorder = Recorder(defense)
    result = adaptive.denying_most_updates(
        recorder, inputs, labels, updates=1, attacks=("apgd-margin",), **SETTINGS
    )
    shortened = lambda points: defense.predict(points, defense.adapt(points.detach(), steps=1))  # noqa: E731
    alone = apgd(shortened, inputs, labels, joint=True, loss="margin", **SETTINGS)
    (submitted,) = recorder.submitted
    torch.testing.assert_close(submitted, alone.inputs)
    torch.testing.assert_close(result.logits, defense(submitted))
    with pytest.raises(ValueError, match="expected updates >= 0, got -1"):
        adaptive.denying_most_updates(defense, inputs, labels, updates=-1, **SETTINGS)


@pytest.mark.parametrize("independent", [True, False, None])
def test_the_best_point_of_each_input_is_kept_where_inputs_are_independent(
    independent: bool | None,
) -> None:
    class Model:
        def __init__(self) -> None:
            self.independent = independent

        def __call__(self, inputs: Tensor) -> Tensor:
            return inputs

    success = torch.tensor([[True, False, False, False], [False, True, True, False]])
    results = [
        AttackResult(torch.full((4, 2), float(number)), row, torch.full((4, 3), float(number)), 4, 2)
        for number, row in enumerate(success)
    ]
    best = pick_strongest(Model(), results)
    assert (best.queries, best.gradients) == (8, 4)
    combined = [True, True, True, False] if independent else [False, True, True, False]
    assert best.success.tolist() == combined
    assert best.inputs[:, 0].tolist() == ([0, 1, 1, 1] if independent else [1, 1, 1, 1])
    assert torch.equal(best.inputs[:, :1], best.logits[:, :1])


@pytest.mark.parametrize(
    ("rows", "columns", "capacity"),
    [(1, 2, 1), (7, 7, 1), (30, 4, 8), (30, 4, 30), (128, 10, 13), (40, 300, 1)],
)
@pytest.mark.parametrize("kind", ["normal", "ties", "forbidden"])
def test_assignments_are_optimal(rows: int, columns: int, capacity: int, kind: str) -> None:
    """scipy solves the same problem with every column repeated as often as it may be used."""
    random = torch.Generator().manual_seed(rows * columns)
    costs = torch.randn(rows, columns, generator=random, dtype=torch.float64)
    if kind == "ties":
        costs = costs.round()
    if kind == "forbidden":
        costs[torch.arange(rows), torch.arange(rows) % columns] = torch.inf
    found = solve_assignment(costs, capacity)
    assert int(found.bincount().max()) <= capacity
    at, chosen = linear_sum_assignment(costs.repeat_interleave(capacity, 1).numpy())
    best = costs[torch.as_tensor(at), torch.as_tensor(chosen) // capacity].sum()
    torch.testing.assert_close(costs[torch.arange(rows), found].sum(), best)


@pytest.mark.parametrize("classes", [2, 3, 10, 50])
@pytest.mark.parametrize("count", [0, 1, 2, 12, 40])
@pytest.mark.parametrize("skewed", [False, True])
def test_even_targets_are_wrong_and_as_even_as_the_labels_allow(
    classes: int, count: int, skewed: bool
) -> None:
    random = torch.Generator().manual_seed(classes + count)
    labels = torch.randint(1 if skewed else classes, (count,), generator=random)
    scores = torch.randn(count, classes, generator=random)
    targets = assign_evenly(scores, labels)
    assert (targets != labels).all()
    if count:
        most = int(labels.bincount().max())
        even = max(-(-count // classes), -(-most // (classes - 1)))
        assert int(targets.bincount().max()) == even


def test_balanced_targets_fill_every_class_of_a_linear_model() -> None:
    """With a radius that reaches every class, the answers are wrong and spread evenly."""
    defense, inputs, labels = make_centered(updates=1)
    static, recorder = make_static(defense), Recorder(defense)
    result = adaptive.balanced(recorder, static, inputs, labels, eps=1.0, steps=40, every=2, rounds=3)
    assert result.success.all()
    torch.testing.assert_close(result.logits, defense(result.inputs))
    even = max(2, -(-int(labels.bincount().max()) // 3))
    counts = [defense(batch).argmax(1).bincount(minlength=4).max() for batch in recorder.submitted]
    assert min(counts) <= even  # of eight inputs and four classes
    ends = defense(recorder.submitted[-1]).argmax(1)
    assert (ends != labels).all()
