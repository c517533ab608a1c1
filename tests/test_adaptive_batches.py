"""Attacks through the composition of a batch: what they submit, what they return, what it does."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from nets import randomized, small
from test_adaptive import Centered, Recorder, count_broken, make_centered, make_dent
from torch import Tensor, nn

import dent
from dent.attacks import adaptive, apgd, autoattack
from dent.attacks.adaptive import Direct, Unrolled
from dent.attacks.losses import margin

EPS = 8 / 255


@pytest.fixture(scope="module")
def robust() -> tuple[nn.Module, Tensor, Tensor]:
    return dent.load_model("resnet20-at"), *dent.load_data("cifar10", n=16)


def entropy(logits: Tensor) -> Tensor:
    return -(logits.softmax(1) * logits.log_softmax(1)).sum(1)


def test_denying_updates_submits_the_points_of_highest_loss(
    robust: tuple[nn.Module, Tensor, Tensor],
) -> None:
    static, inputs, labels = robust
    recorder = Recorder(dent.defend(static, "dent+", steps=3))
    settings: dict[str, Any] = {"eps": EPS, "steps": 8}
    both: dict[str, Any] = {"attacks": ("apgd-ce", "apgd-dlr")}
    results = adaptive.offline(recorder, static, inputs, labels, **both, **settings)
    assert len(recorder.submitted) == 2
    assert not recorder.adapted  # the search does not use the defense
    plain = apgd(static, inputs, labels, **settings)
    loss = {
        name: F.cross_entropy(static(points), labels, reduction="none")
        for name, points in (("max-loss", results["apgd-ce"].inputs), ("first", plain.inputs))
    }
    assert (loss["max-loss"] >= loss["first"] - 1e-4).all()
    assert (loss["max-loss"] > loss["first"] + 0.1).any()
    best = adaptive.denying_updates(recorder, static, inputs, labels, **both, **settings)
    assert int(best.success.sum()) == max(int(one.success.sum()) for one in results.values())
    assert int(best.success.sum()) >= count_broken(recorder.defense, plain.inputs, labels)
    assert best.queries == sum(one.queries for one in results.values())
    on_static = apgd(static, inputs, labels, joint=True, **settings)
    assert results["apgd-ce"].queries == on_static.queries + len(inputs)
    assert torch.equal(results["apgd-ce"].inputs, on_static.inputs)


def test_points_that_stop_at_the_first_success_are_those_that_autoattack_leaves(
    robust: tuple[nn.Module, Tensor, Tensor],
) -> None:
    """Broken inputs lie where they first broke, with less loss than they could have; others stay."""
    static, inputs, labels = robust
    settings: dict[str, Any] = {"eps": EPS, "steps": 8}
    names = ("apgd-ce", "first-success")
    results = adaptive.offline(static, static, inputs, labels, attacks=names, **settings)
    highest, first = (results[name].inputs for name in names)
    plain = autoattack(static, inputs, labels, attacks=["apgd-ce", "apgd-dlr"], **settings)
    moved = (first != inputs).flatten(1).any(1)
    assert torch.equal(first[moved], plain.inputs[moved])
    assert not (moved & ~plain.broken).any()
    assert torch.equal(results["first-success"].success, plain.broken)
    low, high = (F.cross_entropy(static(one), labels, reduction="none") for one in (first, highest))
    assert (high - low)[moved].mean() > 0.1


@given(count=st.integers(1, 200), share=st.floats(0.001, 1), seed=st.integers(0, 50))
def test_masks_hold_their_share(count: int, share: float, seed: int) -> None:
    mask = adaptive.draw_mask(count, share, seed=seed)
    assert mask.dtype == torch.bool
    assert int(mask.sum()) == max(round(share * count), 1)
    assert torch.equal(mask, adaptive.draw_mask(count, share, seed=seed))


def test_masks_are_redrawn_by_seed() -> None:
    drawn = torch.stack([adaptive.draw_mask(10, 0.3, seed=seed) for seed in range(400)])
    assert ((drawn.double().mean(0) - 0.3).abs() < 0.1).all()  # four standard deviations


@pytest.mark.parametrize("share", [0.1, 0.25, 0.5, 0.75, 0.9])
def test_mixed_batches_are_attacked_in_their_share(share: float) -> None:
    defense, _, _ = make_dent(statistics="test")
    inputs = torch.rand(20, 3, 6, 6, dtype=torch.double)
    labels = defense(inputs).argmax(1)
    result = adaptive.mixing(defense, inputs, labels, share=share, eps=0.05, steps=5, seed=1)
    changed = (result.inputs != inputs).flatten(1).any(1)
    assert torch.equal(changed, result.part)
    assert int(changed.sum()) == round(share * 20)
    wrong = defense(result.inputs).argmax(1) != labels
    assert result.accuracy == pytest.approx(1 - wrong[changed].double().mean().item())
    assert result.accuracy < 1
    other = adaptive.mixing(defense, inputs, labels, share=share, eps=0.05, steps=1, seed=2)
    assert not torch.equal(other.part, result.part)


def test_one_among_natural_ones() -> None:
    defense, inputs, _ = make_dent(statistics="test")
    pool = torch.cat([inputs, torch.rand(30, 3, 6, 6, dtype=torch.double)])
    seeds = []
    for seed in (0, 1):
        recorder = Recorder(defense)
        attack = partial(adaptive.one_among, recorder, eps=0.02, steps=4, seed=seed)
        labels = defense(inputs).argmax(1)
        result = attack(inputs, labels, pool)
        seen = [adaptive.draw_companions(x, pool, 15, seed=seed, index=i) for i, x in enumerate(inputs)]
        submitted = iter(recorder.submitted)
        for index, (image, companions) in enumerate(zip(inputs, seen, strict=True)):
            for batch in [next(submitted) for _ in range(7)]:  # natural, 5 of APGD, the result
                assert batch.shape == (16, 3, 6, 6)
                assert torch.equal(batch[1:], companions)
                assert (batch[0] - image).abs().max() <= 0.02 + 1e-9
            assert not (companions == image).flatten(1).all(1).any()
            assert len(companions.flatten(1).unique(dim=0)) == 15
            logits = defense(torch.cat([result.inputs[index : index + 1], companions]))[0]
            torch.testing.assert_close(result.logits[index], logits)
            assert result.success[index] == (logits.argmax() != labels[index])
        assert not list(submitted)
        seeds.append(torch.stack(seen))
    assert not torch.equal(*seeds)


def test_the_companions_are_of_no_concern_to_the_adversary() -> None:
    """The defense subtracts the mean, so lowering an input's margin raises those of its companions.

    These are far on the wrong side of its label: the sum of all losses would drive it the other way.
    """
    linear = nn.Linear(12, 2).double()
    linear.weight.data = torch.stack([torch.ones(12), -torch.ones(12)]).double()
    linear.bias.data = torch.tensor([-2.0, 0.0]).double()
    defense, image = Centered(linear), torch.full((1, 3, 2, 2), 0.6).double()
    pool = torch.linspace(0.38, 0.42, 20).double()[:, None, None, None].expand(20, 3, 2, 2)
    labels = torch.zeros(1, dtype=torch.long)
    settings: dict[str, Any] = {"eps": 0.05, "steps": 10, "through": Unrolled}
    result = adaptive.one_among(defense, image, labels, pool, **settings)
    torch.testing.assert_close(result.inputs, image - 0.05)
    mask = adaptive.draw_mask(16, 1 / 16)
    batch = torch.where(mask[:, None, None, None], image, pool[:16])
    mixed = adaptive.mixing(defense, batch, labels.expand(16), share=1 / 16, **settings)
    torch.testing.assert_close(mixed.inputs[mask], image - 0.05)
    points = batch.clone().requires_grad_()
    logits = defense.predict(points, defense.adapt(points, gradient="unrolled"))
    F.cross_entropy(logits, labels.expand(16)).backward()
    assert points.grad is not None
    assert (points.grad[mask] > 0).all()


def test_high_confidence_is_high(robust: tuple[nn.Module, Tensor, Tensor]) -> None:
    static, inputs, labels = robust
    defense = dent.defend(static, "dent+", steps=3)
    settings: dict[str, Any] = {"eps": EPS, "steps": 10}
    sure = adaptive.high_confidence(defense, static, inputs, labels, targets=2, **settings)
    plain = apgd(static, inputs, labels, joint=True, **settings)
    unsure = dent.attacks.apgd_targeted(static, inputs, labels, joint=True, targets=2, **settings)
    target = static(inputs).scatter(1, labels[:, None], -torch.inf).topk(2).indices
    logits = [static(result.inputs).detach() for result in (sure, plain, unsure)]
    probability = [one.softmax(1).gather(1, target).amax(1).mean().item() for one in logits]
    uncertainty = [entropy(one).mean().item() for one in logits]
    assert probability[0] > max(probability[1:])
    assert uncertainty[0] < min(uncertainty[1:])
    assert torch.equal(sure.success, defense(sure.inputs).argmax(1) != labels)  # any wrong class
    assert int(sure.success.sum()) > count_broken(defense, inputs, labels)


def test_high_confidence_submits_a_batch_for_each_class_and_one_for_the_surest() -> None:
    defense, inputs, labels = make_centered()
    recorder = Recorder(defense)
    static = partial(defense.predict, state=torch.zeros(()).double())
    adaptive.high_confidence(recorder, static, inputs, labels, eps=0.05, steps=5)
    first, second, third, surest = recorder.submitted
    ranks = static(inputs).scatter(1, labels[:, None], -torch.inf).argsort(1, descending=True)[:, :3]
    reached = torch.stack(
        [
            static(batch).softmax(1).gather(1, ranks[:, rank : rank + 1]).squeeze(1)
            for rank, batch in enumerate((first, second, third))
        ]
    )
    expected = torch.stack([first, second, third])[reached.argmax(0), torch.arange(8)]
    assert torch.equal(surest, expected)


@given(
    labels=st.lists(st.integers(0, 5), min_size=1, max_size=40),
    batch_size=st.integers(1, 9),
    window=st.one_of(st.none(), st.integers(1, 4)),
)
def test_labels_rise_within_each_window(labels: list[int], batch_size: int, window: int | None) -> None:
    given = torch.tensor(labels)
    order = adaptive.sort_by_label(given, batch_size=batch_size, window=window)
    assert torch.equal(order.sort().values, torch.arange(len(labels)))
    assert torch.equal(given[order][order.argsort()], given)
    size = len(labels) if window is None else window * batch_size
    for ours, theirs in zip(given[order].split(size), given.split(size), strict=True):
        assert ours.tolist() == sorted(theirs.tolist())


def test_sorted_batches_are_answered_in_the_order_of_the_inputs() -> None:
    defense, _, _ = make_dent(statistics="test")
    inputs = torch.rand(22, 3, 6, 6, dtype=torch.double)
    labels, mask = torch.arange(22) * 7 % 4, torch.arange(22) % 5 != 0
    recorder = Recorder(defense)
    natural = adaptive.sorted_batches(recorder, inputs, labels, batch_size=6, window=2)
    assert [len(batch) for batch in recorder.submitted] == [6, 6, 6, 4]
    assert torch.equal(natural.inputs, inputs)
    order = torch.cat([labels[:12].argsort(stable=True), labels[12:].argsort(stable=True) + 12])
    logits = torch.cat([defense(inputs[at]) for at in order.split(6)])
    torch.testing.assert_close(natural.logits[order], logits)
    assert torch.equal(natural.success, natural.logits.argmax(1) != labels)
    assert not torch.allclose(natural.logits, defense(inputs))  # the batch matters
    attacked = adaptive.sorted_batches(
        defense, inputs, labels, batch_size=6, attack=apgd, eps=0.02, steps=3, joint=True, mask=mask
    )
    assert torch.equal((attacked.inputs != inputs).flatten(1).any(1), mask)
    logits = torch.cat([defense(attacked.inputs[at]) for at in order.split(6)])
    torch.testing.assert_close(attacked.logits[order], logits)
    assert int(attacked.success.sum()) > int(natural.success.sum())
    starts = [
        adaptive.sorted_batches(
            defense, inputs, labels, batch_size=11, attack=apgd, eps=0.02, steps=0, joint=True, seed=seed
        ).inputs
        - inputs
        for seed in (0, 0, 1)
    ]
    assert torch.equal(starts[0], starts[1])
    assert not torch.equal(starts[0], starts[2])


def test_malicious_members_flip_benign_ones() -> None:
    net = randomized(small(nn.BatchNorm2d(8)))
    inputs = torch.rand(12, 3, 6, 6, dtype=torch.double)
    malicious = adaptive.draw_mask(12, 0.25)
    for settings, views in (
        ({"statistics": "test", "steps": 0, "affine": "off"}, (Unrolled, Direct)),
        ({"steps": 5, "lr": 0.1}, (Unrolled,)),
    ):
        defense = dent.Dent(net, dent.Settings(**settings))
        labels = defense(inputs).argmax(1)
        for view in views:
            result = adaptive.poisoning(
                defense, inputs, labels, malicious=malicious, steps=15, through=view
            )
            assert torch.equal(result.inputs[~malicious], inputs[~malicious])
            assert torch.equal(result.part, ~malicious)
            assert 0 <= result.inputs.min() <= result.inputs.max() <= 1
            torch.testing.assert_close(result.logits, defense(result.inputs))
            wrong = (result.logits.argmax(1) != labels)[~malicious]
            assert wrong.any()
            assert result.accuracy == pytest.approx(1 - wrong.double().mean().item())


def test_malicious_members_do_nothing_where_inputs_are_independent() -> None:
    net = randomized(small(nn.BatchNorm2d(8)))
    inputs = torch.rand(12, 3, 6, 6, dtype=torch.double)
    defense = dent.Dent(net, dent.Settings(affine="sample", reduction="sum", steps=2, lr=0.1))
    assert defense.settings.independent
    labels, malicious = torch.arange(12) % 4, adaptive.draw_mask(12, 0.5)
    natural = defense(inputs)[~malicious]
    result = adaptive.poisoning(defense, inputs, labels, malicious=malicious, steps=5, restarts=2)
    torch.testing.assert_close(result.logits[~malicious], natural)
    right = (natural.argmax(1) == labels[~malicious]).double().mean().item()
    assert 0 < right < 1
    assert result.accuracy == pytest.approx(right)


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_malicious_members_go_where_the_shared_mean_hurts_most(norm: str) -> None:
    """The benign logits are linear in the malicious inputs, so the best poison has a closed form."""
    linear = nn.Linear(12, 2).double()
    defense = Centered(linear, updates=1)
    inputs = torch.rand(6, 3, 2, 2).double() * 0.2 + 0.4
    labels, malicious = torch.zeros(6, dtype=torch.long), torch.arange(6) < 2
    away = (
        (linear.weight[0] - linear.weight[1]).detach().view(3, 2, 2)
    )  # the gradient of the mean, which is subtracted
    eps = 0.1
    step = eps * (away.sign() if norm == "linf" else away / away.norm())
    worst = torch.where(malicious[:, None, None, None], inputs + step, inputs)
    result = adaptive.poisoning(
        defense, inputs, labels, malicious=malicious, eps=eps, norm=norm, loss="margin",
        steps=60, step_size=eps,
    )  # fmt: skip
    expected = margin(defense(worst), labels)[~malicious]
    reached = margin(result.logits, labels)[~malicious]
    natural = margin(defense(inputs), labels)[~malicious]
    assert (expected > natural).all()
    torch.testing.assert_close(reached, expected, rtol=1e-3, atol=1e-4)
