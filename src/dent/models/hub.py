"""Models of the Hugging Face Hub: which files of a repository are read, and what they say.

Nothing of a repository is run. `config.json` names the architecture, and the weights are safetensors, or
a checkpoint that is read with `weights_only`. Three layouts are known:

- dent: `config.json` with `"library_name": "dent"`, `architecture` (a name of `MODELS`), `classes`,
  `mean`, `std` and `labels`; the state dict in `model.safetensors` or `pytorch_model.bin`;
- a checkpoint of `dent train`: `checkpoint.pt`, without a `config.json`;
- timm: `config.json` with `architecture` and `pretrained_cfg`, as timm publishes its models; the same
  files of weights.
"""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

CONFIG, CHECKPOINT = "config.json", "checkpoint.pt"
WEIGHTS = ("model.safetensors", "pytorch_model.bin")  # the first that a repository has


class HubFiles(NamedTuple):
    """The files of a model of the Hub. A checkpoint of `dent train` has no config."""

    source: str
    config: dict[str, Any] | None
    weights: Path


def fetch_hub(name: str) -> HubFiles:
    """Return the files of `owner/name` or `owner/name@revision`, from the local cache if they are there.

    Raise ValueError if the repository cannot be read, or has none of the known layouts.
    """
    repository, _, revision = name.partition("@")
    source = f"hf:{name}"
    first = _fetch(source, repository, revision or None, CONFIG, CHECKPOINT)
    if first.name == CHECKPOINT:
        return HubFiles(source, None, first)
    try:
        config = json.loads(first.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{CONFIG} of {source} is no JSON: {error}") from error
    if not isinstance(config, dict) or not isinstance(config.get("architecture"), str):
        raise ValueError(
            f"{CONFIG} of {source} names no `architecture`, as models of timm and of dent do; if it is a"
            " model of another library, make it in a function of yours: package.module:function"
        )
    return HubFiles(source, config, _fetch(source, repository, revision or None, *WEIGHTS))


def is_of_dent(config: dict[str, Any]) -> bool:
    """Return True if the architecture is one of dent's, False if it is one of timm's."""
    return config.get("library_name") == "dent"


def read_timm_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return the `pretrained_cfg` of a config of timm, with its number of classes.

    Older configs have its entries at the top.

    >>> read_timm_config({"architecture": "resnet18", "num_classes": 10, "mean": [0.5], "std": [0.5]})
    {'num_classes': 10, 'mean': [0.5], 'std': [0.5]}
    """
    inner = config.get("pretrained_cfg")
    known = dict(config if inner is None else inner)
    known.pop("architecture", None)
    if "num_classes" in config:
        known["num_classes"] = config["num_classes"]
    return known


def _fetch(source: str, repository: str, revision: str | None, *candidates: str) -> Path:
    """Return the local path of the first file that the repository has."""
    try:
        hub = import_module("huggingface_hub")
        errors = import_module("huggingface_hub.errors")
    except ModuleNotFoundError as error:
        raise ImportError(f"{source} needs: pip install 'dent-defense[hf]' ({error})") from error
    problem, is_offline = None, False
    for file in candidates:
        try:
            path = hub.hf_hub_download(
                repository, file, revision=revision, library_name="dent", local_files_only=is_offline
            )
            return Path(path)
        except errors.EntryNotFoundError as error:
            # Without a network every file would be tried for half a minute: once is enough.
            is_offline = isinstance(error, errors.LocalEntryNotFoundError)
            problem = problem or error
        except Exception as error:  # a wrong id, no permission, a broken connection
            raise ValueError(f"{source} cannot be read: {_shorten(error)}") from error
    raise ValueError(f"{source} has no {' and no '.join(candidates)}: {_shorten(problem)}") from problem


def _shorten(error: Exception | None) -> str:
    """Return the kind of an error and its first line that says something."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else 'no reason given'}"
