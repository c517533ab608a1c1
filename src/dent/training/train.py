"""`train`: train a model, resume it after a kill, and stop it when it goes wrong."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dent.data.dataset import Dataset
from dent.models import build, find_class_names, load_model
from dent.models.checkpoint import load_state, read_checkpoint
from dent.seeds import use_seed
from dent.storage import lock_folder, replace_file
from dent.training.loop import Step, Training
from dent.training.machine import (
    Processes,
    choose_half,
    describe_arithmetic,
    find_own_device,
    join_processes,
)
from dent.training.recipe import Recipe
from dent.training.watch import Epoch, TrainingError

CHECKPOINT, AVERAGE, LOG = "checkpoint.pt", "average.pt", "log.jsonl"


@dataclass(frozen=True)
class Trained:
    """A trained model in evaluation mode, its epochs, and the file of its checkpoint."""

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
    start: str | Path | None = None,
    device: str = "cpu",
    compile: bool = False,
    mixed_precision: bool | None = None,
    on_step: Callable[[Step], None] | None = None,
    on_epoch: Callable[[Epoch], None] | None = None,
) -> Trained:
    """Train a model. The same call resumes a training that was stopped or killed, to the same result.

    architecture: a name in `dent.models.MODELS`, or `package.module:function`.
    out: folder that has a checkpoint for `dent.load_model` and a log after every epoch.
    start: model whose weights training begins from, as `dent.load_model` names it: a shipped model or
    a checkpoint file.
    mixed_precision: compute mostly in half precision (default: on GPUs only). A processor needs
    bfloat16 instructions for it.

    Under `torchrun`, every process takes its part of each batch.
    Raise TrainingError when the model diverges or collapses; the checkpoint is then the last good one.
    """
    torch_device, folder, dataset = find_own_device(device), Path(out), match_start(dataset, start)
    with join_processes(torch_device) as processes, _lock_first(folder, processes):
        check_sizes(dataset, recipe, processes)
        model = make_model(architecture, dataset, recipe, mean=mean, std=std)
        if start is not None:
            copy_weights(start, architecture, model)
        header = describe_training(architecture, model, dataset, recipe, start)
        resumed = load_checkpoint(folder, asked=header["asked"])
        half = choose_half(torch_device, mixed_precision, resumed)
        header["arithmetic"] = describe_arithmetic(torch_device, half)
        return _run_epochs(
            # Not kept in a variable here: what it shares with other processes must be freed before
            # they part.
            Training(
                model, dataset, recipe, device=torch_device, processes=processes, compile=compile,
                half=half,
            ),
            folder, header, resumed, on_step, on_epoch,
        )  # fmt: skip


def _run_epochs(
    training: Training,
    folder: Path,
    header: dict[str, Any],
    resumed: dict[str, Any] | None,
    on_step: Callable[[Step], None] | None,
    on_epoch: Callable[[Epoch], None] | None,
) -> Trained:
    if resumed is not None:
        training.load_state_dict(resumed)
    while len(training.history) < training.recipe.epochs:
        epoch = training.run_epoch(on_step)
        fault = training.processes.share_first(training.find_fault(epoch))
        if fault:
            good = f"{folder / CHECKPOINT} is of epoch {epoch.epoch - 1}, the last good one"
            raise TrainingError(f"{fault}. {good if epoch.epoch > 1 else 'Nothing was saved'}")
        training.history.append(epoch)
        if training.processes.rank == 0:
            save_checkpoint(folder, header | training.state_dict())
            if on_epoch is not None:
                on_epoch(epoch)
    return Trained(training.model.eval(), training.history, folder / CHECKPOINT)


def _lock_first(folder: Path, processes: Processes) -> AbstractContextManager[None]:
    """Lock the folder against a second training; the first process holds the lock for all."""
    return lock_folder(folder, doing="trains") if processes.rank == 0 else nullcontext()


def save_checkpoint(folder: Path, checkpoint: dict[str, Any]) -> None:
    """Write the checkpoint, the averaged weights if there are any, and one log line per epoch."""
    with replace_file(folder / CHECKPOINT) as file:
        torch.save(checkpoint, file)
    if checkpoint["average"] is not None:
        # Without the entries that only resuming needs: a file for `dent.load_model` alone.
        shown = {key: value for key, value in checkpoint.items() if key not in ("optimizer", "scaler")}
        with replace_file(folder / AVERAGE) as file:
            torch.save(shown | {"model": checkpoint["average"], "average": None}, file)
    with replace_file(folder / LOG) as file:
        file.writelines(json.dumps(epoch).encode() + b"\n" for epoch in checkpoint["history"])


def load_checkpoint(folder: Path, *, asked: dict[str, Any]) -> dict[str, Any] | None:
    """Return the checkpoint of the folder, or None. Raise ValueError if it is of another training."""
    path = folder / CHECKPOINT
    if not path.exists():
        return None
    try:
        checkpoint: dict[str, Any] = read_checkpoint(path)
        found = checkpoint["asked"]
    except Exception as error:
        raise ValueError(
            f"{path} is no checkpoint of a training ({error}); move it away, or choose another folder"
        ) from error
    if found != asked:
        differences = [
            f"{key} is {found.get(key)!r} there, {asked.get(key)!r} was asked for"
            for key in {**found, **asked}
            if found.get(key) != asked.get(key)
        ]
        raise ValueError(
            f"{folder} holds another training: {'; '.join(differences)}. "
            "Choose another folder, or ask for the same"
        )
    return checkpoint


def check_sizes(dataset: Dataset, recipe: Recipe, processes: Processes) -> None:
    """Raise ValueError if the processes cannot share a batch, or the images do not fill one."""
    size, images = recipe.batch_size, len(dataset) - recipe.hold_out
    if size % processes.count:
        raise ValueError(f"expected batch_size as a multiple of {processes.count} processes, got {size}")
    if images < size:
        raise ValueError(
            f"expected at least one batch of {size} images, got {len(dataset)} less {recipe.hold_out} "
            "held out; lower batch_size or hold_out"
        )


def make_model(
    architecture: str,
    dataset: Dataset,
    recipe: Recipe,
    *,
    mean: float | Sequence[float] | None,
    std: float | Sequence[float] | None,
) -> nn.Module:
    """Return the model with random weights drawn by the recipe's seed."""
    if ":" in architecture and (mean is not None or std is not None):
        raise ValueError(f"{architecture} does its own normalization; leave mean and std out")
    with use_seed(recipe.seed):
        if ":" not in architecture:
            return build(architecture, classes=len(dataset.classes), mean=mean, std=std)
        return load_model(architecture).train()


