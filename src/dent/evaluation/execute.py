"""Run one unit: attack a batch of a cell, submit the result, and see what stands. The local engine."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from dent.attacks import AttackResult, Finding, autoattack
from dent.attacks.adaptive import PartResult
from dent.attacks.checks import InvalidPointsError, check_logits, check_points
from dent.attacks.findings import count_backward_passes, inspect_model
from dent.attacks.norms import find_largest
from dent.defense import Dent
from dent.evaluation.attacks import ATTACKS, Attack
from dent.evaluation.battle import list_recordable, record_battle
from dent.evaluation.behavior import FreshCopies, ask
from dent.evaluation.cost import measure_cost
from dent.evaluation.defenses import Subject
from dent.evaluation.paired import JudgedPoints
from dent.evaluation.plan import BATTLE_STEPS, FEW, SUBMISSIONS, TIMED_CALLS, WHOLE, Unit
from dent.evaluation.results import Score, score_points
from dent.evaluation.sources import Sources, ignore_low_diversity
from dent.evaluation.spec import Cell, Evaluation
from dent.evaluation.store import Outcome, UnitResult
from dent.evaluation.suites import (
    ABOUT,
    BATTLE,
    NATURAL,
    PROTOCOL,
    SPECIAL,
    choose_draws,
    explain_missing,
    parse_attack,
)
from dent.names import lookup
from dent.precision import search_in_bfloat16
from dent.seeds import use_seed
from dent.storage import replace_file
from dent.texts import join_lines


@dataclass(frozen=True)
class Task:
    """A unit with the options of its attack.

    standing: which points of the batch the attacks before it left; None if it gets all.
    """

    unit: Unit
    options: dict[str, Any]
    standing: tuple[bool, ...] | None = None


@ignore_low_diversity()
def execute_task(task: Task, sources: Sources) -> UnitResult:
    """Return the result of a unit. Any error becomes the unit's, unless it breaks the rules.

    All that is random is seeded by the unit, also what models draw by themselves.
    """
    started = time.perf_counter()
    try:
        with seed_unit(task.unit, sources.evaluation):
            sources.subject(task.unit.cell)  # what loading draws is not the unit's
        with seed_unit(task.unit, sources.evaluation):
            outcome, took = _execute(task, sources)
    except InvalidPointsError:
        raise
    except Exception as error:
        message = join_lines(error) or "no message"
        return UnitResult(task.unit, error=f"{type(error).__name__}: {message}")
    return UnitResult(task.unit, outcome, took={"seconds": time.perf_counter() - started, **took})


def seed_unit(unit: Unit, evaluation: Evaluation) -> AbstractContextManager[None]:
    """Seed torch by the unit within, and restore its random state at the end."""
    return use_seed(unit.seed(evaluation.seed), evaluation.device)


def _execute(task: Task, sources: Sources) -> tuple[Outcome, dict[str, float]]:
    unit = task.unit
    subject = sources.subject(unit.cell)
    attack = None if unit.attack in SPECIAL else sources.attack(unit.attack, task.options)
    indices = find_points(unit, attack, sources.batches())
    inputs, labels = sources.read(indices)
    if unit.attack == ABOUT:
        return _measure_cell(subject, sources, inputs, labels)
    if unit.attack == BATTLE:
        return _record_battle(unit, subject, sources, indices, inputs, labels), {}
    if unit.attack == PROTOCOL:
        return _run_protocol(task, subject, sources, indices, inputs, labels), {}
    standing = torch.ones_like(labels, dtype=torch.bool)
    if task.standing is not None:
        standing = torch.tensor(task.standing, device=labels.device)
    result, verdict = attack_batch(task, attack, subject, inputs, labels, standing, sources.evaluation)
    if attack and attack.kind == "scenario":
        part = result.part if isinstance(result, PartResult) else torch.ones_like(result.success)
        counts = part.cpu()
        return _make_outcome(indices[counts], verdict.correct.cpu()[counts], result), {}
    outcome = _make_outcome(
        indices, verdict.correct & standing, result,
        given=standing, queries=result.queries + len(inputs) * verdict.submissions,
        majority=() if verdict.majority is None else tuple((verdict.majority & standing).tolist()),
        largest=find_largest(result.inputs, inputs, unit.cell.norm),
    )  # fmt: skip
    return outcome, {}


def _make_outcome(
    indices: Tensor, correct: Tensor, result: AttackResult, *, given: Tensor | None = None, **others: Any
) -> Outcome:
    given = torch.ones_like(correct) if given is None else given
    figures = {"queries": result.queries, "gradients": result.gradients} | others
    points, bits, attacked = (tuple(one.tolist()) for one in (indices, correct, given))
    return Outcome(points, bits, attacked, **figures)


class Verdict(NamedTuple):
    """Which inputs of a batch the model gets right: in one submission, and in most of several."""

    correct: Tensor
    majority: Tensor | None = None  # of a random defense
    submissions: int = 1


def attack_batch(
    task: Task,
    attack: Attack | None,
    subject: Subject,
    inputs: Tensor,
    labels: Tensor,
    standing: Tensor,
    evaluation: Evaluation,
) -> tuple[AttackResult, Verdict]:
    """Attack a batch; return the result, and which inputs of it the model gets right.

    The result is submitted as deployed: the whole batch, once, from a clean state. A random defense gets
    it several times. A scenario is another batch than the deployed one, and keeps the answers of its
    attack.

    attack: the attack of the task; None leaves the batch as it is.
    evaluation: gives the seed, and the precision of the search; a scenario has no judge but its search,
    and is run in float32.
    """
    unit, seed = task.unit, task.unit.seed(evaluation.seed)
    is_scenario = attack is not None and attack.kind == "scenario"
    if attack is None or not standing.any():
        result = AttackResult(inputs, torch.zeros_like(standing), inputs.new_empty(0), 0, 0)
    else:
        network = subject.model if subject.static is None else subject.static
        in_half = evaluation.mixed_precision and not is_scenario
        with search_in_bfloat16(network, inputs.device, enabled=in_half):
            result = attack.run(
                subject, inputs, labels, mask=standing, eps=unit.cell.eps, norm=unit.cell.norm,
                seed=seed, **task.options,
            )  # fmt: skip
    eps = math.inf if attack and attack.is_free else unit.cell.eps
    check_points(result.inputs, inputs, eps=eps, norm=unit.cell.norm, of=str(unit))
    if is_scenario:
        return result, Verdict(~result.success)
    return result, submit_batch(subject, result.inputs, labels, seed=seed)


def submit_batch(subject: Subject, points: Tensor, labels: Tensor, *, seed: int) -> Verdict:
    """Submit a batch to the model as deployed; to a random one several times, from seeds of its own.

    The first of several submissions is the one submission. A search that begins with `seed` itself has
    seen none of their random numbers.
    """
    count = SUBMISSIONS if subject.randomized else 1
    votes = []
    for number in range(count):
        with torch.no_grad():
            logits = (
                ask(subject.model, points, seed + 1 + number)
                if subject.randomized
                else subject.model(points)
            )
        check_logits(logits, points)  # NaN is no answer, though it has a largest
        votes.append(logits.argmax(1).eq(labels))
    if not subject.randomized:
        return Verdict(votes[0])
    return Verdict(votes[0], 2 * torch.stack(votes).sum(0) > count, count)


def find_points(unit: Unit, attack: Attack | None, batches: tuple[Tensor, ...]) -> Tensor:
    """Return the indices of a unit's points, in the order of the batch."""
    if unit.batch == WHOLE:
        return torch.cat(batches)
    return torch.cat(batches[unit.batch : unit.batch + (attack.span if attack else 1)])


