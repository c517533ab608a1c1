"""Weights that come with dent: for each model a file, and a card that describes it."""

from __future__ import annotations

import hashlib
import io
import json
from dataclasses import MISSING, dataclass, fields
from functools import partial
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any

import torch

from dent.models.architectures import MODELS
from dent.models.checkpoint import find_state, make_network, read_checkpoint, split_normalization
from dent.models.normalization import Normalized
from dent.names import lookup

FOLDER: Traversable = files("dent.models") / "weights"


@dataclass(frozen=True)
class Card:
    """The description of a shipped model; each of `accuracies` has what, n, percent, low and high."""

    name: str
    architecture: str
    classes: int
    normalization: dict[str, list[float]]
    summary: str
    recipe: Any
    data: Any
    accuracies: list[dict[str, Any]]
    sha256: str
    labels: list[str] | None = None  # class names in the order of the outputs
    precision: str = "float32"  # of the stored parameters; the loaded model is float32


def read_cards(folder: Traversable | None = None) -> dict[str, Card]:
    """Return the shipped models by name: every card in the folder whose weights are there."""
    folder = FOLDER if folder is None else folder
    if not folder.is_dir():
        return {}
    names = {file.name for file in folder.iterdir()}
    stems = sorted(name.removesuffix(".json") for name in names if name.endswith(".json"))
    return {stem: _read_card(folder, stem) for stem in stems if f"{stem}.pt" in names}


def load_shipped(
    name: str, *, device: str | torch.device = "cpu", folder: Traversable | None = None
) -> Normalized:
    """Return the shipped model called `name` in float32. Raise ValueError if its file was altered."""
    folder = FOLDER if folder is None else folder
    card = lookup("shipped model", name, read_cards(folder))
    content = (folder / f"{name}.pt").read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    if digest != card.sha256:
        raise ValueError(
            f"the weights of {name} are not those of its card: expected sha256 {card.sha256}, got"
            f" {digest}; install dent again"
        )
    make = partial(lookup("architecture", card.architecture, MODELS).make, classes=card.classes)
    source = f"{name}.pt"
    stored = read_checkpoint(io.BytesIO(content), source=source)
    state, _ = split_normalization(find_state(stored, source=source))
    net = make_network(make, state, source=source, device=device)
    model = Normalized(net, card.normalization["mean"], card.normalization["std"])
    model.class_names = tuple(card.labels) if card.labels else None
    return model.to(device).eval()


def _read_card(folder: Traversable, stem: str) -> Card:
    needed = [field.name for field in fields(Card) if field.default is MISSING]
    try:
        content = json.loads((folder / f"{stem}.json").read_text(encoding="utf-8"))
        known = {field.name: content[field.name] for field in fields(Card) if field.name in content}
        return Card(**{name: content[name] for name in needed} | known)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{stem}.json is no card: expected JSON with {', '.join(needed)}; "
            f"{type(error).__name__}: {error}"
        ) from error
