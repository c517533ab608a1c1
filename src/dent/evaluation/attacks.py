"""The table of attacks: function, kind, options with their defaults, and cost.

To add an attack, write its function in `dent.attacks` and one entry of `ATTACKS`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, create_model

from dent.attacks import AttackResult, adaptive, pgd
from dent.attacks.autoattack import ATTACKS as DIRECT
from dent.attacks.losses import LOSSES
from dent.attacks.targets import FEW_TARGETS, MOST_TARGETS, ORDERS
from dent.declared import Declared
from dent.evaluation.runners import (
    attack_defense,
    attack_model,
    attack_one_among,
    attack_states,
    attack_static,
    attack_view,
    count_share,
    mix,
    poison,
    shorten_updates,
    sort_labels,
)
from dent.names import is_function_path, lookup

# direct: attacks the defended model itself. adaptive: made for defenses that adapt. scenario: answers
# come from another batch than the deployed one, or only a part counts; it is in no worst case.
Kind = Literal["direct", "adaptive", "scenario"]


@dataclass(frozen=True)
class Forwards:
    """Costs of a model, in forwards of its static model for each input; a backward counts as one.

    >>> Forwards(updates=10).answer
    21.0
    """

    updates: int
    size: int = 128  # number of inputs in the batch
    known: float | None = None  # cost of an answer

    @property
    def answer(self) -> float:
        """If it is not known: an update takes a forward and a backward; then comes the prediction."""
        return 2.0 * self.updates + 1 if self.known is None else self.known

    @property
    def gradient(self) -> float:
        return self.answer + 1

    @property
    def asked(self) -> float:
        """Every attack asks three times besides: naturally, at the end, and to submit."""
        return 3 * self.answer


Run = Callable[..., AttackResult]  # (subject, inputs, labels, *, eps, norm, seed, mask, **options)
Cost = Callable[[Forwards, dict[str, Any]], float]  # from all options to forwards for each input
Options = dict[str, tuple[Any, Any]]  # type and default of each; `...` if it must be given


@dataclass(frozen=True)
class Attack:
    """An entry of the table.

    cost: upper bound, for models with ten classes or more.
    needs_updates: only for defenses that make updates. (Scenarios are for defenses that depend on
        their batch.)
    needs: what it needs: optional parts of the protocol of a defense (see `find_parts`), or "static".
    span: number of batches that it takes at a time.
    least: number of inputs that it needs; smaller batches are left out.
    is_free: what it perturbs may leave the ball, but not [0, 1].
    budget: the option that `--converge` doubles. If it has no such option, it is never doubled.
    """

    name: str
    kind: Kind
    run: Run
    options: Options
    cost: Cost
    note: str
    needs_updates: bool = False
    needs: tuple[str, ...] = ()
    span: int = 1
    least: int = 1
    is_free: bool = False
    budget: str = "steps"

    @cached_property
    def schema(self) -> type[Declared]:
        """Return the pydantic model of the options."""
        fields: dict[str, Any] = dict(self.options)
        schema: type[Declared] = create_model(self.name, __base__=Declared, **fields)
        schema.title = f"attack {self.name}"
        return schema

    def read_options(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options that were given, checked; raise an error that lists every fault."""
        return self.schema(**given).model_dump(exclude_unset=True)

    def multiply_budget(self, given: Mapping[str, Any], times: int) -> dict[str, Any]:
        """Return the options with a multiple of the budget, which was at least 1.

        >>> ATTACKS["square"].multiply_budget({"restarts": 2}, 4)
        {'restarts': 2, 'queries': 20000}
        """
        value = given.get(self.budget, self.options[self.budget][1])
        return dict(given) | {self.budget: times * max(value, 1)}

    def count_forwards(self, forwards: Forwards, given: Mapping[str, Any]) -> float:
        """Return the cost for each input, with defaults for the options that were not given."""
        defaults = {name: default for name, (_, default) in self.options.items()}
        return float(self.cost(forwards, defaults | dict(given)))


# Options