def _run_protocol(
    task: Task, subject: Subject, sources: Sources, indices: Tensor, inputs: Tensor, labels: Tensor
) -> Outcome:
    """Run the reference AutoAttack, which makes its own batches: for comparison alone."""
    result = autoattack(
        subject.model, inputs, labels, eps=task.unit.cell.eps, norm=task.unit.cell.norm,
        engine="reference", batch_size=sources.evaluation.batch_size, joint=False,
        seed=task.unit.seed(sources.evaluation.seed), **task.options,
    )  # fmt: skip
    largest = find_largest(result.inputs, inputs, task.unit.cell.norm)
    return _make_outcome(indices, ~result.broken, result, largest=largest)


def _record_battle(
    unit: Unit, subject: Subject, sources: Sources, indices: Tensor, inputs: Tensor, labels: Tensor
) -> Outcome:
    names = sources.dataset().classes
    count = subject.count_classes(inputs[:FEW])
    lacks = subject.list_lacks(inputs[:2])
    battle = record_battle(
        subject, inputs[:FEW], labels[:FEW], eps=unit.cell.eps, norm=unit.cell.norm,
        seed=unit.seed(sources.evaluation.seed), steps=BATTLE_STEPS, points=indices[:FEW].tolist(),
        attacks=list_recordable(subject, lacks),
        classes=names if len(names) == count else None,  # images may have fewer than the model knows
    )  # fmt: skip
    return Outcome(battle=battle)


