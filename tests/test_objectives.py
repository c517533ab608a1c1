from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import softmax
from scipy.stats import entropy as scipy_entropy

from dent.defense.dent.descent import entropy, information_maximization, mean_entropy

batches = st.integers(0, 2**32 - 1).map(
    lambda seed: 5 * torch.randn(4, 6, dtype=torch.double, generator=torch.Generator().manual_seed(seed))
)


@given(batches)
def test_entropy_is_scipys(logits: torch.Tensor) -> None:
    expected = scipy_entropy(softmax(logits.numpy(), axis=1), axis=1)
    torch.testing.assert_close(entropy(logits), torch.tensor(expected))


@given(batches, st.floats(-100, 100))
def test_entropy_is_bounded_and_ignores_a_shift_of_the_logits(
    logits: torch.Tensor, shift: float
) -> None:
    values = entropy(logits)
    assert (values >= -1e-12).all()
    assert (values <= math.log(6) + 1e-12).all()
    torch.testing.assert_close(entropy(logits + shift), values)


@given(batches)
def test_information_maximization_is_minus_the_mutual_information(logits: torch.Tensor) -> None:
    p = softmax(logits.numpy(), axis=1)
    expected = scipy_entropy(p, axis=1).mean() - scipy_entropy(p.mean(0))
    torch.testing.assert_close(information_maximization(logits).item(), float(expected))
    assert information_maximization(logits) <= 1e-12


@given(batches)
def test_the_authors_constant_changes_information_maximization_by_little(logits: torch.Tensor) -> None:
    p, eps = logits.softmax(1), 1e-5
    mean = p.mean(0)
    theirs = -(p * (p + eps).log()).sum(1).mean() + (mean * (mean + eps).log()).sum()
    assert 0 < (information_maximization(logits) - theirs).abs() <= logits.shape[1] * eps


def test_extreme_logits_are_stable() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        logits = torch.tensor([[3e4, 0, -3e4], [0, 0, 0]], dtype=dtype, requires_grad=True)
        for objective in (mean_entropy, information_maximization):
            value = objective(logits)
            (grad,) = torch.autograd.grad(value, logits)
            assert value.isfinite()
            assert grad.isfinite().all()
        torch.testing.assert_close(entropy(logits).tolist(), [0.0, math.log(3)], rtol=1e-6, atol=1e-6)


def test_information_of_one_prediction_has_exactly_no_gradient() -> None:
    for seed in range(20):
        logits = torch.randn(1, 10, generator=torch.Generator().manual_seed(seed), requires_grad=True)
        value = information_maximization(logits)
        (grad,) = torch.autograd.grad(value, logits)
        assert value == 0
        assert not grad.any()
