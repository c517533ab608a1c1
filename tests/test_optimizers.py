from __future__ import annotations

from typing import Any

import pytest
import pytorch_optimizer
import torch

from dent.defense.dent.descent import OPTIMIZERS

REFERENCES: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.8}, {"lr": 0.1, "momentum": 0.8}),
    "adam": (torch.optim.Adam, {"lr": 0.02, "betas": (0.8, 0.95)}, {"lr": 0.02, "betas": (0.8, 0.95)}),
    "adamod": (
        pytorch_optimizer.AdaMod,
        {"lr": 0.006, "betas": (0.99, 0.999, 0.6), "weight_decay": 0.0},
        {"lr": 0.006, "betas": (0.99, 0.999), "beta3": 0.6},
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_several_steps_equal_the_reference(name: str, dtype: torch.dtype) -> None:
    reference, reference_options, options = REFERENCES[name]
    params = torch.randn(3, 40, dtype=dtype)
    theirs = torch.nn.Parameter(params.clone())
    optimizer = reference([theirs], **reference_options)
    moments = tuple(torch.zeros_like(params) for _ in range(OPTIMIZERS[name].moments))
    for step in range(1, 9):
        # Gradients from tiny to large, one of them exactly zero.
        grad = torch.randn(3, 40, dtype=dtype) * torch.logspace(-9, 3, 40, dtype=dtype)
        grad[0, 0] = 0
        theirs.grad = grad.clone()
        optimizer.step()
        params, moments = OPTIMIZERS[name].update(params, grad, moments, step, **options)
    tolerance = 1e-6 if dtype == torch.float32 else 1e-12
    torch.testing.assert_close(params, theirs.detach(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_updates_can_be_differentiated_twice(name: str) -> None:
    def two_steps(params: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        moments = tuple(torch.zeros_like(params) for _ in range(OPTIMIZERS[name].moments))
        for step in (1, 2):
            params, moments = OPTIMIZERS[name].update(params, grad * params, moments, step, lr=0.1)
        return params

    tensors = [torch.randn(4, dtype=torch.double, requires_grad=True) for _ in range(2)]
    assert torch.autograd.gradcheck(two_steps, tensors)
    assert torch.autograd.gradgradcheck(two_steps, tensors, atol=1e-4)


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_a_zero_gradient_moves_nothing_and_passes_no_nan(name: str) -> None:
    grad = torch.zeros(3, requires_grad=True)
    moments = tuple(torch.zeros(3) for _ in range(OPTIMIZERS[name].moments))
    after, _ = OPTIMIZERS[name].update(torch.ones(3), grad, moments, 1, lr=0.1)
    assert torch.equal(after, torch.ones(3))
    (back,) = torch.autograd.grad(after.sum(), grad)
    assert back.isfinite().all()
