"""Every attack respects the ball, the range, the seed and the mask, and does not change the model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import dent
from dent.attacks import AttackResult, apgd, apgd_targeted, autoattack, fab, fab_targeted, pgd, square
from dent.attacks.adaptive import high_confidence, lazy
from dent.attacks.norms import NORMS, lengths

Attack = Callable[..., AttackResult]
ATTACKS: dict[str, Attack] = {
    "pgd": partial(pgd, steps=3),
    "pgd-margin": partial(pgd, steps=3, loss="margin", restarts=2),
    "apgd": partial(apgd, steps=5),
    "apgd-dlr": partial(apgd, steps=5, loss="dlr"),
    "apgd_targeted": partial(apgd_targeted, steps=3),
    "fab": partial(fab, steps=3),
    "fab_targeted": partial(fab_targeted, steps=3, restarts=2),
    "square": partial(square, queries=6),
    "autoattack": partial(autoattack, steps=2, queries=3),
}
# How far rounding can lead out of the ball: relative to eps, and absolute.
ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 0.02}
DTYPES = list(ROUNDING)


class Little(nn.Module):
    """A network for images of any size and precision."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(channels, 6), nn.Linear(12, classes)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs.permute(0, 2, 3, 1)).tanh()
        logits: Tensor = 4 * self.last(torch.cat([hidden.mean((1, 2)), hidden.amax((1, 2))], 1))
        return logits


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=list(ATTACKS))
@settings(max_examples=20)
@given(
    norm=st.sampled_from(list(NORMS)),
    eps=st.one_of(st.just(0.0), st.floats(1e-3, 3)),
    dtype=st.sampled_from(DTYPES),
    shape=st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 7), st.integers(1, 7)),
    classes=st.integers(2, 5),
    joint=st.booleans(),
    seed=st.integers(0, 99),
)
def test_results_lie_in_the_ball_and_the_model_is_as_it_was(
    attack: Attack,
    norm: str,
    eps: float,
    dtype: torch.dtype,
    shape: tuple[int, int, int, int],
    classes: int,
    joint: bool,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    net = Little(shape[1], classes).to(dtype)
    before = copy.deepcopy(net.state_dict())
    inputs, labels = torch.rand(shape).to(dtype), torch.randint(classes, shape[:1])
    given = inputs.clone()
    eps = min(eps, 1) if norm == "linf" else eps
    result = attack(net, inputs, labels, eps=eps, norm=norm, joint=joint, seed=seed)
    rounding = ROUNDING[dtype]
    assert result.inputs.dtype == dtype
    assert result.inputs.shape == inputs.shape
    assert result.inputs.min() >= 0
    assert result.inputs.max() <= 1
    exact = (result.inputs.double() - inputs.double()).flatten(1)
    slack = rounding * (exact.shape[1] if norm == "l1" else 1)
    assert (lengths(exact, norm) <= eps * (1 + rounding) + slack).all()
    with torch.no_grad():
        torch.testing.assert_close(result.logits, net(result.inputs), atol=1e-4, rtol=1e-3)
    assert torch.equal(result.success, result.logits.argmax(1) != labels)
    assert torch.equal(inputs, given)
    assert not inputs.requires_grad
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())
    assert all(parameter.grad is None for parameter in net.parameters())
    if eps == 0:
        with torch.no_grad():
            assert torch.equal(result.success, net(inputs).argmax(1) != labels)


