"""The defenses of an evaluation: dent's list, and a user's own by import path or in memory."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dent.defense import DEFENSES, Defended, Dent, Method, Settings, defend
from dent.defense.own import check_made, is_import_path, make_by_text, name_defense
from dent.defense.text import format_defense
from dent.evaluation.digests import describe, digest_model, digest_object, name_of
from dent.names import accepts, import_function
from dent.testing import count_updates
from dent.texts import join_lines

DYNAMIC = "dynamic"  # the row of a model that adapts inside of its forward pass
PARTS = ("start", "steps", "gradient")  # optional arguments of adapt()


def name_defenses(asked: Any) -> tuple[list[Any] | None, dict[str, Any]]:
    """Return the defenses as an evaluation lists them, and those that are in memory, by name.

    asked: one defense, a list, or a mapping from names. A defense is a text, settings, an object that
    is a defense, or a function from the model to one.
    """
    if asked is None:
        return None, {}
    if isinstance(asked, Mapping) and "preset" in asked:
        asked = [asked]
    return name_own(
        asked,
        "defense",
        is_text=lambda one: isinstance(one, str | Mapping),
        is_listed=lambda one, name: isinstance(one, str | Mapping) and name_defense(one) == name,
        is_taken=lambda name: name.partition(":")[0] in (DYNAMIC, *DEFENSES),
        read=_read_own,
    )


def _read_own(one: Any, name: str) -> Any:
    """Return a defense, or a function from the model to it."""
    if isinstance(one, str) and is_import_path(one):
        return import_function(one)
    if isinstance(one, str | Mapping):
        return partial(_defend, format_defense(one))
    if isinstance(one, Settings | Method):
        return partial(_defend, one)
    if not callable(one):
        raise ValueError(
            f"{name}: expected a defense, a function from the model to a defense, or its text such as "
            f"'dent+:steps=3', got {type(one).__name__}"
        )
    return one


def _defend(defense: Any, model: nn.Module) -> Any:
    return defend(model, defense)


def is_defense(one: Any) -> bool:
    """Return True for a defense, and False for a function or class that makes one of a model."""
    is_made = not inspect.isclass(one) and not inspect.isroutine(one) and not isinstance(one, partial)
    return is_made and (isinstance(one, nn.Module) or hasattr(one, "adapt"))


def is_defended(one: Any) -> bool:
    """Return True for a defended model: a defense that has its static model as `model`."""
    has_parts = hasattr(one, "adapt") and hasattr(one, "predict")
    return has_parts and not inspect.isclass(one) and isinstance(getattr(one, "model", None), nn.Module)


def name_defended(defended: Any) -> str:
    """Return the name of a defended model's row: its text if it is of dent's list, else its class.

    >>> model = nn.Sequential(nn.Flatten(), nn.Linear(12, 10))
    >>> name_defended(defend(model, "hedge", steps=5))
    'hedge:steps=5'
    """
    if isinstance(defended, Dent | Defended) and defended.name in DEFENSES:
        return format_defense({"preset": defended.name, **vars(defended.settings)})
    return type(defended).__name__


def make_defense(text: str, own: Mapping[str, Any], static: nn.Module) -> Any:
    """Return the defense of a name, of an import path, or of dent's list, on a model."""
    if text in own:
        given = own[text]
        return check_made(given if is_defense(given) else given(static), text)
    return make_by_text(text, static)


@dataclass(frozen=True)
class Subject:
    """What is attacked: the model as deployed, the model without a defense, and the defense."""

    model: Any  # from inputs to logits: the static model itself, or the defense
    static: nn.Module | None  # None if it is not known
    defense: Any  # see `dent.defense.Defense`; a user's own may lack all but the call
    independent: bool
    randomized: bool = False  # its answers are random

    @property
    def updates(self) -> int | None:
        """Return the number of updates of a call; None if the defense does not say."""
        return count_updates(self.defense)

    @property
    def forwards(self) -> float | None:
        """Return the cost of a call, in forwards of the static model; None if it is not known."""
        settings = getattr(self.defense, "settings", None)
        return settings.forwards if isinstance(settings, Settings | Method) else None

    def count_classes(self, inputs: Tensor) -> int:
        """Return the number of classes that an answer to the inputs has."""
        with torch.no_grad():
            return int((self.model if self.static is None else self.static)(inputs).shape[1])

    def list_lacks(self, inputs: Tensor) -> dict[str, str]:
        """Return what attacks may need and is missing, each with the reason; see `find_parts`."""
        lacks = find_parts(self.defense, inputs)
        return lacks if self.static is not None else lacks | {"static": NO_STATIC}


NO_STATIC = (
    "the static model is not known; give it and the defense separately to run these attacks: "
    "dent.evaluate(model, {'mine': defense})"
)
NO_ADAPT = (
    "the defense has no adapt(inputs) and predict(inputs, state); give it both to run these attacks"
)


