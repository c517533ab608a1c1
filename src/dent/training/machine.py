"""What training runs on: one process or several of `torchrun`, a device, and a precision."""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dent.devices import find_device
from dent.precision import has_bfloat16, refuse_slow_bfloat16


@dataclass(frozen=True)
class Processes:
    """The number of processes that share each batch, and the rank of this one."""

    rank: int = 0
    count: int = 1

    def take_part(self, batch: Tensor) -> Tensor:
        """Return this process's part of a batch; all parts have the same size."""
        return batch.chunk(self.count)[self.rank]

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the model with its gradients averaged over the processes."""
        return DistributedDataParallel(model) if self.count > 1 else model

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum of `values` over the processes."""
        if self.count > 1:
            values = values.clone()
            dist.all_reduce(values)
        return values

    def share_first(self, value: Any) -> Any:
        """Return the first process's value in all of them."""
        if self.count > 1:
            holder = [value]
            dist.broadcast_object_list(holder, 0)
            return holder[0]
        return value


@contextmanager
def join_processes(device: torch.device) -> Iterator[Processes]:
    """Join the processes that `torchrun` started; without `torchrun`, this process is the only one."""
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if count == 1:
        yield Processes()
        return
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield Processes(dist.get_rank(), count)
        dist.barrier()  # a process that left early would close the connections of the others
    finally:
        gc.collect()  # DistributedDataParallel is a cycle that keeps the group open until it is freed
        dist.destroy_process_group()


def is_first() -> bool:
    """Return True in the process that writes files and prints for all."""
    return int(os.environ.get("RANK", "0")) == 0


def find_own_device(name: str) -> torch.device:
    """Return the device of this process. Under `torchrun`, each process has its own GPU."""
    if name == "cuda" and "LOCAL_RANK" in os.environ:
        name = f"cuda:{os.environ['LOCAL_RANK']}"
    return find_device(name)


def choose_half(
    device: torch.device, mixed_precision: bool | None, resumed: dict[str, Any] | None
) -> torch.dtype | None:
    """Return the half precision to train in, or None for float32 throughout.

    GPUs use half precision unless `mixed_precision` is False, processors only if it is True. A new
    training in bfloat16 is refused on a processor without bfloat16 instructions, where it would be ten
    times slower or crash. A training that is resumed there goes on in float32. Warn if what is
    resumed (the content of a checkpoint) began in another precision or on another kind of device.
    """
    wanted = device.type == "cuda" if mixed_precision is None else mixed_precision
    half = torch.bfloat16 if wanted else None
    if half and device.type == "cuda" and not torch.cuda.is_bf16_supported():
        half = torch.float16
    if half == torch.bfloat16 and not has_bfloat16(device):
        if resumed is None:
            refuse_slow_bfloat16(device)
        half = None
    before, now = (resumed or {}).get("arithmetic"), describe_arithmetic(device, half)
    if before not in (None, now):
        warnings.warn(
            f"this training began in {before} and goes on in {now}: it is no longer identical, "
            "bit for bit, to one that never stopped",
            stacklevel=2,
        )
    return half


def describe_arithmetic(device: torch.device, half: torch.dtype | None) -> str:
    """Return what decides the last bits of a training: precision, device and instructions.

    >>> describe_arithmetic(torch.device("cpu"), None).startswith("float32 on cpu")
    True
    """
    precision = "float32" if half is None else str(half).removeprefix("torch.")
    if device.type == "cpu":
        return f"{precision} on cpu with {torch.backends.cpu.get_cpu_capability()}"
    return f"{precision} on {torch.cuda.get_device_name(device)}"
