"""APGD takes the same walk as the reference, and reaches the best loss where it is known."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pyautoattack.autopgd_base import APGDAttack, APGDAttack_targeted
from torch import Tensor, nn

import dent
from dent.attacks import apgd, apgd_targeted
from dent.attacks.apgd import Momentum, walk
from dent.attacks.losses import LOSSES, dlr, make_loss, margin, targeted_dlr
from dent.attacks.norms import lengths, project
from dent.attacks.search import AttackedModel, BestPoints

NORMS = {"linf": "Linf", "l2": "L2", "l1": "L1"}
EPS = {"linf": 6 / 255, "l2": 0.7, "l1": 10.0}


@pytest.fixture
def task() -> tuple[nn.Module, Tensor, Tensor]:
    """Return a robust model and images that it classifies correctly; some are hard to break."""
    net = dent.load_model("resnet20-at")
    inputs, labels = dent.load_data("cifar10", n=48)
    with torch.no_grad():
        right = (net(inputs).argmax(1) == labels).nonzero().squeeze(1)[:24]
    return net, inputs[right], labels[right]


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("loss", ["ce", "dlr"])
def test_the_same_walk_as_the_reference(
    task: tuple[nn.Module, Tensor, Tensor], norm: str, loss: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, inputs, labels = task
    # The reference counts values that differ by rounding only as changed.
    count = "pyautoattack.autopgd_base.L0_norm"
    monkeypatch.setattr(count, lambda difference: (difference.abs() > 1e-6).flatten(1).sum(1))
    eps, steps = EPS[norm], 20 if norm == "l1" else 50
    theirs = APGDAttack(net, n_iter=steps, norm=NORMS[norm], eps=eps, loss=loss, seed=0, device="cpu")
    theirs.init_hyperparam(inputs)
    start = (inputs + eps * (2 * torch.rand_like(inputs) - 1) / 10).clamp(0, 1)
    if norm == "l1":
        start = project(inputs + torch.randn_like(inputs), inputs, eps=eps, norm=norm)
    their_points, standing, best_loss, _ = theirs.attack_single_run(inputs, labels, x_init=start)
    best = BestPoints(inputs, labels)
    walk(
        AttackedModel(net), best, inputs, start, make_loss(loss, labels), eps=eps, norm=norm, steps=steps
    )
    assert torch.equal(~best.broken, standing.bool())
    assert 0 < int(best.broken.sum()) < len(inputs)  # otherwise the test proves little
    stands = ~best.broken
    # Rounding can lead one input elsewhere; all others take the same walk to the end.
    same = (best.values - best_loss).abs() <= 1e-4 + 1e-3 * best_loss.abs()
    assert int((stands & ~same).sum()) <= 1
    apart = lengths(best.points - their_points, "linf").flatten()[stands & same]
    assert (apart <= (eps / 50 if norm != "l1" else 0.05)).all()


@pytest.mark.parametrize("norm", NORMS)
def test_as_strong_as_the_reference(task: tuple[nn.Module, Tensor, Tensor], norm: str) -> None:
    net, inputs, labels = task
    eps = EPS[norm]
    inputs, labels = inputs[:12], labels[:12]
    settings: dict[str, Any] = {"n_iter": 20, "norm": NORMS[norm], "eps": eps, "device": "cpu"}
    settings["use_largereps"] = norm == "l1"
    theirs = APGDAttack_targeted(net, n_target_classes=4, seed=0, **settings)
    reference = net(theirs.perturb(inputs, labels)).argmax(1) != labels
    ours = apgd_targeted(net, inputs, labels, targets=4, eps=eps, norm=norm, steps=20).success
    assert abs(int(ours.sum()) - int(reference.sum())) <= 1
    assert int((ours == reference).sum()) >= 11


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("loss", ["ce", "margin"])
def test_the_worst_point_of_a_linear_model(norm: str, loss: str) -> None:
    linear = nn.Sequential(nn.Flatten(), nn.Linear(12, 2)).double()
    inputs = torch.rand(6, 3, 2, 2).double() * 0.2 + 0.4
    weight = linear.get_parameter("1.weight").detach()
    labels = linear(inputs).argmax(1)
    away = (weight[1 - labels] - weight[labels]).view_as(inputs)
    if norm == "l1":  # the whole perturbation is on the largest value
        largest = away.abs() == away.abs().amax((1, 2, 3), keepdim=True)
        direction = away.sign() * largest
    else:
        direction = away.sign() if norm == "linf" else away / lengths(away, "l2")
    eps = 0.02
    expected = margin(linear(inputs + eps * direction), labels)
    result = apgd(linear, inputs, labels, eps=eps, norm=norm, loss=loss, steps=100)
    reached = margin(result.logits, labels)
    stands = expected < 0
    torch.testing.assert_close(reached[stands], expected[stands], rtol=1e-3, atol=1e-4)
    assert torch.equal(result.success, expected > 0)


def test_the_checkpoints_of_other_lengths() -> None:
    for steps in (1, 2, 5, 20, 37, 1000):
        gaps = Momentum.checkpoints(steps)
        assert max(gaps) <= steps
        assert list(gaps) == torch.tensor(list(gaps.values())).cumsum(0).tolist()
        assert all(gap >= max(int(0.06 * steps), 1) for gap in gaps.values())


def test_dlr_is_its_formula_and_has_no_scale() -> None:
    logits, labels = torch.randn(40, 6).double(), torch.randint(6, (40,))
    targets = (labels + torch.randint(1, 6, (40,))) % 6
    for row, label, target, plain, aimed in zip(
        logits, labels, targets, dlr(logits, labels), targeted_dlr(logits, labels, targets), strict=True
    ):
        ranked = sorted(row.tolist(), reverse=True)
        other = max(value for index, value in enumerate(row.tolist()) if index != label)
        assert plain.item() == pytest.approx((other - row[label].item()) / (ranked[0] - ranked[2]))
        below = ranked[0] - (ranked[2] + ranked[3]) / 2
        assert aimed.item() == pytest.approx((row[target] - row[label]).item() / below)
    torch.testing.assert_close(dlr(100 * logits, labels), dlr(logits, labels))


@pytest.mark.parametrize("classes", [2, 3, 4])
def test_two_to_four_classes_can_be_attacked(classes: int) -> None:
    linear = nn.Sequential(nn.Flatten(), nn.Linear(12, classes))
    inputs = torch.rand(8, 3, 2, 2)
    labels = linear(inputs).argmax(1)
    for result in (
        apgd(linear, inputs, labels, eps=0.5, loss="dlr", steps=20),
        apgd_targeted(linear, inputs, labels, eps=0.5, steps=20),
    ):
        assert torch.isfinite(result.inputs).all()
        by_cross_entropy = apgd(linear, inputs, labels, eps=0.5, steps=20)
        assert int(result.success.sum()) >= int(by_cross_entropy.success.sum())


def test_a_joint_batch_breaks_the_same_inputs(task: tuple[nn.Module, Tensor, Tensor]) -> None:
    net, inputs, labels = task
    whole = apgd(net, inputs, labels, eps=EPS["linf"], steps=20)
    again = apgd(net, inputs, labels, eps=EPS["linf"], steps=20)
    assert torch.equal(whole.inputs, again.inputs)
    joint = apgd(net, inputs, labels, eps=EPS["linf"], steps=20, joint=True)  # no input leaves
    assert torch.equal(whole.success, joint.success)
    assert whole.queries < joint.queries


def test_only_the_masked_are_perturbed(task: tuple[nn.Module, Tensor, Tensor]) -> None:
    net, inputs, labels = task
    mask = torch.arange(24) % 3 == 0
    for joint in (False, True):
        result = apgd(net, inputs, labels, eps=0.1, steps=10, mask=mask, joint=joint)
        assert torch.equal(result.inputs[~mask], inputs[~mask])
        assert result.success[mask].float().mean() > 0.5
        assert not result.success[~mask].any()


def test_a_joint_batch_is_scored_as_it_is_submitted(task: tuple[nn.Module, Tensor, Tensor]) -> None:
    net, inputs, labels = task
    defended = dent.defend(net, "dent", statistics="test", steps=2)
    assert not defended.independent
    result = apgd(defended, inputs, labels, eps=EPS["linf"], steps=8, joint=True)
    torch.testing.assert_close(defended(result.inputs), result.logits)
    assert torch.equal(result.success, defended(result.inputs).argmax(1) != labels)
    assert result.success.any()


def test_a_larger_budget_breaks_no_fewer(task: tuple[nn.Module, Tensor, Tensor]) -> None:
    net, inputs, labels = task
    for name, values in {"eps": (0.0, 0.01, 0.03, 0.5), "restarts": (1, 3)}.items():
        settings: dict[str, Any] = {"eps": EPS["linf"], "steps": 15}
        broken = [
            int(apgd(net, inputs, labels, **settings | {name: value}).success.sum()) for value in values
        ]
        assert broken == sorted(broken)
        if name == "eps":
            assert broken[-1] == len(inputs)


def test_losses_are_those_of_torch() -> None:
    logits, labels = torch.randn(9, 5), torch.randint(5, (9,))
    torch.testing.assert_close(
        LOSSES["ce"](logits, labels), -F.log_softmax(logits, 1)[torch.arange(9), labels]
    )
