"""Models of timm and torchvision by name, where these are installed."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dent.models.architectures import Values, pair
from dent.models.checkpoint import fit, normalization_in, read, state_in
from dent.models.normalization import Normalized


def load_external(
    library: str,
    name: str,
    *,
    weights: str | Path | None = None,
    classes: int | None = None,
    mean: Values | None = None,
    std: Values | None = None,
    device: str | torch.device = "cpu",
) -> nn.Module:
    """The model `name` of `library` (timm or torchvision), with the normalization it was trained for.

    `weights` is a file, "random", or "pretrained" (as without it): those that the library publishes,
    which it downloads itself.
    """
    pretrained = weights is None or weights == "pretrained"
    if pretrained and classes is not None:
        raise ValueError(
            f"classes={classes} would give the pretrained {library}:{name} a random final layer; leave"
            " it out, or give weights= a file of that many classes"
        )
    given = pair(mean, std)
    module = _library(library)
    create = {"timm": _timm, "torchvision": _torchvision}[library]
    net, own = create(module, name, pretrained, {} if classes is None else {"num_classes": classes})
    stored = None
    if weights is not None and not pretrained and weights != "random":
        stored = load_into(net, weights)
    mean_and_std = given or stored or own
    if mean_and_std is None:
        raise ValueError(f"{library} gives no mean and std for {name!r}; give mean= and std=")
    return Normalized(net, *mean_and_std).to(device).eval()


def load_into(net: nn.Module, weights: str | Path) -> tuple[list[float], list[float]] | None:
    """Fill any network from a checkpoint file; returns the normalization that it stored, if it did."""
    state, stored = state_in(read(weights), source=str(weights)), None
    if not state.keys() & net.state_dict().keys():  # else its names are the network's own
        state, stored = normalization_in(state)
    fit(net, state, source=str(weights))
    return stored


def _library(library: str) -> Any:
    try:
        return import_module("torchvision.models" if library == "torchvision" else library)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{library}:NAME needs {library}, which is not installed ({error});"
            f" pip install 'dent-defense[{library}]'"
        ) from error
    except Exception as error:  # torchvision for another torch raises no ImportError
        raise ValueError(
            f"{library}:NAME needs {library}, which is installed but fails ({type(error).__name__}:"
            f" {error}); install versions of torch and {library} that belong together"
        ) from error


Created = tuple[nn.Module, tuple[Sequence[float], Sequence[float]] | None]


def _timm(timm: Any, name: str, pretrained: bool, options: dict[str, int]) -> Created:
    hosted = ":" in name or "/" in name  # such as hf-hub:owner/model, which timm looks up itself
    if not hosted and not timm.is_model(name):
        raise _unknown("timm", name, timm.list_models())
    net = _created("timm", name, timm.create_model, name, pretrained=pretrained, **options)
    config = getattr(net, "pretrained_cfg", None) or {}
    own = (config["mean"], config["std"]) if "mean" in config and "std" in config else None
    return net, own


def _torchvision(models: Any, name: str, pretrained: bool, options: dict[str, int]) -> Created:
    if name not in models.list_models():
        raise _unknown("torchvision", name, models.list_models())
    published = models.get_model_weights(name).DEFAULT
    chosen = published if pretrained else None
    net = _created("torchvision", name, models.get_model, name, weights=chosen, **options)
    preparation = published.transforms()
    own = (preparation.mean, preparation.std) if hasattr(preparation, "mean") else None
    return net, own


def _created(library: str, name: str, create: Any, *args: Any, **options: Any) -> nn.Module:
    try:
        net: nn.Module = create(*args, **options)
    except Exception as error:
        raise ValueError(
            f"{library} could not make {name!r} ({type(error).__name__}: {error}); where it cannot"
            " download, give weights= a file that you brought by hand"
        ) from error
    return net


def _unknown(library: str, name: str, known: list[str]) -> ValueError:
    near = " or ".join(map(repr, get_close_matches(name, known)))
    return ValueError(f"{library} has no model {name!r}{f'; did you mean {near}?' if near else ''}")
