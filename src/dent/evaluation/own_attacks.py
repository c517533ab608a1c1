"""A user's own attacks in an evaluation, in memory or by import path."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

from torch import Tensor

from dent.attacks import AttackResult
from dent.attacks.own import OwnAttack, run_own
from dent.evaluation.attacks import ATTACKS, Attack, Forwards, Kind
from dent.evaluation.defenses import Subject, name_own
from dent.evaluation.suites import SPECIAL, SUITE_NOTES, is_own_path, parse_attack
from dent.names import accepts, import_function

GIVEN = ("eps", "norm", "seed", "mask", "joint")  # what an evaluation gives to attacks


def name_attacks(asked: Any) -> tuple[list[Any] | None, dict[str, OwnAttack]]:
    """Return the attacks as an evaluation lists them, and those that are in memory, by name.

    asked: one attack, a list, or a mapping from names. An attack is a text or a function.
    """
    if asked is None:
        return None, {}
    return name_own(
        asked,
        "attack",
        is_text=lambda one: not callable(one),
        is_listed=lambda one, name: isinstance(one, str) and _find_name(one) == name,
        is_taken=lambda name: _find_name(name).partition(" (")[0] in (*ATTACKS, *SUITE_NOTES, *SPECIAL),
        read=_read_own,
    )


def _find_name(text: str) -> str:
    """Return the part of a text before the options."""
    return parse_attack(text)[0] if is_own_path(text) else text.partition(":")[0].strip()


def _read_own(one: Any, name: str) -> OwnAttack:
    if isinstance(one, str) and is_own_path(one):
        path, options = parse_attack(one)
        return partial(import_attack(path), **options)
    if isinstance(one, str):
        raise ValueError(
            f"expected an attack of dent's list under its own name, got {one!r} as {name!r}; name a "
            f"variant as '{_find_name(one)} ({name})'"
        )
    if not callable(one):
        raise ValueError(
            f"{name}: expected an attack: a function (model, inputs, labels, *, eps, norm, ...), or a "
            f"text such as package.module:function, got {type(one).__name__}"
        )
    return one  # type: ignore[no-any-return]


def import_attack(path: str) -> OwnAttack:
    """Return the function that an import path names; the path may end with a variant."""
    return import_function(path.partition(" (")[0])


def make_own_attack(name: str, function: OwnAttack) -> Attack:
    """Return the entry of a user's own attack. Its options are the arguments that the function has."""
    kind = _find_kind(name, function)
    run = partial(_attack_defense if kind == "adaptive" else _attack_model, function, name)
    options = dict.fromkeys(inspect.signature(function).parameters, (Any, None))
    return replace(describe_own(name, kind), run=run, options=options)


def describe_own(name: str, kind: Kind) -> Attack:
    """Return the entry of a user's own attack that is not here, as far as a run's file tells it.

    Its cost is not known, and no option of it is known to be a budget that can be doubled.
    """
    needs = ("adapt",) if kind == "adaptive" else ()
    return Attack(name, kind, _refuse, {}, _count_asked, "your own", needs=needs, budget="")


def _count_asked(forwards: Forwards, options: Mapping[str, Any]) -> float:
    """Return the least that any attack costs."""
    return forwards.asked


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise ValueError("expected an attack in memory, got its name alone; give the attack itself")


def _find_kind(name: str, function: Callable[..., Any]) -> Kind:
    """Return what the function's attribute `kind` says; direct if it has none."""
    inner = inspect.unwrap(function)
    while isinstance(inner, partial) and not hasattr(inner, "kind"):
        inner = inspect.unwrap(inner.func)
    kind: Kind = getattr(inner, "kind", "direct")
    if kind not in ("direct", "adaptive"):
        raise ValueError(f"{name}: expected `kind` of the attack as direct or adaptive, got {kind!r}")
    return kind


def check_call(name: str, function: OwnAttack, options: Mapping[str, Any]) -> None:
    """Raise ValueError if the function cannot be called as an attack with these options."""
    if both := [option for option in options if option in GIVEN]:
        raise ValueError(f"{name}: expected no option {both[0]}, which the evaluation gives to attacks")
    given = {option: None for option in GIVEN if option in ("eps", "norm") or accepts(function, option)}
    try:
        inspect.signature(function).bind(None, None, None, **given, **options)
    except TypeError as error:
        told = "".join(f", {option}={value!r}" for option, value in options.items())
        raise ValueError(
            f"{name}: expected a function that can be called as attack(model, inputs, labels, eps=..., "
            f"norm=...{told}), got one with {inspect.signature(function)}: {error}"
        ) from error


def _attack_model(
    function: OwnAttack, name: str, subject: Subject, inputs: Tensor, labels: Tensor, *,
    eps: float, norm: str, seed: int, mask: Tensor, **options: Any,
) -> AttackResult:  # fmt: skip
    """Attack the model as deployed."""
    return run_own(
        partial(function, **options), name, subject.model, inputs, labels, eps=eps, norm=norm,
        mask=mask, seed=seed, joint=not subject.independent,
    )  # fmt: skip


def _attack_defense(
    function: OwnAttack, name: str, subject: Subject, inputs: Tensor, labels: Tensor, **given: Any
) -> AttackResult:
    """Attack the defense; that of a static model makes no updates, but has `adapt` and `predict`."""
    seen = replace(subject, model=subject.defense)
    return _attack_model(function, name, seen, inputs, labels, **given)
