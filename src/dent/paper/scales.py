"""Scales: what is loaded for the paper's models, how many images are taken, and which attacks.

A scale is a file of `data/scales`. A table may have less at a scale, or other attacks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from dent.defense.dent.settings import PRESETS
from dent.defense.text import format_defense
from dent.evaluation.suites import attack_text
from dent.names import check_known, lookup
from dent.paper.tables import FOLDER, SETS, Ask, find_table, read_mapping
from dent.texts import parse_text

BATCH = Ask.batch_size  # what the paper takes, unless it varies it
ALONE = ("mixed", "none")  # sets whose numbers have no worst case, so nothing else is run beside them


@dataclass(frozen=True)
class Standing:
    """What is loaded for a model of the paper.

    stands_in: whether it is another model, or on other data, than the paper's.
    note: where it comes from, or how to make it.
    architecture: of a file that may not be there yet, for estimates.
    """

    model: str
    data: str = "cifar10"
    architecture: str = ""
    stands_in: bool = False
    note: str = ""


@dataclass(frozen=True)
class Budget:
    """What a table has of its own at a scale; what is None is the scale's.

    skip: titles of columns that are not run.
    """

    n: int | None = None
    attacks: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    adaptive: tuple[str, ...] | None = None
    skip: tuple[str, ...] = ()


@dataclass(frozen=True)
class Scale:
    """All that a reproduction's size and models depend on.

    n: images, the first of the data; None is all.
    attacks: those of each set, as `attack_text` writes them.
    adaptive: those made for adaptation, which are run beside them for the worst case.
    protocol: sets beside which the reference AutoAttack is run as the paper did.
    most_updates: of a defense. most_attack_steps: where the paper varies them.
    """

    name: str
    title: str
    n: int | None
    models: Mapping[str, Standing]
    attacks: Mapping[str, tuple[str, ...]]
    adaptive: tuple[str, ...]
    protocol: tuple[str, ...] = ()
    most_updates: int | None = None
    most_attack_steps: int | None = None
    tables: Mapping[str, Budget] = field(default_factory=dict)

    def with_imagenet(self, folder: Path | None) -> Scale:
        """The same, with ImageNet's images from a folder."""
        if folder is None:
            return self
        models = {
            name: replace(one, data=one.data.replace("imagenet", f"imagenet:{folder}", 1))
            if one.data.startswith("imagenet")
            else one
            for name, one in self.models.items()
        }
        return replace(self, models=models)

    def skips(self, table: str, column: str) -> bool:
        """Whether a column of a table is not run at this scale.

        >>> [find_scale(name).skips("figure-4", "2/255") for name in ("smoke", "paper")]
        [True, False]
        """
        return column in self.tables.get(table, Budget()).skip


