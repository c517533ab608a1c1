"""The folder of a training: its checkpoint, its log, its lock. Nothing half-written is ever read."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from dent import storage
from dent.models.checkpoint import read
from dent.storage import replace_file

CHECKPOINT, AVERAGE, LOG = "checkpoint.pt", "average.pt", "log.jsonl"


def save(folder: Path, checkpoint: dict[str, Any]) -> None:
    """The checkpoint, and what it knows of the past epochs as a log with one line for each."""
    with replace_file(folder / CHECKPOINT) as file:
        torch.save(checkpoint, file)
    if checkpoint["average"] is not None:
        # Without what resumes a training: a file for `dent.load_model` alone.
        shown = {key: value for key, value in checkpoint.items() if key not in ("optimizer", "scaler")}
        with replace_file(folder / AVERAGE) as file:
            torch.save(shown | {"model": checkpoint["average"], "average": None}, file)
    with replace_file(folder / LOG) as file:
        file.writelines(json.dumps(epoch).encode() + b"\n" for epoch in checkpoint["history"])


def load(folder: Path, *, asked: dict[str, Any]) -> dict[str, Any] | None:
    """The checkpoint of the folder, if there is one; it must be of the training that was `asked` for."""
    path = folder / CHECKPOINT
    if not path.exists():
        return None
    try:
        checkpoint: dict[str, Any] = read(path)
        found = checkpoint["asked"]
    except Exception as error:
        raise ValueError(
            f"{path} is no checkpoint of a training ({error}); move it away, or choose another folder"
        ) from error
    if found != asked:
        differ = [
            f"{key} is {found.get(key)!r} there, {asked.get(key)!r} was asked for"
            for key in {**found, **asked}
            if found.get(key) != asked.get(key)
        ]
        raise ValueError(
            f"{folder} holds another training: {'; '.join(differ)}. "
            "Choose another folder, or ask for the same"
        )
    return checkpoint


def locked(folder: Path, *, first: bool = True) -> AbstractContextManager[None]:
    """Refuse a second training in the folder while one runs; its first process holds the lock."""
    return storage.lock_folder(folder, doing="trains") if first else nullcontext()
