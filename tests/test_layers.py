"""Every kind of normalization layer and of network is adapted as defined, or refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from nets import (
    BatchNormAct,
    ChannelsFirstLayerNorm,
    OwnLayerNorm,
    Shared,
    Transformer,
    Viewing,
    randomized,
    small,
)
from torch import Tensor, nn

import dent
from dent.defense.dent.layers import channel_affine

MODELS: dict[str, Callable[[], nn.Module]] = {
    "BatchNorm2d": lambda: small(nn.BatchNorm2d(8)),
    "SyncBatchNorm": lambda: small(nn.SyncBatchNorm(8)),
    "BatchNorm subclass": lambda: small(BatchNormAct(8)),
    "GroupNorm": lambda: small(nn.GroupNorm(2, 8)),
    "LayerNorm over images": lambda: small(nn.LayerNorm([8, 12, 12])),
    "LayerNorm of a ConvNeXt": lambda: small(ChannelsFirstLayerNorm(8)),
    "LayerNorm without bias": lambda: small(nn.LayerNorm([8, 12, 12], bias=False)),
    "InstanceNorm2d": lambda: small(nn.InstanceNorm2d(8, affine=True)),
    "InstanceNorm2d with statistics": lambda: small(
        nn.InstanceNorm2d(8, affine=True, track_running_stats=True)
    ),
    "RMSNorm": lambda: small(nn.RMSNorm([8, 12, 12])),
    "BatchNorm1d twice": lambda: nn.Sequential(
        nn.Flatten(), nn.Linear(432, 8), nn.BatchNorm1d(8), nn.ReLU(),
        nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4),
    ),
    "BatchNorm1d": lambda: nn.Sequential(
        nn.Flatten(), nn.Linear(432, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4)
    ),
    "BatchNorm1d over sequences": lambda: nn.Sequential(
        nn.Flatten(2), nn.Conv1d(3, 8, 3), nn.BatchNorm1d(8), nn.AdaptiveAvgPool1d(1), nn.Flatten(),
        nn.Linear(8, 4),
    ),
    "BatchNorm3d": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 3)), nn.Conv3d(1, 8, 3), nn.BatchNorm3d(8), nn.AdaptiveAvgPool3d(1),
        nn.Flatten(), nn.Linear(8, 4),
    ),
    "transformer": Transformer,
    "shared, uncalled, dropout, list": Shared,
    "view": Viewing,
}  # fmt: skip


def reference(net: nn.Module, inputs: Tensor, steps: int) -> nn.Module:
    """Adam on every scale and shift of a normalization layer, in place on a copy."""
    adapted = copy.deepcopy(net).eval()
    norms = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)
    affine = [
        parameter
        for module in adapted.modules()
        if isinstance(module, norms)
        for parameter in module.parameters(recurse=False)
    ]
    optimizer = torch.optim.Adam(affine, lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        torch.distributions.Categorical(logits=adapted(inputs)).entropy().sum().backward()
        optimizer.step()
    return adapted


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("train_mode", [False, True])
def test_every_layer_batch_wise_and_sample_wise(name: str, train_mode: bool, images: Tensor) -> None:
    net = randomized(MODELS[name]())
    static = net(images).detach()
    net.train(train_mode)  # a defense evaluates, whatever the mode: no dropout, statistics of training
    batch = dent.defend(net, "dent", steps=3, lr=0.01, reduction="sum")
    with torch.no_grad():  # where torch's transformer would take its fast path
        got = batch(images)
    torch.testing.assert_close(got, reference(net, images, 3)(images).detach(), rtol=1e-8, atol=1e-8)
    assert not torch.allclose(got, static)
    sample = dent.defend(net, "dent", steps=3, lr=0.01, reduction="sum", affine="sample")
    with torch.no_grad():
        got = sample(images)
    alone = torch.cat([reference(net, image[None], 3)(image[None]) for image in images])
    torch.testing.assert_close(got, alone.detach(), rtol=1e-8, atol=1e-8)
    assert all(module.training == train_mode for module in net.modules())


@pytest.mark.parametrize("name", ["BatchNorm subclass", "BatchNorm1d", "BatchNorm3d", "SyncBatchNorm"])
@pytest.mark.parametrize("affine", ["batch", "sample"])
def test_test_statistics_for_every_batch_norm(name: str, affine: str, images: Tensor) -> None:
    net = randomized(MODELS[name]())
    stripped = copy.deepcopy(net)
    for module in stripped.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.running_mean = module.running_var = None
    torch.testing.assert_close(dent.defend(net, "norm")(images), stripped(images).detach())
    if affine == "batch":
        got = dent.defend(net, "dent", statistics="test", steps=3, lr=0.01, reduction="sum")(images)
        torch.testing.assert_close(got, reference(stripped, images, 3)(images).detach())
    else:
        defended = dent.defend(net, "dent", statistics="test", steps=1, lr=0.01, affine="sample")
        assert defended(images).isfinite().all()
        start = defended.adapt(images, steps=0)
        torch.testing.assert_close(defended.predict(images, start), stripped(images).detach())


def test_batch_norm_without_affine_parameters_keeps_its_part(images: Tensor) -> None:
    net = randomized(
        nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8, affine=False), nn.ReLU(), nn.Conv2d(8, 8, 3),
            nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4),
        )
    )  # fmt: skip
    defended = dent.defend(net, "dent", steps=3, lr=0.01, reduction="sum")
    torch.testing.assert_close(defended(images), reference(net, images, 3)(images).detach())
    assert list(defended.affine(defended.adapt(images))) == ["4.weight", "4.bias"]
    assert dent.defend(net, "dent+", statistics="test", steps=2)(images).isfinite().all()


def test_layers_that_are_not_called_do_not_move(images: Tensor) -> None:
    defended = dent.defend(randomized(Shared()), "dent", steps=2, gradient="unrolled")
    affine = defended.affine(defended.adapt(images))
    own = dict(defended.model.named_parameters())
    assert torch.equal(affine["unused.weight"][0], own["unused.weight"])
    assert not torch.equal(affine["first.1.weight"][0], own["first.1.weight"])
    inputs = images.clone().requires_grad_()
    (grad,) = torch.autograd.grad(defended(inputs).sum(), inputs)
    assert grad.isfinite().all()


@pytest.mark.parametrize("affine", ["batch", "sample"])
@pytest.mark.parametrize("statistics", ["train", "test"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_lower_precision_follows_double(
    dtype: torch.dtype, statistics: str, affine: str, images: Tensor
) -> None:
    # No strided convolution: torch 2.13 dies of its bfloat16 backward on some CPUs, without dent too.
    net = randomized(small(nn.BatchNorm2d(8)))
    settings: dict[str, Any] = {
        "steps": 4,
        "lr": 0.01,
        "affine": affine,
        "statistics": statistics,
        "blur": "dynamic",
    }
    exact = dent.defend(net, "dent", **settings)(images)
    static = dent.defend(net, "dent", **(settings | {"steps": 0}))(images)
    lower = copy.deepcopy(net).to(dtype)
    got = dent.defend(lower, "dent", **settings)(images.to(dtype))
    assert got.dtype == dtype
    error = (got.double() - exact).norm() / (exact - static).norm()
    assert error < {torch.float16: 0.2, torch.bfloat16: 0.8, torch.float32: 1e-2}[dtype]


def test_channels_last_gives_the_same_and_is_kept_off_where_the_model_cannot(images: Tensor) -> None:
    net = randomized(small(nn.BatchNorm2d(8)))
    plain = dent.defend(net, "dent", steps=3, channels_last=False)(images)
    torch.testing.assert_close(dent.defend(net, "dent", steps=3)(images), plain)
    last = images.contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(dent.defend(net, "dent", steps=3)(last), plain)
    net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    torch.testing.assert_close(dent.defend(net, "dent", steps=3)(last), plain)
    viewing = dent.defend(randomized(Viewing()), "dent", steps=2)
    assert torch.equal(viewing(images), viewing(images))
    with pytest.raises(RuntimeError, match="view"):
        dent.defend(viewing.model, "dent", steps=2, channels_last=True)(images)


def test_reparametrized_weights(images: Tensor) -> None:
    net = randomized(small(nn.BatchNorm2d(8)))
    nn.utils.parametrizations.weight_norm(net[0])  # type: ignore[index]
    nn.utils.parametrizations.spectral_norm(net[-1])  # type: ignore[index]
    net.eval()
    defended = dent.defend(net, "dent", steps=3, lr=0.01, reduction="sum")
    torch.testing.assert_close(defended(images), reference(net, images, 3)(images).detach())


def test_autocast(images: Tensor) -> None:
    net = randomized(small(nn.BatchNorm2d(8))).float()
    settings: dict[str, Any] = {"steps": 4, "lr": 0.01, "affine": "sample", "blur": "dynamic"}
    exact = dent.defend(net, "dent", **settings)(images.float())
    static = dent.defend(net, "dent", **(settings | {"steps": 0}))(images.float())
    with torch.autocast("cpu", torch.bfloat16):
        got = dent.defend(net, "dent", **settings)(images.float())
    assert (got.float() - exact).norm() / (exact - static).norm() < 0.8


@pytest.mark.parametrize("layers", [[OwnLayerNorm], ["1"], OwnLayerNorm])
@pytest.mark.parametrize("defense", ["dent:steps=3", "dent+:steps=3", "eata"])
def test_own_layers_are_adapted_when_they_are_named(layers: Any, defense: str, images: Tensor) -> None:
    known, own = randomized(small(ChannelsFirstLayerNorm(8))), small(OwnLayerNorm(8)).double()
    own.load_state_dict(known.state_dict())
    with pytest.raises(ValueError, match=r"name those of your own by layers=\[...\]"):
        dent.defend(own, defense)
    defended = dent.defend(own, defense, layers=layers)
    torch.testing.assert_close(defended(images), dent.defend(known, defense)(images))
    assert not torch.equal(defended(images), own(images))
    if isinstance(defended, dent.Dent):
        assert "1 layers (OwnLayerNorm)" in repr(defended)
        assert defended.affine(defended.adapt(images)).keys() == {"1.weight", "1.bias"}


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (["11"], "unknown layer of Sequential '11'"),
        ([nn.GroupNorm], "expected layers of GroupNorm, got none in Sequential"),
        (["2"], r"expected parameters `weight` and `bias`, or one of them, got none in '2' \(ReLU\)"),
        ([nn.Conv2d(1, 1, 1)], "expected names or classes, got Conv2d"),
    ],
)
def test_layers_that_cannot_be_adapted(layers: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        dent.defend(small(OwnLayerNorm(8)), layers=layers)


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("shape", [(5, 3), (5, 3, 2), (5, 3, 2, 2)], ids=len)
def test_scale_and_shift_have_exact_gradients(shape: tuple[int, ...], rows: int) -> None:
    x, scale, shift = (
        torch.randn(one, dtype=torch.float64, requires_grad=True)
        for one in (shape, (rows, 3), (rows, 3))
    )
    weights = torch.randn(shape, dtype=torch.float64)
    wide = (-1, 3, *[1] * (len(shape) - 2))
    plain = x * scale.view(wide) + shift.view(wide)
    made = channel_affine(x, scale, shift)
    torch.testing.assert_close(made, plain)
    wanted, got = (
        torch.autograd.grad((weights * one).sum(), (x, scale, shift)) for one in (plain, made)
    )
    torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_scaled_in_float32(dtype: torch.dtype, rows: int) -> None:
    x = torch.randn(5, 3, 4, 4, dtype=dtype).requires_grad_()
    scale, shift = (torch.randn(rows, 3, requires_grad=True) for _ in range(2))
    weights = torch.randn_like(x)
    made, exact = channel_affine(x, scale, shift), x.double()
    plain = exact * scale[:, :, None, None] + shift[:, :, None, None]
    assert made.dtype == dtype
    torch.testing.assert_close(made, plain.to(dtype))  # rounded once
    wanted = torch.autograd.grad((weights.double() * plain).sum(), (scale, shift))
    torch.testing.assert_close(torch.autograd.grad(made, (scale, shift), weights), wanted)
