"""What a run would cost, before it is begun."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dent.evaluation.plan import Plan
from dent.evaluation.sources import Sources
from dent.evaluation.spec import Cell

DOUBLINGS = "doublings, at most"  # all doublings of a cell


@dataclass(frozen=True)
class Estimate:
    """Upper bounds for one attack on one cell: units, images through the static model, seconds.

    is_known: False if the attack or the defense is the user's own: what these cost is not known, and the
        figures are too low.
    """

    cell: Cell
    attack: str
    units: int
    forwards: float
    seconds: float
    is_known: bool = True


def estimate_run(plan: Plan, sources: Sources) -> list[Estimate]:
    """Return an estimate for each cell and attack, from the time of a few static forwards."""
    inputs, _ = sources.read(sources.batches()[0])
    speed = {name: time_forward(sources.model(name), inputs) for name in sources.evaluation.models}
    groups: defaultdict[tuple[Cell, str], list[float]] = defaultdict(list)
    for unit in plan.largest.units():
        name = unit.attack if unit.attack in plan.cells[unit.cell].attacks else DOUBLINGS
        groups[unit.cell, name].append(plan.largest.forwards(unit))
    forwards = {group: sum(each) for group, each in groups.items()}
    for cell, name in forwards:
        if name == DOUBLINGS and plan.doubling_cost is not None:
            suite = sum(forwards[cell, attack] for attack in plan.list_doubled(cell))
            forwards[cell, name] = min(forwards[cell, name], plan.doubling_cost * suite)
    is_known = {cell: _knows_defense(cell, sources) for cell in plan.cells}
    return [
        Estimate(
            cell,
            attack,
            len(groups[cell, attack]),
            each,
            each * speed[cell.model],
            is_known=is_known[cell] and attack not in plan.own_attacks,
        )
        for (cell, attack), each in forwards.items()
    ]


def _knows_defense(cell: Cell, sources: Sources) -> bool:
    """Return True if the cost of an answer is known. A dynamic model is timed itself."""
    return cell.is_dynamic or sources.subject(cell).forwards is not None


def time_forward(model: nn.Module, inputs: Tensor, *, rounds: int = 3) -> float:
    """Return the seconds of a forward for each image: the fastest round, after one to warm up."""
    times = []
    with torch.no_grad():
        for _ in range(rounds + 1):
            started = time.perf_counter()
            model(inputs).sum().item()  # waits for a GPU too
            times.append(time.perf_counter() - started)
    return min(times[1:]) / len(inputs)
