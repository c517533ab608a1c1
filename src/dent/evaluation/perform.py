"""One unit of work: attack a batch of a cell, submit what came out, and see what stands."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from dent.attacks import AttackResult, autoattack
from dent.attacks.adaptive import PartResult
from dent.attacks.checks import check_logits
from dent.attacks.findings import inspect_model
from dent.attacks.norms import lengths
from dent.evaluation.attacks import Subject, attack_named
from dent.evaluation.battle import record_battle
from dent.evaluation.config import Evaluation
from dent.evaluation.cost import measure_cost
from dent.evaluation.sources import Sources, own_draws
from dent.evaluation.units import ABOUT, BATTLE, NATURAL, PROTOCOL, SPECIAL, WHOLE, Done, Outcome, Unit

TOLERANCE = 1e-5  # of a distance, for what rounding does to it
BATTLE_STEPS = 10  # of the attack that is recorded
ROUNDS, FEW = 3, 32  # timed forwards; inputs that are enough to know what is to be known


class OutOfBallError(ValueError):
    """Something was to be submitted that the rules do not allow: the run stops."""


@dataclass(frozen=True)
class Task:
    """A unit, with the attack's settings, and what of its batch the attacks before it left standing."""

    unit: Unit
    settings: dict[str, Any]
    standing: tuple[bool, ...] | None = None


def perform(task: Task, sources: Sources) -> Done:
    """Do it. Whatever goes wrong is the unit's error, unless the rules were broken.

    All that is random is seeded by the unit, also what models draw by themselves.
    """
    started = time.perf_counter()
    try:
        with seeded(task.unit, sources.evaluation):
            sources.subject(task.unit.cell)  # what loading draws is not the unit's
        with seeded(task.unit, sources.evaluation):
            outcome, took = _done(task, sources)
    except OutOfBallError:
        raise
    except Exception as error:
        message = " ".join(str(error).split()) or "no message"
        return Done(task.unit, error=f"{type(error).__name__}: {message}")
    return Done(task.unit, outcome, took={"seconds": time.perf_counter() - started, **took})


@contextmanager
def seeded(unit: Unit, evaluation: Evaluation) -> Iterator[None]:
    """Within, torch draws what belongs to the unit."""
    with own_draws(evaluation.device):
        torch.manual_seed(unit.seed(evaluation.seed))
        yield


def _done(task: Task, sources: Sources) -> tuple[Outcome, dict[str, float]]:
    unit = task.unit
    subject = sources.subject(unit.cell)
    indices = points_of(unit, sources.batches())
    inputs, labels = sources.read(indices)
    if unit.attack == ABOUT:
        return _about(subject, inputs, labels)
    if unit.attack == BATTLE:
        return _battle(task, subject, sources, indices, inputs, labels), {}
    standing = torch.ones_like(labels, dtype=torch.bool)
    if task.standing is not None:
        standing = torch.tensor(task.standing, device=labels.device)
    if unit.attack == PROTOCOL:
        return _protocol(task, subject, sources, indices, inputs, labels), {}
    result, correct = attacked(task, subject, inputs, labels, standing, sources.evaluation.seed)
    if _is_scenario(unit.attack):
        return _scenario(result, indices), {}
    outcome = Outcome(
        points=tuple(indices.tolist()),
        correct=tuple((correct & standing).tolist()),
        given=tuple(standing.tolist()),
        queries=result.queries + len(inputs),
        gradients=result.gradients,
        largest=_largest(result.inputs, inputs, unit.cell.norm),
    )
    return outcome, {}


def attacked(
    task: Task, subject: Subject, inputs: Tensor, labels: Tensor, standing: Tensor, seed: int
) -> tuple[AttackResult, Tensor]:
    """The attack of a task on a batch, and what the model gets right of what came out.

    That is submitted as deployed: the whole batch, once, from a clean state. A scenario is another
    batch than the deployed one, and stays as it was answered in the attack.
    """
    unit = task.unit
    if unit.attack == NATURAL or not standing.any():
        result = AttackResult(inputs, torch.zeros_like(standing), inputs.new_empty(0), 0, 0)
    else:
        result = attack_named(unit.attack).run(
            subject, inputs, labels, mask=standing, eps=unit.cell.eps, norm=unit.cell.norm,
            seed=unit.seed(seed), **task.settings,
        )  # fmt: skip
    free = unit.attack != NATURAL and attack_named(unit.attack).free
    eps = math.inf if free else unit.cell.eps
    check_allowed(result.inputs, inputs, eps=eps, norm=unit.cell.norm, of=str(unit))
    if _is_scenario(unit.attack):
        return result, ~result.success
    with torch.no_grad():
        logits = subject.model(result.inputs)
    check_logits(logits, inputs)  # NaN is no answer, though it has a largest
    return result, logits.argmax(1).eq(labels)


