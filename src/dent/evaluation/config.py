"""What an evaluation is asked for: typed settings, which a YAML file holds and flags override."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

import yaml

from dent.defense.text import format_defense
from dent.evaluation.suites import SUITE_NOTES, Suite, attack_text, chosen_attacks, suite_attacks
from dent.evaluation.units import Cell
from dent.fields import number, refuse, setting, wrong_choices
from dent.names import check_known

Norm = Literal["linf", "l2", "l1"]

# The shipped models, with the defenses that suit them and the radius at which they are attacked.
SHIPPED: dict[str, tuple[tuple[str, ...], float]] = {
    "resnet20-at": (("static", "dent:steps=10", "dent+"), 8 / 255),
    "resnet20-nominal": (("static", "dent-nominal"), 1.5 / 255),
}
DEFENSES = ("static", "dent", "dent+")  # of other models, unless told
EPS = {"linf": 8 / 255, "l2": 0.5, "l1": 12.0}


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """All that decides the numbers of an evaluation; how and where they are computed does not.

    >>> Evaluation(suite="quik", n=-1)
    Traceback (most recent call last):
    ...
    ValueError: 2 wrong settings of the evaluation:
      suite: expected one of quick, standard, plus, rand, adaptive, none, full, got 'quik'
      n: expected an integer >= 1, got -1
    """

    models: tuple[str, ...] = setting(tuple(SHIPPED), "models by name, see `dent list models`")
    defenses: tuple[str, ...] = setting(
        (), "defenses, as dent+ or dent:steps=10; those that suit the model if not given"
    )
    suite: str = setting("quick", "attacks", tuple(SUITE_NOTES))
    attacks: tuple[str, ...] = setting(
        (), "attacks instead of a suite, as apgd-ce or fpa:rounds=3,steps=10"
    )
    data: str = setting("cifar10", "data set, see `dent list data`")
    n: int | None = setting(128, "how many images; all if 0 or null")
    batch_size: int = setting(128, "images of a batch; the defense adapts to each batch")
    eps: float | None = setting(
        None, "radius, as 8/255 or 0.5; what suits the model or the norm if not given"
    )
    norm: Norm = setting("linf", "norm of the ball", get_args(Norm))
    steps: int | None = setting(None, "steps of every gradient attack, instead of its own")
    queries: int | None = setting(None, "queries of Square, instead of its own")
    protocol: bool = setting(
        False, "also run the reference AutoAttack as the paper did (extra: reference)"
    )
    exhaustive: bool = setting(False, "attack also what an attack before has broken")
    battle: bool = setting(True, "also record an attack step by step, for the report")
    seed: int = setting(0, "of the batches and of every attack")
    device: str = setting("cpu", "cpu, cuda, cuda:1, mps")

    def __post_init__(self) -> None:
        if self.n == 0 and self.n is not False:
            object.__setattr__(self, "n", None)
        faults = self._names("models", _model_name) + self._names("defenses", format_defense)
        faults += self._names("attacks", attack_text)
        if not faults:
            try:
                chosen_attacks(self.attacks)
            except ValueError as error:
                faults.append(f"attacks: {error}")
        if self.models == ():
            faults.append("models: expected one or more, got none")
        faults += wrong_choices(self) + self._type_faults() + self._number_faults()
        refuse(faults, " of the evaluation")

    def _names(self, name: str, text: Callable[[Any], str]) -> list[str]:
        """One way to write the same, so that the same evaluation is known as the same."""
        given, texts, faults = getattr(self, name), [], []
        if isinstance(given, str) or not isinstance(given, Sequence):
            return [f"{name}: expected a list of names, got {given!r}"]
        for asked in given:
            try:
                texts.append(text(asked))
            except (ValueError, TypeError) as error:
                faults.append(f"{name}: {' '.join(str(error).split())}")
        if not faults:
            object.__setattr__(self, name, tuple(dict.fromkeys(texts)))
        return faults

    def _type_faults(self) -> list[str]:
        faults = []
        for kind, what, names in (
            (str, "a name", ("data", "device")),
            (bool, "true or false", ("protocol", "exhaustive", "battle")),
        ):
            for name in names:
                if not isinstance(value := getattr(self, name), kind):
                    faults.append(f"{name}: expected {what}, got {value!r}")
        return faults

    def _number_faults(self) -> list[str]:
        faults = []
        least = {"n": 1, "batch_size": 1, "steps": 0, "queries": 0, "seed": 0}
        optional = ("n", "steps", "queries")
        for name, bound in least.items():
            value = getattr(self, name)
            if value is None and name in optional:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < bound:
                faults.append(f"{name}: expected an integer >= {bound}, got {value!r}")
        try:
            if self.eps is not None:
                object.__setattr__(self, "eps", number(self.eps))
                if not 0 <= self.eps < math.inf:
                    faults.append(f"eps: expected a number >= 0, got {self.eps!r}")
        except ValueError as error:
            faults.append(f"eps: {error}")
        return faults

    @property
    def with_protocol(self) -> bool:
        """Whether the reference AutoAttack is run: if asked for, or by the suite that has all."""
        return self.protocol or (self.suite == "full" and not self.attacks)

    def attacks_in(self, norm: str) -> Suite:
        """The attacks that were asked for, or those of the suite."""
        return chosen_attacks(self.attacks) if self.attacks else suite_attacks(self.suite, norm)

    def cells(self) -> tuple[Cell, ...]:
        """Each model with each of its defenses.

        >>> for cell in Evaluation(models=("resnet20-at",), defenses=("dent+",)).cells():
        ...     print(cell)
        resnet20-at, dent+, linf 8/255
        """
        made = []
        for model in self.models:
            suited, eps = SHIPPED.get(model, (DEFENSES, EPS["linf"]))
            eps = eps if self.norm == "linf" else EPS[self.norm]
            eps = eps if self.eps is None else self.eps
            made += [Cell(model, text, eps, self.norm) for text in self.defenses or suited]
        return tuple(made)

    def to_json(self) -> dict[str, Any]:
        return {
            key: list(value) if isinstance(value, tuple) else value
            for key, value in asdict(self).items()
        }


def make_evaluation(content: Mapping[str, Any] | None = None, **given: Any) -> Evaluation:
    """An evaluation from what a file holds, and what is given besides, which wins.

    >>> make_evaluation({"n": 256, "seed": 1}, n=64).n
    64
    """
    asked = {str(name): value for name, value in {**(content or {}), **given}.items()}
    check_known("settings of the evaluation", asked, [one.name for one in fields(Evaluation)])
    for name in ("models", "defenses", "attacks"):
        if isinstance(asked.get(name), str):
            asked[name] = (asked[name],)
        elif isinstance(asked.get(name), list):
            asked[name] = tuple(asked[name])
    return Evaluation(**asked)


def read_evaluation(path: Path, **given: Any) -> Evaluation:
    """The evaluation that a YAML file holds."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no YAML file: {' '.join(str(error).split())}") from error
    if content is None:
        content = {}
    if not isinstance(content, dict):
        raise ValueError(f"expected settings in {path}, as 'suite: quick', got {type(content).__name__}")
    return make_evaluation(content, **given)


def _model_name(asked: Any) -> str:
    if not isinstance(asked, str):
        raise TypeError(f"expected the name of a model, got {asked!r}")
    return asked
