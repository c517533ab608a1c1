"""Models of timm and torchvision by name, and timm's from the Hub, if these libraries are installed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from difflib import get_close_matches
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dent.models.architectures import check_pair
from dent.models.checkpoint import find_state, load_state, read_checkpoint, split_normalization
from dent.models.hub import HubFiles, read_timm_config
from dent.models.normalization import (
    Normalized,
    Pair,
    Values,
    check_normalization,
    describe_weights,
)

# Arguments of timm.create_model that load weights, which a config from the network may not set.
RESERVED = ("checkpoint", "pretrained", "cache_dir")


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
    """Return the model `name` of `library` (timm or torchvision) with its normalization.

    weights: "pretrained" (the default), which the library downloads itself; "random"; or a file.
    """
    pretrained = weights is None or weights == "pretrained"
    if pretrained and classes is not None:
        raise ValueError(
            f"classes={classes} would give the pretrained {library}:{name} a random final layer; leave"
            " it out, or give weights= a file of that many classes"
        )
    given = check_pair(mean, std)
    module = _import_library(library)
    create = {"timm": _create_timm, "torchvision": _create_torchvision}[library]
    net, own = create(module, name, pretrained, {} if classes is None else {"num_classes": classes})
    stored = None
    if weights is not None and not pretrained and weights != "random":
        stored = load_file(net, weights)
    mean_and_std = given or stored or own
    if mean_and_std is None:
        raise ValueError(f"{library} gives no mean and std for {name!r}; give mean= and std=")
    if pretrained and own is not None:
        check_normalization(mean_and_std, own, source=f"{library}:{name}")
    else:
        describe_weights(net, *mean_and_std)
    return Normalized(net, *mean_and_std).to(device).eval()


def load_timm_files(files: HubFiles, given: Pair | None, *, device: str | torch.device) -> nn.Module:
    """Return the model that a repository of timm's layout has, with its normalization.

    timm makes the network; the weights are loaded here, key for key, and nothing of them is run.
    """
    config = files.config or {}
    name, options = config["architecture"], dict(config.get("model_args") or {})
    if wrong := {key for key in options if key.startswith(RESERVED)} | set(":/") & set(name):
        raise ValueError(
            f"config.json of {files.source} may not say {', '.join(sorted(wrong))}: a repository names"
            " an architecture of timm and its size, and no other files"
        )
    about = read_timm_config(config)
    if "num_classes" in about:
        options["num_classes"] = about["num_classes"]
    net, _ = _create_timm(_import_library("timm"), name, False, options)
    load_file(net, files.weights, source=files.source)
    own = (about["mean"], about["std"]) if "mean" in about and "std" in about else None
    mean_and_std = given or own
    if mean_and_std is None:
        raise ValueError(f"{files.source} gives no mean and std; give mean= and std=")
    check_normalization(mean_and_std, own or mean_and_std, source=files.source)
    describe_weights(net, *mean_and_std)
    return Normalized(net, *mean_and_std).to(device).eval()


def load_file(
    net: nn.Module, weights: str | Path, *, source: str = ""
) -> tuple[list[float], list[float]] | None:
    """Load a checkpoint file into any network; return the normalization that it stored, or None."""
    source = source or str(weights)
    state, stored = find_state(read_checkpoint(weights, source=source), source=source), None
    if not state.keys() & net.state_dict().keys():  # else its names are the network's own
        state, stored = split_normalization(state)
    load_state(net, state, source=source)
    return stored


def _import_library(library: str) -> Any:
    try:
        return import_module("torchvision.models" if library == "torchvision" else library)
    except ModuleNotFoundError as error:
        missing = (error.name or library).partition(".")[0]
        extra = f"'dent-defense[{library}]'" if missing == library else missing
        raise ValueError(
            f"{library}:NAME needs {missing}, which is not installed ({error}); pip install {extra}"
        ) from error
    except Exception as error:  # torchvision for another torch raises no ImportError
        raise ValueError(
            f"{library}:NAME needs {library}, which is installed but fails ({type(error).__name__}:"
            f" {error}); install versions of torch and {library} that belong together"
        ) from error


Created = tuple[nn.Module, tuple[Sequence[float], Sequence[float]] | None]


def _create_timm(timm: Any, name: str, pretrained: bool, options: dict[str, Any]) -> Created:
    hosted = ":" in name or "/" in name  # such as hf-hub:owner/model, which timm looks up itself
    if not hosted and not timm.is_model(name):
        raise _make_unknown_error("timm", name, timm.list_models())
    net = _create("timm", name, partial(timm.create_model, name, pretrained=pretrained, **options))
    config = getattr(net, "pretrained_cfg", None) or {}
    own = (config["mean"], config["std"]) if "mean" in config and "std" in config else None
    return net, own


def _create_torchvision(models: Any, name: str, pretrained: bool, options: dict[str, int]) -> Created:
    if name not in models.list_models():
        raise _make_unknown_error("torchvision", name, models.list_models())
    published = models.get_model_weights(name).DEFAULT
    chosen = published if pretrained else None
    net = _create("torchvision", name, partial(models.get_model, name, weights=chosen, **options))
    preparation = published.transforms()
    own = (preparation.mean, preparation.std) if hasattr(preparation, "mean") else None
    return net, own


def _create(library: str, name: str, create: Callable[[], nn.Module]) -> nn.Module:
    try:
        return create()
    except Exception as error:
        raise ValueError(
            f"{library} could not make {name!r} ({type(error).__name__}: {error}); if it cannot"
            " download, give weights= a file that you brought by hand"
        ) from error


def _make_unknown_error(library: str, name: str, known: list[str]) -> ValueError:
    near = " or ".join(map(repr, get_close_matches(name, known)))
    return ValueError(f"{library} has no model {name!r}{f'; did you mean {near}?' if near else ''}")
