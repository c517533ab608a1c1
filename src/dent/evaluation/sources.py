"""The models and images of an evaluation: load them, cut batches, and take digests of both."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from dent.attacks.checks import check_model
from dent.data import Dataset, open_data
from dent.defense import LowDiversityWarning, is_independent
from dent.evaluation.defenses import Subject, digest_defense, is_defense, is_import_path, make_defense
from dent.evaluation.digests import digest_model
from dent.evaluation.spec import Cell, Evaluation
from dent.models import find_class_names, load_model
from dent.seeds import make_generator


@dataclass
class Sources:
    """Load the models and images of an evaluation, each once in a process.

    given: models in memory, by their name in the evaluation. They are never changed or moved.
    images: images in memory, instead of the evaluation's data.
    own: defenses in memory, or functions from a model to one, by their name in the evaluation.
    digests: the digests that models and own defenses must have, if another process has taken them.
    class_names: names of the models' outputs; None before they are looked up, () if they are not known.
    """

    evaluation: Evaluation
    given: Mapping[str, nn.Module] = field(default_factory=dict)
    images: Dataset | None = None
    own: Mapping[str, Any] = field(default_factory=dict)
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
            defense = self._make_defense(cell, static)
            model = static if cell.static else defense
            independent = self._find_independence(cell, model, getattr(defense, "independent", None))
            self._subjects[cell] = Subject(model, static, defense, independent)
        return self._subjects[cell]

    def _make_defense(self, cell: Cell, static: nn.Module) -> Any:
        text = cell.defense
        if text in self.evaluation.own and text not in self.own:
            raise ValueError(f"{text} is a defense in the memory of another program; give it here too")
        if len(self.evaluation.models) > 1 and is_defense(self.own.get(text)):
            raise ValueError(
                f"{text}: expected a function from the model to the defense, because there are several "
                "models, got a defense of one model"
            )
        defense = make_defense(text, self.own, static)
        if isinstance(defense, nn.Module) and text in self.own:
            defense = copy_to(defense, find_device(self.evaluation.device))
        if self._is_own(cell):
            key, digest = f"{cell.model}, {text}", digest_defense(defense)
            # A defense in memory was sent by value; in a worker, its code may have no file.
            if self.digests.setdefault(key, digest) != digest and text not in self.own:
                raise ValueError(
                    f"the defense {text} is not the one that the run began with; every machine of a run "
                    "must have the same code"
                )
        return defense

    def _is_own(self, cell: Cell) -> bool:
        return cell.defense in self.own or is_import_path(cell.defense)

    def digest_defenses(self) -> dict[str, str]:
        """Return the digests of the user's own defenses, by model and name."""
        cells = filter(self._is_own, self.evaluation.cells())
        return {key: self.digests[key] for key in (f"{one.model}, {one.defense}" for one in cells)}

    def _find_independence(self, cell: Cell, model: Any, declared: bool | None) -> bool:
        """Return what the defense declares; if it is not ours or declares nothing, see whether it is so.

        Attacks drop inputs from a batch if the answers are independent.
        """
        is_own = self._is_own(cell)
        if declared is not None and not (is_own and declared):
            return bool(declared)
        if declared and getattr(model, "randomized", False):
            return True  # two answers differ anyhow
        inputs, _ = self.read(self.batches()[0][: 8 if is_own else 2])
        with preserve_rng(self.evaluation.device):
            found = is_independent(model, inputs)
        if declared and not found:
            raise ValueError(
                f"{cell}: the defense declares independent = True, but it answers inputs otherwise "
                "together than one by one; set independent = False"
            )
        return found

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
