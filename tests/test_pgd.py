"""PGD reaches the worst point of the ball where it is known, and stays in the ball."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from scipy.optimize import minimize
from torch import Tensor, nn

from dent.attacks import pgd
from dent.attacks.losses import margin
from dent.attacks.norms import NORMS, lengths, project, sample_in_ball
from dent.models import CifarResNet


@pytest.fixture
def linear() -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 2)).double()


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("loss", ["ce", "margin"])
def test_the_worst_point_of_a_linear_model(linear: nn.Sequential, norm: str, loss: str) -> None:
    inputs = torch.rand(6, 3, 2, 2).double() * 0.2 + 0.4  # far enough from 0 and 1
    labels = torch.arange(6) % 2
    weight = linear.get_parameter("1.weight").detach()
    away = (weight[1 - labels] - weight[labels]).view_as(inputs)
    if norm == "l1":  # the whole perturbation is on the largest value
        flat = away.flatten(1)
        direction = (
            torch.zeros_like(flat).scatter(1, flat.abs().argmax(1, keepdim=True), 1) * flat.sign()
        )
        direction = direction.view_as(inputs)
    else:
        direction = away.sign() if norm == "linf" else away / lengths(away, norm)
    # No input leaves a joint batch, so all of them reach the end.
    result = pgd(
        linear, inputs, labels, eps=0.1, norm=norm, loss=loss, steps=60, step_size=0.1, joint=True
    )
    torch.testing.assert_close(result.inputs, inputs + 0.1 * direction, atol=1e-4, rtol=0)
    torch.testing.assert_close(result.logits, linear(result.inputs))
    assert torch.equal(result.success, result.logits.argmax(1) != labels)


@pytest.mark.parametrize("norm", ["linf", "l2"])
@pytest.mark.parametrize("steps", [1, 7])
def test_the_same_points_as_foolbox(norm: str, steps: int) -> None:
    net = CifarResNet(1).eval()
    inputs, labels = torch.rand(4, 3, 8, 8), torch.tensor([0, 3, 5, 9])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scipy's, about foolbox's imports
        import foolbox
    eps, size = (0.03, 0.01) if norm == "linf" else (0.5, 0.2)
    attack = foolbox.attacks.LinfPGD if norm == "linf" else foolbox.attacks.L2PGD
    theirs, _, _ = attack(abs_stepsize=size, steps=steps, random_start=False)(
        foolbox.PyTorchModel(net, bounds=(0, 1), device="cpu"), inputs, labels, epsilons=eps
    )
    ours = pgd(
        net, inputs, labels, eps=eps, norm=norm, steps=steps, step_size=size, start="input", joint=True
    )
    torch.testing.assert_close(ours.inputs, theirs, atol=1e-5, rtol=0)


@given(
    norm=st.sampled_from(list(NORMS)),
    eps=st.floats(0, 3),
    seed=st.integers(0, 1000),
    far=st.floats(0.01, 10),
)
def test_projection_ends_in_both_sets_and_moves_nothing_twice(
    norm: str, eps: float, seed: int, far: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.rand(3, 2, 4, 4, generator=generator, dtype=torch.double)
    points = inputs + far * torch.randn(3, 2, 4, 4, generator=generator, dtype=torch.double)
    projected = project(points, inputs, eps=eps, norm=norm)
    assert projected.min() >= 0
    assert projected.max() <= 1
    assert (lengths(projected - inputs, norm) <= eps + 1e-9).all()
    torch.testing.assert_close(project(projected, inputs, eps=eps, norm=norm), projected)


def test_the_projection_to_l1_is_the_nearest_point() -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.rand(12, 1, 2, 3, generator=generator, dtype=torch.double)
    points = inputs + 0.5 * torch.randn(12, 1, 2, 3, generator=generator, dtype=torch.double)
    projected = project(points, inputs, eps=0.6, norm="l1")
    for point, center, ours in zip(points, inputs, projected, strict=True):
        x, y = center.flatten().numpy(), point.flatten().numpy()

        # The problem is smooth in the positive and the negative part of the difference.
        def distance(parts: Any, x: Any = x, y: Any = y) -> float:
            return float(((x + parts[:6] - parts[6:] - y) ** 2).sum())

        limits: Any = [*((0, 1 - value) for value in x), *((0, value) for value in x)]
        in_the_ball: Any = {"type": "ineq", "fun": lambda parts: 0.6 - parts.sum()}
        best: Any = minimize(
            distance,
            np.full(12, 0.01),
            bounds=limits,
            constraints=in_the_ball,
            method="SLSQP",
            tol=1e-12,
        )
        np.testing.assert_allclose(ours.flatten().numpy(), x + best.x[:6] - best.x[6:], atol=1e-4)


@pytest.mark.parametrize("norm", NORMS)
def test_random_points_are_uniform_in_the_ball(norm: str) -> None:
    points = sample_in_ball(torch.Size([4000, 1, 2, 2]), norm, torch.Generator().manual_seed(0))
    radius = lengths(points, norm).flatten()
    # A ball of radius r holds the share r^4 of the volume.
    assert stats.kstest((radius**4).numpy(), "uniform").pvalue > 0.01
    assert abs(float(points.mean())) < 0.02


def test_restarts_break_at_least_as_many(net: nn.Module, images: Tensor) -> None:
    labels = net(images).argmax(1)
    budget: dict[str, Any] = {"eps": 0.02, "steps": 3, "step_size": 0.01}
    once, often = (pgd(net, images, labels, restarts=restarts, **budget) for restarts in (1, 5))
    assert (often.success | ~once.success).all()
    budget |= {"eps": 1e-9, "step_size": 1e-9}  # nothing breaks: count starts, steps and two scores
    often = pgd(net, images, labels, restarts=5, **budget)
    assert (often.queries, often.gradients) == (5 * (5 * 4 + 2), 5 * 5 * 3)
    torch.testing.assert_close(often.logits, net(often.inputs))


@pytest.mark.parametrize("loss", ["ce", "margin", "dlr"])
def test_targets_are_reached(net: nn.Module, images: Tensor, loss: str) -> None:
    labels, targets = net(images).topk(2).indices.T
    result = pgd(net, images, labels, eps=0.3, steps=30, towards=targets.int(), loss=loss)
    assert result.success.all()
    assert torch.equal(net(result.inputs).argmax(1), targets)


def test_eps_zero_and_no_steps_leave_the_inputs(net: nn.Module, images: Tensor) -> None:
    labels = net(images).argmax(1)
    for settings in ({"eps": 0.0}, {"eps": 0.1, "steps": 0, "start": "input"}):
        result = pgd(net, images, labels, **settings)
        assert torch.equal(result.inputs, images)
        assert not result.success.any()


def test_the_seed_decides(net: nn.Module, images: Tensor) -> None:
    labels = net(images).argmax(1)
    first, same, other = (pgd(net, images, labels, eps=0.1, steps=1, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(first.inputs, same.inputs)
    assert not torch.equal(first.inputs, other.inputs)


def test_margin_is_positive_where_misclassified() -> None:
    logits, labels = torch.randn(50, 7), torch.randint(7, (50,))
    assert torch.equal(margin(logits, labels) > 0, logits.argmax(1) != labels)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"eps": -1}, "expected eps >= 0, got -1"),
        ({"eps": 1, "norm": "l7"}, "unknown norm 'l7'"),
        ({"eps": 1, "steps": -1}, "expected steps >= 0, got -1"),
        ({"eps": 1, "step_size": 0.0}, "expected step_size > 0"),
        ({"eps": 1, "restarts": 0}, "expected restarts >= 1, got 0"),
        ({"eps": 1, "loss": "cee"}, "unknown loss 'cee'; did you mean 'ce'"),
        ({"eps": 1, "start": "there"}, "expected start 'random', 'input' or points"),
    ],
)
def test_invalid_settings_raise(net: nn.Module, images: Tensor, settings: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pgd(net, images, torch.zeros(5, dtype=torch.long), **settings)
