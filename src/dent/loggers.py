"""Loggers that receive the figures of a run: TensorBoard, Weights & Biases."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from dent.names import lookup

Write = Callable[[Mapping[str, float], int], None]  # called with figures by name, and their step


@contextmanager
def log_to_tensorboard(out: Path, config: dict[str, Any]) -> Iterator[Write]:
    """Write event files to the folder `tensorboard` in `out`."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ImportError("tensorboard is missing: pip install 'dent-defense[tensorboard]'") from error
    writer = SummaryWriter(str(out / "tensorboard"))
    writer.add_text("config", ", ".join(f"{key}={value}" for key, value in config.items()))

    def write(figures: Mapping[str, float], step: int) -> None:
        for name, value in figures.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    try:
        yield write
    finally:
        writer.close()


@contextmanager
def log_to_wandb(out: Path, config: dict[str, Any]) -> Iterator[Write]:
    """Log to a run of Weights & Biases, named after the folder; resuming continues the same run.

    With `WANDB_MODE=offline` it stays in the folder `wandb` in `out`, for `wandb sync`.
    """
    try:
        import wandb
    except ImportError as error:
        raise ImportError("wandb is missing: pip install 'dent-defense[wandb]'") from error
    name = out.resolve().name
    identity = re.sub(r"[^\w.+=-]", "-", name)  # wandb does not allow every character of a folder's name
    with wandb.init(
        project="dent", id=identity, name=name, dir=str(out), config=config, resume="allow"
    ) as run:
        yield lambda figures, step: run.log(dict(figures), step=step)


LOGGERS: dict[str, Callable[[Path, dict[str, Any]], AbstractContextManager[Write]]] = {
    "tensorboard": log_to_tensorboard,
    "wandb": log_to_wandb,
}


def open_logger(name: str, out: Path, config: dict[str, Any]) -> AbstractContextManager[Write]:
    """Return a logger by name, for a run in the folder `out` with the settings `config`.

    It is a context manager that gives a function, `write(figures, step)`.
    """
    logger = lookup("logger", name, LOGGERS)
    out.mkdir(parents=True, exist_ok=True)
    return logger(out, config)
