"""The models of RobustBench (Croce et al., 2021) in the paper's tables, by their ids.

The package `robustbench` loads them if it can be imported. Without it, the published checkpoint file is
loaded into our own architectures, which have the same keys and compute the same.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dent.intervals import wilson
from dent.models.architectures import MODELS
from dent.models.checkpoint import find_state, make_network, read_checkpoint, split_normalization
from dent.models.normalization import (
    CIFAR_MEAN,
    CIFAR_STD,
    IMAGENET_MEAN,
    IMAGENET_STD,
    Normalized,
    PerImageNormalized,
)
from dent.models.preact import PreActResNet18, WideResNet
from dent.models.resnet import ResNet50
from dent.names import lookup
from dent.storage import find_home


@dataclass(frozen=True)
class RobustModel:
    """A model of RobustBench: the function that makes it, and its published accuracies in percent."""

    architecture: str
    make: Callable[[], nn.Module]
    eps: str
    clean: float
    robust: float
    normalization: tuple[Sequence[float], Sequence[float]] | None = None
    per_image: bool = False
    n: int = 10_000
    note: str = ""


_WRN = partial(WideResNet, 28, 10)
_TWICE = partial(WideResNet, 28, 10, duplicate=True)
_CIFAR = (CIFAR_MEAN, CIFAR_STD)
_RONY = ((0.491, 0.482, 0.447), (0.247, 0.243, 0.262))  # the same, as its authors rounded it
_TO_ONE = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))  # 2x - 1
_MMA = partial(WideResNet, 28, 4)

# By data set, threat model and id, as RobustBench names models and files.
ROBUSTBENCH: dict[str, RobustModel] = {
    "cifar10/Linf/Wu2020Adversarial_extra": RobustModel("WRN-28-10", _TWICE, "8/255", 88.25, 60.04),
    "cifar10/Linf/Carmon2019Unlabeled": RobustModel("WRN-28-10", _TWICE, "8/255", 89.69, 59.53),
    "cifar10/Linf/Sehwag2020Hydra": RobustModel("WRN-28-10", _TWICE, "8/255", 88.98, 57.14),
    "cifar10/Linf/Wang2020Improving": RobustModel("WRN-28-10", _TWICE, "8/255", 87.50, 56.29),
    "cifar10/Linf/Hendrycks2019Using": RobustModel("WRN-28-10", _WRN, "8/255", 87.11, 54.92, _TO_ONE),
    "cifar10/Linf/Wong2020Fast": RobustModel(
        "PreActResNet-18", PreActResNet18, "8/255", 83.34, 43.21, _CIFAR
    ),
    "cifar10/Linf/Ding2020MMA": RobustModel("WRN-28-4", _MMA, "8/255", 84.36, 41.44, per_image=True),
    "cifar10/L2/Rice2020Overfitting": RobustModel(
        "PreActResNet-18", MODELS["preact-resnet18-bn"].make, "0.5", 88.67, 67.68, _CIFAR
    ),
    "cifar10/L2/Rony2019Decoupling": RobustModel("WRN-28-10", _WRN, "0.5", 89.05, 66.44, _RONY),
    "cifar10/L2/Ding2020MMA": RobustModel("WRN-28-4", _MMA, "0.5", 88.02, 66.09, per_image=True),
    "imagenet/Linf/Wong2020Fast": RobustModel(
        "ResNet-50",
        ResNet50,
        "4/255",
        55.62,
        26.24,
        (IMAGENET_MEAN, IMAGENET_STD),
        n=5_000,
        note="crops of 288 pixels",
    ),
}
ENDING = ".pt"
DATASETS, THREATS = ("cifar10", "cifar100", "imagenet"), ("Linf", "L2", "corruptions")


def load_robustbench(
    spec: str, *, weights: str | Path | None = None, device: str | torch.device = "cpu"
) -> nn.Module:
    """Return the model with the id `spec` (see `resolve_id`), by the package or from its file.

    The spec may also be the published file itself, in RobustBench's layout: its path ends with
    `data set/threat model/id.pt`.
    """
    if spec.endswith(ENDING) and weights is None:
        spec, weights = "/".join(Path(spec.removesuffix(ENDING)).parts[-3:]), spec
        lookup("RobustBench model", spec, ROBUSTBENCH)
    key = resolve_id(spec)
    if weights == "random":
        entry = lookup("RobustBench model", key, ROBUSTBENCH)
        return _normalize(entry, entry.make(), None).to(device).eval()
    if weights is None or weights == "pretrained":
        package, reason = _import_package()
        if package is not None:
            return _load_by_package(package, key).to(device).eval()
        if key not in ROBUSTBENCH:
            known = ", ".join(shorten_id(key) for key in ROBUSTBENCH)
            raise ValueError(
                f"unknown RobustBench model {key!r}: without its package ({reason}) dent knows {known};"
                " others need: pip install 'dent-defense[robustbench]'"
            )
        weights = _find_file(key, reason)
        if "not installed" not in reason:
            warnings.warn(
                f"robustbench is installed but cannot be used ({reason}); {key} is loaded from"
                f" {weights} by dent's own architecture",
                stacklevel=3,
            )
    entry = lookup("RobustBench model", key, ROBUSTBENCH)
    source = str(weights)
    state, stored = split_normalization(find_state(read_checkpoint(weights), source=source))
    net = make_network(entry.make, state, source=source, device=device)
    return _normalize(entry, net, stored).to(device).eval()


def resolve_id(spec: str) -> str:
    """Return `data set/threat model/id` for an id with both, one or none of them before it.

    The first entry of the table that fits decides what was left out: CIFAR-10 before ImageNet, and Linf
    before L2. So an id alone means Linf, unless the table has it only for L2 (`Rice2020Overfitting`,
    whose Linf model, a WRN-34-20, is not in the table).

    >>> resolve_id("Ding2020MMA"), resolve_id("L2/Ding2020MMA")
    ('cifar10/Linf/Ding2020MMA', 'cifar10/L2/Ding2020MMA')
    >>> resolve_id("Rice2020Overfitting"), resolve_id("imagenet/Wong2020Fast")
    ('cifar10/L2/Rice2020Overfitting', 'imagenet/Linf/Wong2020Fast')
    """
    *given, name = spec.split("/")
    known = {word.lower(): word for word in (*DATASETS, *THREATS)}
    words = [known.get(word.lower(), "") for word in given]
    if not name or "" in words or len(words) > 2:
        raise ValueError(
            f"expected robustbench:[data set/][threat model/]id, such as robustbench:L2/Ding2020MMA;"
            f" data sets: {', '.join(DATASETS)}; threat models: {', '.join(THREATS)}; got {spec!r}"
        )
    for key in ROBUSTBENCH:
        *parts, own = key.split("/")
        if own == name and set(words) <= set(parts):
            return key
    dataset = next((word for word in words if word in DATASETS), DATASETS[0])
    threat = next((word for word in words if word in THREATS), THREATS[0])
    return f"{dataset}/{threat}/{name}"


def shorten_id(key: str) -> str:
    """Return the shortest name that `load_model` takes for this entry and no other.

    >>> shorten_id("cifar10/L2/Ding2020MMA"), shorten_id("cifar10/L2/Rony2019Decoupling")
    ('robustbench:L2/Ding2020MMA', 'robustbench:Rony2019Decoupling')
    """
    dataset, threat, name = key.split("/")
    shorter = [
        spec for spec in (name, f"{threat}/{name}", f"{dataset}/{name}") if resolve_id(spec) == key
    ]
    return f"robustbench:{shorter[0] if shorter else key}"


def find_checkpoint(folder: Path, key: str) -> Path | None:
    """Return the published checkpoint file of an entry in a folder of RobustBench's layout, or None."""
    file = folder / f"{key}{ENDING}"
    return file if file.is_file() else None


