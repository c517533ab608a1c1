"""The method against a plain loop of an optimizer over a copy of the model."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import pytorch_optimizer
import torch
from nets import affine_parameters
from torch import Tensor, nn

import dent
from dent.defense import LowDiversityWarning


def entropy(logits: Tensor) -> Tensor:
    return torch.as_tensor(torch.distributions.Categorical(logits=logits).entropy())


def batch_statistics(net: nn.Module) -> None:
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean = module.running_var = None


def plain_loop(net: nn.Module, inputs: Tensor, steps: int, optimizer: Any, **options: Any) -> nn.Module:
    """The method as anybody would write it."""
    adapted = copy.deepcopy(net)
    updates = optimizer(affine_parameters(adapted), **options)
    for _ in range(steps):
        updates.zero_grad()
        entropy(adapted(inputs)).mean().backward()
        updates.step()
    return adapted


@pytest.mark.parametrize("statistics", ["train", "test"])
def test_batch_wise_is_adam_over_the_affine_parameters(
    net: nn.Module, images: Tensor, statistics: str
) -> None:
    own = copy.deepcopy(net)
    if statistics == "test":
        batch_statistics(own)
    expected = plain_loop(own, images, 10, torch.optim.Adam, lr=1e-3)
    defended = dent.defend(net, "dent", steps=10, statistics=statistics)
    state = defended.adapt(images)
    torch.testing.assert_close(
        defended.predict(images, state), expected(images).detach(), rtol=1e-9, atol=1e-9
    )
    adapted, started = dict(expected.named_parameters()), dict(net.named_parameters())
    affine = defended.affine(state)
    assert len(affine) == len(affine_parameters(net))
    for name, value in affine.items():
        torch.testing.assert_close(value[0], adapted[name].detach(), rtol=1e-9, atol=1e-9)
        assert (value[0] - started[name]).abs().max() > 1e-3  # it did move


@pytest.mark.parametrize("statistics", ["train", "test"])
def test_information_maximization_batch_wise(net: nn.Module, images: Tensor, statistics: str) -> None:
    adapted = copy.deepcopy(net)
    if statistics == "test":
        batch_statistics(adapted)
    optimizer = torch.optim.SGD(affine_parameters(adapted), lr=0.1, momentum=0.9)
    for _ in range(4):
        optimizer.zero_grad()
        p = adapted(images).softmax(1)
        mean = p.mean(0)
        (-(p * p.log()).sum(1).mean() + (mean * mean.log()).sum()).backward()
        optimizer.step()
    defended = dent.defend(
        net,
        "dent",
        steps=4,
        statistics=statistics,
        objective="information-maximization",
        optimizer="sgd",
        lr=0.1,
    )
    torch.testing.assert_close(defended(images), adapted(images).detach(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("optimizer", ["adam", "adamod"])
def test_sample_wise_is_the_loop_over_single_inputs(
    net: nn.Module, images: Tensor, optimizer: str
) -> None:
    defended = dent.defend(
        net, "dent+", steps=10, objective="entropy", reduction="sum", optimizer=optimizer, lr=6e-3
    )
    reference: Any = torch.optim.Adam
    options: dict[str, Any] = {"lr": 6e-3}
    if optimizer == "adamod":
        reference, options = pytorch_optimizer.AdaMod, {"lr": 6e-3, "betas": (0.99, 0.999, 0.6)}
        options["weight_decay"] = 0.0
    alone = [plain_loop(net, image[None], 10, reference, **options) for image in images]
    state = defended.adapt(images)
    expected = torch.cat([adapted(image[None]) for adapted, image in zip(alone, images, strict=True)])
    torch.testing.assert_close(defended.predict(images, state), expected.detach(), rtol=1e-8, atol=1e-8)
    for name, rows in defended.affine(state).items():
        each = torch.stack([dict(adapted.named_parameters())[name] for adapted in alone])
        torch.testing.assert_close(rows, each.detach(), rtol=1e-8, atol=1e-8)


def test_information_maximization_of_one_input_leaves_the_model_static(
    net: nn.Module, images: Tensor
) -> None:
    defended = dent.defend(net, "dent+")
    state = defended.adapt(images[:1])
    assert state.delta is not None
    assert not state.delta.any()
    torch.testing.assert_close(defended(images[:1]), net(images[:1]).detach())
    assert defended.adapt(images[:2]).trace.delta[-1].min() > 0


def test_information_maximization_warns_once_of_batches_that_look_like_one_class() -> None:
    net = nn.Sequential(nn.BatchNorm1d(3), nn.Identity())  # the class of an input is its largest value
    several = 2 * torch.eye(3)
    same = several[[1, 1]] + 0.1 * torch.rand(2, 3)
    problems = ((several[:1], "a batch of one leaves the model static"), (same, "all 2 inputs"))
    for batch, message in problems:
        defended = dent.defend(net, "dent+")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            defended(several)
            assert not caught
            defended(batch), defended(batch)
        assert [warning.category for warning in caught] == [LowDiversityWarning]
        assert message in str(caught[0].message)
        assert "dent+solo" in str(caught[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dent.defend(net, "dent+solo")(several[:1])
        dent.defend(net, "dent+").adapt(several[:1], steps=0)


def test_no_steps_is_the_static_model_to_the_bit(net: nn.Module, images: Tensor) -> None:
    for preset in ("static", "dent", "dent+"):
        defended = dent.defend(net, preset, steps=0, channels_last=False)
        assert torch.equal(defended(images), net(images).detach())
    batch_statistics(norm := copy.deepcopy(net))
    torch.testing.assert_close(dent.defend(net, "norm")(images), norm(images).detach())
    torch.testing.assert_close(
        dent.defend(net, "dent-nominal", steps=0)(images),
        dent.defend(net, "norm", blur="static")(images),
    )


def test_mixed_statistics_are_weighted_means(net: nn.Module, images: Tensor) -> None:
    first = net.get_submodule("bn1")
    seen: list[Tensor] = []
    first.register_forward_hook(lambda module, args, output: seen.append(args[0].detach()))
    net(images)
    mixed = copy.deepcopy(net)
    bn = mixed.get_submodule("bn1")
    assert isinstance(bn, nn.BatchNorm2d)
    assert bn.running_mean is not None
    assert bn.running_var is not None
    bn.running_mean = 0.7 * bn.running_mean + 0.3 * seen[0].mean((0, 2, 3))
    bn.running_var = 0.7 * bn.running_var + 0.3 * seen[0].var((0, 2, 3), correction=0)
    expected = bn(seen[0]).detach()
    got: list[Tensor] = []
    first.register_forward_hook(lambda module, args, output: got.append(output.detach()))
    dent.defend(net, "norm", statistics=0.3)(images)
    torch.testing.assert_close(got[-1], expected)
    for weight, name in ((0.0, "train"), (1.0, "test")):
        torch.testing.assert_close(
            dent.defend(net, "norm", statistics=weight)(images),
            dent.defend(net, "norm", statistics=name)(images),
        )


@pytest.mark.parametrize("affine", ["batch", "sample"])
@pytest.mark.parametrize("statistics", ["train", "test", 0.4])
def test_frozen_statistics_make_the_adapted_model_static(
    net: nn.Module, images: Tensor, affine: str, statistics: Any
) -> None:
    defended = dent.defend(net, "dent", steps=2, affine=affine, statistics=statistics)
    plain = defended.adapt(images)
    frozen = defended.adapt(images, freeze_statistics=True)
    together = defended.predict(images, frozen)
    torch.testing.assert_close(together, defended.predict(images, plain))
    if affine == "batch":
        torch.testing.assert_close(defended.predict(images[3:4], frozen), together[3:4])


def test_dynamic_smoothing_learns_sigma_with_its_own_rate(net: nn.Module, images: Tensor) -> None:
    defended = dent.defend(net, "dent-nominal", steps=1, covariance="diagonal")
    state = defended.adapt(images)
    assert state.blur is not None
    moved = state.blur - torch.tensor(0.7).log()
    torch.testing.assert_close(moved.abs(), torch.full_like(moved, 0.25), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(state.trace.sigma[-1], state.blur.exp())


def test_trace_tells_the_steps(net: nn.Module, images: Tensor) -> None:
    defended = dent.defend(net, "dent+", steps=6, objective="entropy", reduction="sum")
    state = defended.adapt(images)
    assert state.trace.logits.shape == (6, 5, 10)
    assert state.trace.entropy.shape == (6, 5)
    torch.testing.assert_close(state.trace.entropy[0], entropy(net(images)).detach())
    after = entropy(defended.predict(images, state))
    assert (after < state.trace.entropy[0]).all()  # it minimizes
    assert state.trace.delta.shape == (7, 5)
    assert state.delta is not None
    assert not state.trace.delta[0].any()
    torch.testing.assert_close(state.trace.delta[-1], state.delta.norm(dim=1))
    # A longer adaptation begins as a shorter one, and can be continued.
    short = defended.adapt(images, steps=2)
    torch.testing.assert_close(short.trace.delta, state.trace.delta[:3])
    continued = defended.adapt(images, start=short, steps=4)
    torch.testing.assert_close(continued.delta, state.delta)


@pytest.mark.parametrize("preset", list(dent.PRESETS))
def test_forward_is_predict_after_adapt_and_deterministic(
    net: nn.Module, images: Tensor, preset: str
) -> None:
    if preset == "tent":
        first, again = dent.defend(net, preset), dent.defend(net, preset)
        assert torch.equal(first(images), again(images))
        return
    defended = dent.defend(net, preset)
    expected = defended(images)
    assert torch.equal(defended(images), expected)
    assert torch.equal(defended.predict(images, defended.adapt(images)), expected)


@pytest.mark.parametrize("gradient", ["stale", "unrolled"])
@pytest.mark.parametrize("affine", ["batch", "sample"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_chunks_give_the_same_updates(
    net: nn.Module, images: Tensor, reduction: str, affine: str, gradient: str
) -> None:
    settings: dict[str, Any] = {"steps": 3, "affine": affine, "reduction": reduction, "blur": "dynamic"}
    settings |= {"blur_per": affine, "gradient": gradient}
    inputs = images.clone().requires_grad_()
    whole = dent.defend(net, "dent", **settings)
    for chunk in (1, 2, 4, 9):  # five inputs: uneven pieces, and more than there are
        cut = dent.defend(net, "dent", chunk=chunk, **settings)
        torch.testing.assert_close(cut(images), whole(images))
        torch.testing.assert_close(cut.adapt(images).trace.logits, whole.adapt(images).trace.logits)
        (got,) = torch.autograd.grad(cut(inputs).sum(), inputs)
        (expected,) = torch.autograd.grad(whole(inputs).sum(), inputs)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
