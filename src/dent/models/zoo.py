"""All models by name: shipped, of RobustBench, timm and torchvision, from a file, or the user's own."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dent.models.architectures import MODELS, Values, build, check_classes, pair, parameters
from dent.models.checkpoint import filled, normalization_in, read, state_in
from dent.models.external import load_external, load_into
from dent.models.normalization import Normalized
from dent.models.robustbench import (
    ROBUSTBENCH,
    load_robustbench,
    published,
    short_name,
)
from dent.models.shipped import cards, load_shipped
from dent.names import import_function, lookup

ENDINGS = (".pt", ".pth", ".th", ".ckpt", ".tar")  # of checkpoint files


def load_model(
    name: str | Path,
    *,
    weights: str | Path | None = None,
    classes: int | None = None,
    mean: Values | None = None,
    std: Values | None = None,
    device: str | torch.device = "cpu",
) -> nn.Module:
    """A classifier from images in [0, 1], (N, C, H, W), to logits, in evaluation mode.

    `name` is one of

    - a shipped model, such as `resnet20-at`;
    - an architecture of `MODELS` with `weights`: a checkpoint file, or "random";
    - a model of RobustBench: `robustbench:Carmon2019Unlabeled`, or the id alone. Where an id stands
      for several, CIFAR-10 and Linf are meant: say `robustbench:L2/Ding2020MMA` or
      `robustbench:imagenet/Linf/Wong2020Fast` for others. `weights` is its published file, if the
      package `robustbench` is not to fetch it;
    - `timm:NAME` or `torchvision:NAME`, pretrained unless `weights` is a file or "random";
    - a checkpoint that `dent train` wrote;
    - `package.module:function`, called without arguments, which returns a module; the current
      folder is searched as well.

    `mean` and `std`, a number or one for each channel, normalize the inputs inside the model. Left
    out, they are those stored in the checkpoint, else those of the architecture; a function of
    yours does its own. `mean=0, std=1` is none.

    >>> model = load_model("resnet20", weights="random", classes=4)
    >>> model(torch.rand(2, 3, 32, 32)).shape
    torch.Size([2, 4])
    """
    name = str(name)
    given = pair(mean, std)
    if classes is not None:
        check_classes(classes)
    library, _, rest = name.partition(":")
    if library in ("timm", "torchvision") and rest:
        return load_external(
            library, rest, weights=weights, classes=classes, mean=mean, std=std, device=device
        )
    if name in (shipped := cards()):
        _refuse(name, weights=weights, classes=classes, mean=mean)
        return load_shipped(name, device=device)
    if name in MODELS:
        if weights is None or weights == "pretrained":
            raise ValueError(
                f"{name} is an architecture without weights: give weights= a checkpoint file, or"
                " weights='random' if that is what you want"
            )
        if weights == "random":
            return build(name, classes=classes, mean=mean, std=std).to(device).eval()
        return _from_file(weights, name, classes, given, device)
    if library == "robustbench" or name in _ids():
        _refuse(name, classes=classes, mean=mean)
        return load_robustbench(name.removeprefix("robustbench:"), weights=weights, device=device)
    if name.endswith(ENDINGS) or Path(name).is_file():
        _refuse(name, weights=weights)
        return _from_file(name, None, classes, given, device)
    if ":" in name:
        return _from_function(name, weights, classes, given, device)
    known = [*shipped, *MODELS, *_ids()]
    near = " or ".join(map(repr, get_close_matches(name, known)))
    raise ValueError(
        f"unknown model {name!r}; {f'did you mean {near}? ' if near else ''}Expected one of:"
        f" {', '.join(known)}, timm:NAME, torchvision:NAME, robustbench:ID, package.module:function,"
        " or a checkpoint file"
    )


def model_table() -> list[dict[str, Any]]:
    """A row for each model: what it is, what it needs, and the accuracies published for it.

    Keys: name, summary, architecture, parameters, norm, eps, needs, and accuracies, a list of
    what, n, percent, low and high. The last rows are forms of names, without parameters.

    >>> [row["needs"] for row in model_table() if row["name"] == "wrn-28-10"]
    ['weights or training']
    """
    rows = []
    for name, card in cards().items():
        make = partial(lookup("architecture", card.architecture, MODELS).make, card.classes)
        rows.append(
            _row(name, card.summary, card.architecture, parameters(make), "ships with dent")
            | {"accuracies": card.accuracies}
        )
    for key, entry in ROBUSTBENCH.items():
        dataset, threat, _ = key.split("/")
        data = {"cifar10": "CIFAR-10", "imagenet": "ImageNet"}[dataset]
        summary = f"{entry.architecture} for {data}, {threat} {entry.eps}"
        summary += f", {entry.note}" if entry.note else ""
        needs = "robustbench or its checkpoint file"
        rows.append(
            _row(short_name(key), summary, entry.architecture, parameters(entry.make), needs)
            | {"norm": threat.lower(), "eps": entry.eps, "accuracies": published(entry)}
        )
    for name, architecture in MODELS.items():
        count = parameters(partial(architecture.make, architecture.classes))
        rows.append(_row(name, architecture.summary, name, count, "weights or training"))
    forms = {
        "timm:NAME": ("a model of timm", "dent-defense[timm]"),
        "torchvision:NAME": ("a model of torchvision", "dent-defense[torchvision]"),
        "FILE.pt": ("a checkpoint that dent train wrote", "the file"),
        "package.module:function": ("your own, made by a function of yours", "the module"),
    }
    return rows + [_row(name, summary, "", None, needs) for name, (summary, needs) in forms.items()]


def _row(name: str, summary: str, architecture: str, count: int | None, needs: str) -> dict[str, Any]:
    about = {"name": name, "summary": summary, "architecture": architecture, "parameters": count}
    return about | {"norm": None, "eps": None, "needs": needs, "accuracies": []}


def _ids() -> list[str]:
    return list(dict.fromkeys(key.rpartition("/")[2] for key in ROBUSTBENCH))


def _from_file(
    weights: str | Path,
    architecture: str | None,
    classes: int | None,
    given: tuple[Values, Values] | None,
    device: str | torch.device,
) -> Normalized:
    source = str(weights)
    content = read(weights)
    state, stored = normalization_in(state_in(content, source=source))
    about = _about(content, source)
    if architecture is None and "architecture" not in about:
        raise ValueError(
            f"{source} does not say its architecture; give it: load_model('resnet20', weights="
            f"{source!r}). Known: {', '.join(MODELS)}"
        )
    name = str(about.get("architecture", architecture))
    if architecture not in (None, name):
        raise ValueError(f"{source} is a checkpoint of {name}, not of {architecture}")
    if ":" in name:  # a file is not to choose which code is run: its reader is
        raise ValueError(f"{source} is a checkpoint of {name}: load_model({name!r}, weights={source!r})")
    if classes is not None and about.get("classes", classes) != classes:
        raise ValueError(f"{source} is a checkpoint of {about['classes']} classes, not of {classes}")
    entry = lookup("architecture", name, MODELS)
    classes = about.get("classes", entry.classes if classes is None else classes)
    own = pair(about.get("mean"), about.get("std"))
    net = filled(partial(entry.make, classes), state, source=source, device=device)
    mean, std = given or own or stored or (entry.mean, entry.std)
    return Normalized(net, mean, std).to(device).eval()


def _about(content: Any, source: str) -> dict[str, Any]:
    """What a checkpoint of `dent train` says of itself; nothing for others."""
    if not isinstance(content, Mapping) or not isinstance(content.get("architecture"), str):
        return {}
    about = {key: content[key] for key in ("architecture", "classes", "mean", "std") if key in content}
    if "classes" in about:
        check_classes(about["classes"])
    return about


def _from_function(
    spec: str,
    weights: str | Path | None,
    classes: int | None,
    given: tuple[Values, Values] | None,
    device: str | torch.device,
) -> nn.Module:
    _refuse(spec, classes=classes)
    if weights in ("random", "pretrained"):
        raise ValueError(f"weights={weights!r} has no meaning for {spec}: its function decides")
    net = import_function(spec)()
    if not isinstance(net, nn.Module):
        raise ValueError(f"expected {spec} to return a torch.nn.Module, got {type(net).__name__}")
    stored = load_into(net, weights) if weights is not None else None
    mean_and_std = given or stored
    return (net if mean_and_std is None else Normalized(net, *mean_and_std)).to(device).eval()


def _refuse(name: str, **given: Any) -> None:
    """What was given of these, but is part of the model already."""
    extra = [key for key, value in given.items() if value is not None]
    if extra:
        raise ValueError(
            f"{name} brings its own {' and '.join(extra)}: leave {'it' if len(extra) == 1 else 'them'}"
            " out, or load an architecture with weights= a file"
        )
