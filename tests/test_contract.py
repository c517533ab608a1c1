"""What a defense promises to leave alone, also when something goes wrong, and from several threads."""

from __future__ import annotations

import copy
import inspect
import io
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from nets import Shared, Viewing, affine_parameters, randomized, small
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


def test_the_models_current_tensors_are_used_however_they_were_changed(images: Tensor) -> None:
    net = randomized(small(nn.BatchNorm2d(8)))
    defended = dent.defend(net, "dent", steps=2)
    conv = net.get_submodule("0")
    assert isinstance(conv, nn.Conv2d)

    def change_in_place() -> None:
        with torch.no_grad():
            conv.weight.mul_(1.1)

    def change_data() -> None:
        conv.weight.data = 1.1 * conv.weight.data

    def replace() -> None:
        conv.weight = nn.Parameter(1.1 * conv.weight.detach())

    def assign() -> None:
        state = {name: 1.1 * value for name, value in net.state_dict().items()}
        net.load_state_dict(state, assign=True)

    for change in (change_in_place, change_data, replace, assign):
        before = defended(images)
        change()
        assert not torch.allclose(defended(images), before), change
        assert torch.equal(defended(images), dent.defend(net, "dent", steps=2)(images))


class Watching(nn.Module):
    """Notes, in each forward, who calls it and where its weights are."""

    def __init__(self) -> None:
        super().__init__()
        self.net = small(nn.BatchNorm2d(8))
        self.notes: list[tuple[int, set[int]]] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> Watching:
        twin = Watching()
        twin.net, twin.notes = copy.deepcopy(self.net, memo), self.notes
        return twin

    def forward(self, x: Tensor) -> Tensor:
        ours = str(Path(dent.__file__).parent)
        frames = sum(frame.filename.startswith(ours) for frame in inspect.stack(0))
        self.notes.append((frames, {value.data_ptr() for value in self.net[0].parameters()}))  # type: ignore[index]
        return self.net(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("gradient", ["stale", "unrolled"])
def test_few_frames_stand_above_the_model_and_its_weights_are_not_copied(gradient: str) -> None:
    net = Watching()
    images = torch.rand(4, 3, 12, 12, requires_grad=True)  # in the layout of the fast path
    defended = dent.defend(net, "dent", steps=3, gradient=gradient)
    defended(images)
    net.notes.clear()
    defended(images).sum().backward()
    assert len(net.notes) == (4 if gradient == "stale" else 7)  # backward makes each update again
    assert max(frames for frames, _ in net.notes) <= 5
    own = {value.data_ptr() for value in net.net[0].parameters()}  # type: ignore[index]
    assert all(pointers == own for _, pointers in net.notes)
    defended.predict(images, defended.adapt(images, freeze_statistics=True))
    assert max(frames for frames, _ in net.notes) <= 5


def test_the_layout_is_tried_without_the_users_hooks_and_random_numbers(images: Tensor) -> None:
    net = randomized(Viewing())
    seen: list[bool] = []
    net.get_submodule("norm").register_forward_hook(
        lambda module, args, out: seen.append(args[0].is_contiguous())
    )
    state = torch.get_rng_state()
    defended = dent.defend(net, "dent", steps=2)
    defended(images), defended(images)
    assert seen == 6 * [True]
    assert torch.equal(torch.get_rng_state(), state)


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


@pytest.mark.parametrize("affine", ["batch", "sample"])
@pytest.mark.parametrize("statistics", ["train", "test"])
def test_compiled_unrolled_gradient_equals_eager(affine: str, statistics: str) -> None:
    # SGD in double precision: Adam divides by small gradients, which would hide an error in the noise.
    torch._dynamo.reset()
    net = randomized(small(nn.BatchNorm2d(8)))
    inputs = torch.rand(4, 3, 8, 8, dtype=torch.double, requires_grad=True)
    settings: dict[str, Any] = {"affine": affine, "statistics": statistics, "gradient": "unrolled"}
    settings |= {"steps": 2, "optimizer": "sgd", "lr": 0.1}
    grads = [
        torch.autograd.grad(dent.defend(net, "dent", compile=one, **settings)(inputs).sum(), inputs)[0]
        for one in (True, False)
    ]
    stale = dent.defend(net, "dent", **settings)(inputs, gradient="stale").sum()
    assert not torch.allclose(torch.autograd.grad(stale, inputs)[0], grads[1], rtol=1e-2)
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-7, atol=1e-9)


def test_what_is_printed_is_short(net: nn.Module, images: Tensor) -> None:
    state = dent.defend(net, "dent", steps=3).adapt(images)
    first, last = state.trace.entropy[0].mean(), state.trace.entropy[-1].mean()
    seen = f"entropy={first:.3f} before the first update, {last:.3f} before the last"
    layers = sum(isinstance(layer, nn.BatchNorm2d) for layer in net.modules())
    assert repr(state) == f"State(layers={layers}, updates=3, {seen})"
    assert repr(state.trace) == "Trace(updates=3, n=5)"
    assert repr(dent.defend(net, "static").adapt(images)) == "State(layers=0, updates=0)"
    adaptation = dent.defend(net, "hedge", steps=2).adapt(images)
    assert repr(adaptation) == "Adaptation(updates=2, variables=[(5, 3, 12, 12)])"
    labels = net(images).argmax(1)
    result = dent.attacks.pgd(net, images, labels, eps=0.1, steps=2)
    broken = int(result.success.sum())
    counts = f"queries={result.queries}, gradients={result.gradients}"
    assert repr(result) == f"AttackResult(n=5, broken={broken}, {counts})"
    suite = dent.attacks.autoattack(net, images, labels, eps=0.1, attacks=["square"], queries=2)
    assert repr(suite).startswith(f"SuiteResult(n=5, broken={int(suite.broken.sum())}, queries=")
    assert len(repr(suite)) < 100
