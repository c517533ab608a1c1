"""One process, or several that `torchrun` started, each with its part of every batch."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


@dataclass(frozen=True)
class Processes:
    """How many processes share the work, and which of them this is."""

    rank: int = 0
    count: int = 1

    def part(self, batch: Tensor) -> Tensor:
        """What this process takes of a batch; all take the same number."""
        return batch.chunk(self.count)[self.rank]

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model with its gradients averaged over the processes."""
        return DistributedDataParallel(model) if self.count > 1 else model

    def total(self, values: Tensor) -> Tensor:
        """The sum over the processes."""
        if self.count > 1:
            dist.all_reduce(values)
        return values

    def from_first(self, value: Any) -> Any:
        """What the first process has, in all of them."""
        if self.count > 1:
            holder = [value]
            dist.broadcast_object_list(holder, 0)
            return holder[0]
        return value


@contextmanager
def processes(device: torch.device) -> Iterator[Processes]:
    """Join the processes that `torchrun` started; without it, this one alone."""
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if count == 1:
        yield Processes()
        return
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield Processes(dist.get_rank(), count)
        dist.barrier()  # whoever left first would take the connections of the others along
    finally:
        gc.collect()  # DistributedDataParallel is a cycle, and holds the group open until it is gone
        dist.destroy_process_group()


def is_first() -> bool:
    """Whether this process is the one that writes and speaks for all."""
    return int(os.environ.get("RANK", "0")) == 0


def local_device(device: str) -> torch.device:
    """The device of this process: of several on a machine with GPUs, each takes its own."""
    if device == "cuda" and "LOCAL_RANK" in os.environ:
        device = f"cuda:{os.environ['LOCAL_RANK']}"
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:  # torch without CUDA asserts
        raise ValueError(f"expected a device that this machine has, got {device!r}: {error}") from error
