"""What inference costs, against what convolutions and matrix products cost on paper."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from nets import Transformer, Viewing
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

import dent
from dent.evaluation import cost
from dent.evaluation.cost import count_flops, measure_cost, time_calls

N, SIZE = 2, 8
FIRST = 2 * N * 4 * 3 * 9 * SIZE**2  # 2 N Cout Cin K K H W
REST = 2 * N * 6 * 4 * 9 * SIZE**2 + 2 * N * 6 * 5


def net() -> nn.Sequential:
    """A convolution before the first layer that is adapted, one after it, and a linear layer."""
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(),
        nn.Conv2d(4, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 5),
    ).eval()  # fmt: skip


def images(n: int = N) -> Tensor:
    return torch.rand(n, 3, SIZE, SIZE)


@given(
    n=st.integers(1, 3),
    channels=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    groups=st.integers(1, 3),
    kernel=st.integers(1, 3),
    stride=st.integers(1, 2),
    padding=st.integers(0, 1),
)
def test_convolutions_have_a_closed_form(
    n: int, channels: tuple[int, int], groups: int, kernel: int, stride: int, padding: int
) -> None:
    inside, outside = (count * groups for count in channels)
    layer = nn.Conv2d(inside, outside, kernel, stride, padding, groups=groups)
    side = (7 + 2 * padding - kernel) // stride + 1
    forward = 2 * n * outside * (inside // groups) * kernel**2 * side**2
    inputs = torch.rand(n, inside, 7, 7)
    assert count_flops(layer, inputs) == forward

    class Trained(nn.Module):
        def forward(self, inputs: Tensor) -> Tensor:
            with torch.enable_grad():
                torch.autograd.grad(layer(inputs.requires_grad_()).sum(), [inputs, layer.weight])
            return inputs

    # Each gradient is as many products as the convolution: of every weight with every place it meets.
    assert count_flops(Trained(), inputs) == 3 * forward


@pytest.mark.parametrize("bias", [False, True])
def test_transposed_convolutions_have_a_closed_form(bias: bool) -> None:
    layer = nn.ConvTranspose2d(3, 4, 2, stride=2, bias=bias)

    class Trained(nn.Module):
        def forward(self, inputs: Tensor) -> Tensor:
            with torch.enable_grad():
                return torch.autograd.grad(layer(inputs).sum(), [layer.weight])[0]

    forward = 2 * N * 3 * 4 * 4 * SIZE**2
    assert count_flops(layer, images()) == forward
    assert count_flops(Trained(), images()) == 2 * forward


@pytest.mark.parametrize("steps", [0, 1, 3])
@pytest.mark.parametrize("preset", ["dent", "dent+"])
def test_dent_takes_a_forward_and_a_backward_for_each_step(preset: str, steps: int) -> None:
    defended = dent.defend(net(), preset, steps=steps)
    assert count_flops(net(), images()) == FIRST + REST
    assert count_flops(defended, images()) == (2 * steps + 1) * (FIRST + REST) - steps * FIRST


def test_nothing_is_saved_where_the_first_layer_is_adapted() -> None:
    model = nn.Sequential(nn.BatchNorm2d(3), *net()).eval()
    assert count_flops(dent.defend(model, steps=3), images()) == 7 * (FIRST + REST)


@pytest.mark.parametrize("steps", [1, 6])
def test_the_shipped_model_costs_almost_two_forwards_more_for_each_step(steps: int) -> None:
    model = dent.load_model("resnet20-at")
    inputs, _ = dent.load_data("cifar10", n=2)
    static, first = count_flops(model, inputs), 2 * 2 * 16 * 3 * 9 * 32**2
    count = count_flops(dent.defend(model, "dent+", steps=steps), inputs)
    assert count == (2 * steps + 1) * static - steps * first
    assert count / static == pytest.approx(2 * steps + 1, rel=0.01)


@pytest.mark.parametrize("per", ["batch", "sample"])
def test_a_dynamic_blur_counts_as_one_more_layer(per: str) -> None:
    options: dict[str, Any] = {"blur_per": per, "affine": per}
    options |= {"sigma": 0.75, "blur_lr": 0.01}  # five pixels wide, and stays so
    defended = dent.defend(net(), "dent-nominal", steps=2, **options)
    blur = 2 * 16 * 3 * 5**2 * SIZE**2
    assert count_flops(defended, images(16)) == 5 * (16 // N * (FIRST + REST) + blur)


def test_attention_is_counted_on_every_device_and_path() -> None:
    tokens, width = 9, 16
    patches = 2 * N * width * 3 * 4**2 * tokens
    attention = 2 * N * tokens * width * 4 * width + 4 * N * tokens**2 * width
    rest = 2 * N * tokens * 2 * width * 32 + 2 * N * width * 4
    model, inputs = Transformer().eval(), torch.rand(N, 3, 12, 12)
    assert count_flops(model, inputs) == patches + attention + rest
    assert torch.backends.mha.get_fastpath_enabled()
    # The first normalization layer comes after attention.
    assert (
        count_flops(dent.defend(model, "dent+", steps=2), inputs) == 3 * (patches + attention) + 5 * rest
    )


def test_a_layout_tried_in_vain_is_not_counted() -> None:
    model, inputs = Viewing().eval(), torch.rand(N, 3, 12, 12)
    convolution, linear = 2 * N * 4 * 3 * 9 * 100, 2 * N * 400 * 4
    assert count_flops(model, inputs) == convolution + linear
    assert count_flops(dent.defend(model, steps=2), inputs) == 3 * convolution + 5 * linear


def test_what_is_compiled_counts_as_what_it_is() -> None:
    compiled: Any = torch.compile(net(), backend="eager")
    figures, _ = measure_cost(dent.defend(net(), steps=1), compiled, images(), rounds=1)
    assert figures["static_flops"] == (FIRST + REST) / N


def test_a_continual_defense_carries_nothing_on() -> None:
    online = dent.defend(net(), "tent", steps=2)
    assert isinstance(online, dent.Online)
    online(images(16))
    state = online.state
    assert count_flops(online, images(16)) == 16 // N * (4 * (FIRST + REST) - 2 * FIRST)
    assert online.state is state
    measure_cost(online, net(), images(16), rounds=1)
    assert online.state is state


def test_measured_for_each_input_and_for_the_batch() -> None:
    inputs = images()
    figures, took = measure_cost(dent.defend(net(), steps=4), net(), inputs)
    assert figures == {"flops": (9 * (FIRST + REST) - 4 * FIRST) / N, "static_flops": (FIRST + REST) / N}
    assert took["forward_seconds"] > took["static_seconds"] > 0
    assert measure_cost(net(), net(), images(8), rounds=1)[0]["flops"] == (FIRST + REST) / N
    with pytest.raises(ValueError, match="expected at least one input"):
        measure_cost(net(), net(), images(0))


class Checked(nn.Module):
    """Calls `check` before it predicts."""

    def __init__(self, check: Callable[[], None]) -> None:
        super().__init__()
        self.check, self.net = check, net()

    def forward(self, inputs: Tensor) -> Tensor:
        self.check()
        return self.net(inputs)  # type: ignore[no-any-return]


def test_what_cannot_be_counted_is_left_out() -> None:
    def refuse_counters() -> None:
        if _get_current_dispatch_mode() is not None:
            raise NotImplementedError("no dispatch modes")

    exotic = Checked(refuse_counters)
    figures, took = measure_cost(exotic, net(), images(), rounds=1)
    assert figures == {}
    assert set(took) == {"forward_seconds", "static_seconds"}
    with pytest.raises(NotImplementedError):
        count_flops(exotic, images())
    assert torch.backends.mha.get_fastpath_enabled()
    assert measure_cost(nn.ReLU(), nn.ReLU(), images(), rounds=1)[0] == {}  # no operation that it knows


def test_an_error_of_the_model_is_an_error() -> None:
    def fail() -> None:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        measure_cost(Checked(fail), net(), images())


def test_models_are_called_without_gradients() -> None:
    seen: list[bool] = []
    measure_cost(net(), Checked(lambda: seen.append(torch.is_grad_enabled())), images(), rounds=1)
    assert seen == [False] * 3  # the warm-up, the round, the count


class Clock:
    """Time that passes only when it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.calls = 0.0, ""
        monkeypatch.setattr(cost, "time", SimpleNamespace(perf_counter=lambda: self.now))

    def call(self, name: str, durations: list[float]) -> Callable[[], object]:
        remaining = iter(durations)

        def run() -> None:
            self.calls += name
            self.now += next(remaining)

        return run


def test_seconds_are_medians_of_calls_that_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    calls = {"a": clock.call("a", [90, 1, 30, 2]), "b": clock.call("b", [0, 8, 7, 7.5])}
    assert time_calls(calls, rounds=3) == {"a": 2, "b": 7.5}
    assert clock.calls == "abababab"
    assert time_calls({}) == {}
    with pytest.raises(ValueError, match="expected rounds >= 1, got 0"):
        time_calls({}, rounds=0)


def test_seconds_wait_for_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: clock.call("s", [5])())
    assert time_calls({"a": clock.call("a", [1, 1, 1])}, rounds=2) == {"a": 6}
    assert clock.calls == "asasas"


def test_operations_are_counted_on_few_inputs_and_the_whole_batch_is_timed() -> None:
    class Sized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.sizes = net(), list[int]()

        def forward(self, inputs: Tensor) -> Tensor:
            self.sizes.append(len(inputs))
            return self.net(inputs)  # type: ignore[no-any-return]

    model = Sized()
    figures, _ = measure_cost(model, None, images(8), few=N, rounds=2)
    assert model.sizes == [8, 8, 8, N]  # the warm-up, two rounds, the count
    assert figures == {"flops": (FIRST + REST) / N}
