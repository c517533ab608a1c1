"""Checkpoints: read without running code in them, and loaded into a network key for key."""

from __future__ import annotations

import pickle
import re
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor, nn

NESTS = ("state_dict", "model_state_dict", "model", "net")  # entries that may hold the state dict
PREFIXES = (
    "module.",
    "model.",
    "net.",
    "_orig_mod.",
)  # added by wrappers
# The names under which a checkpoint may store its normalization.
STORED = (("mu", "sigma"), ("mean", "std"), ("normalize.mean", "normalize.std"))

State = dict[str, Tensor]


def read_checkpoint(file: str | Path | IO[bytes], *, source: str = "") -> Any:
    """Return what `torch.save` wrote: tensors, numbers, text and containers of them. Never run code.

    A file that ends in `.safetensors` is read as such, to a dict of tensors.
    """
    source = source or str(file)
    if isinstance(file, str | Path):
        if not Path(file).exists():
            raise ValueError(f"expected a checkpoint at {source}, but there is no such file")
        if not Path(file).is_file():
            raise ValueError(f"expected a checkpoint at {source}, but it is not a file")
        if Path(file).suffix == ".safetensors":
            return _read_safetensors(file, source)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of foreign pickles, which end in an error anyway
            return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # torch does not promise a type for broken files
        found = re.search(r"GLOBAL (\S+)", str(error)) if isinstance(error, pickle.PickleError) else None
        if found is not None:
            raise ValueError(
                f"{source} holds more than tensors: {found[1]!r}, which could run code, so nothing of"
                " it was loaded; if you trust it, load it with torch yourself and save only the"
                " state dict"
            ) from error
        raise ValueError(
            f"{source} is no checkpoint that can be read: cut short, or not written by torch.save"
            f" ({type(error).__name__}); copy or download it again"
        ) from error


def _read_safetensors(file: str | Path, source: str) -> State:
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load_file
    except ImportError as error:
        raise ImportError(f"{source} needs safetensors: pip install 'dent-defense[hf]'") from error
    try:
        state: State = load_file(file, device="cpu")
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{source} is no safetensors file that can be read ({error}); copy or download it again"
        ) from error
    return state


def find_state(content: Any, *, source: str) -> State:
    """Return the state dict in a checkpoint, which is all of it or one entry.

    >>> sorted(find_state({"epoch": 3, "net": {"weight": torch.ones(2)}}, source="a.pt"))
    ['weight']
    """
    for nest in (None, *NESTS):
        state = content if nest is None else content.get(nest) if isinstance(content, Mapping) else None
        if isinstance(state, Mapping) and state and all(map(_is_entry, state.items())):
            return dict(state)
    holds = (
        f"a dict of {_few(list(content))}" if isinstance(content, Mapping) else type(content).__name__
    )
    raise ValueError(
        f"{source} holds no state dict: expected names with tensors, or such a dict under"
        f" {', '.join(NESTS)}; got {holds}"
    )


def split_normalization(state: State) -> tuple[State, tuple[list[float], list[float]] | None]:
    """Return the state dict without prefixes of wrappers, and its normalization or None.

    >>> state = {"module.mu": torch.zeros(1, 3, 1, 1), "module.sigma": torch.ones(1, 3, 1, 1)}
    >>> split_normalization({**state, "module.fc.bias": torch.ones(2)})
    ({'fc.bias': tensor([1., 1.])}, ([0.0, 0.0, 0.0], [1.0, 1.0, 1.0]))
    """
    rest, stored = dict(state), None
    while True:
        for mean, std in STORED:
            if mean in rest and std in rest:
                stored = (rest.pop(mean).flatten().tolist(), rest.pop(std).flatten().tolist())
        shared = [prefix for prefix in PREFIXES if rest and all(key.startswith(prefix) for key in rest)]
        if not shared:
            return rest, stored
        rest = {key.removeprefix(shared[0]): value for key, value in rest.items()}


def load_state(net: nn.Module, state: State, *, source: str) -> None:
    """Load `state` into `net`, key for key. Raise ValueError with everything that does not fit.

    >>> load_state(nn.Linear(2, 1), {"weight": torch.ones(1, 3), "scale": torch.ones(1)}, source="a.pt")
    Traceback (most recent call last):
    ...
    ValueError: a.pt does not fit Linear; missing (1): bias; unexpected (1): scale; of another shape \
(1): weight (expected (1, 2), got (1, 3)); check the architecture and the number of classes
    """
    wanted = net.state_dict()
    # Checkpoints of torch before 0.4.1 have no counters, and prediction does not need them.
    counters = {key for key in wanted if key.endswith("num_batches_tracked") and key not in state}
    faults = {
        "missing": [key for key in wanted if key not in state and key not in counters],
        "unexpected": [key for key in state if key not in wanted],
        "of another shape": [
            f"{key} (expected {tuple(wanted[key].shape)}, got {tuple(value.shape)})"
            for key, value in state.items()
            if key in wanted and value.shape != wanted[key].shape
        ],
    }
    if any(faults.values()):
        told = "; ".join(f"{kind} ({len(keys)}): {_few(keys)}" for kind, keys in faults.items() if keys)
        raise ValueError(
            f"{source} does not fit {type(net).__name__}; {told};"
            " check the architecture and the number of classes"
        )
    broken = [key for key, value in state.items() if not torch.isfinite(value).all()]
    if broken:
        raise ValueError(f"{source} holds values that are not finite, in {_few(broken)}")
    net.load_state_dict({**state, **{key: torch.zeros_like(wanted[key]) for key in counters}})


def make_network(
    make: Callable[[], nn.Module], state: State, *, source: str, device: str | torch.device = "cpu"
) -> nn.Module:
    """Return the network that `make` makes, with the weights of `state`. Draw no random weights."""
    with torch.device("meta"):
        net = make()
    net.to_empty(device=device)
    load_state(net, state, source=source)
    return net


def _is_entry(item: tuple[Any, Any]) -> bool:
    return isinstance(item[0], str) and isinstance(item[1], Tensor)


def _few(keys: list[Any], most: int = 8) -> str:
    told = ", ".join(map(str, keys[:most]))
    return told if len(keys) <= most else f"{told} and {len(keys) - most} more"