def _measure_cell(
    subject: Subject, sources: Sources, inputs: Tensor, labels: Tensor
) -> tuple[Outcome, dict[str, float]]:
    """Measure the cost of a cell, and look for signs that its numbers may mislead."""
    few = inputs[:FEW]
    figures, took = measure_cost(subject.model, subject.static, inputs, few=FEW, rounds=TIMED_CALLS)
    figures["backward_passes"] = float(count_backward_passes(subject.model, few))
    found = inspect_model(subject.model, few, labels[:FEW], random=subject.randomized)
    findings = [*found, *_inspect_batches(subject, sources)]
    if isinstance(subject.model, FreshCopies):
        findings.append(
            Finding(
                "state kept",
                "a call changes the module: every batch was answered by a fresh copy of it, as deployed",
            )
        )
    return Outcome(figures=figures, findings=tuple(asdict(one) for one in findings)), took


def _inspect_batches(subject: Subject, sources: Sources) -> Iterator[Finding]:
    """Yield findings if batches are of the kind that information maximization cannot use.

    It wants different classes in a batch. It makes them up where there is one class, and has no
    effect on a batch of one.
    """
    if not isinstance(subject.defense, Dent) or not subject.updates:
        return
    if subject.defense.settings.objective != "information-maximization":
        return
    labels = sources.dataset().labels
    batches = [labels[batch] for batch in sources.batches()]
    if single := sum(len(batch) == 1 for batch in batches):
        yield Finding(
            "batch of one",
            "information maximization does nothing on a batch of one input: the answers there are those "
            "of the static model, at the cost of the defense",
            {"batches": float(single)},
        )
    if same := sum(len(batch) > 1 and len(batch.unique()) == 1 for batch in batches):
        yield Finding(
            "batch of one class",
            "information maximization spreads answers over the classes: natural accuracy falls on "
            "batches of a single class",
            {"batches": float(same)},
        )


class Engine(Protocol):
    """Run tasks, and return each when it is finished, in any order."""

    slots: int  # number of tasks that it wants at once

    def submit(self, task: Task) -> None: ...

    def wait(self) -> UnitResult:
        """Wait for one of the tasks."""
        ...


class LocalEngine:
    """Run one task after the other, in this process."""

    slots = 1

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._tasks: deque[Task] = deque()

    def submit(self, task: Task) -> None:
        self._tasks.append(task)

    def wait(self) -> UnitResult:
        return execute_task(self._tasks.popleft(), self._sources)


