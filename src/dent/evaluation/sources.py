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
from dent.attacks.own import OwnAttack
from dent.data import Dataset, open_data
from dent.defense import LowDiversityWarning, is_independent
from dent.defense.own import is_import_path, refuse_continual
from dent.devices import find_device
from dent.evaluation.attacks import Attack, find_attack
from dent.evaluation.behavior import is_dynamic, is_independent_at_random, start_clean
from dent.evaluation.defenses import (
    DYNAMIC,
    Subject,
    digest_defense,
    is_defended,
    is_defense,
    make_defense,
    name_defended,
)
from dent.evaluation.digests import digest_model, digest_object
from dent.evaluation.own_attacks import check_call, import_attack, make_own_attack
from dent.evaluation.spec import Cell, Evaluation
from dent.evaluation.suites import is_own_path
from dent.models import find_class_names, load_model
from dent.seeds import make_generator
from dent.testing import find_independence, is_random, refuse_broken_promises


@dataclass
class Sources:
    """Load the models and images of an evaluation, each once in a process.

    given: models in memory, by their name in the evaluation. They are never changed or moved. A defended
        model is taken apart: it stands for its static model, and brings a defense.
    images: images in memory, instead of the evaluation's data.
    own: defenses in memory, or functions from a model to one, by their name in the evaluation.
    own_attacks: attacks in memory, by their name in the evaluation.
    digests: the digests that models and own defenses must have, if another process has taken them.
    attack_digests: those of own attacks.
    class_names: names of the models' outputs; None before they are looked up, () if they are not known.
    """

    evaluation: Evaluation
    given: Mapping[str, Any] = field(default_factory=dict)
    images: Dataset | None = None
    own: Mapping[str, Any] = field(default_factory=dict)
    own_attacks: Mapping[str, OwnAttack] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)
    attack_digests: dict[str, str] = field(default_factory=dict)
    class_names: tuple[str, ...] | None = None
    _models: dict[str, nn.Module] = field(default_factory=dict, init=False)
    _brought: dict[str, Any] = field(default_factory=dict, init=False)  # defenses, by model
    _subjects: dict[Cell, Subject] = field(default_factory=dict, init=False)
    _functions: dict[str, OwnAttack] = field(default_factory=dict, init=False)
    _dataset: Dataset | None = field(default=None, init=False)

    def __getstate__(self) -> dict[str, Any]:
        """Send no loaded models or images: another process loads by name for itself."""
        loaded: dict[str, Any] = {
            "_models": {},
            "_brought": {},
            "_subjects": {},
            "_functions": {},
            "_dataset": None,
        }
        return self.__dict__ | loaded

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

    def recognize_models(self) -> None:
        """Find the models that bring a defense, and those that adapt inside of their forward pass.

        The first get a row for that defense, beside their static model. The others have no static model
        that is known, and get one row, `DYNAMIC`.
        """
        found: dict[str, str] = {}
        for name in self.evaluation.models:
            model = self.model(name)
            if name in self._brought:
                found[name] = name_defended(self._brought[name])
            elif (name in self.given or ":" in name) and is_dynamic(model, self._read_few(2)):
                found[name] = DYNAMIC
                self._refuse_defenses(name)
        if found != self.evaluation.adaptive:
            self.evaluation = self.evaluation.replace(adaptive=found)

    def _refuse_defenses(self, name: str) -> None:
        others = [text for text in self.evaluation.defenses if text != "static"]
        if others:
            raise ValueError(
                f"expected no other defense for {name}, which adapts inside of its forward pass, got "
                f"{', '.join(others)}; give the static model, and this one as a defense of it: "
                "dent.evaluate(model, {'mine': defense})"
            )

    def model(self, name: str) -> nn.Module:
        """Return the static model of a name, or one that adapts inside of its forward pass."""
        if name not in self._models:
            device = find_device(self.evaluation.device)
            given = self.given.get(name)
            model = load_model(name, device=device) if given is None else copy_to(given, device)
            refuse_continual(model, name)
            if is_defended(model):
                self._brought[name] = model
                model = model.model
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
            defense = static if cell.is_dynamic else self._make_defense(cell, static)
            if isinstance(defense, nn.Module) and not hasattr(defense, "adapt"):
                defense = start_clean(defense, self._read_few(2))
            model = static if cell.static else defense
            randomized = self._find_randomness(cell, model, getattr(defense, "randomized", None))
            declared = getattr(defense, "independent", None)
            independent = self._find_independence(cell, model, declared, randomized)
            known = None if cell.is_dynamic else static
            self._subjects[cell] = Subject(model, known, defense, independent, randomized)
        return self._subjects[cell]

    def _make_defense(self, cell: Cell, static: nn.Module) -> Any:
        text = cell.defense
        if self._is_brought(cell):
            self.digests.setdefault(f"{cell.model}, {text}", digest_defense(self._brought[cell.model]))
            return self._brought[cell.model]
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
        if self.is_own(cell):
            key, digest = f"{cell.model}, {text}", digest_defense(defense)
            # A defense in memory was sent by value; in a worker, its code may have no file.
            if self.digests.setdefault(key, digest) != digest and text not in self.own:
                raise ValueError(
                    f"the defense {text} is not the one that the run began with; every machine of a run "
                    "must have the same code"
                )
        return defense

    def _is_brought(self, cell: Cell) -> bool:
        """Return True if the defense is the one that the model was given with."""
        return cell.model in self._brought and self.evaluation.adaptive.get(cell.model) == cell.defense

    def is_own(self, cell: Cell) -> bool:
        """Return True if the defense is the user's, whose promises must be checked."""
        is_given = cell.defense in self.own or is_import_path(cell.defense)
        return is_given or cell.is_dynamic or self._is_brought(cell)

    def check_states(self) -> None:
        """Raise ValueError if a state of the user's own defense cannot be sent to another process."""
        for cell in filter(self.is_own, self.evaluation.cells()):
            defense, promises = self.subject(cell).defense, ("picklable state",)
            refuse_broken_promises(defense, self._read_few(2), promises, of=str(cell))

    def digest_defenses(self) -> dict[str, str]:
        """Return the digests of the user's own defenses, by model and name."""
        keys = (f"{one.model}, {one.defense}" for one in self.evaluation.cells())
        return {key: self.digests[key] for key in keys if key in self.digests}

    def attack(self, name: str, options: Mapping[str, Any]) -> Attack:
        """Return an attack of the table, or the user's own if it can be called with the options.

        The options may name own attacks too, such as those that run on the static model.
        """
        if self.is_own_attack(name):
            function = self._find_function(name)
            check_call(name, function, options)
            return make_own_attack(name, function)
        for within in filter(is_own_path, options.get("attacks", ())):
            check_call(within, self._find_function(within), {})
        return find_attack(name)

    def find_own_attacks(self) -> dict[str, Attack]:
        """Return the user's own attacks, by name."""
        chosen = self.evaluation.find_attacks().items()
        attacks = {name: self.attack(name, options) for name, options in chosen}
        return {name: attack for name, attack in attacks.items() if self.is_own_attack(name)}

    def is_own_attack(self, name: str) -> bool:
        return name in self.evaluation.own_attacks or is_own_path(name)

    def _find_function(self, name: str) -> OwnAttack:
        """Return the function of a user's own attack, whose code must be that of the run."""
        if name not in self._functions:
            if name in self.evaluation.own_attacks and name not in self.own_attacks:
                raise ValueError(
                    f"{name} is an attack in the memory of another program; give it here too"
                )
            function = self.own_attacks[name] if name in self.own_attacks else import_attack(name)
            digest = digest_object(function)
            # An attack in memory was sent by value; in a worker, its code may have no file.
            if self.attack_digests.setdefault(name, digest) != digest and name not in self.own_attacks:
                raise ValueError(
                    f"the attack {name} is not the one that the run began with; every machine of a run "
                    "must have the same code"
                )
            self._functions[name] = function
        return self._functions[name]

    def _find_randomness(self, cell: Cell, model: Any, declared: bool | None) -> bool:
        """Return True if the defense declares `randomized`, or if its answers differ with the seed."""
        may_draw = self.is_own(cell) or cell.model in self.given or ":" in cell.model
        return bool(declared) or (may_draw and is_random(model, self._read_few(2)))

    def _find_independence(
        self, cell: Cell, model: Any, declared: bool | None, randomized: bool
    ) -> bool:
        """Return True if no answer depends on its batch; attacks then drop inputs from a batch."""
        is_own = self.is_own(cell)
        few = self._read_few(8 if is_own else 2)
        check = is_independent_at_random if randomized else is_independent
        return find_independence(model, few, declared, is_own=is_own, of=str(cell), check=check)

    def batches(self) -> tuple[Tensor, ...]:
        """Return the batches, as indices of the data set."""
        return cut_batches(len(self.dataset()), self.evaluation.batch_size, seed=self.evaluation.seed)

    def read(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return images and labels on the device of the evaluation."""
        dataset, device = self.dataset(), find_device(self.evaluation.device)
        return dataset.read(indices).to(device), dataset.labels[indices].to(device)

    def _read_few(self, count: int) -> Tensor:
        """Return the first images, to ask models for what they do not declare."""
        return self.read(self.batches()[0][:count])[0]


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


def copy_to(model: Any, device: torch.device) -> Any:
    """Return the model itself if it is on the device, else a copy of it there.

    A defense that is no module is returned as it is: nobody but itself can move it.
    """
    if not isinstance(model, nn.Module) or all(
        tensor.device == device for tensor in chain(model.parameters(), model.buffers())
    ):
        return model
    return deepcopy(model).to(device)
