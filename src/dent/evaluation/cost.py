"""Measure the cost of inference: operations and seconds, of a defended model and its static one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from math import prod
from statistics import median
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.module_tracker import ModuleTracker

from dent.defense import Online


def count_flops(model: nn.Module, inputs: Tensor) -> int:
    """Return the floating-point operations of a call, with all forwards and backwards inside of it.

    It counts convolutions and matrix products, each multiplication and addition as one operation;
    everything else in a network is small beside them. With k steps, dent counts as 2k + 1 static
    forwards, minus k times what comes before the first adapted layer (usually one convolution): no
    gradient goes there, nor to any weight. A dynamic blur comes before everything, so then nothing is
    subtracted and 2k + 1 blurs are added. A defense that predicts before it adapts takes 2k forwards.

    >>> count_flops(nn.Linear(4, 3), torch.rand(5, 4)) == 2 * 5 * 4 * 3
    True
    """
    with torch.no_grad(), _preserve_state(model):
        model(inputs)  # a defense's first call may try a memory layout in vain
        return _count(model, inputs)


def time_calls(calls: Mapping[str, Callable[[], object]], *, rounds: int = 5) -> dict[str, float]:
    """Return the median seconds of each call, after one that is not counted.

    The calls take turns, so that all of them suffer if the machine gets slower.

    >>> took = time_calls({"short": lambda: None, "long": lambda: time.sleep(0.01)}, rounds=3)
    >>> took["short"] < took["long"]
    True
    """
    if rounds < 1:
        raise ValueError(f"expected rounds >= 1, got {rounds}")
    took: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        _finish(call())
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            _finish(call())
            took[name].append(time.perf_counter() - start)
    return {name: median(times) for name, times in took.items()}


def measure_cost(
    model: nn.Module,
    static: nn.Module | None,
    inputs: Tensor,
    *,
    few: int | None = None,
    rounds: int = 5,
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the operations for each input, and the seconds for the batch, of both models.

    The operations (`flops`, `static_flops`) are the same in every run; they are left out if torch
    cannot count them. The seconds (`forward_seconds`, `static_seconds`) vary.

    static: the model without its defense; None if it is not known, and then nothing is measured of it.
    few: number of inputs that operations are counted on (default: all); the whole batch is timed.
    """
    if len(inputs) == 0:
        raise ValueError("expected at least one input, got none")
    counted = inputs[:few]
    models = {"forward": model} if static is None else {"forward": model, "static": static}
    with torch.no_grad(), _preserve_state(model), _preserve_state(static):
        calls = {f"{name}_seconds": partial(one, inputs) for name, one in models.items()}
        took = time_calls(calls, rounds=rounds)
        try:
            names = {"forward": "flops", "static": "static_flops"}
            counts = {names[name]: _count(one, counted) for name, one in models.items()}
        except Exception:  # the model itself works: it was just timed
            counts = {}
    if not all(counts.values()):  # operations that the counter does not know
        counts = {}
    return {name: count / len(counted) for name, count in counts.items()}, took


def _count(model: nn.Module, inputs: Tensor) -> int:
    # The counter sees torch's operations one by one: it knows neither what was compiled, nor
    # attention and encoder layers that run as a single operation.
    fast_path = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    counter = FlopCounterMode(display=False, custom_mapping=_CORRECTED)
    counter.mod_tracker = _Untracked()
    try:
        with (
            torch.compiler.set_stance("force_eager"),
            sdpa_kernel(SDPBackend.MATH),
            counter,
        ):
            model(inputs)
        return counter.get_total_flops()
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)


class _Untracked(ModuleTracker):
    """Record no layers: the hooks for that fail on gradients of a model's own inputs."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def _convolution_backward(
    grad: torch.Size, inputs: torch.Size, weight: torch.Size, *options: Any, **_: Any
) -> int:
    """Return the operations of a backward: each gradient takes as many as the convolution did.

    For weights, torch counts as if there were no groups, so a blur of each sample by a filter of its
    own would count as hundreds.
    """
    transposed, wanted = options[4], options[7]
    places = (inputs if transposed else grad)[2:]
    return 2 * inputs[0] * prod(weight) * prod(places) * sum(map(bool, wanted[:2]))


_CORRECTED = {torch.ops.aten.convolution_backward: _convolution_backward}


@contextmanager
def _preserve_state(model: nn.Module | None) -> Iterator[None]:
    """Restore what a continual defense carries from call to call."""
    state = model.state if isinstance(model, Online) else None
    try:
        yield
    finally:
        if isinstance(model, Online):
            model.state = state


def _finish(result: object) -> None:
    """Wait until the GPU is done."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize(result.device if isinstance(result, Tensor) and result.is_cuda else None)
