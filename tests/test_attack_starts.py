"""Attacks that begin at given points, and the order of their targets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_adaptive import Recorder, make_centered, make_dent
from torch import Tensor, nn

from dent.attacks import apgd, apgd_targeted, fab_targeted, pgd
from dent.attacks.norms import DUALS, NORMS, lengths, project
from dent.attacks.search import AttackedModel
from dent.attacks.targets import rank_targets, select_targets

EPS = {"linf": 0.1, "l2": 0.4, "l1": 1.5}


class Watched(nn.Module):
    """A linear model that records what it is asked."""

    def __init__(self, classes: int = 4) -> None:
        super().__init__()
        self.linear = nn.Linear(12, classes).double()
        self.asked: list[Tensor] = []

    def forward(self, inputs: Tensor) -> Tensor:
        self.asked.append(inputs.detach().clone())
        logits: Tensor = self.linear(inputs.flatten(1))
        return logits


def make_task(seed: int = 0, n: int = 6) -> tuple[Watched, Tensor, Tensor]:
    torch.manual_seed(seed)
    model, inputs = Watched(), torch.rand(n, 3, 2, 2).double()
    return model, inputs, model(inputs).argmax(1)


@pytest.mark.parametrize("norm", list(NORMS))
@pytest.mark.parametrize("attack", [pgd, apgd, apgd_targeted])
def test_the_first_run_begins_at_the_start_projected_into_the_ball(attack: Any, norm: str) -> None:
    model, inputs, labels = make_task()
    start = inputs + torch.randn_like(inputs)
    model.asked.clear()
    attack(model, inputs, labels, eps=EPS[norm], norm=norm, steps=2, start=start, joint=True)
    natural, first, *_ = model.asked
    assert torch.equal(natural, inputs)
    torch.testing.assert_close(first, project(start, inputs, eps=EPS[norm], norm=norm))


@pytest.mark.parametrize("norm", list(NORMS))
@pytest.mark.parametrize("attack", [pgd, apgd])
def test_an_attack_is_never_weaker_than_its_start(attack: Any, norm: str) -> None:
    for seed in range(5):
        model, inputs, labels = make_task(seed, n=20)
        start = attack(model, inputs, labels, eps=EPS[norm], norm=norm, steps=3, seed=seed).inputs
        before = model(start).argmax(1) != labels
        for joint in (False, True):
            for steps in (0, 2):
                result = attack(
                    model, inputs, labels, eps=EPS[norm], norm=norm, steps=steps, start=start,
                    joint=joint, seed=1,
                )  # fmt: skip
                assert (result.success | ~before).all()
                distances = lengths(result.inputs - inputs, norm)
                assert (distances <= EPS[norm] * (1 + 1e-9)).all()


@pytest.mark.parametrize("step_size", [0.05, 0.2, None])
def test_the_first_step_of_apgd_has_the_size_that_was_asked_for(step_size: float | None) -> None:
    """One step on a linear model along the sign of the gradient, from the middle of a large ball."""
    model, inputs, _ = make_task()
    inputs, labels = torch.full_like(inputs, 0.5), torch.zeros(len(inputs), dtype=torch.long)
    model.asked.clear()
    apgd(
        model, inputs, labels, eps=0.15, steps=1, start=inputs, step_size=step_size, towards=labels + 1,
        loss="dlr", joint=True,
    )  # fmt: skip
    moved = model.asked[2] - inputs
    size = min(0.3 if step_size is None else step_size, 0.15)
    torch.testing.assert_close(moved.abs(), torch.full_like(moved, size))


def test_other_restarts_begin_at_random_points_and_the_mask_is_kept() -> None:
    model, inputs, labels = make_task()
    start, mask = inputs + 0.02, torch.arange(len(inputs)) % 2 == 0
    for attack in (pgd, apgd):
        model.asked.clear()
        result = attack(
            model, inputs, labels, eps=0.03, steps=1, restarts=2, start=start, joint=True, mask=mask
        )
        asked = [points for points in model.asked if points.shape == inputs.shape]
        at_start = [torch.allclose(points[mask], start.clamp(0, 1)[mask]) for points in asked]
        assert sum(at_start) == 1
        assert all(torch.equal(points[~mask], inputs[~mask]) for points in asked)
        assert torch.equal(result.inputs[~mask], inputs[~mask])


@pytest.mark.parametrize("attack", [pgd, apgd, apgd_targeted])
def test_bad_starts_are_told(attack: Any) -> None:
    model, inputs, labels = make_task()
    for start, message in (
        (inputs[:3], r"expected a point to start from for each input, \(6, 3, 2, 2\)"),
        (inputs.long(), "expected a point to start from"),
        (inputs * torch.nan, "expected finite points to start from"),
    ):
        with pytest.raises(ValueError, match=message):
            attack(model, inputs, labels, eps=0.1, start=start)


@pytest.mark.parametrize("norm", list(NORMS))
def test_targets_by_distance_are_those_of_the_nearest_boundaries_of_a_linear_model(norm: str) -> None:
    model, inputs, labels = make_task(n=30)
    weight, logits = model.linear.weight.detach(), model(inputs).detach()
    gaps = logits.gather(1, labels[:, None]) - logits
    slopes = lengths((weight[labels][:, None] - weight).flatten(0, 1), DUALS[norm]).view(30, 4)
    distances = (gaps / slopes).scatter(1, labels[:, None], torch.inf)  # 0 / 0 at the label
    expected = distances.argsort(1)[:, :3]
    attacked = AttackedModel(model)
    found = rank_targets(attacked, inputs, labels, logits, norm=norm, order="distance")
    assert torch.equal(torch.stack(found, 1), expected)
    two = rank_targets(attacked, inputs, labels, logits, norm=norm, count=2, order="distance")
    assert torch.equal(torch.stack(two, 1), expected[:, :2])
    likeliest = rank_targets(attacked, inputs, labels, logits, norm=norm)
    assert torch.equal(torch.stack(likeliest), torch.stack(select_targets(logits, labels)))
    assert not torch.equal(torch.stack(likeliest, 1), expected)
    assert (attacked.queries, attacked.gradients) == (60, 180)


@pytest.mark.parametrize("attack", [apgd_targeted, fab_targeted])
def test_one_target_by_distance_is_enough_for_a_linear_model(attack: Any) -> None:
    """Class 1 has the higher logit, but class 2 the nearer boundary, at 0.5 / 12 instead of 0.1 / 0.12.

    The directions to the two are opposite, so that the way to the one does not lead to the other.
    """
    model, inputs, _ = make_task()
    inputs, labels = torch.full_like(inputs, 0.5), torch.zeros(len(inputs), dtype=torch.long)
    slopes = torch.tensor([0.0, -0.01, 1.0, 0.0]).double()
    model.linear.weight.data = slopes[:, None].expand(4, 12).clone()
    model.linear.bias.data = torch.tensor([0.0, -0.1, -0.5, -9.0]).double() - 6 * slopes
    torch.testing.assert_close(model(inputs)[0].tolist(), [0.0, -0.1, -0.5, -9.0])
    for eps, breaks in ((0.98 * 0.5 / 12, False), (1.02 * 0.5 / 12, True)):
        by_distance, by_logits = (
            attack(model, inputs, labels, eps=eps, steps=10, targets=1, order=order).success
            for order in ("distance", "logits")
        )
        assert by_distance.all() if breaks else not by_distance.any()
        assert not by_logits.any()
    with pytest.raises(ValueError, match="unknown order of targets 'likeliest'"):
        attack(model, inputs, labels, eps=0.1, order="likeliest")
    with pytest.raises(ValueError, match="expected at most 3 targets"):
        attack(model, inputs, labels, eps=0.1, targets=4, order="distance")


def test_targets_of_a_defense_are_ranked_on_its_adapted_state() -> None:
    tasks: list[tuple[Any, Tensor, Tensor]] = [make_centered(), make_dent(statistics="test")]
    for defense, inputs, labels in tasks:
        recorder: Recorder[Any] = Recorder(defense)
        logits = defense(inputs).detach()
        rank_targets(
            AttackedModel(recorder), inputs, labels, logits, norm="linf", count=1, order="distance"
        )
        assert len(recorder.submitted) == 1
        assert torch.equal(recorder.submitted[0], inputs)
