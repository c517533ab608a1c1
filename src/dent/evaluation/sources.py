"""Where the models and the images of an evaluation come from, and how they are known again."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from dent.attacks.checks import check_model
from dent.data import Dataset, open_data
from dent.defense import defend, is_independent
from dent.evaluation.attacks import Subject
from dent.evaluation.config import Evaluation
from dent.evaluation.units import Cell
from dent.models import find_class_names, load_model
from dent.seeds import generator


@dataclass
class Sources:
    """Models and images of an evaluation; each is loaded once in a process.

    given: models in memory, by the name that the evaluation has for them.
    images: likewise, instead of the evaluation's data.
    digests: what the weights must be, where another process said so.
    class_names: names of the models' outputs; None before they are looked up, () if they are not known.
    """

    evaluation: Evaluation
    given: Mapping[str, nn.Module] = field(default_factory=dict)
    images: Dataset | None = None
    digests: Mapping[str, str] = field(default_factory=dict)
    class_names: tuple[str, ...] | None = None
    _models: dict[str, nn.Module] = field(default_factory=dict, init=False)
    _subjects: dict[Cell, Subject] = field(default_factory=dict, init=False)
    _dataset: Dataset | None = field(default=None, init=False)

    def __getstate__(self) -> dict[str, Any]:
        """Another process loads for itself what has a name."""
        return self.__dict__ | {"_models": {}, "_subjects": {}, "_dataset": None}

    def dataset(self) -> Dataset:
        if self._dataset is None:
            asked, found = self.evaluation, self.images
            if found is None:  # an empty one is given too
                found = open_data(asked.data, n=asked.n, seed=asked.seed)
            if not len(found):
                raise ValueError(f"expected one image or more, got none in {found.name}")
            self._dataset = self._match_classes(found)
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
            device = _device(self.evaluation.device)
            model = (
                self.given[name].to(device) if name in self.given else load_model(name, device=device)
            )
            check_model(model)  # in training mode, every question would change it
            found = weights_digest(model)
            if self.digests.get(name, found) != found:
                raise ValueError(
                    f"the weights of {name} are not those that the run began with; every machine of a "
                    "run must have the same file"
                )
            self._models[name] = model
        return self._models[name]

    def subject(self, cell: Cell) -> Subject:
        if cell not in self._subjects:
            static = self.model(cell.model)
            defense = defend(static, cell.defense)
            model = static if cell.static else defense
            independent = defense.independent
            if independent is None:
                inputs, _ = self.read(self.batches()[0][:2])
                with own_draws(self.evaluation.device):
                    independent = is_independent(model, inputs)
            self._subjects[cell] = Subject(model, static, defense, independent)
        return self._subjects[cell]

    def batches(self) -> tuple[Tensor, ...]:
        """The images cut into batches: indices of the data set."""
        asked = self.evaluation
        return cut(len(self.dataset()), asked.batch_size, asked.seed)

    def read(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        dataset, device = self.dataset(), _device(self.evaluation.device)
        return dataset.read(indices).to(device), dataset.labels[indices].to(device)


@contextmanager
def own_draws(device: str) -> Iterator[None]:
    """Afterwards torch draws as if nothing had been drawn within."""
    kind = torch.device(device)
    with torch.random.fork_rng([kind] if kind.type == "cuda" else []):
        yield


def cut(n: int, size: int, seed: int) -> tuple[Tensor, ...]:
    """The points 0 to n - 1 in batches, once and for all by the size and the seed.

    >>> [sorted(batch.tolist()) for batch in cut(3, 3, seed=0)], [len(batch) for batch in cut(5, 2, 0)]
    ([[0, 1, 2]], [2, 2, 1])
    """
    batches: tuple[Tensor, ...] = torch.randperm(n, generator=generator(seed, 1)).split(size)
    return batches


def _device(name: str) -> torch.device:
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:  # torch without CUDA asserts
        raise ValueError(f"expected a device that this machine has, got {name!r}: {error}") from error


def weights_digest(model: nn.Module) -> str:
    """The sha256 of a model's parameters and buffers, with their names and shapes.

    >>> two, three = nn.BatchNorm1d(2), nn.BatchNorm1d(3)
    >>> weights_digest(two) == weights_digest(nn.BatchNorm1d(2)) != weights_digest(three)
    True
    """
    digest = hashlib.sha256()
    for name, value in model.state_dict().items():
        if isinstance(value, Tensor):
            digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
            digest.update(
                value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
            )
    return digest.hexdigest()


def data_digest(dataset: Dataset, progress: Callable[[int, int], None] | None = None) -> str:
    """The sha256 of all images and labels, read a batch at a time; images outside [0, 1] are refused."""
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
