"""What a run would do, and about how long it would take: `--dry-run`."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dent.evaluation.plan import Plan
from dent.evaluation.sources import Sources
from dent.evaluation.units import Cell, Unit

ROUNDS = 3


@dataclass(frozen=True)
class Estimate:
    """Of one attack on one cell: units of work, forwards of the static model in images, seconds.

    A defended answer counts for the forwards and backwards that it is made of. It is what an attack
    takes at most; where broken inputs leave, it is less.
    """

    cell: Cell
    attack: str
    units: int
    forwards: float
    seconds: float


def estimate(plan: Plan, sources: Sources) -> list[Estimate]:
    """For each cell and attack of the plan, from the time of some forwards of each static model."""
    inputs, _ = sources.read(sources.batches()[0])
    speed = {name: seconds_per_image(sources.model(name), inputs) for name in sources.evaluation.models}
    groups: defaultdict[tuple[Cell, str], list[Unit]] = defaultdict(list)
    for unit in plan.units():
        groups[unit.cell, unit.attack].append(unit)
    found = []
    for (cell, attack), units in groups.items():
        forwards = sum(map(plan.forwards, units))
        found.append(Estimate(cell, attack, len(units), forwards, forwards * speed[cell.model]))
    return found


def seconds_per_image(model: nn.Module, inputs: Tensor) -> float:
    """Of a forward: the fastest of some, after one that warms up."""
    times = []
    with torch.no_grad():
        for _ in range(ROUNDS + 1):
            started = time.perf_counter()
            model(inputs).sum().item()  # waits for a GPU too
            times.append(time.perf_counter() - started)
    return min(times[1:]) / len(inputs)
