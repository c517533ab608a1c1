"""What a defense promises to leave alone, also when something goes wrong, and from several threads."""

from __future__ import annotations

import copy
import io
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from nets import Shared, affine_parameters, randomized, small
from torch import Tensor, nn

import dent
from dent.models import CifarResNet


def fingerprint(net: nn.Module) -> list[Any]:
    """All that could be changed in a model."""
    return [
        [
            (id(module), module.training, list(vars(module)), sorted(module._forward_hooks.items()))
            for module in net.modules()
        ],
        [(name, id(p), p.requires_grad, p.data_ptr(), p._version) for name, p in net.named_parameters()],
        [(name, id(b), b.data_ptr(), b._version) for name, b in net.named_buffers()],
        {name: value.clone() for name, value in net.state_dict().items()},
        [None if p.grad is None else p.grad.clone() for p in net.parameters()],
    ]


def assert_same(before: list[Any], after: list[Any]) -> None:
    assert before[:3] == after[:3]
    assert all(torch.equal(before[3][name], after[3][name]) for name in before[3])
    for old, new in zip(before[4], after[4], strict=True):
        assert (old is None and new is None) or torch.equal(old, new)


@pytest.mark.parametrize("train_mode", [False, True])
@pytest.mark.parametrize("preset", list(dent.PRESETS))
def test_the_model_is_bit_identical_after_any_call(
    preset: str, train_mode: bool, images: Tensor
) -> None:
    net = randomized(CifarResNet(1)).train(train_mode)
    net(images).sum().backward()  # some gradients of the user's own
    before = fingerprint(net)
    defended = dent.defend(net, preset)
    inputs = images.clone().requires_grad_()
    defended(inputs).sum().backward()
    if isinstance(defended, dent.Dent):
        defended.predict(images, defended.adapt(images, freeze_statistics=True))
        if defended.settings.steps:
            defended(inputs, gradient="unrolled").sum().backward()
    defended.train()
    defended.eval()
    repr(defended)
    assert_same(before, fingerprint(net))


class Failing(nn.Module):
    """Raises in its `fail_at`-th forward."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.calls = [0]
        self.fail_at = 3

    def forward(self, x: Tensor) -> Tensor:
        self.calls[0] += 1
        if self.calls[0] == self.fail_at:
            raise RuntimeError("out of luck")
        return self.net(x)  # type: ignore[no-any-return]


def test_the_model_is_bit_identical_after_an_exception(images: Tensor) -> None:
    net = Failing(randomized(small(nn.BatchNorm2d(8)))).train()
    before = fingerprint(net)
    defended = dent.defend(net, "dent", steps=5)
    with pytest.raises(RuntimeError, match="out of luck"):
        defended(images)
    assert_same(before, fingerprint(net))
    fresh = dent.defend(net.net, "dent", steps=5)
    torch.testing.assert_close(defended(images), fresh(images))  # and the defense works on


def test_weights_are_shared_not_copied(images: Tensor) -> None:
    net = randomized(CifarResNet(1))
    defended = dent.defend(net, "dent", steps=2)
    before = defended(images)
    other = randomized(CifarResNet(1), seed=1)
    net.load_state_dict(other.state_dict())
    assert not torch.allclose(defended(images), before)
    torch.testing.assert_close(defended(images), dent.defend(other, "dent", steps=2)(images))
    defended.float()  # as `to(device)` does, this replaces the model's buffers
    assert defended(images.float()).dtype == torch.float32
    assert sum(t.numel() for t in defended.state_dict().values()) == sum(
        t.numel() for t in net.state_dict().values()
    )


def test_hooks_of_the_user_run_and_stay(images: Tensor) -> None:
    net = randomized(CifarResNet(1))
    seen: list[torch.Size] = []
    handle = net.get_submodule("layer3").register_forward_hook(
        lambda m, args, out: seen.append(out.shape)
    )
    dent.defend(net, "dent", steps=3)(images)
    assert len(seen) == 4
    handle.remove()
    assert not net.get_submodule("layer3")._forward_hooks


def test_several_threads_at_once(images: Tensor) -> None:
    defended = dent.defend(randomized(CifarResNet(1)), "dent+", steps=3)
    batches = [images + 0.01 * i for i in range(16)]
    expected = [defended(batch) for batch in batches]
    with ThreadPoolExecutor(8) as pool:
        got = list(pool.map(defended, batches))
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_copies_and_pickles(images: Tensor) -> None:
    defended = dent.defend(randomized(Shared()), "dent", steps=2)
    expected = defended(images)
    twin = copy.deepcopy(defended)
    assert torch.equal(twin(images), expected)
    assert not {id(p) for p in twin.parameters()} & {id(p) for p in defended.parameters()}
    buffer = io.BytesIO()
    torch.save(defended, buffer)
    buffer.seek(0)
    assert torch.equal(torch.load(buffer, weights_only=False)(images), expected)
    online = copy.deepcopy(dent.defend(randomized(Shared()), "tent"))
    assert online(images).shape == (5, 4)


def test_repr_says_what_is_adapted() -> None:
    net = CifarResNet(1)
    count = sum(p.numel() for p in affine_parameters(net))
    total = sum(p.numel() for p in net.parameters())
    text = repr(dent.defend(net, "dent+"))
    assert f"{count:,} of {total:,} parameters" in text
    assert "9 layers (BatchNorm2d), per sample" in text
    assert "updates carried by Dent(tent" in repr(dent.defend(net, "tent"))


def test_a_model_that_torch_has_compiled_is_unwrapped(images: Tensor) -> None:
    net = randomized(small(nn.BatchNorm2d(8)))
    assert dent.defend(torch.compile(net), "dent").model is net  # type: ignore[call-overload]


def test_compiled_equals_eager(caplog: pytest.LogCaptureFixture) -> None:
    torch._dynamo.reset()
    net = randomized(small(nn.BatchNorm2d(8))).float()
    images = torch.rand(4, 3, 8, 8)
    for affine in ("batch", "sample"):
        settings: dict[str, Any] = {"steps": 3, "lr": 0.01, "affine": affine}
        compiled = dent.defend(net, "dent", compile=True, **settings)
        torch.testing.assert_close(
            compiled(images), dent.defend(net, "dent", **settings)(images), rtol=1e-4, atol=1e-4
        )
    assert not torch._dynamo.utils.counters["graph_break"]
    assert "compiling for inputs of shape (4, 3, 8, 8)" in caplog.text
    inputs = images.clone().requires_grad_()
    (grad,) = torch.autograd.grad(compiled(inputs, gradient="unrolled").sum(), inputs)
    (expected,) = torch.autograd.grad(
        dent.defend(net, "dent", gradient="unrolled", **settings)(inputs).sum(), inputs
    )
    torch.testing.assert_close(grad, expected, rtol=1e-2, atol=1e-3)