def find_parts(defense: Any, inputs: Tensor) -> dict[str, str]:
    """Return the optional parts of the protocol that a defense lacks, each with the reason.

    The parts are "adapt" (with predict), "start", "steps", "gradient", "updates" and "unrolled". The
    exact gradient is tried on the inputs: a defense may take the argument and refuse that value.
    """
    parts = ("adapt", *PARTS, "updates", "unrolled")
    if not (hasattr(defense, "adapt") and hasattr(defense, "predict")):
        return dict.fromkeys(parts, NO_ADAPT)
    lacks = {
        part: f"adapt() of the defense takes no `{part}`"
        for part in PARTS
        if not accepts(defense.adapt, part)
    }
    if count_updates(defense) is None:
        lacks["updates"] = "the defense has no attribute `updates`, the number of updates of a call"
    if "gradient" in lacks:
        lacks["unrolled"] = "adapt() of the defense takes no `gradient`"
    elif not isinstance(defense, Dent | Defended):
        try:
            with torch.enable_grad():
                defense.adapt(inputs.detach().clone().requires_grad_(), gradient="unrolled")
        except Exception as error:
            message = join_lines(error) or type(error).__name__
            lacks["unrolled"] = f"adapt() of the defense refuses gradient='unrolled' ({message[:100]})"
    return lacks


class AnyDefense:
    """A defense as attacks call it, with all arguments; those that it does not take are left away.

    Only calls that mean the same without the argument may leave it away: a stale gradient is that of
    inputs without a gradient. All others belong to attacks that are not run on such a defense.

    independent: True if no answer depends on the batch, as the evaluation has found.
    """

    def __init__(self, defense: Any, independent: bool | None = None) -> None:
        self.defense = defense
        self.independent = independent
        adapt = getattr(defense, "adapt", None)
        self._takes = {part for part in PARTS if adapt is not None and accepts(adapt, part)}

    def __call__(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.defense(inputs)
        return logits

    def adapt(self, inputs: Tensor, **options: Any) -> Any:
        given = {name: value for name, value in options.items() if value is not None}
        if "gradient" not in self._takes and given.get("gradient") == "stale":
            del given["gradient"]
            inputs = inputs.detach()
        return self.defense.adapt(inputs, **given)

    def predict(self, inputs: Tensor, state: Any) -> Tensor:
        logits: Tensor = self.defense.predict(inputs, state)
        return logits


def digest_defense(defense: Any) -> str:
    """Return the sha256 of a defense: names and code of its classes, and all values that it holds."""
    if isinstance(defense, Dent | Defended):
        held = name_of(defense), repr(defense.settings), digest_model(defense.model), *defense.layers
        return hashlib.sha256(describe(held)).hexdigest()
    return digest_object(defense)


# Names for what users bring along in memory: defenses, and attacks too.


def name_own(
    asked: Any,
    kind: str,
    *,
    is_text: Callable[[Any], bool],
    is_listed: Callable[[Any, str], bool],
    is_taken: Callable[[str], bool],
    read: Callable[[Any, str], Any],
) -> tuple[list[Any], dict[str, Any]]:
    """Return all entries as an evaluation lists them, and those that are in memory, by name.

    asked: one entry, a list, or a mapping from names.
    kind: what the entries are, for messages: "defense" or "attack".
    is_text: True for an entry that needs no name, because it is written.
    is_listed: True if an entry that was given under a name is the text of that very name.
    is_taken: True for names that entries in memory may not have.
    read: returns what an evaluation uses for an entry in memory, or raises ValueError.
    """
    if isinstance(asked, Mapping):
        entries: list[tuple[str | None, Any]] = [(str(name), one) for name, one in asked.items()]
    else:
        given = list(asked) if isinstance(asked, list | tuple) else [asked]
        entries = [(None if is_text(one) else _find_name(one, kind), one) for one in given]
    names: list[Any] = []
    own: dict[str, Any] = {}
    for name, one in entries:
        if name is None or is_listed(one, name):
            names.append(one)
            continue
        if is_taken(name):
            raise ValueError(f"expected another name for your own {kind}: {name!r} is of dent's list")
        if name in own:
            raise ValueError(
                f"expected each {kind} in memory under a name of its own, got two as {name!r}; give "
                f"them as {{'name': {kind}, ...}}"
            )
        own[name] = read(one, name)
        names.append(name)
    return names, own


def _find_name(one: Any, kind: str) -> str:
    """Return the name of an entry in memory that was given without one."""
    while isinstance(one, partial):
        one = one.func
    name = getattr(one, "__name__", None) or type(one).__name__
    if name == "<lambda>":
        raise ValueError(f"expected a name for a lambda; give {kind}s as {{'name': {kind}, ...}}")
    return str(name)