@dataclass(frozen=True)
class AdversarialData:
    """Images that an attack made, in the order of the data set, and the answers to them."""

    cell: Cell
    images: Tensor
    labels: Tensor
    natural: Tensor  # which natural images are right
    correct: Tensor  # which adversarial images are right, as submitted
    independent: bool  # no answer depends on the rest of its batch
    batch_of: dict[int, int]  # batch of each image

    def scores(self) -> dict[str, Score]:
        return {
            name: score_points(
                JudgedPoints(dict(enumerate(one.tolist())), self.independent, self.batch_of)
            )
            for name, one in (("natural", self.natural), ("attacked", self.correct))
        }

    def save(self, path: Path) -> None:
        """Write images, labels and verdicts to an .npz, which can be read as data."""
        with replace_file(path) as file:
            np.savez(
                file,
                images=self.images.numpy(),
                labels=self.labels.numpy(),
                natural_correct=self.natural.numpy(),
                correct=self.correct.numpy(),
            )


@ignore_low_diversity()
def attack_data(
    sources: Sources,
    attack: str,
    options: dict[str, Any] | None = None,
    progress: Callable[[float, float | None, str], None] | None = None,
) -> AdversarialData:
    """Attack the one cell of an evaluation, batch by batch, and keep the images.

    attack: the text of an attack. options: those that replace the ones of the text.
    """
    if not (is_own := sources.is_own_attack(attack)):
        known = {name: one for name, one in ATTACKS.items() if one.kind != "scenario"}
        lookup("attack", attack.partition(":")[0].strip(), known)
    attack, given = parse_attack(attack, sources.evaluation.own_attacks)
    options = given | (options or {})
    found = sources.attack(attack, options)
    options = options if is_own else found.read_options(options)
    sources.recognize_models()
    adaptive = sources.evaluation.adaptive
    cells = sources.evaluation.cells()
    cells = tuple(one for one in cells if adaptive.get(one.model) == one.defense) or cells
    if len(cells) != 1:
        raise ValueError(
            f"expected one model and one defense, got {len(cells)}: {'; '.join(map(str, cells))}"
        )
    (cell,), batches = cells, sources.batches()
    subject = sources.subject(cell)
    if found.needs_updates and subject.updates == 0:
        raise ValueError(f"{attack} is for defenses that make updates, and {cell.defense} makes none")
    few, _ = sources.read(batches[0][:2])
    if reason := explain_missing(found, subject.list_lacks(few)):
        raise ValueError(f"{attack} cannot be run on {cell.defense}: {reason}")
    options = choose_draws(found, subject.randomized) | options
    sources.dataset().check_outputs(subject.count_classes(few), owner=cell.model)
    images: list[Tensor] = []
    verdicts: dict[str, list[Tensor]] = {NATURAL: [], attack: []}
    for number, batch in enumerate(batches):
        text = f"batch {number + 1} of {len(batches)}"
        if progress:
            progress(number, len(batches), text)
        inputs, labels = sources.read(batch)
        everyone = torch.ones_like(labels, dtype=torch.bool)
        for name, correct in verdicts.items():
            task = Task(Unit(cell, number, name), {} if name == NATURAL else options)
            entry = None if name == NATURAL else found
            with seed_unit(task.unit, sources.evaluation):
                result, verdict = attack_batch(
                    task, entry, subject, inputs, labels, everyone, sources.evaluation
                )
            correct.append(verdict.correct.cpu())
        images.append(result.inputs.cpu())
        if progress:
            progress(number + 1, len(batches), text)
    order = torch.cat(batches).argsort()
    made, before, after = (torch.cat(parts)[order] for parts in (images, *verdicts.values()))
    batch_of = {point: number for number, batch in enumerate(batches) for point in batch.tolist()}
    labels = sources.dataset().labels
    return AdversarialData(cell, made, labels, before, after, subject.independent, batch_of)
