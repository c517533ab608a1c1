"""The models and images of an evaluation: load them, cut batches, and take digests of both."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dent.attacks.checks import check_model
from dent.data import Dataset, open_data
from dent.defense import LowDiversityWarning, defend, is_independent
from dent.evaluation.attacks import Subject
from dent.evaluation.spec import Cell, Evaluation
from dent.models import find_class_names, load_model
from dent.seeds import make_generator


@dataclass
class Sources:
    """Load the models and images of an evaluation, each once in a process.

    given: models in memory, by their name in the evaluation. They are never changed or moved.
    images: images in memory, instead of the evaluation's data.
    digests: the digests that models must have, if another process has taken them.
    class_names: names of the models' outputs; None before they are looked up, () if they are not known.
    """

    evaluation: Evaluation
    given: Mapping[str, nn.Module] = field(default_factory=dict)
    images: Dataset | None = None
    digests: dict[str, str] = field(default_factory=dict)
    class_names: tuple[str, ...] | None = None
    _models: dict[str, nn.Module] = field(default_factory=dict, init=False)
    _subjects: dict[Cell, Subject] = field(default_factory=dict, init=False)
    _dataset: Dataset | None = field(default=None, init=False)

    def __getstate__(self) -> dict[str, Any]:
        """Send no loaded models or images: another process loads by name for itself."""
        return self.__dict__ | {"_models": {}, "_subjects": {}, "_dataset": None}

    def dataset(self) -> Dataset:
        if self._dataset is None:
            asked, dataset = self.evaluation, self.images
            if dataset is None:  # an empty data set is false, and given all the same
                dataset = open_data(asked.data, n=asked.n, seed=asked.seed)
            if not len(dataset):
                raise ValueError(f"expected one image or more, got none in {dataset.name}")
            self._dataset = self._match_classes(dataset)
        return self._dataset

    def _match_classes(self, dataset: Dataset) -> Dataset:
        """Return the data with the labels that the models have for classes of these names."""
        if dataset.has_names and self.class_names is None:
            known = {name: find_class_names(self.model(name)) for name in self.evaluation.models}
            known = {name: classes for name, classes in known.items() if classes}
            if len(set(known.values())) > 1:
                raise ValueError(
                    f"expected models with the same classes, got others in {' and '.join(known)}; "
                    "evaluate each alone"
                )
            self.class_names = next(iter(known.values()), None) or ()
        return dataset.match_classes(self.class_names or dataset.classes, owner="the model")

    def model(self, name: str) -> nn.Module:
        if name not in self._models:
            device = find_device(self.evaluation.device)
            given = self.given.get(name)
            model = load_model(name, device=device) if given is None else copy_to(given, device)
            check_model(model)  # in training mode, every call would change it
            digest = digest_model(model)
            if self.digests.setdefault(name, digest) != digest:
                raise ValueError(
                    f"the model {name} is not the one that the run began with; every machine of a run "
                    "must have the same code and the same file of weights"
                )
            self._models[name] = model
        return self._models[name]

    def subject(self, cell: Cell) -> Subject:
        if cell not in self._subjects:
            static = self.model(cell.model)
            defense = defend(static, cell.defense)
            model = static if cell.static else defense
            independent = defense.independent
            if independent is None:  # not declared: see whether it is
                inputs, _ = self.read(self.batches()[0][:2])
                with preserve_rng(self.evaluation.device):
                    independent = is_independent(model, inputs)
            self._subjects[cell] = Subject(model, static, defense, independent)
        return self._subjects[cell]

    def batches(self) -> tuple[Tensor, ...]:
        """Return the batches, as indices of the data set."""
        return cut_batches(len(self.dataset()), self.evaluation.batch_size, seed=self.evaluation.seed)

    def read(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return images and labels on the device of the evaluation."""
        dataset, device = self.dataset(), find_device(self.evaluation.device)
        return dataset.read(indices).to(device), dataset.labels[indices].to(device)


@contextmanager
def preserve_rng(device: str) -> Iterator[None]:
    """Restore torch's random state at the end, as if nothing had been drawn within."""
    kind = torch.device(device)
    with torch.random.fork_rng([kind] if kind.type == "cuda" else []):
        yield


