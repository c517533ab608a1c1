"""Weights that come with dent: for each a file, and a card that says what it is."""

from __future__ import annotations

import hashlib
import io
import json
from dataclasses import dataclass, fields
from functools import partial
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any

import torch

from dent.models.architectures import MODELS
from dent.models.checkpoint import filled, normalization_in, read, state_in
from dent.models.normalization import Normalized
from dent.names import lookup

FOLDER: Traversable = files("dent.models") / "weights"


@dataclass(frozen=True)
class Card:
    """What is known of a shipped model; `accuracies` has what, n, percent, low and high."""

    name: str
    architecture: str
    classes: int
    normalization: dict[str, list[float]]
    summary: str
    recipe: Any
    data: Any
    accuracies: list[dict[str, Any]]
    sha256: str


def cards(folder: Traversable | None = None) -> dict[str, Card]:
    """The shipped models by name: every card in the folder whose weights are there."""
    folder = FOLDER if folder is None else folder
    if not folder.is_dir():
        return {}
    names = {file.name for file in folder.iterdir()}
    stems = sorted(name.removesuffix(".json") for name in names if name.endswith(".json"))
    return {stem: _card(folder, stem) for stem in stems if f"{stem}.pt" in names}


def load_shipped(
    name: str, *, device: str | torch.device = "cpu", folder: Traversable | None = None
) -> Normalized:
    """The shipped model called `name`, its weights checked against the card."""
    folder = FOLDER if folder is None else folder
    card = lookup("shipped model", name, cards(folder))
    content = (folder / f"{name}.pt").read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    if digest != card.sha256:
        raise ValueError(
            f"the weights of {name} are not those of its card: expected sha256 {card.sha256}, got"
            f" {digest}; install dent again"
        )
    make = partial(lookup("architecture", card.architecture, MODELS).make, card.classes)
    source = f"{name}.pt"
    state, _ = normalization_in(state_in(read(io.BytesIO(content), source=source), source=source))
    net = filled(make, state, source=source, device=device)
    return Normalized(net, card.normalization["mean"], card.normalization["std"]).to(device).eval()


def _card(folder: Traversable, stem: str) -> Card:
    try:
        content = json.loads((folder / f"{stem}.json").read_text(encoding="utf-8"))
        return Card(**{field.name: content[field.name] for field in fields(Card)})
    except (ValueError, KeyError, TypeError) as error:
        expected = ", ".join(field.name for field in fields(Card))
        raise ValueError(
            f"{stem}.json is no card: expected JSON with {expected}; {type(error).__name__}: {error}"
        ) from error
