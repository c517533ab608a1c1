"""Where the figures of each epoch go besides the log of the folder: TensorBoard, Weights & Biases."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dent.names import lookup
from dent.training.watch import Epoch

Write = Callable[[Epoch], None]


@contextmanager
def tensorboard(out: Path, recipe: dict[str, Any]) -> Iterator[Write]:
    """Event files in the folder of the training."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ImportError("tensorboard is missing: pip install 'dent-defense[tensorboard]'") from error
    writer = SummaryWriter(str(out / "tensorboard"))
    writer.add_text("recipe", ", ".join(f"{key}={value}" for key, value in recipe.items()))

    def write(epoch: Epoch) -> None:
        for name, value in figures(epoch).items():
            writer.add_scalar(name, value, epoch.epoch)
        writer.flush()

    try:
        yield write
    finally:
        writer.close()


@contextmanager
def wandb(out: Path, recipe: dict[str, Any]) -> Iterator[Write]:
    """A run of Weights & Biases; a resumed training goes on with the same run."""
    try:
        import wandb as client
    except ImportError as error:
        raise ImportError("wandb is missing: pip install 'dent-defense[wandb]'") from error
    name = out.resolve().name
    with client.init(
        project="dent", id=name, name=name, dir=str(out), config=recipe, resume="allow"
    ) as run:
        yield lambda epoch: run.log(figures(epoch), step=epoch.epoch)


LOGGERS: dict[str, Callable[[Path, dict[str, Any]], AbstractContextManager[Write]]] = {
    "tensorboard": tensorboard,
    "wandb": wandb,
}


def open_logger(name: str, out: Path, recipe: dict[str, Any]) -> AbstractContextManager[Write]:
    """A logger by name."""
    out.mkdir(parents=True, exist_ok=True)
    return lookup("logger", name, LOGGERS)(out, recipe)


def figures(epoch: Epoch) -> dict[str, float]:
    """The figures that the epoch has."""
    return {
        name: value for name, value in asdict(epoch).items() if value is not None and name != "epoch"
    }
