"""Every random number comes from what it belongs to, not from what was drawn before it."""

from __future__ import annotations

import numpy as np
import torch


def generator(*parts: int) -> torch.Generator:
    """A generator (on the CPU) seeded by all of `parts`: a seed, an epoch, a batch.

    So a resumed run, another order of work or another number of processes draws the same numbers.

    >>> same = [torch.rand(1, generator=generator(0, 1, 2)).item() for _ in range(2)]
    >>> same[0] == same[1] != torch.rand(1, generator=generator(0, 2, 1)).item()
    True
    """
    state = np.random.SeedSequence(list(parts)).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(state[0]))
