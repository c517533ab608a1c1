"""Train a model on data given by name, measure it, and write its card."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dent.data import open_data
from dent.data.dataset import Dataset
from dent.intervals import wilson
from dent.loggers import open_logger
from dent.storage import replace_file
from dent.training.loop import Step, split_images
from dent.training.machine import is_first
from dent.training.recipe import Recipe
from dent.training.train import Trained, match_start, train
from dent.training.watch import Epoch

CARD = "card.json"


def train_and_measure(
    architecture: str,
    recipe: Recipe,
    *,
    data: str = "cifar10",
    test_data: str | None = None,
    out: Path,
    start: str | Path | None = None,
    loggers: Sequence[str] = (),
    progress: Callable[[int, int | None, str], None] | None = None,
    on_step: Callable[[Step], None] | None = None,
    on_epoch: Callable[[Epoch], None] | None = None,
    **options: Any,
) -> dict[str, Any] | None:
    """Train on the training images of `data`, measure on its test images, and return the card.

    Under `torchrun`, the first process returns the card, the others None. `test_data` replaces the
    test images of `data`, for data that have none. `options` are further arguments of `train`.
    """
    images = match_start(open_data(data, split="train", progress=progress), start)
    tested = open_data(test_data or data, split="test")
    tested = tested.match_classes(images.classes, owner=f"training on {data}")
    with ExitStack() as stack:
        writers = [
            stack.enter_context(open_logger(name, out, recipe.model_dump()))
            for name in loggers
            if is_first()
        ]

        def log_epoch(epoch: Epoch) -> None:
            for write in writers:
                write(list_figures(epoch), epoch.epoch)
            if on_epoch is not None:
                on_epoch(epoch)

        trained = train(
            architecture,
            images,
            recipe,
            out=out,
            start=start,
            on_step=on_step,
            on_epoch=log_epoch,
            **options,
        )
    if not is_first():
        return None
    card = make_card(architecture, data, images, tested, recipe, trained)
    with replace_file(out / CARD) as file:
        file.write(json.dumps(card, indent=2).encode() + b"\n")
    return card


def list_figures(epoch: Epoch) -> dict[str, float]:
    """Return the figures of an epoch by name, for a logger."""
    return {
        name: value for name, value in asdict(epoch).items() if value is not None and name != "epoch"
    }


def make_card(
    architecture: str,
    data: str,
    images: Dataset,
    tested: Dataset,
    recipe: Recipe,
    trained: Trained,
) -> dict[str, Any]:
    """Return what a reader must know about a trained model."""
    what = "natural, test images"
    if tested.source == images.source and torch.equal(tested.labels, images.labels):
        # The data have no test images: all but the held-out ones were trained on.
        trained_on, held_out = split_images(images, recipe)
        what = (
            "natural, held-out images" if recipe.hold_out else "natural, the training images themselves"
        )
        tested = images.subset(held_out if recipe.hold_out else trained_on)
    return {
        "architecture": architecture,
        "classes": len(images.classes),
        "data": data,
        "recipe": recipe.model_dump(),
        "seconds": round(sum(epoch.seconds for epoch in trained.history)),
        "accuracies": [make_accuracy(what, count_correct(trained.model, tested), len(tested))],
        "torch": torch.__version__,
        "sha256": hashlib.sha256(trained.checkpoint.read_bytes()).hexdigest(),
    }


def make_accuracy(what: str, correct: int, n: int) -> dict[str, Any]:
    """Return an accuracy as cards store it: in percent, with n and its 95 % interval.

    >>> make_accuracy("natural", 81, 100)
    {'what': 'natural', 'n': 100, 'percent': 81.0, 'low': 72.22, 'high': 87.49}
    """
    low, high = wilson(correct, n)
    percents = {
        key: round(100 * value, 2)
        for key, value in {"percent": correct / n, "low": low, "high": high}.items()
    }
    return {"what": what, "n": n, **percents}


def count_correct(model: nn.Module, dataset: Dataset, *, batch_size: int = 500) -> int:
    """Return the number of images that the model classifies as labeled."""
    device = next(model.parameters()).device
    correct = 0
    with torch.no_grad():
        for inputs, labels in dataset.batches(batch_size):
            # `forward` is the model without compilation, because these batches have another size.
            correct += int((model.forward(inputs.to(device)).argmax(1).cpu() == labels).sum())
    return correct