@dataclass(frozen=True)
class Work:
    """What is run for a number; numbers with equal work share it.

    attacks: those of the number's set, then those made for adaptation.
    n: None is all images. protocol: whether the reference AutoAttack is run too.
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
    stands_in: bool = field(default=False, compare=False)
    note: str = field(default="", compare=False)
    architecture: str = field(default="", compare=False)


def scales() -> dict[str, Scale]:
    """All scales by name, the largest first.

    >>> list(scales())
    ['paper', 'cpu', 'smoke']
    """
    return dict(_all())


def find_scale(name: str) -> Scale:
    return lookup("scale", name, scales())


def resolve(ask: Ask, scale: Scale, table: str) -> Work:
    """What is run for a number of a table at a scale.

    What is measured does not matter: one run has natural and adversarial accuracy, and cost.

    >>> from dent.paper.tables import find_number
    >>> work = resolve(find_number("table-3/CIFAR-10 ResNet-26-4/madry2018/adversarial dent").ask,
    ...                find_scale("cpu"), "table-3")
    >>> work.model, work.defense, work.attacks[0]
    ('resnet20-at', 'dent:statistics=test,steps=10', 'apgd-ce:steps=10')
    """
    own = scale.tables.get(table, Budget())
    standing = lookup("model of the paper", ask.model, scale.models)
    attacks = {**scale.attacks, **own.attacks}[ask.attack]
    if ask.attack_steps is not None:
        attacks = tuple(_with_steps(text, _least(ask.attack_steps, scale)) for text in attacks)
    if ask.attack not in ALONE:
        attacks += scale.adaptive if own.adaptive is None else own.adaptive
    n = scale.n if own.n is None else own.n
    batch_size = ask.batch_size
    if n is not None:
        # Larger batches than the usual one are filled; with fewer images there is one batch of them.
        n = max(n, batch_size) if n >= BATCH else n
        batch_size = min(batch_size, n)
    return Work(
        model=standing.model,
        data=standing.data,
        defense=_capped(ask.defense, scale.most_updates),
        norm=ask.norm,
        eps=ask.eps,
        attacks=attacks,
        n=n,
        batch_size=batch_size,
        protocol=ask.attack in scale.protocol,
        battle=ask.battle,
        stands_in=standing.stands_in,
        note=standing.note,
        architecture=standing.architecture,
    )


def _least(steps: int, scale: Scale) -> int:
    return steps if scale.most_attack_steps is None else min(steps, scale.most_attack_steps)


def _with_steps(text: str, steps: int) -> str:
    return attack_text(f"{text}{',' if ':' in text else ':'}steps={steps}")


def _capped(defense: str, most: int | None) -> str:
    """The defense with at most so many updates.

    >>> _capped("dent:statistics=test", 2), _capped("dent+:steps=1", 2), _capped("static", 2)
    ('dent:statistics=test,steps=2', 'dent+:steps=1', 'static')
    """
    preset, settings = parse_text(defense, "dent+")
    if most is None or settings.get("steps", PRESETS[preset].steps) <= most:
        return defense
    return format_defense({"preset": preset, **settings, "steps": most})


@cache
def _all() -> dict[str, Scale]:
    return {name: read_scale(FOLDER / "scales" / f"{name}.yaml") for name in ("paper", "cpu", "smoke")}


def read_scale(path: Path) -> Scale:
    """The scale of a file; whatever is wrong with it is an error that names the file."""
    content = read_mapping(path)
    try:
        _check(content, Scale, needed=("name", "title", "n", "models", "attacks", "adaptive"))
        if content["name"] != path.stem:
            raise ValueError(f"expected the name of the file, got {content['name']!r}")
        if missing := [name for name in SETS if name not in content["attacks"]]:
            raise ValueError(f"expected all sets of attacks, got none for {', '.join(missing)}")
        given = content | {
            "models": {name: _standing(one) for name, one in content["models"].items()},
            "tables": {name: _budget(name, one) for name, one in content.get("tables", {}).items()},
            "protocol": tuple(content.get("protocol", ())),
        }
        return Scale(**given | _attacks(content) | _numbers(content))
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{path.name}: {' '.join(str(error).split())}") from error


def _standing(content: Any) -> Standing:
    _check(content, Standing, needed=("model",))
    return Standing(**content)


def _budget(table: str, content: Any) -> Budget:
    _check(content, Budget)
    columns = {column for part in find_table(table).parts for column in part.columns}
    skip = tuple(content.get("skip", ()))
    if unknown := [column for column in skip if column not in columns]:
        raise ValueError(f"{table} has no column {unknown[0]!r} to skip")
    return Budget(**content | {"skip": skip} | _attacks(content) | _numbers(content))


def _attacks(content: Mapping[str, Any]) -> dict[str, Any]:
    """The attacks as they are written in one way."""
    found: dict[str, Any] = {}
    if "attacks" in content:
        check_known("sets of attacks", content["attacks"], list(SETS))
        found["attacks"] = {
            name: tuple(map(attack_text, texts)) for name, texts in content["attacks"].items()
        }
    if "adaptive" in content:
        found["adaptive"] = tuple(map(attack_text, content["adaptive"]))
    return found


def _numbers(content: Mapping[str, Any]) -> dict[str, int | None]:
    found = {key: content[key] for key in ("n", "most_updates", "most_attack_steps") if key in content}
    for key, value in found.items():
        if value is not None and (type(value) is not int or value < 1):
            raise ValueError(f"expected {key} as an integer >= 1, or null, got {value!r}")
    return found


def _check(content: Any, kind: Any, needed: tuple[str, ...] = ()) -> None:
    if not isinstance(content, dict):
        raise ValueError(f"expected keys and values, got {content!r}")
    check_known("keys", map(str, content), [one.name for one in fields(kind)])
    if missing := [key for key in needed if key not in content]:
        raise ValueError(f"expected {' and '.join(missing)}, got {', '.join(content)}")
