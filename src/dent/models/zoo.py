"""Load any model by name: shipped, of a library, of the Hub, a file, or the user's own."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dent.models.architectures import MODELS, build, check_classes, check_pair, count_parameters
from dent.models.checkpoint import find_state, make_network, read_checkpoint, split_normalization
from dent.models.external import load_external, load_file, load_timm_files
from dent.models.hub import fetch_hub, is_of_dent
from dent.models.normalization import (
    Normalized,
    Pair,
    Values,
    check_normalization,
    describe_weights,
    find_own_normalization,
)
from dent.models.robustbench import ROBUSTBENCH, list_accuracies, load_robustbench, shorten_id
from dent.models.shipped import load_shipped, read_cards
from dent.names import import_function, lookup

ENDINGS = (".pt", ".pth", ".th", ".ckpt", ".tar", ".safetensors")  # suffixes of checkpoint files


def load_model(
    name: str | Path,
    *,
    weights: str | Path | None = None,
    classes: int | None = None,
    mean: Values | None = None,
    std: Values | None = None,
    device: str | torch.device = "cpu",
) -> nn.Module:
    """Return a classifier in evaluation mode: images in [0, 1], (N, C, H, W), to logits.

    `name` is one of

    - a shipped model, such as `resnet20-at`;
    - an architecture of `MODELS`, with `weights`: a checkpoint file, or "random";
    - a model of RobustBench: `robustbench:Carmon2019Unlabeled`, or the id alone. If an id has several
      models, it means CIFAR-10 and Linf. Write `robustbench:L2/Ding2020MMA` or
      `robustbench:imagenet/Linf/Wong2020Fast` for the others. Give the published file as `weights`
      if the package `robustbench` should not download it;
    - `timm:NAME` or `torchvision:NAME`, pretrained unless `weights` is a file or "random";
    - `hf:OWNER/NAME` or `hf:OWNER/NAME@REVISION`, a model of timm or of dent on the Hugging Face Hub;
    - a checkpoint that `dent train` wrote;
    - `package.module:function`, a function without arguments that returns a module, or a defense that
      has its static model as `model`. The current folder is searched too.

    `mean` and `std`, a number or one for each channel, normalize the inputs inside the model. By
    default they are those stored in the checkpoint, else those of the architecture. A function of
    yours does its own. `mean=0, std=1` means no normalization. If pretrained weights are known to need
    others, they are refused.

    >>> model = load_model("resnet20", weights="random", classes=4)
    >>> model(torch.rand(2, 3, 32, 32)).shape
    torch.Size([2, 4])
    """
    name = str(name)
    given = check_pair(mean, std)
    if classes is not None:
        check_classes(classes)
    library, _, rest = name.partition(":")
    if library in ("timm", "torchvision") and rest:
        return load_external(
            library, rest, weights=weights, classes=classes, mean=mean, std=std, device=device
        )
    if library == "hf" and rest:
        _refuse(name, weights=weights, classes=classes)
        return _load_hub(rest, given, device)
    if name in (shipped := read_cards()):
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
        return _load_file(weights, name, classes, given, device)
    if library == "robustbench" or name in _list_ids():
        _refuse(name, classes=classes, mean=mean)
        return load_robustbench(name.removeprefix("robustbench:"), weights=weights, device=device)
    if name.endswith(ENDINGS) or Path(name).is_file():
        _refuse(name, weights=weights)
        return _load_file(name, None, classes, given, device)
    if ":" in name:
        return _load_function(name, weights, classes, given, device)
    known = [*shipped, *MODELS, *_list_ids()]
    near = " or ".join(map(repr, get_close_matches(name, known)))
    raise ValueError(
        f"unknown model {name!r}; {f'did you mean {near}? ' if near else ''}Expected one of:"
        f" {', '.join(known)}, timm:NAME, torchvision:NAME, robustbench:ID, hf:OWNER/NAME,"
        " package.module:function, or a checkpoint file"
    )


def find_class_names(model: str | Path | nn.Module) -> tuple[str, ...] | None:
    """Return the names of a model's outputs in their order, or None if they are not known.

    Shipped models and checkpoints of `dent train` have names. A module has them if it has an attribute
    `class_names`.

    >>> find_class_names("resnet20-at")[:3], find_class_names("timm:resnet18")
    (('airplane', 'automobile', 'bird'), None)
    """
    names: Any = None
    if isinstance(model, nn.Module):
        names = getattr(model, "class_names", None)
    elif str(model) in (shipped := read_cards()):
        names = shipped[str(model)].labels
    elif str(model) not in MODELS and Path(model).is_file():
        names = _describe(read_checkpoint(model)).get("labels")
    return None if names is None else tuple(map(str, names))


def list_models() -> list[dict[str, Any]]:
    """Return a row for each model: what it is, what it needs, and its published accuracies.

    Keys: name, summary, architecture, parameters, norm, eps, needs, and accuracies, a list of
    what, n, percent, low and high. The last rows are forms of names, without parameters.

    >>> [row["needs"] for row in list_models() if row["name"] == "wrn-28-10"]
    ['weights or training']
    """
    rows = []
    for name, card in read_cards().items():
        make = partial(lookup("architecture", card.architecture, MODELS).make, classes=card.classes)
        rows.append(
            _make_row(name, card.summary, card.architecture, count_parameters(make), "ships with dent")
            | {"accuracies": card.accuracies}
        )
    for key, entry in ROBUSTBENCH.items():
        dataset, threat, _ = key.split("/")
        data = {"cifar10": "CIFAR-10", "imagenet": "ImageNet"}[dataset]
        summary = f"{entry.architecture} for {data}, {threat} {entry.eps}"
        summary += f", {entry.note}" if entry.note else ""
        needs = "robustbench or its checkpoint file"
        rows.append(
            _make_row(shorten_id(key), summary, entry.architecture, count_parameters(entry.make), needs)
            | {"norm": threat.lower(), "eps": entry.eps, "accuracies": list_accuracies(entry)}
        )
    for name, architecture in MODELS.items():
        count = count_parameters(partial(architecture.make, classes=architecture.classes))
        rows.append(_make_row(name, architecture.summary, name, count, "weights or training"))
    forms = {
        "timm:NAME": ("a model of timm", "dent-defense[timm]"),
        "torchvision:NAME": ("a model of torchvision", "dent-defense[torchvision]"),
        "hf:OWNER/NAME": ("a model of timm or of dent on the Hugging Face Hub", "dent-defense[hf]"),
        "FILE.pt": ("a checkpoint that dent train wrote", "the file"),
        "package.module:function": ("your own, made by a function of yours", "the module"),
    }
    return rows + [_make_row(name, summary, "", None, needs) for name, (summary, needs) in forms.items()]


def _make_row(
    name: str, summary: str, architecture: str, count: int | None, needs: str
) -> dict[str, Any]:
    about = {"name": name, "summary": summary, "architecture": architecture, "parameters": count}
    return about | {"norm": None, "eps": None, "needs": needs, "accuracies": []}


def _list_ids() -> list[str]:
    return list(dict.fromkeys(key.rpartition("/")[2] for key in ROBUSTBENCH))


def _load_file(
    weights: str | Path,
    architecture: str | None,
    classes: int | None,
    given: Pair | None,
    device: str | torch.device,
) -> Normalized:
    return _load_content(read_checkpoint(weights), str(weights), architecture, classes, given, device)


def _load_hub(name: str, given: Pair | None, device: str | torch.device) -> nn.Module:
    files = fetch_hub(name)
    if files.config is not None and not is_of_dent(files.config):
        return load_timm_files(files, given, device=device)
    content = read_checkpoint(files.weights, source=files.source)
    if files.config is not None:
        content = files.config | {"model": find_state(content, source=files.source)}
    stored = check_pair(content.get("mean"), content.get("std")) if isinstance(content, dict) else None
    if given is not None and stored is not None:
        check_normalization(given, stored, source=files.source)
    return _load_content(content, files.source, None, None, given, device)


def _load_content(
    content: Any,
    source: str,
    architecture: str | None,
    classes: int | None,
    given: Pair | None,
    device: str | torch.device,
) -> Normalized:
    state, stored = split_normalization(find_state(content, source=source))
    about = _describe(content)
    if architecture is None and "architecture" not in about:
        raise ValueError(
            f"{source} does not say its architecture; give it: load_model('resnet20', weights="
            f"{source!r}). Known: {', '.join(MODELS)}"
        )
    name = str(about.get("architecture", architecture))
    if architecture not in (None, name):
        raise ValueError(f"{source} is a checkpoint of {name}, not of {architecture}")
    if ":" in name:  # the reader chooses which code is run, never a file
        raise ValueError(f"{source} is a checkpoint of {name}: load_model({name!r}, weights={source!r})")
    if classes is not None and about.get("classes", classes) != classes:
        raise ValueError(f"{source} is a checkpoint of {about['classes']} classes, not of {classes}")
    entry = lookup("architecture", name, MODELS)
    classes = about.get("classes", entry.classes if classes is None else classes)
    own = check_pair(about.get("mean"), about.get("std"))
    net = make_network(partial(entry.make, classes=classes), state, source=source, device=device)
    model = Normalized(net, *(given or own or stored or (entry.mean, entry.std)))
    model.class_names = tuple(about["labels"]) if about.get("labels") else None
    return model.to(device).eval()


def _describe(content: Any) -> dict[str, Any]:
    """Return what a checkpoint of `dent train` says about itself; nothing for others."""
    if not isinstance(content, Mapping) or not isinstance(content.get("architecture"), str):
        return {}
    keys = ("architecture", "classes", "mean", "std", "labels")
    about = {key: content[key] for key in keys if key in content}
    if "classes" in about:
        check_classes(about["classes"])
    return about


def _load_function(
    spec: str,
    weights: str | Path | None,
    classes: int | None,
    given: Pair | None,
    device: str | torch.device,
) -> nn.Module:
    _refuse(spec, classes=classes)
    if weights in ("random", "pretrained"):
        raise ValueError(f"weights={weights!r} has no meaning for {spec}: its function decides")
    net = import_function(spec)()
    if isinstance(getattr(net, "model", None), nn.Module) and hasattr(net, "adapt"):
        _refuse(spec, weights=weights, mean=given)
        return net.to(device) if isinstance(net, nn.Module) else net
    if not isinstance(net, nn.Module):
        raise ValueError(f"expected {spec} to return a torch.nn.Module, got {type(net).__name__}")
    stored = load_file(net, weights) if weights is not None else None
    names = find_class_names(net) or (None if weights is None else find_class_names(weights))
    mean_and_std = given or stored
    if mean_and_std is not None and weights is not None:
        describe_weights(net, *mean_and_std)
    if mean_and_std is None and weights is None and (own := find_own_normalization(net)) is not None:
        raise ValueError(
            f"{spec} returns a model of timm that was trained with mean={own[0]} and std={own[1]}, and"
            " nothing normalizes its images in [0, 1]; give mean= and std=, or return"
            " dent.models.Normalized(model, mean, std)"
        )
    model = net if mean_and_std is None else Normalized(net, *mean_and_std)
    if names is not None:
        model.class_names = names  # type: ignore[assignment]
    return model.to(device).eval()


def _refuse(name: str, **given: Any) -> None:
    """Raise ValueError if something was given that the model already has."""
    extra = [key for key, value in given.items() if value is not None]
    if extra:
        raise ValueError(
            f"{name} brings its own {' and '.join(extra)}: leave {'it' if len(extra) == 1 else 'them'}"
            " out, or load an architecture with weights= a file"
        )
