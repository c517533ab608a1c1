"""Scales: what is loaded for the paper's models, how many images are used, and which attacks are run.

A scale is a file of `data/scales`. It may give a table fewer images or other attacks. It names the
models of the paper that it does not have, whose numbers are not measured.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, field_validator

from dent.declared import Declared
from dent.defense.dent.settings import PRESETS
from dent.defense.text import format_defense
from dent.evaluation.suites import format_attack
from dent.models.robustbench import find_checkpoint, resolve_id
from dent.names import lookup
from dent.paper.tables import (
    FOLDER,
    SETS,
    Ask,
    AttackSet,
    PublishedNumber,
    find_table,
    read_mapping,
)
from dent.texts import parse_text

BATCH = Ask.batch_size  # the paper's batch size, unless it varies it
# Sets whose numbers have no worst case, so no other attacks are run beside.
ALONE = ("mixed", "none", "transfer", "protocol")
PROTOCOL_SET = "protocol"  # the set that is always run by the reference AutoAttack too
NAMES = ("paper", "cpu-large", "cpu", "smoke")
LEFT_OUT = "left out at this scale"


def _read_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _read_attacks(value: Any) -> Any:
    """Return attacks with their settings in the order in which `format_attack` writes them."""
    return tuple(map(format_attack, value)) if isinstance(value, list | tuple) else value


Texts = Annotated[tuple[str, ...], BeforeValidator(_read_tuple)]
Attacks = Annotated[tuple[str, ...], BeforeValidator(_read_attacks)]


class LoadedModel(Declared):
    """What is loaded for a model of the paper.

    stands_in: True if it is another model, or on other data, than the paper's.
    note: where it comes from, or how to make it.
    architecture: the architecture of a file that may not exist yet, for estimates.
    """

    title = "model"
    model: str
    data: str = "cifar10"
    architecture: str = ""
    stands_in: bool = False
    note: str = ""


class Budget(Declared):
    """What a scale changes for one table; None means no change.

    batch_size: see `Scale`. steps, queries: replace the budget of every attack, the reference's too.
    skip: names of columns that are not run. without: see `Scale`.
    """

    title = "budget"
    n: int | None = Field(default=None, ge=1)
    batch_size: int | None = Field(default=None, ge=1)
    steps: int | None = Field(default=None, ge=1)
    queries: int | None = Field(default=None, ge=1)
    attacks: dict[AttackSet, Attacks] = Field(default_factory=dict)
    adaptive: Attacks | None = None
    skip: Texts = ()
    without: dict[str, str] = Field(default_factory=dict)


class Scale(Declared):
    """The models, images and attacks of a reproduction.

    takes: how long all tables take with as many images.
    n: number of images, the first of the data; None means all.
    batch_size: size of a batch where the paper has its usual size.
    without: the models of the paper that this scale does not have, and why.
    attacks: the attacks of each set. adaptive: attacks made for adaptation, run beside these for the
    worst case. protocol: sets beside which the reference AutoAttack is run as in the paper.
    mixed_precision: attacks search in bfloat16. most_updates: at most so many updates of a defense.
    most_attack_steps: at most so many steps of an attack where the paper varies them.
    """

    title = "scale"
    name: str
    summary: str
    takes: str = ""
    n: int | None = Field(ge=1)
    batch_size: int = Field(default=BATCH, ge=1)
    models: dict[str, LoadedModel]
    without: dict[str, str] = Field(default_factory=dict)
    attacks: dict[AttackSet, Attacks]
    adaptive: Attacks
    protocol: Texts = ()
    mixed_precision: bool = False
    most_updates: int | None = Field(default=None, ge=1)
    most_attack_steps: int | None = Field(default=None, ge=1)
    tables: dict[str, Budget] = Field(default_factory=dict)

    @field_validator("attacks")
    @classmethod
    def _check_sets(cls, attacks: dict[str, Any]) -> dict[str, Any]:
        if missing := [name for name in SETS if name not in attacks]:
            raise ValueError(f"expected all sets of attacks, got none for {', '.join(missing)}")
        return attacks

    @field_validator("tables")
    @classmethod
    def _check_columns(cls, tables: dict[str, Budget]) -> dict[str, Budget]:
        for name, budget in tables.items():
            columns = {column for part in find_table(name).parts for column in part.columns}
            if unknown := [column for column in budget.skip if column not in columns]:
                raise ValueError(f"{name} has no column {unknown[0]!r} to skip")
        return tables

    def describe(self) -> str:
        """Return what is run, on how many images, and how long it takes.

        >>> find_scale("cpu").with_images(640).describe()
        'the shipped ResNet-20s, smaller attacks; 640 images in batches of 32 for most numbers'
        """
        images = ""
        if self.n is not None:
            size = min(self.n, self.batch_size)
            images = f"{self.n:,} images in batches of {size} for most numbers"
        return "; ".join(filter(None, (self.summary, images, self.takes)))

    def with_images(self, n: int) -> Scale:
        """Return the scale with another number of images, but for tables that have their own."""
        return self.replace(n=n, takes="")

    def with_imagenet(self, folder: Path | None) -> Scale:
        """Return the scale with ImageNet's images from a folder."""
        if folder is None:
            return self
        models = {
            name: one.replace(data=one.data.replace("imagenet", f"imagenet:{folder}", 1))
            if one.data.startswith("imagenet")
            else one
            for name, one in self.models.items()
        }
        return self.replace(models=models)

    def with_robustbench(self, folder: Path) -> Scale:
        """Return the scale with RobustBench's own models, by its published files in a folder.

        The layout is RobustBench's: FOLDER/cifar10/Linf/Carmon2019Unlabeled.pt. A model whose file is
        not there is not measured; nothing stands in for it.
        """
        models, without = dict(self.models), dict(self.without)
        for name, key in list_robustbench().items():
            models.pop(name, None)
            without.pop(name, None)
            if file := find_checkpoint(folder, key):
                data = find_scale("paper").models[name].data
                models[name] = LoadedModel(model=f"robustbench:{file}", data=data)
            else:
                without[name] = f"not measured ({key}.pt is not in {folder})"
        own = {
            table: budget.replace(
                without={one: why for one, why in budget.without.items() if one not in models}
            )
            for table, budget in self.tables.items()
        }
        return self.replace(models=models, without=without, tables=own)

    def explain_left_out(self, table: str, number: PublishedNumber) -> str | None:
        """Return why a number of a table is not measured at this scale, or None if it is.

        >>> from dent.paper.tables import find_number
        >>> number = find_number("figure-4/linf/dent/2/255")
        >>> [find_scale(name).explain_left_out("figure-4", number) for name in ("smoke", "paper")]
        ['left out at this scale', None]
        """
        own = self.tables.get(table, Budget())
        if number.column in own.skip:
            return LEFT_OUT
        return {**self.without, **own.without}.get(number.ask.model)


