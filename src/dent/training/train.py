"""Training: nominal, adversarial, TRADES; resumable, and stopped when it goes wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dent.data.dataset import Dataset
from dent.models import build, load_model
from dent.training import store
from dent.training.loop import Run, Step
from dent.training.processes import Processes, local_device, processes
from dent.training.recipe import Recipe
from dent.training.watch import Epoch, TrainingError


@dataclass(frozen=True)
class Trained:
    """A trained model, in evaluation mode, and how it came about."""

    model: nn.Module
    history: list[Epoch]
    checkpoint: Path


def train(
    architecture: str,
    dataset: Dataset,
    recipe: Recipe,
    *,
    out: str | Path,
    mean: float | Sequence[float] | None = None,
    std: float | Sequence[float] | None = None,
    device: str = "cpu",
    compile: bool = False,
    mixed_precision: bool | None = None,
    on_step: Callable[[Step], None] | None = None,
    on_epoch: Callable[[Epoch], None] | None = None,
) -> Trained:
    """Train a model of the zoo; the same call resumes it, also after a kill, to the same result.

    After every epoch the folder `out` holds a checkpoint that `dent.load_model` reads, and a log with
    one line for each epoch. Under `torchrun`, every process takes its part of each batch. On a GPU,
    most of the work is in half precision unless `mixed_precision` says otherwise.
    Raises `TrainingError` when the model diverges or collapses; the checkpoint is then the last good.
    """
    torch_device, folder = local_device(device), Path(out)
    half = torch_device.type == "cuda" if mixed_precision is None else mixed_precision
    with processes(torch_device) as group, store.locked(folder, first=group.rank == 0):
        check_training(dataset, recipe, group)
        model = make_model(architecture, dataset, recipe, mean=mean, std=std)
        header = describe(architecture, model, dataset, recipe)
        # In a function of its own, so that what it shares with other processes is gone before they part.
        return _train(
            lambda: Run(
                model, dataset, recipe, device=torch_device, group=group, compile=compile, half=half
            ),
            folder,
            header,
            on_step,
            on_epoch,
        )


def _train(
    make_run: Callable[[], Run],
    folder: Path,
    header: dict[str, Any],
    on_step: Callable[[Step], None] | None,
    on_epoch: Callable[[Epoch], None] | None,
) -> Trained:
    run = make_run()
    run.resume(store.load(folder, asked=header["asked"]))
    while len(run.history) < run.recipe.epochs:
        epoch = run.epoch(on_step)
        wrong = run.group.from_first(run.fault(epoch))
        if wrong:
            good = f"{folder / store.CHECKPOINT} is of epoch {epoch.epoch - 1}, the last good one"
            raise TrainingError(f"{wrong}. {good if epoch.epoch > 1 else 'Nothing was saved'}")
        run.history.append(epoch)
        if run.group.rank == 0:
            store.save(folder, header | run.state())
            if on_epoch is not None:
                on_epoch(epoch)
    return Trained(run.model.eval(), run.history, folder / store.CHECKPOINT)


def describe(architecture: str, model: nn.Module, dataset: Dataset, recipe: Recipe) -> dict[str, Any]:
    """What a checkpoint says of itself: how to load it, and what was asked for, to resume it."""
    mean, std = (getattr(model, name, torch.zeros(0)).flatten().tolist() for name in ("mean", "std"))
    asked = {"architecture": architecture, "data": dataset.name, "images": len(dataset)}
    return {
        "architecture": architecture,
        "classes": len(dataset.classes),
        "mean": mean or None,
        "std": std or None,
        "labels": list(dataset.classes),
        "asked": asked | asdict(recipe),
    }


def make_model(
    architecture: str,
    dataset: Dataset,
    recipe: Recipe,
    *,
    mean: float | Sequence[float] | None,
    std: float | Sequence[float] | None,
) -> nn.Module:
    """The model with the random weights of the recipe's seed."""
    if ":" in architecture and (mean is not None or std is not None):
        raise ValueError(f"{architecture} does its own normalization; leave mean and std out")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        if ":" not in architecture:
            return build(architecture, classes=len(dataset.classes), mean=mean, std=std)
        return load_model(architecture).train()


def check_training(dataset: Dataset, recipe: Recipe, group: Processes) -> None:
    """Refuse what cannot be trained, before anything is written."""
    size, images = recipe.batch_size, len(dataset) - recipe.hold_out
    if size % group.count:
        raise ValueError(f"expected batch_size as a multiple of {group.count} processes, got {size}")
    if images < size:
        raise ValueError(
            f"expected at least one batch of {size} images, got {len(dataset)} less {recipe.hold_out} "
            "held out; lower batch_size or hold_out"
        )