def _is_scenario(attack: str) -> bool:
    return attack != NATURAL and attack_named(attack).kind == "scenario"


def points_of(unit: Unit, batches: tuple[Tensor, ...]) -> Tensor:
    """The indices of the points that a unit is about, in the order of the batch."""
    if unit.batch == WHOLE:
        return torch.cat(batches)
    span = 1 if unit.attack in SPECIAL else attack_named(unit.attack).span
    return torch.cat(batches[unit.batch : unit.batch + span])


def check_allowed(points: Tensor, inputs: Tensor, *, eps: float, norm: str, of: str) -> None:
    """Refuse points that lie outside of the ball or of [0, 1]."""
    distance = _largest(points, inputs, norm)
    if not distance <= eps + TOLERANCE * max(eps, 1):
        raise OutOfBallError(
            f"{of}: a perturbation of {distance:g} left the ball of {eps:g}; nothing is scored"
        )
    low, high = (float(bound) for bound in torch.aminmax(points))
    if not (low >= 0 and high <= 1):
        raise OutOfBallError(f"{of}: values from {low:g} to {high:g} left [0, 1]; nothing is scored")


def _largest(points: Tensor, inputs: Tensor, norm: str) -> float:
    return float(lengths(points - inputs, norm).max()) if len(inputs) else 0.0


def _scenario(result: AttackResult, indices: Tensor) -> Outcome:
    """Another batch than the deployed one: as it was answered in the attack."""
    part = result.part if isinstance(result, PartResult) else torch.ones_like(result.success)
    counted = part.cpu()
    correct = (~result.success).cpu()[counted]
    return Outcome(
        points=tuple(indices[counted].tolist()),
        correct=tuple(correct.tolist()),
        given=tuple([True] * len(correct)),
        queries=result.queries,
        gradients=result.gradients,
    )


def _protocol(
    task: Task, subject: Subject, sources: Sources, indices: Tensor, inputs: Tensor, labels: Tensor
) -> Outcome:
    """The reference's own verdict, on batches of its own making: for comparison alone."""
    result = autoattack(
        subject.model, inputs, labels, eps=task.unit.cell.eps, norm=task.unit.cell.norm,
        engine="reference", batch_size=sources.evaluation.batch_size, joint=False,
        seed=task.unit.seed(sources.evaluation.seed), **task.settings,
    )  # fmt: skip
    correct = ~result.broken
    return Outcome(
        points=tuple(indices.tolist()),
        correct=tuple(correct.tolist()),
        given=tuple([True] * len(correct)),
        queries=result.queries,
        gradients=result.gradients,
        largest=_largest(result.inputs, inputs, task.unit.cell.norm),
    )


def _battle(
    task: Task, subject: Subject, sources: Sources, indices: Tensor, inputs: Tensor, labels: Tensor
) -> Outcome:
    few, cell, names = indices[:FEW], task.unit.cell, sources.dataset().classes
    with torch.no_grad():
        count = subject.static(inputs[:FEW]).shape[1]
    return Outcome(
        battle=record_battle(
            subject, inputs[:FEW], labels[:FEW], eps=cell.eps, norm=cell.norm,
            seed=task.unit.seed(sources.evaluation.seed), steps=BATTLE_STEPS, points=few.tolist(),
            classes=names if len(names) == count else None,  # images may have fewer than the model knows
        )
    )  # fmt: skip


def _about(subject: Subject, inputs: Tensor, labels: Tensor) -> tuple[Outcome, dict[str, float]]:
    few, classes = inputs[:FEW], labels[:FEW]
    figures, took = measure_cost(subject.model, subject.static, few, rounds=ROUNDS)
    found = inspect_model(subject.model, few, classes)
    return Outcome(figures=figures, findings=tuple(asdict(finding) for finding in found)), took
