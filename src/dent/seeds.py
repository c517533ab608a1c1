"""Seed every random number by what it belongs to, not by what was drawn before it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import numpy as np
import torch


def make_generator(*parts: int) -> torch.Generator:
    """Return a generator (on the CPU) that is seeded by all of `parts`: a seed, an epoch, a batch.

    A resumed run, another order of work or another number of processes then draws the same numbers.

    >>> same = [torch.rand(1, generator=make_generator(0, 1, 2)).item() for _ in range(2)]
    >>> same[0] == same[1] != torch.rand(1, generator=make_generator(0, 2, 1)).item()
    True
    """
    state = np.random.SeedSequence(list(parts)).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(state[0]))


def preserve_random_state(device: str | None = None) -> AbstractContextManager[None]:
    """Restore torch's random state at the end, as if nothing had been drawn within.

    device: that is going to be used, beside the CPU (default: all GPUs that are in use).

    >>> with preserve_random_state():
    ...     first = torch.rand(1)
    >>> torch.equal(first, torch.rand(1))
    True
    """
    if device is not None:
        kind = torch.device(device)
        return torch.random.fork_rng([kind] if kind.type == "cuda" else [])
    return torch.random.fork_rng(range(torch.cuda.device_count()) if torch.cuda.is_initialized() else [])


@contextmanager
def use_seed(seed: int, device: str | None = None) -> Iterator[None]:
    """Seed torch within, and restore its random state at the end. device: see `preserve_random_state`.

    >>> with use_seed(0):
    ...     first = torch.rand(1)
    >>> with use_seed(0):
    ...     torch.equal(first, torch.rand(1))
    True
    """
    with preserve_random_state(device):
        torch.manual_seed(seed)
        yield
