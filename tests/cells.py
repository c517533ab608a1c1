"""Little cells to evaluate, and a way to see what is asked of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from nets import randomized, small
from torch import Tensor, nn

import dent
from dent.attacks import AttackResult
from dent.data import from_arrays
from dent.evaluation import CellResult, Results
from dent.evaluation.attacks import ATTACKS, find_attack
from dent.evaluation.execute import Task, execute_task
from dent.evaluation.plan import Plan, Unit
from dent.evaluation.sources import Sources
from dent.evaluation.spec import Evaluation
from dent.evaluation.store import Outcome
from dent.evaluation.suites import SPECIAL

EPS = {"linf": 0.03, "l2": 0.3, "l1": 2.0}
INDEPENDENT = "dent+:objective=entropy,reduction=sum,steps=1"  # sample-wise in all respects


def tiny(*, classes: int = 4) -> nn.Module:
    torch.manual_seed(0)
    return randomized(small(nn.BatchNorm2d(8), classes=classes)).float()


def labeled(net: nn.Module, n: int, *, wrong: int = 0) -> tuple[Tensor, Tensor]:
    """Images and the net's own answers to them, but for some."""
    images = torch.rand(n, 3, 8, 8, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        labels = net(images).argmax(1)
    labels[:wrong] = (labels[:wrong] + 1) % 4
    return images, labels


def sources_of(net: nn.Module, data: tuple[Tensor, Tensor], *defenses: str, **asked: Any) -> Sources:
    small_budget: dict[str, Any] = {"steps": 2, "queries": 4, "eps": EPS[asked.get("norm", "linf")]}
    small_budget |= {"batch_size": 4, "battle": False}
    evaluation = Evaluation(models="net", defenses=list(defenses), n=None, **small_budget | asked)
    return Sources(evaluation, {"net": net}, from_arrays(*data))


def outcomes(plan: Plan, sources: Sources, units: Iterable[Unit]) -> dict[Unit, Outcome]:
    """Each unit by itself, as if nothing came before it."""
    found = {}
    for unit in units:
        done = execute_task(Task(unit, plan.options(unit)), sources)
        assert done.outcome is not None, done.error
        found[unit] = done.outcome
    return found


class Watched:
    """What a defense is asked and answers, and what attacks are given and return; in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[tuple[str, Tensor, Tensor | None]] = []
        self.masks: list[tuple[str, str, tuple[bool, ...]]] = []  # of a defense, by an attack
        self.ended: list[tuple[int, AttackResult]] = []  # when so much was asked
        adapt, predict = dent.Dent.adapt, dent.Dent.predict

        def adapting(of: dent.Dent, inputs: Tensor, **options: Any) -> dent.State:
            self.asked.append(("adapt", inputs.detach().clone(), None))
            return adapt(of, inputs, **options)

        def predicting(of: dent.Dent, inputs: Tensor, state: dent.State) -> Tensor:
            logits = predict(of, inputs, state)
            self.asked.append(("predict", inputs.detach().clone(), logits.detach().clone()))
            return logits

        monkeypatch.setattr(dent.Dent, "adapt", adapting)
        monkeypatch.setattr(dent.Dent, "predict", predicting)
        for name, attack in list(ATTACKS.items()):
            monkeypatch.setitem(ATTACKS, name, replace(attack, run=self._watching(name, attack.run)))

    def _watching(self, name: str, run: Callable[..., AttackResult]) -> Callable[..., AttackResult]:
        def running(subject: Any, *tensors: Tensor, mask: Tensor, **settings: Any) -> AttackResult:
            of = "static" if subject.model is subject.static else subject.model.name
            self.masks.append((of, name, tuple(mask.tolist())))
            result = run(subject, *tensors, mask=mask, **settings)
            self.ended.append((len(self.asked), result))
            return result

        return running


def units_of_kind(plan: Plan, *kinds: str) -> list[Unit]:
    """The units whose attacks are of these kinds; not those that are no attacks."""
    attacks = [unit for unit in plan.units() if unit.attack not in SPECIAL]
    return [unit for unit in attacks if find_attack(unit.attack).kind in kinds]


def numbers(results: Results) -> list[Any]:
    """All numbers of the cells; names of defenses and seconds are left out."""
    cells = [cell.to_json(points=True) for cell in results.cells]
    for cell in cells:
        cell["cost"] = {name: value for name, value in cell["cost"].items() if "second" not in name}
        del cell["defense"]
    return cells


def only(results: Results) -> CellResult:
    (cell,) = results.cells
    assert not cell.missing
    return cell
