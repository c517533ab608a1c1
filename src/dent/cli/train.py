"""`dent train`: train a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from dent.cli.app import Device, Log, Threads
from dent.flags import add_flags
from dent.report.terminal import epoch_line, progress_bar, show_table, step_text
from dent.training import Recipe, make_recipe
from dent.training.card import train_and_measure


@add_flags(Recipe)
def train(
    architecture: Annotated[str, typer.Argument(help="Architecture, see `dent list models`.")],
    recipe: Annotated[str, typer.Option(help="Recipe, see `dent list recipes`.")] = "nominal",
    data: Annotated[
        str,
        typer.Option(
            help="Training data: cifar10, cifar100, a folder, an .npz file or module:function."
        ),
    ] = "cifar10",
    test_data: Annotated[
        str | None, typer.Option(help="Test data (default: the test images of --data).")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the run (default: runs/ARCHITECTURE-RECIPE).")
    ] = None,
    start: Annotated[
        str | None, typer.Option(help="Model or checkpoint to begin from (default: random weights).")
    ] = None,
    device: Device = "cpu",
    threads: Threads = None,
    compile: Annotated[
        bool, typer.Option(help="Compile the model first. It takes a minute and makes training faster.")
    ] = False,
    mixed_precision: Annotated[
        bool | None,
        typer.Option(
            help="Train in half precision (default: on GPUs). A processor needs bfloat16 instructions."
        ),
    ] = None,
    log: Log = None,
    **settings: Any,
) -> None:
    """Train a model by a recipe.

    Flags override the settings of the recipe. The same command resumes a training that was stopped.
    To use several processes, run `torchrun --nproc-per-node 8 -m dent train ...`.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    folder = out or Path("runs") / f"{architecture}-{recipe}".replace(":", "-")
    with progress_bar("training", has_lines=False) as move:
        card = train_and_measure(
            architecture,
            make_recipe(recipe, **settings),
            data=data,
            test_data=test_data,
            out=folder,
            start=start,
            device=device,
            compile=compile,
            mixed_precision=mixed_precision,
            loggers=log or [],
            progress=move,
            on_step=lambda step: move(step.done, step.total, step_text(step)),
            on_epoch=lambda epoch: typer.echo(epoch_line(epoch)),
        )
    if card is not None:
        show_table(card["accuracies"], right=("n", "percent", "low", "high"))
        typer.echo(f"model, log and card: {folder}")
