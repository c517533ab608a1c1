"""Training: nominal, adversarial, TRADES; resumable, and stopped when it goes wrong."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dent.data.dataset import Dataset
from dent.models import build, load_model
from dent.models.checkpoint import fit
from dent.training import precision, store
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
    start: str | Path | None = None,
    device: str = "cpu",
    compile: bool = False,
    mixed_precision: bool | None = None,
    on_step: Callable[[Step], None] | None = None,
    on_epoch: Callable[[Epoch], None] | None = None,
) -> Trained:
    """Train a model of the zoo; the same call resumes it, also after a kill, to the same result.

    After every epoch the folder `out` holds a checkpoint that `dent.load_model` reads, and a log with
    one line for each epoch. `start` is a model of `dent.load_model`, such as a shipped one or a
    checkpoint, whose weights training begins from. Under `torchrun`, every process takes its part of
    each batch. On a GPU, most of the work is in half precision unless `mixed_precision` says otherwise;
    on a processor, only if it does, and if the processor has bfloat16 instructions.
    Raises `TrainingError` when the model diverges or collapses; the checkpoint is then the last good.
    """
    torch_device, folder = local_device(device), Path(out)
    half = precision.half_precision(torch_device, mixed_precision)
    with processes(torch_device) as group, store.locked(folder, first=group.rank == 0):
        check_training(dataset, recipe, group)
        model = make_model(architecture, dataset, recipe, mean=mean, std=std)
        if start is not None:
            copy_weights(start, architecture, model)
        header = describe(architecture, model, dataset, recipe, start)
        resumed = store.load(folder, asked=header["asked"])
        half = settle_precision(torch_device, half, resumed)
        header["arithmetic"] = precision.describe_arithmetic(torch_device, half)
        # In a function of its own, so that what it shares with other processes is gone before they part.
        return _train(
            lambda: Run(
                model, dataset, recipe, device=torch_device, group=group, compile=compile, half=half
            ),
            folder,
            header,
            resumed,
            on_step,
            on_epoch,
        )


def _train(
    make_run: Callable[[], Run],
    folder: Path,
    header: dict[str, Any],
    resumed: dict[str, Any] | None,
    on_step: Callable[[Step], None] | None,
    on_epoch: Callable[[Epoch], None] | None,
) -> Trained:
    run = make_run()
    run.resume(resumed)
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


def settle_precision(
    device: torch.device, half: torch.dtype | None, resumed: dict[str, Any] | None
) -> torch.dtype | None:
    """Return the half precision that this machine can train in, or None for float32.

    A training that was begun elsewhere goes on here, with a warning if its bits will differ; one that
    begins here is refused what this machine cannot do.
    """
    if half == torch.bfloat16 and not precision.has_bfloat16(device):
        if resumed is None:
            raise ValueError(
                "expected a processor with bfloat16 instructions for mixed precision; this one has "
                "none, and would be many times slower or crash; leave --mixed-precision out"
            )
        half = None
    if resumed is not None:
        before, now = resumed.get("arithmetic"), precision.describe_arithmetic(device, half)
        if before is not None and before != now:
            warnings.warn(
                f"this training began in {before} and goes on in {now}: it is no longer identical, "
                "bit for bit, to one that never stopped",
                stacklevel=2,
            )
    return half


def copy_weights(start: str | Path, architecture: str, model: nn.Module) -> None:
    """Copy weights, buffers and normalization into `model` from a named model or a checkpoint file."""
    is_file = Path(start).is_file()
    source = load_model(architecture, weights=start) if is_file else load_model(start)
    fit(model, source.state_dict(), source=str(start))
    for name in ("mean", "std"):  # of the input's normalization, which is no part of a state dict
        ours, theirs = getattr(model, name, None), getattr(source, name, None)
        if isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor):
            setattr(model, name, theirs.clone())


def describe(
    architecture: str,
    model: nn.Module,
    dataset: Dataset,
    recipe: Recipe,
    start: str | Path | None,
) -> dict[str, Any]:
    """What a checkpoint says of itself: how to load it, and what was asked for, to resume it."""
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
