"""What an evaluation measures: settings from a YAML file, from flags or from Python."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

import yaml
from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from dent.attacks.checks import check_radius
from dent.declared import Declared, Number, raise_faults
from dent.defense.own import name_defense
from dent.evaluation.defenses import DYNAMIC
from dent.evaluation.suites import Suite, format_attack, parse_attacks, slugify
from dent.texts import join_lines

# The shipped models, with the defenses that suit them and the radius at which they are attacked.
SHIPPED: dict[str, tuple[tuple[str, ...], float]] = {
    "resnet20-at": (("static", "dent:steps=10", "dent+"), 8 / 255),
    "resnet20-nominal": (("static", "dent-nominal"), 1.5 / 255),
}
DEFENSES = ("static", "dent", "dent+")  # of other models
PUBLISHED = ("cifar10", "cifar100", "imagenet")  # data of which a part is evaluated if n is not given
EPS = {"linf": 8 / 255, "l2": 0.5, "l1": 12.0}
# The default images are eight batches. A p needs five, and eight allow one below 0.05 for up to six
# comparisons (Holm): 6 * 2 / 2^8 is 0.047.
POINTS = 256
BATCH_SIZE = 32
IDLE = ("own", "adaptive", "own_attacks", "mixed_precision")  # settings without effect if not given


def format_eps(eps: float) -> str:
    """Return a radius as people write it.

    >>> format_eps(8 / 255), format_eps(1.5 / 255), format_eps(0.5)
    ('8/255', '1.5/255', '0.5')
    """
    over = eps * 255
    is_short = abs(eps * 100 - round(eps * 100)) < 1e-9
    return f"{eps:g}" if is_short or abs(over * 4 - round(over * 4)) > 1e-9 else f"{over:g}/255"


@dataclass(frozen=True)
class Cell:
    """A model with a defense, and the ball in which its inputs may be perturbed."""

    model: str
    # A name of dent's list with the settings that replace its own ("static" is the model alone), an
    # import path, the name of a defense in memory, or `DYNAMIC`.
    defense: str
    eps: float
    norm: str

    @property
    def static(self) -> bool:
        return self.defense == "static"

    @property
    def is_dynamic(self) -> bool:
        """Return True if the model adapts in its own forward pass; its static model is unknown."""
        return self.defense == DYNAMIC

    def __str__(self) -> str:
        return f"{self.model}, {self.defense}, {self.norm} {format_eps(self.eps)}"

    @cached_property
    def slug(self) -> str:
        """Return a readable name for files that no other cell has."""
        readable = slugify(f"{self.model}_{self.defense}_{self.norm}")[:80]
        exact = repr((self.model, self.defense, float(self.eps), self.norm))
        return f"{readable}_{hashlib.sha256(exact.encode()).hexdigest()[:8]}"


def _read_list(value: Any) -> Any:
    """Return one name or a list of names as a tuple."""
    return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value


def _format_with(format_name: Callable[[Any], str]) -> Callable[[Any], str]:
    def format_one(value: Any) -> str:
        try:
            return format_name(value)
        except (TypeError, ValueError) as error:  # pydantic collects a ValueError alone
            raise ValueError(join_lines(error)) from error

    return format_one


def _format_defense(value: Any, info: ValidationInfo) -> str:
    own = info.data.get("own", ())
    return _format_with(lambda asked: name_defense(asked, own=own))(value)


def _format_attack(value: Any, info: ValidationInfo) -> str:
    own = info.data.get("own_attacks", ())
    return _format_with(lambda asked: format_attack(asked, own))(value)


def _check_model_name(name: Any) -> str:
    if not isinstance(name, str):
        raise ValueError(f"expected the name of a model, got {name!r}")
    return name


def _drop_repeated(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))


def _check_attacks(texts: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
    parse_attacks(texts, info.data.get("own_attacks", ()))
    return texts


Model = Annotated[str, BeforeValidator(_check_model_name)]
Defense = Annotated[str, BeforeValidator(_format_defense)]
AttackText = Annotated[str, BeforeValidator(_format_attack)]
# Names are written in one way, so that the same evaluation is recognized as the same.
Unique = AfterValidator(_drop_repeated)
SuiteName = Literal["quick", "standard", "plus", "rand", "adaptive", "none", "full"]


class Evaluation(Declared):
    """All settings that decide the numbers of an evaluation.

    >>> Evaluation(suite="quik", n=-1)
    Traceback (most recent call last):
    ...
    dent.declared.SettingsError: 2 wrong settings of the evaluation:
      suite: expected one of quick, standard, plus, rand, adaptive, none, full, got 'quik'
      n: expected an integer >= 1, got -1
    """

    title = "evaluation"

    models: Annotated[tuple[Model, ...], BeforeValidator(_read_list), Unique] = Field(
        tuple(SHIPPED), description="Models by name; see `dent list models`.", min_length=1
    )
    own: Annotated[tuple[str, ...], BeforeValidator(_read_list)] = Field(
        (), description="Names of the defenses that are given in memory."
    )
    defenses: Annotated[tuple[Defense, ...], BeforeValidator(_read_list), Unique] = Field(
        (),
        description="Defenses such as dent+, hedge:steps=5 or package.module:function "
        "(default: those that suit the model).",
    )
    adaptive: dict[str, str] = Field(
        {}, description="Models that bring a defense or adapt by themselves, with the name of that row."
    )
    suite: SuiteName = Field("quick", description="Suite of attacks")
    own_attacks: Annotated[tuple[str, ...], BeforeValidator(_read_list)] = Field(
        (), description="Names of the attacks that are given in memory."
    )
    attacks: Annotated[
        tuple[AttackText, ...], BeforeValidator(_read_list), Unique, AfterValidator(_check_attacks)
    ] = Field(
        (),
        description="Attacks instead of a suite, such as apgd-ce, fpa:rounds=3,steps=10 or "
        "package.module:function; the name of a suite is all of its attacks.",
    )
    data: str = Field("cifar10", description="Data set; see `dent list data`.")
    n: int | None = Field(
        POINTS,
        description=f"Number of images; 0 is all (default: {POINTS}, or all of your own).",
        ge=1,
    )
    batch_size: int = Field(
        BATCH_SIZE, description="Number of images in a batch; the defense adapts to each batch.", ge=1
    )
    eps: Number | None = Field(
        None,
        description="Radius of the ball, such as 8/255 or 0.5 (default: what suits model and norm).",
        ge=0,
        allow_inf_nan=False,
    )
    norm: Literal["linf", "l2", "l1"] = Field("linf", description="Norm of the ball")
    steps: int | None = Field(
        None, description="Number of steps of every gradient attack (default: its own).", ge=0
    )
    queries: int | None = Field(None, description="Number of Square's queries (default: its own).", ge=0)
    protocol: bool | None = Field(
        None,
        description="Also run the reference AutoAttack as the paper did (extra: reference; default: in "
        "the suite full).",
    )
    converge: bool | None = Field(
        None,
        description="After the suite, double the budget of attacks that still gain, until this changes "
        "the worst case by less than half a percentage point (default: only with the suite full).",
    )
    doublings: int = Field(3, description="Largest number of doublings with --converge.", ge=1)
    doubling_cost: Number | None = Field(
        None,
        description="Largest cost of all doublings, as a multiple of the suite's (default: 1 with the "
        "suite full, else no limit).",
        gt=0,
        allow_inf_nan=False,
    )
    mixed_precision: bool = Field(
        False,
        description="Search in bfloat16, which is faster on hardware that has it. What attacks find is "
        "judged in float32.",
    )
    exhaustive: bool = Field(False, description="Attack also inputs that an earlier attack has broken.")
    battle: bool = Field(True, description="Also record an attack step by step, for the report.")
    seed: int = Field(0, description="Seed of the batches and of every attack.", ge=0)
    device: str = Field("cpu", description="Device: cpu, cuda, cuda:1 or mps.")

    @model_validator(mode="before")
    @classmethod
    def _take_all_of_own(cls, given: dict[str, Any]) -> dict[str, Any]:
        """Set n to None, which is all, if it is not given and the data are the user's own."""
        name, _, _ = str(given.get("data", "cifar10")).partition(":")
        return given if "n" in given or name in PUBLISHED else given | {"n": None}

    @model_validator(mode="after")
    def _check_radius(self) -> Self:
        if self.eps is not None:
            try:
                check_radius(self.eps, self.norm)
            except ValueError as error:
                raise_faults([f"eps: {error}"])
        return self

    @model_validator(mode="after")
    def _check_doublings(self) -> Self:
        idle = [one for one in ("doublings", "doubling_cost") if one in self.model_fields_set]
        if idle and self.converge is None and not self._is_full:
            raise_faults(
                [f"{one}: expected converge too; nothing is doubled without it" for one in idle]
            )
        return self

    @field_validator("n", mode="before")
    @classmethod
    def _read_count(cls, value: Any) -> Any:
        return None if value == 0 and value is not False else value

    if TYPE_CHECKING:  # a list of one may be given as its name, and a number as text

        def __init__(self, **given: Any) -> None: ...

    @property
    def has_protocol(self) -> bool:
        """Return True if the reference AutoAttack is run: by request, or in the suite `full`."""
        return self._is_full if self.protocol is None else self.protocol

    @property
    def most_doublings(self) -> int:
        """Return how often budgets may be doubled: never without `converge`."""
        return self.doublings if (self._is_full if self.converge is None else self.converge) else 0

    @property
    def most_doubling_cost(self) -> float | None:
        """Return the largest cost of all doublings, as a multiple of the suite's; None is no limit."""
        return 1.0 if self.doubling_cost is None and self._is_full else self.doubling_cost

    @property
    def _is_full(self) -> bool:
        return "full" in (self.attacks or (self.suite,))

    def find_attacks(self) -> Suite:
        """Return the attacks that were chosen, or those of the suite."""
        return parse_attacks(self.attacks or (self.suite,), self.own_attacks, self.norm)

    def cells(self) -> tuple[Cell, ...]:
        """Return each model with each of its defenses.

        >>> for cell in Evaluation(models="resnet20-at", defenses="dent+").cells():
        ...     print(cell)
        resnet20-at, dent+, linf 8/255
        """
        made = []
        for model in self.models:
            suited, eps = SHIPPED.get(model, (DEFENSES, EPS["linf"]))
            eps = eps if self.norm == "linf" else EPS[self.norm]
            eps = eps if self.eps is None else self.eps
            made += [Cell(model, text, eps, self.norm) for text in self._list_defenses(model, suited)]
        return tuple(made)

    def _list_defenses(self, model: str, suited: tuple[str, ...]) -> Iterable[str]:
        own = self.adaptive.get(model)
        if own is None:
            return self.defenses or suited
        return (DYNAMIC,) if own == DYNAMIC else dict.fromkeys((*(self.defenses or ("static",)), own))

    def to_json(self) -> dict[str, Any]:
        """Return plain values, by which a run is found again, without settings that have no effect."""
        without = {name: not getattr(self, name) for name in IDLE}
        without |= {"converge": self.converge is None}
        without |= dict.fromkeys(("doublings", "doubling_cost"), not self.most_doublings)
        return self.model_dump(mode="json", exclude={name for name, idle in without.items() if idle})


def read_evaluation(path: Path, **given: Any) -> Evaluation:
    """Return the evaluation that a YAML file describes; what is given besides wins."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no YAML file: {join_lines(error)}") from error
    if not isinstance(content := {} if content is None else content, Mapping):
        raise ValueError(f"expected settings in {path}, as 'suite: quick', got {type(content).__name__}")
    return Evaluation(**{str(name): value for name, value in content.items()} | given)