@contextmanager
def ignore_low_diversity() -> Iterator[None]:
    """Ignore the warning of information maximization: evaluation makes it a finding of its own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LowDiversityWarning)
        yield


def cut_batches(n: int, size: int, *, seed: int) -> tuple[Tensor, ...]:
    """Return the points 0 to n - 1 in batches; the seed and the size alone decide them.

    >>> [sorted(batch.tolist()) for batch in cut_batches(3, 3, seed=0)]
    [[0, 1, 2]]
    >>> [len(batch) for batch in cut_batches(5, 2, seed=0)]
    [2, 2, 1]
    """
    batches: tuple[Tensor, ...] = torch.randperm(n, generator=make_generator(seed, 1)).split(size)
    return batches


def find_device(name: str) -> torch.device:
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:  # torch without CUDA asserts
        raise ValueError(f"expected a device that this machine has, got {name!r}: {error}") from error


def copy_to(model: nn.Module, device: torch.device) -> nn.Module:
    """Return the model itself if it is on the device, else a copy of it there."""
    if all(tensor.device == device for tensor in chain(model.parameters(), model.buffers())):
        return model
    return deepcopy(model).to(device)


# Attributes of every module, which are digested by name or decide nothing.
_OWN_ATTRIBUTES = frozenset(vars(nn.Module())) - {"training"}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


def digest_model(model: nn.Module) -> str:
    """Return the sha256 of all that decides a model's answers.

    That is: parameters, all buffers (also those that no state dict has), and for each module its class,
    its plain attributes (`eps`, `stride`), its hooks and tensors that are neither. What functions do
    is not digested, only their names are.

    >>> two, three = nn.BatchNorm1d(2), nn.BatchNorm1d(3)
    >>> digest_model(two) == digest_model(nn.BatchNorm1d(2)) != digest_model(three)
    True
    """
    digest = hashlib.sha256(_describe_tensors(model))
    for name, module in model.named_modules(remove_duplicate=False):
        digest.update(f"{name} {_name(type(module))} {module.extra_repr()}".encode())
        own = {key: value for key, value in vars(module).items() if key not in _OWN_ATTRIBUTES}
        own |= {key: list(getattr(module, key).values()) for key in _HOOKS}
        digest.update(_describe(own))
    return digest.hexdigest()


def _describe_tensors(model: nn.Module) -> bytes:
    tensors = chain(model.named_parameters(), model.named_buffers())
    return b" ".join(name.encode() + b" " + _describe(tensor) for name, tensor in tensors)


def _describe(value: Any) -> bytes:
    """Return bytes that are the same in every process, and differ where the value does, if known."""
    if isinstance(value, Tensor):
        plain = value.detach().cpu().contiguous().flatten()
        content = plain.view(torch.uint8).numpy().tobytes()
        return f"{value.dtype} {tuple(value.shape)} ".encode() + content
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {value.shape} ".encode() + value.tobytes()
    if isinstance(value, Mapping):
        return _describe(list(value.items()))
    if isinstance(value, list | tuple):
        return b"[%s]" % b", ".join(map(_describe, value))
    if isinstance(value, set | frozenset):
        return b"{%s}" % b", ".join(sorted(map(_describe, value)))
    if isinstance(value, partial):
        return _describe([value.func, value.args, value.keywords])
    if isinstance(value, nn.Module):  # one that is not registered
        return _name(value).encode() + _describe_tensors(value)
    text = repr(value)
    return (text if " at 0x" not in text else _name(value)).encode()


def _name(value: Any) -> str:
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"


def digest_data(dataset: Dataset, progress: Callable[[int, int], None] | None = None) -> str:
    """Return the sha256 of all images and labels; raise ValueError if an image leaves [0, 1]."""
    digest, done = hashlib.sha256(), 0
    for images, labels in dataset.batches(256):
        low, high = (float(bound) for bound in torch.aminmax(images))
        if not (low >= 0 and high <= 1):
            raise ValueError(
                f"{dataset.name}: expected images in [0, 1], got {low:g} to {high:g}; normalization is "
                "the model's"
            )
        for values in (images, labels):
            digest.update(values.contiguous().numpy().tobytes())
        done += len(labels)
        if progress:
            progress(done, len(dataset))
    return digest.hexdigest()
