"""One attack on one model: `dent attack`, which keeps the images."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dent.evaluation.attacks import ATTACKS
from dent.evaluation.perform import Task, attacked, seeded
from dent.evaluation.results import Score
from dent.evaluation.sources import Sources
from dent.evaluation.units import NATURAL, Cell, Unit
from dent.names import lookup
from dent.storage import replace_file


@dataclass(frozen=True)
class Attacked:
    """The images that an attack made, in the order of the data set, and what they did."""

    cell: Cell
    images: Tensor
    labels: Tensor
    natural: Tensor  # whether each was right before
    correct: Tensor  # and is when submitted

    def scores(self) -> dict[str, Score]:
        return {
            name: Score(int(one.sum()), len(one))
            for name, one in (("natural", self.natural), ("attacked", self.correct))
        }

    def save(self, path: Path) -> None:
        """An .npz with images and labels, which can be read as data, and the verdicts."""
        with replace_file(path) as file:
            np.savez(
                file,
                images=self.images.numpy(),
                labels=self.labels.numpy(),
                natural_correct=self.natural.numpy(),
                correct=self.correct.numpy(),
            )


def attack_data(
    sources: Sources,
    attack: str,
    settings: dict[str, Any] | None = None,
    progress: Callable[[float, float | None, str], None] | None = None,
) -> Attacked:
    """Attack the one cell of an evaluation, batch by batch, each submitted whole."""
    lookup("attack", attack, {name: one for name, one in ATTACKS.items() if one.kind != "scenario"})
    cells = sources.evaluation.cells()
    if len(cells) != 1:
        raise ValueError(
            f"expected one model and one defense, got {len(cells)}: {'; '.join(map(str, cells))}"
        )
    (cell,), batches, seed = cells, sources.batches(), sources.evaluation.seed
    subject = sources.subject(cell)
    if ATTACKS[attack].updates and not subject.defense.settings.steps:
        raise ValueError(f"{attack} is for defenses that make updates, and {cell.defense} makes none")
    with torch.no_grad():
        outputs = subject.static(sources.read(batches[0][:1])[0]).shape[-1]
    sources.dataset().check_outputs(outputs, owner=cell.model)
    images: list[Tensor] = []
    natural: list[Tensor] = []
    correct: list[Tensor] = []
    for number, batch in enumerate(batches):
        if progress:
            progress(number, len(batches), f"batch {number + 1} of {len(batches)}")
        inputs, labels = sources.read(batch)
        everyone = torch.ones_like(labels, dtype=torch.bool)
        for name, kept in ((NATURAL, natural), (attack, correct)):
            task = Task(Unit(cell, number, name), {} if name == NATURAL else settings or {})
            with seeded(task.unit, sources.evaluation):
                result, right = attacked(task, subject, inputs, labels, everyone, seed)
            kept.append(right.cpu())
        images.append(result.inputs.cpu())
    order = torch.cat(batches).argsort()
    made, before, after = (torch.cat(parts)[order] for parts in (images, natural, correct))
    return Attacked(cell, made, sources.dataset().labels, before, after)
