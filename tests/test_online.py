"""Continual adaptation, against tent written as a loop."""

from __future__ import annotations

import copy

import torch
from nets import affine_parameters
from torch import Tensor, nn

import dent


def test_tent_is_the_online_loop_with_predictions_before_the_update(
    net: nn.Module, images: Tensor
) -> None:
    batches = [images, images.flip(0) * 0.9, images + 0.05]
    model = copy.deepcopy(net)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean = module.running_var = None
    optimizer = torch.optim.Adam(affine_parameters(model), lr=1e-3)
    expected = []
    for batch in batches:
        logits = model(batch)
        optimizer.zero_grad()
        torch.distributions.Categorical(logits=logits).entropy().mean().backward()
        optimizer.step()
        expected.append(logits.detach())
    tent = dent.defend(net, "tent")
    with torch.no_grad():
        for batch, logits in zip(batches, expected, strict=True):
            torch.testing.assert_close(tent(batch), logits)
    assert tent.state is not None
    assert tent.state.steps == 3
    # With a graph to the inputs the predictions are the same.
    tent.reset()
    for batch, logits in zip(batches, expected, strict=True):
        got = tent(batch.clone().requires_grad_())
        assert got.requires_grad
        torch.testing.assert_close(got.detach(), logits)


def test_reset_forgets(net: nn.Module, images: Tensor) -> None:
    online = dent.defend(net, "dent", steps=2, continual=True)
    first = online(images)
    assert not torch.allclose(online(images), first)
    online.reset()
    assert torch.equal(online(images), first)
    episodic = dent.defend(net, "dent", steps=2)
    assert torch.equal(episodic(images), first)
    # Two batches of two steps are four steps on the same batch.
    torch.testing.assert_close(online(images), dent.defend(net, "dent", steps=4)(images))


def test_adapt_looks_ahead_without_carrying(net: nn.Module, images: Tensor) -> None:
    online = dent.defend(net, "dent", steps=2, continual=True)
    ahead = online.predict(images, online.adapt(images))
    assert online.state is None
    assert torch.equal(online(images), ahead)
    assert not online.independent


def test_tent_without_updates_is_the_model_with_test_statistics(net: nn.Module, images: Tensor) -> None:
    tent = dent.defend(net, "tent", steps=0)
    torch.testing.assert_close(tent(images), dent.defend(net, "norm")(images))