@dataclass(frozen=True)
class Work:
    """What is run for a number; numbers with equal work share it.

    attacks: those of the number's set, then those made for adaptation.
    n: None means all images. protocol: if True, the reference AutoAttack is run too.
    steps, queries: if they are given, the budget of every attack, the reference's too.
    """

    model: str
    data: str
    defense: str
    norm: str
    eps: float
    attacks: tuple[str, ...]
    n: int | None
    batch_size: int
    protocol: bool
    battle: bool = False
    steps: int | None = None
    queries: int | None = None
    mixed_precision: bool = False
    stands_in: bool = field(default=False, compare=False)
    note: str = field(default="", compare=False)
    architecture: str = field(default="", compare=False)


def scales() -> dict[str, Scale]:
    """Return all scales by name, the largest first.

    >>> list(scales())
    ['paper', 'cpu-large', 'cpu', 'smoke']
    """
    return dict(_read_scales())


def find_scale(name: str) -> Scale:
    """Return a scale by its name."""
    return lookup("scale", name, scales())


def list_robustbench() -> dict[str, str]:
    """Return the models of the paper that RobustBench published, with the names of their files.

    >>> list_robustbench()["ding2020-l2"]
    'cifar10/L2/Ding2020MMA'
    """
    prefix = "robustbench:"
    return {
        name: resolve_id(one.model.removeprefix(prefix))
        for name, one in find_scale("paper").models.items()
        if one.model.startswith(prefix)
    }


def resolve(ask: Ask, scale: Scale, table: str) -> Work:
    """Return what is run for a number of a table at a scale.

    The measure does not matter: one run gives natural and adversarial accuracy, and cost.

    >>> from dent.paper.tables import find_number
    >>> work = resolve(find_number("table-3/CIFAR-10 ResNet-26-4/madry2018/adversarial dent").ask,
    ...                find_scale("cpu"), "table-3")
    >>> work.model, work.defense, work.attacks[0]
    ('resnet20-at', 'dent:statistics=test,steps=10', 'apgd-ce:steps=10')
    """
    own = scale.tables.get(table, Budget())
    loaded = lookup("model of the paper", ask.model, scale.models)
    attacks = {**scale.attacks, **own.attacks}[ask.attack]
    if ask.attack_steps is not None:
        most = scale.most_attack_steps or ask.attack_steps
        attacks = tuple(_set_steps(text, min(ask.attack_steps, most)) for text in attacks)
    if ask.attack not in ALONE:
        attacks += scale.adaptive if own.adaptive is None else own.adaptive
    n = scale.n if own.n is None else own.n
    usual = scale.batch_size if own.batch_size is None else own.batch_size
    batch_size = usual if ask.batch_size == BATCH else ask.batch_size
    if n is not None:
        # There are enough images for a batch that is larger than usual; too few make one batch.
        n = max(n, batch_size) if n >= usual else n
        batch_size = min(batch_size, n)
    return Work(
        model=loaded.model,
        data=loaded.data,
        defense=_limit_updates(ask.defense, scale.most_updates),
        norm=ask.norm,
        eps=ask.eps,
        attacks=attacks,
        n=n,
        batch_size=batch_size,
        protocol=ask.attack in (*scale.protocol, PROTOCOL_SET),
        battle=ask.battle,
        steps=own.steps,
        queries=own.queries,
        mixed_precision=scale.mixed_precision,
        stands_in=loaded.stands_in,
        note=loaded.note,
        architecture=loaded.architecture,
    )


def _set_steps(text: str, steps: int) -> str:
    return format_attack(f"{text}{',' if ':' in text else ':'}steps={steps}")


def _limit_updates(defense: str, most: int | None) -> str:
    """Return the defense with at most so many updates.

    >>> [_limit_updates(text, 2) for text in ("dent:statistics=test", "dent+:steps=1", "static")]
    ['dent:statistics=test,steps=2', 'dent+:steps=1', 'static']
    """
    preset, settings = parse_text(defense, "dent+")
    if most is None or settings.get("steps", PRESETS[preset].steps) <= most:
        return defense
    return format_defense({"preset": preset, **settings, "steps": most})


@cache
def _read_scales() -> dict[str, Scale]:
    return {name: read_scale(FOLDER / "scales" / f"{name}.yaml") for name in NAMES}


def read_scale(path: Path) -> Scale:
    """Return the scale of a file, or raise one ValueError that names the file and every fault."""
    try:
        scale = Scale(**read_mapping(path))
        if scale.name != path.stem:
            raise ValueError(f"expected the name of the file, {path.stem}, got {scale.name!r}")
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path.name}: {error}") from error
    return scale
