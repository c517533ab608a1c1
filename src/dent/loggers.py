"""Where figures go besides the files of a run: TensorBoard, Weights & Biases."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from dent.names import lookup

Write = Callable[[Mapping[str, float], int], None]  # the figures by name, and the step they belong to


@contextmanager
def tensorboard(out: Path, config: dict[str, Any]) -> Iterator[Write]:
    """Event files in the folder `tensorboard` of `out`."""
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
def wandb(out: Path, config: dict[str, Any]) -> Iterator[Write]:
    """A run of Weights & Biases, named after the folder; what is resumed goes on with the same run.

    `WANDB_MODE=offline` keeps it in the folder `wandb` of `out`, for `wandb sync`.
    """
    try:
        import wandb as client
    except ImportError as error:
        raise ImportError("wandb is missing: pip install 'dent-defense[wandb]'") from error
    name = out.resolve().name
    identity = re.sub(r"[^\w.+=-]", "-", name)  # which may not have every character of a folder's name
    with client.init(
        project="dent", id=identity, name=name, dir=str(out), config=config, resume="allow"
    ) as run:
        yield lambda figures, step: run.log(dict(figures), step=step)


LOGGERS: dict[str, Callable[[Path, dict[str, Any]], AbstractContextManager[Write]]] = {
    "tensorboard": tensorboard,
    "wandb": wandb,
}


def open_logger(name: str, out: Path, config: dict[str, Any]) -> AbstractContextManager[Write]:
    """A logger by name, for what runs in the folder `out` as `config` says.

    It is a context with a function inside, `write(figures, step)`.
    """
    opened = lookup("logger", name, LOGGERS)
    out.mkdir(parents=True, exist_ok=True)
    return opened(out, config)