def list_folders() -> list[Path]:
    """Return the folders where published checkpoint files are searched for, in RobustBench's layout."""
    return [Path("models"), find_home() / "models"]


def list_accuracies(entry: RobustModel) -> list[dict[str, Any]]:
    """Return the accuracies that RobustBench reports, each with its n and 95 % interval."""
    rows = []
    for what, percent in {"natural": entry.clean, "AutoAttack": entry.robust}.items():
        low, high = wilson(round(entry.n * percent / 100), entry.n)
        rows.append(
            {"what": what, "n": entry.n, "percent": percent, "low": 100 * low, "high": 100 * high}
        )
    return rows


def _import_package() -> tuple[Any, str]:
    try:
        return import_module("robustbench"), ""
    except ModuleNotFoundError as error:
        return None, "not installed" if error.name == "robustbench" else str(error)
    except Exception as error:  # its own imports may raise anything; torchvision's is no ImportError
        return None, f"{type(error).__name__}: {error}"


def _load_by_package(package: Any, key: str) -> nn.Module:
    dataset, threat, name = key.split("/")
    places = [folder for folder in list_folders() if (folder / f"{key}.pt").is_file()]
    folder = (places or list_folders()[-1:])[0]
    try:
        model: nn.Module = package.load_model(
            model_name=name, model_dir=folder, dataset=dataset, threat_model=threat
        )
    except KeyError as error:
        raise ValueError(
            f"robustbench has no model {name!r} for {dataset} and {threat}; if you mean others, give"
            " both: robustbench:cifar10/L2/ID"
        ) from error
    return model


def _find_file(key: str, reason: str) -> Path:
    places = [folder / f"{key}.pt" for folder in list_folders()]
    for folder in list_folders():
        if place := find_checkpoint(folder, key):
            return place
    raise ValueError(
        f"{key} needs the package robustbench ({reason}) or its published checkpoint file, which is not"
        f" at {' or '.join(map(str, places))}; install the package by"
        " pip install 'dent-defense[robustbench]', or bring the file (RobustBench's model zoo links"
        " it: https://github.com/RobustBench/robustbench) to one of these places or give it by weights="
    )


def _normalize(
    entry: RobustModel, net: nn.Module, stored: tuple[list[float], list[float]] | None
) -> nn.Module:
    if entry.per_image:
        return PerImageNormalized(net)
    mean_and_std = stored or entry.normalization
    return net if mean_and_std is None else Normalized(net, *mean_and_std)
