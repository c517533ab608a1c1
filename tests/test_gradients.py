"""What an attacker's gradient sees: the adapted model as a constant, or every update."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import pytest
import torch
from nets import affine_parameters, randomized, small
from torch import Tensor, nn

import dent

UNROLLED: list[dict[str, Any]] = [
    {},
    {"optimizer": "sgd", "lr": 0.1},
    {"affine": "sample", "optimizer": "adamod", "objective": "information-maximization"},
    {"statistics": "test"},
    {"statistics": 0.3, "affine": "sample"},
    {"affine": "off", "blur": "dynamic", "blur_lr": 0.1},
    {
        "statistics": "test",
        "blur": "dynamic",
        "blur_per": "sample",
        "covariance": "full",
        "blur_lr": 0.02,
    },
]


@pytest.mark.parametrize("settings", UNROLLED, ids=str)
def test_unrolled_gradient_by_finite_differences(settings: dict[str, Any]) -> None:
    net = randomized(small(nn.BatchNorm2d(8)))
    inputs = torch.rand(3, 3, 6, 6, dtype=torch.double, requires_grad=True)
    options: dict[str, Any] = {"steps": 3, "lr": 0.01, "gradient": "unrolled"} | settings
    defended = dent.defend(net, "dent", **options)
    weights, direction = torch.randn(3, 4, dtype=torch.double), torch.randn_like(inputs)

    def value(inputs: Tensor, gradient: Any = None) -> Tensor:
        return torch.sum(defended(inputs, gradient=gradient) * weights)

    (exact,) = torch.autograd.grad(value(inputs), inputs)
    (stale,) = torch.autograd.grad(value(inputs, "stale"), inputs)
    with torch.no_grad():
        # Adam divides by gradients, so it is steep where they are small: small differences.
        step = 1e-8
        measured = (value(inputs + step * direction) - value(inputs - step * direction)) / (2 * step)
    torch.testing.assert_close((exact * direction).sum(), measured, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(exact, stale)


@pytest.mark.parametrize("statistics", ["train", "test"])
def test_stale_gradient_is_that_of_the_adapted_model(
    net: nn.Module, images: Tensor, statistics: str
) -> None:
    defended = dent.defend(net, "dent", steps=5, lr=0.01, statistics=statistics)
    inputs = images.clone().requires_grad_()
    state = defended.adapt(images)
    adapted = copy.deepcopy(net)
    for name, value in defended.affine(state).items():
        adapted.get_parameter(name).data = value[0]
    if statistics == "test":
        for module in adapted.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean = module.running_var = None
    loss = nn.CrossEntropyLoss()
    labels = torch.arange(len(images))
    (expected,) = torch.autograd.grad(loss(adapted(inputs), labels), inputs)
    (got,) = torch.autograd.grad(loss(defended(inputs), labels), inputs)
    torch.testing.assert_close(got, expected)


def test_unrolled_memory_does_not_grow_with_the_steps(net: nn.Module, images: Tensor) -> None:
    def held_bytes(steps: int) -> int:
        """What the graph of an unrolled forward keeps for its backward."""
        packed: list[weakref.ref[Tensor]] = []

        def pack(tensor: Tensor) -> Tensor:
            packed.append(weakref.ref(tensor))
            return tensor

        defended = dent.defend(net, "dent", steps=steps)
        inputs = images.clone().requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            logits = defended(inputs, gradient="unrolled")
        held = [tensor for ref in packed if (tensor := ref()) is not None]
        storages = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in held
        }
        logits.sum().backward()
        assert inputs.grad is not None
        return sum(storages.values())

    variables = 3 * 8 * sum(parameter.numel() for parameter in affine_parameters(net))
    one, nine = held_bytes(1), held_bytes(9)
    assert nine - one <= 9 * variables  # Delta and two moments are all that a step keeps,
    assert 9 * variables < one / 10  # which is little beside the activations of one forward


def test_gradient_reaches_inputs_and_nothing_else(net: nn.Module, images: Tensor) -> None:
    for gradient in ("stale", "unrolled"):
        inputs = images.clone().requires_grad_()
        inputs.grad = torch.full_like(inputs, 7.0)
        logits = dent.defend(net, "dent-nominal", steps=2, gradient=gradient)(inputs)
        assert torch.equal(inputs.grad, torch.full_like(inputs, 7.0))  # not touched by adaptation
        inputs.grad = None
        logits.sum().backward()
        assert inputs.grad is not None
        assert inputs.grad.abs().sum() > 0
        assert all(parameter.grad is None for parameter in net.parameters())


def test_modes(net: nn.Module, images: Tensor) -> None:
    defended = dent.defend(net, "dent-nominal", steps=2)
    expected = defended(images)
    with torch.no_grad():
        logits = defended(images.clone().requires_grad_())
        assert not logits.requires_grad
        assert torch.equal(logits, expected)
    with torch.inference_mode():
        made_inside = images.clone()
        assert torch.equal(defended(images), expected)
        assert torch.equal(defended(made_inside), expected)
    assert torch.equal(defended(made_inside), expected)  # an inference tensor outside
    assert defended(images.clone().requires_grad_()).requires_grad
    upstream = images.clone().requires_grad_()
    (grad,) = torch.autograd.grad(defended(upstream * 0.5).sum(), upstream)  # not a leaf
    assert grad.abs().sum() > 0