def match_start(dataset: Dataset, start: str | Path | None) -> Dataset:
    """Return the data set with the labels that `start` has for its classes.

    A data set with other classes than those of `start` keeps its labels: they are learned anew.
    """
    names = None if start is None else find_class_names(start)
    known = names is not None and set(dataset.classes) <= set(names)
    return dataset.match_classes(names, owner=str(start)) if names and known else dataset


def copy_weights(start: str | Path, architecture: str, model: nn.Module) -> None:
    """Copy weights, buffers and normalization into `model` from a named model or a checkpoint file."""
    is_file = Path(start).is_file()
    source = load_model(architecture, weights=start) if is_file else load_model(start)
    load_state(model, source.state_dict(), source=str(start))
    for name in ("mean", "std"):  # the normalization of the input is not in the state dict
        ours, theirs = getattr(model, name, None), getattr(source, name, None)
        if isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor):
            setattr(model, name, theirs.clone())


def describe_training(
    architecture: str,
    model: nn.Module,
    dataset: Dataset,
    recipe: Recipe,
    start: str | Path | None,
) -> dict[str, Any]:
    """Return what a checkpoint says about itself: how to load it, and what was asked for."""
    mean, std = (getattr(model, name, torch.zeros(0)).flatten().tolist() for name in ("mean", "std"))
    asked = {"architecture": architecture, "data": dataset.name, "images": len(dataset)}
    if start is not None:
        asked["start"] = f"{start} ({digest_weights(model)})"
    return {
        "architecture": architecture,
        "classes": len(dataset.classes),
        "mean": mean or None,
        "std": std or None,
        "labels": list(dataset.classes),
        "asked": asked | recipe.model_dump(),
    }


def digest_weights(model: nn.Module) -> str:
    """Return the first characters of a sha256 of the weights."""
    digest = hashlib.sha256()
    for name, value in model.state_dict().items():
        digest.update(name.encode() + value.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:12]