@pytest.fixture(scope="module")
def task() -> tuple[nn.Module, Tensor, Tensor]:
    net = dent.load_model("resnet20-at")
    inputs, labels = dent.load_data("cifar10", n=16)
    with torch.no_grad():
        right = (net(inputs).argmax(1) == labels).nonzero().squeeze(1)[:8]
    return net, inputs[right], labels[right]


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=list(ATTACKS))
def test_the_seed_decides_and_global_random_numbers_do_not(
    attack: Attack, task: tuple[nn.Module, Tensor, Tensor]
) -> None:
    net, inputs, labels = task
    results = []
    for number in range(2):
        torch.manual_seed(number)
        state = torch.get_rng_state()
        results.append(attack(net, inputs, labels, eps=4 / 255, seed=3))
        assert torch.equal(torch.get_rng_state(), state)  # the attack does not draw from it
    assert torch.equal(results[0].inputs, results[1].inputs)
    assert results[0].queries == results[1].queries


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=list(ATTACKS))
def test_a_large_radius_breaks_all_and_the_mask_is_kept(
    attack: Attack, task: tuple[nn.Module, Tensor, Tensor]
) -> None:
    net, inputs, labels = task
    stronger = {"queries": 300} if "square" in str(attack) else {"steps": 15}
    whole = attack(net, inputs, labels, eps=0.5, **stronger)
    assert whole.success.all()
    mask = torch.arange(len(inputs)) % 2 == 0
    for joint in (False, True):
        part = attack(net, inputs, labels, eps=0.5, mask=mask, joint=joint)
        assert torch.equal(part.inputs[~mask], inputs[~mask])
        assert not part.success[~mask].any()


BUDGETS: dict[str, tuple[Any, ...]] = {
    "eps": (0.0, 0.004, 0.016, 0.06, 0.5),
    "steps": (1, 4, 12, 30),
    "restarts": (1, 2, 4),
    "queries": (0, 10, 60),
}


@pytest.mark.parametrize(
    ("attack", "setting"),
    [(one, name) for one in (pgd, apgd, apgd_targeted, fab_targeted) for name in list(BUDGETS)[:3]]
    + [(square, name) for name in ("eps", "restarts", "queries")],
)
def test_accuracy_does_not_rise_with_the_budget(
    attack: Attack, setting: str, task: tuple[nn.Module, Tensor, Tensor]
) -> None:
    net, inputs, labels = task
    if attack in (fab_targeted, apgd_targeted):
        attack = partial(attack, targets=2)
    budget: dict[str, Any] = {"eps": 6 / 255, "queries" if attack is square else "steps": 8}
    broken = [
        int(attack(net, inputs, labels, **budget | {setting: value}).success.sum())
        for value in BUDGETS[setting]
    ]
    assert broken == sorted(broken)


def test_attacks_run_where_the_model_is_in_channels_last(task: tuple[nn.Module, Tensor, Tensor]) -> None:
    net, inputs, labels = task
    other = inputs.contiguous(memory_format=torch.channels_last)
    for attack in ATTACKS.values():
        plain, last = (attack(net, images, labels, eps=4 / 255) for images in (inputs, other))
        assert (lengths(last.inputs - inputs, "linf") <= 4 / 255 + 1e-6).all()
        assert int((plain.success != last.success).sum()) <= 1


def test_independent_decides_whether_the_batch_stays_together(
    task: tuple[nn.Module, Tensor, Tensor],
) -> None:
    net, inputs, labels = task
    batchwise = dent.defend(net, "dent", steps=1)
    samplewise = dent.defend(net, "dent+", objective="entropy", reduction="sum", steps=1)
    assert (batchwise.settings.independent, samplewise.settings.independent) == (False, True)
    for defended, together in ((batchwise, True), (samplewise, False)):
        sizes: set[int] = set()

        class Watched:
            independent = defended.independent

            def __call__(self, points: Tensor, asked: Any = defended, sizes: set[int] = sizes) -> Tensor:
                sizes.add(len(points))
                return asked(points)  # type: ignore[no-any-return]

        apgd(Watched(), inputs, labels, eps=12 / 255, steps=4)
        assert (sizes == {len(inputs)}) == together


def test_adaptive_attacks_take_any_gradient_attack(
    task: tuple[nn.Module, Tensor, Tensor],
) -> None:
    net, inputs, labels = task
    defended = dent.defend(net, "dent+", steps=1)
    for attack in (pgd, apgd, apgd_targeted):
        result = lazy(defended, inputs, labels, every=2, eps=8 / 255, steps=3, attack=attack)
        torch.testing.assert_close(result.logits, defended(result.inputs))
    result = high_confidence(defended, net, inputs, labels, eps=8 / 255, steps=3)
    torch.testing.assert_close(result.logits, defended(result.inputs))