def _read_names(value: Any) -> Any:
    """Return the names of `(apgd-ce,apgd-t)` as a tuple."""
    if isinstance(value, str):
        return tuple(re.findall(r"[^\s,()]+", value))
    return tuple(value) if isinstance(value, list) else value


def _check_name(table: Mapping[str, Any], name: str) -> str:
    lookup("name", name, table)
    return name


def _check_offline(name: str) -> str:
    """Return the name of an offline attack, or the import path of a user's own."""
    return name if is_function_path(name) else _check_name(adaptive.OFFLINE, name)


Steps = Annotated[int, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Share = Annotated[float, Field(gt=0, lt=1)]
Loss = Annotated[str, AfterValidator(partial(_check_name, LOSSES))]
Order = Annotated[str, AfterValidator(partial(_check_name, ORDERS))]
Offline = Annotated[str, AfterValidator(_check_offline)]
OfflineNames = Annotated[tuple[Offline, ...], BeforeValidator(_read_names), Field(min_length=1)]

CLIMB: Options = {"steps": (Steps, 100), "restarts": (Count, 1)}
VIEW: Options = {**CLIMB, "targets": (Steps, 0)}
EVERY: Options = {"every": (Count, 5)}
SHARE: Options = {"updates": (Steps | None, None), "share": (Share, 0.5)}
OFFLINE: Options = {
    **CLIMB, "attacks": (OfflineNames, ("apgd-ce", "apgd-margin", "apgd-t")),
    "targets": (Count, FEW_TARGETS),
}  # fmt: skip
CHAIN: Options = {
    "steps": (Steps, 100), "rounds": (Count, 3), "loss": (Loss, "margin"), **EVERY
}  # fmt: skip
ORDER: Options = {"order": (Order, "logits"), "targets": (Count, MOST_TARGETS)}
DRAW: Options = {**CLIMB, "draws": (Count, 1)}
ROUNDS: Options = {**CLIMB, "rounds": (Count, 10), "loss": (Loss, "margin"), "targets": (Steps, 0)}


# Costs: forwards of an attack for each input, from its options.


def _count_steps(o: dict[str, Any]) -> float:
    """Return the steps of all runs; where a run starts counts as one."""
    return float((o["steps"] + 1) * o["restarts"] * o.get("draws", 1))


def _count_climb(f: Forwards, o: dict[str, Any]) -> float:
    return _count_steps(o) * f.gradient + f.asked


def _count_unrolled(f: Forwards, o: dict[str, Any]) -> float:
    return _count_steps(o) * 3 * f.answer + f.asked


def _count_transfer(f: Forwards, o: dict[str, Any], *, gradient: float = 2.0) -> float:
    """Count climbs at the cost of `gradient`, the gradients that rank targets, and a submission each."""
    several = {"apgd-t": o["targets"], "first-success": 2}
    runs = sum(several.get(name, 1) for name in o["attacks"])
    searched = runs * _count_steps(o) + len(o["attacks"]) * 3
    return float(searched * gradient + MOST_TARGETS + (len(o["attacks"]) + 1) * f.answer)


def _count_view(f: Forwards, o: dict[str, Any], *, runs: int = 1) -> float:
    """Count climbs through a view that adapts at every few steps."""
    runs *= max(o.get("targets", 0), 1)
    ranks = f.gradient + MOST_TARGETS if o.get("targets") else 0
    climbed = runs * _count_steps({"restarts": 1} | o) * (f.answer / o["every"] + 3)
    return float(climbed + ranks + 2 * f.asked)


def _count_rounds(f: Forwards, o: dict[str, Any], *, models: float = 0.5) -> float:
    """Count, in each round, a climb for `models` times the rounds, at least one."""
    climbed = max(models * o["rounds"], 1)
    return float(o["rounds"] * (_count_steps(o) * 2 * climbed + 2 * f.answer) + 2 * f.answer)


def _count_short(f: Forwards, o: dict[str, Any]) -> float:
    """Return the cost of a gradient behind a share of the updates."""
    updates = count_share(f.updates, o["share"]) if o["updates"] is None else o["updates"]
    return Forwards(updates).gradient


def _count_shortened(f: Forwards, o: dict[str, Any]) -> float:
    runs = max(o["targets"], 1)
    ranks = f.gradient + MOST_TARGETS if o["targets"] else 0
    return float(runs * _count_steps(o) * _count_short(f, o) + ranks + 2 * f.asked)


def _count_chain(f: Forwards, o: dict[str, Any]) -> float:
    static = 2 * (o["steps"] + 1) + f.answer
    return float(static + _count_view(f, o) + _count_rounds(f, {"restarts": 1} | o, models=0))


def _count_groups(f: Forwards, o: dict[str, Any]) -> float:
    points, together = min(o["points"], f.size), min(o["companions"] + 1, f.size)
    return float(points * together / f.size * _count_climb(f, o))


# The table


def _direct(
    name: str, attack: Run, options: Options, cost: Cost, note: str, *, budget: str = "steps"
) -> Attack:
    run = partial(attack_model, attack)
    return Attack(name, "direct", run, options, cost, note, budget=budget)


def _adaptive(
    name: str, run: Run, options: Options, cost: Cost, note: str, *,
    needs_updates: bool = True, needs: tuple[str, ...] = (), budget: str = "steps",
) -> Attack:  # fmt: skip
    return Attack(
        name, "adaptive", run, options, cost, note, needs_updates, needs, budget=budget
    )  # fmt: skip


ATTACKS: dict[str, Attack] = {
    attack.name: attack
    for attack in (
        _direct(
            "pgd", pgd, DRAW | {"steps": (Steps, 40), "loss": (Loss, "ce"), "step_size": (
                Annotated[float, Field(gt=0)] | None, None
            )}, _count_climb, "projected gradient ascent",
        ),
        _direct("apgd-ce", DIRECT["apgd-ce"], DRAW, _count_climb, "APGD on the cross-entropy"),
        _direct("apgd-dlr", DIRECT["apgd-dlr"], DRAW, _count_climb, "APGD on the DLR loss"),
        _direct(
            "apgd-t", DIRECT["apgd-t"], DRAW | ORDER,
            lambda f, o: o["targets"] * _count_steps(o) * f.gradient + f.asked + MOST_TARGETS,
            "targeted APGD, nine classes in turn",
        ),
        _direct(
            "fab", DIRECT["fab"], CLIMB,
            # One answer gives the gradients of all classes; another says where the step led.
            lambda f, o: _count_steps(o) * (2 * f.answer + MOST_TARGETS) + f.asked,
            "FAB: across the nearest decision boundary",
        ),
        _direct(
            "fab-t", DIRECT["fab-t"], CLIMB | ORDER,
            lambda f, o: (
                o["targets"] * _count_steps(o) * (f.gradient + f.answer) + f.asked + MOST_TARGETS
            ),
            "targeted FAB, across nine boundaries in turn",
        ),
        _direct(
            "square", DIRECT["square"], {"queries": (Count, 5000), "restarts": (Count, 1)},
            lambda f, o: (o["queries"] + 1) * o["restarts"] * f.answer + f.asked,
            "random squares, without gradients", budget="queries",
        ),
        _adaptive(
            "denying updates", partial(attack_static, adaptive.denying_updates), OFFLINE,
            _count_transfer, "maximize the loss of the static model, then submit to the defense",
            needs_updates=False, needs=("static",),
        ),
        _adaptive(
            "denying most updates",
            partial(shorten_updates, attack_defense, adaptive.denying_most_updates, share=0.25),
            OFFLINE | SHARE | {"share": (Share, 0.25)},
            lambda f, o: _count_transfer(f, o, gradient=_count_short(f, o)),
            "attack the defense with a quarter of its updates, then submit to the full defense",
            needs=("updates", "steps"),
        ),
        _adaptive(
            "high confidence", partial(attack_static, adaptive.high_confidence),
            CLIMB | {"targets": (Count, FEW_TARGETS)},
            lambda f, o: 2 * o["targets"] * _count_steps(o) + (o["targets"] + 2) * f.answer,
            "make the static model confident of a wrong class, then submit to the defense",
            needs_updates=False, needs=("static",),
        ),
        _adaptive(
            "fpa", partial(attack_defense, adaptive.fpa), ROUNDS, partial(_count_rounds, models=0),
            "fixed point: attack the model as adapted to the last attack", needs_updates=False,
            needs=("steps",), budget="rounds",  # of GMSA, twice the rounds would cost four times as much
        ),
        _adaptive(
            "gmsa-avg", partial(attack_defense, adaptive.gmsa_avg), ROUNDS, _count_rounds,
            "average loss over all models adapted so far", needs=("steps",),
        ),
        _adaptive(
            "gmsa-min", partial(attack_defense, adaptive.gmsa_min), ROUNDS, _count_rounds,
            "lowest loss over all models adapted so far", needs=("steps",),
        ),
        _adaptive(
            "unrolled", partial(attack_defense, adaptive.unrolled), DRAW, _count_unrolled,
            "exact gradient, through the updates", needs=("unrolled",),
        ),
        _adaptive(
            "averaged", partial(attack_states, adaptive.averaged),
            DRAW | {"sharpness": (Finite, 0.0)},
            lambda f, o: _count_steps(o) * (f.answer + 3 * (f.updates + 1)) + f.asked,
            "gradients averaged over the states of the defense", needs=("updates", "start", "steps"),
        ),
        _adaptive(
            "trajectory", partial(attack_states, adaptive.trajectory),
            CLIMB | EVERY | {"loss": (Loss, "margin")},
            lambda f, o: _count_steps(o) * (f.answer / o["every"] + 3 * (f.updates + 1)) + 2 * f.asked,
            "lowest margin over the states of the defense", needs=("updates", "start", "steps"),
        ),
        _adaptive(
            "short", partial(shorten_updates, attack_view, adaptive.short), VIEW | DRAW | SHARE,
            _count_shortened,
            "follow the gradient of a share of the updates, submit to the full defense",
            needs=("updates", "steps"),
        ),
        _adaptive(
            "lazy", partial(attack_view, adaptive.lazy), VIEW | EVERY, _count_view,
            "adapt only at every fifth step", needs=("adapt",),
        ),
        _adaptive(
            "chained", partial(attack_static, adaptive.chained), CHAIN, _count_chain,
            "the static model, then lazy, then fpa, each from the last one's images",
            needs=("static", "adapt"),
        ),
        _adaptive(
            "balanced", partial(attack_static, adaptive.balanced), CHAIN | {"loss": (Loss, "ce")},
            lambda f, o: 2 * (o["steps"] + 1) + f.answer + _count_view(f, o, runs=o["rounds"]),
            "toward wrong classes, each for as many inputs", needs=("static", "adapt"),
        ),
        Attack(
            "mixed", "scenario", mix, CLIMB | {"share": (Share, ...)}, _count_climb,
            "attack a share of the batch, and count that share", least=2,
        ),
        Attack(
            "one among", "scenario", attack_one_among,
            CLIMB | {"companions": (Count, 15), "points": (Count, ...)}, _count_groups,
            "one adversarial input among natural ones", least=2,
        ),
        Attack(
            "sorted labels", "scenario", sort_labels, CLIMB, _count_climb,
            "batches sorted by label, attacked", span=2,
        ),
        Attack(
            "poisoning", "scenario", poison, CLIMB | {"share": (Share, ...)}, _count_unrolled,
            "malicious members; the accuracy of the others counts", least=2, is_free=True,
            needs=("unrolled",),
        ),
    )
}  # fmt: skip


def find_attack(name: str, own: Mapping[str, Attack] | None = None) -> Attack:
    """Return the attack of a name. A name of the table may end with a variant in parentheses.

    own: a user's own attacks, by name.

    >>> find_attack("mixed (10 %)").kind
    'scenario'
    """
    if own and name in own:
        return own[name]
    return lookup("attack", name.partition(" (")[0], ATTACKS)
