"""A static model on a CPU in parts: a thread for each part of the batch, instead of for each operation.

Small networks leave a core idle between their operations; two halves of a batch side by side do not.
What the way back needs of a large batch leaves the caches; that of a part does not. That is so where
threads of OpenMP that wait are asleep (`OMP_WAIT_POLICY=PASSIVE`). Where they spin, as they do by
default, they are quick at the next operation and would take the cores from the parts: the batch stays
whole.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor

from dent.attacks.calls import Model

LEAST = 16  # inputs in a part: fewer are not worth a thread
MOST = 64  # where a gradient is asked for; more leave the caches
T = TypeVar("T")


def in_parts(model: Model, points: Tensor) -> Tensor:
    """The model's answer, as one function that autograd goes back through in parts too."""
    threads = torch.get_num_threads()
    count = min(threads, len(points) // LEAST)
    if count < 2 or points.device.type != "cpu" or not waits_asleep():
        return model(points)
    share = max(threads // count, 1)
    if points.requires_grad and torch.is_grad_enabled():
        count *= math.ceil(len(points) / (count * MOST))
    logits: Tensor = _InParts.apply(points, model, count, share)  # type: ignore[no-untyped-call]
    return logits


def waits_asleep() -> bool:
    """Whether OpenMP was told so when it was loaded."""
    return os.environ.get("OMP_WAIT_POLICY", "").strip().lower() == "passive"


class _InParts(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, points: Tensor, model: Model, count: int, threads: int) -> Tensor:
        needed = context.needs_input_grad[0]

        def ask(part: Tensor) -> tuple[Tensor, Tensor]:
            with torch.set_grad_enabled(needed):
                part = part.detach().requires_grad_(needed)
                return part, model(part)

        context.threads = threads
        context.asked = side_by_side(ask, points.chunk(count), threads=threads)
        return torch.cat([logits.detach() for _, logits in context.asked])

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        def back(part: tuple[Tensor, Tensor, Tensor]) -> Tensor:
            points, logits, gradient = part
            # The graph is kept as long as this function's own: it may be gone through again.
            (answer,) = torch.autograd.grad(logits, points, gradient, retain_graph=True)
            return answer

        sizes = [len(points) for points, _ in context.asked]
        parts = [
            (*one, part) for one, part in zip(context.asked, gradients[0].split(sizes), strict=True)
        ]
        return torch.cat(side_by_side(back, parts, threads=context.threads)), None, None, None


def side_by_side(call: Callable[[Any], T], parts: Iterable[Any], *, threads: int) -> list[T]:
    """What `call` returns for each part, in order; each in a thread with so many threads of its own."""

    def run(part: Any) -> T:
        torch.set_num_threads(threads)  # of this thread alone
        return call(part)

    return list(_pool().map(run, parts))


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(torch.get_num_threads(), thread_name_prefix="dent-parts")


if hasattr(os, "register_at_fork"):  # a forked process has none of these threads
    os.register_at_fork(after_in_child=_pool.cache_clear)
