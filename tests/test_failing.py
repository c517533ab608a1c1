"""Units that fail: named, passed over, and done again when they can be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from runs import SHORT, evaluated, images, kept, model
from torch import Tensor, nn

from dent import evaluate
from dent.evaluation import Results, load_results
from dent.evaluation.plan import Unit
from dent.evaluation.results import MissingUnit
from dent.evaluation.store import UnitResult


class Faulty(nn.Module):
    """A network that has no answer to a bright image while a file is there; to some, only of late."""

    def __init__(self, fault: Path, gradients: bool) -> None:
        super().__init__()
        self.net, self.fault, self.gradients = model(), fault, gradients

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.net(inputs)
        wrong = bool((inputs.mean((1, 2, 3)) > 0.8).any()) and self.fault.exists()
        return logits * torch.nan if wrong and torch.is_grad_enabled() >= self.gradients else logits


def one_bright() -> tuple[Tensor, Tensor]:
    inputs, labels = images(16)
    inputs[3] = 0.9
    labels[3] = model()(inputs[3:4]).argmax(1)[0]
    return inputs, labels


@pytest.mark.parametrize(
    ("defense", "gradients", "first"),
    [
        ("static", True, "apgd-ce"),
        ("static", False, "natural"),
        ("dent+:steps=2", True, "natural"),
    ],
)
def test_a_unit_that_fails_is_done_again_and_no_other(
    tmp_path: Path, defense: str, gradients: bool, first: str
) -> None:
    fault, seen = tmp_path / "fault", list[UnitResult]()

    def mend(done: UnitResult) -> None:
        seen.append(done)
        if done.error:
            fault.unlink()

    def run(name: str) -> Results:
        seen.clear()
        return evaluate(
            {"net": Faulty(fault, gradients)}, data=one_bright(), out=tmp_path / name, on_unit=mend,
            **SHORT | {"defenses": defense},
        )  # fmt: skip

    unbroken = run("unbroken")
    units = [done.unit for done in seen]
    fault.touch()
    broken = run("broken")
    assert [done.unit for done in seen] == units  # the rest went on
    (failed,) = (done for done in seen if done.error)
    assert failed.unit.attack == first
    assert "finite logits" in str(failed.error)
    assert not broken.complete
    assert broken.cells[0].missing == (MissingUnit(str(failed.unit), failed.error),)
    assert (broken.cells[0].worst.n, unbroken.cells[0].worst.n) == (12, 16)  # the others of its batches

    fault.touch()
    assert not run("broken").complete
    assert [(done.unit, bool(done.error)) for done in seen] == [(failed.unit, True)]
    assert run("broken").complete
    assert [(done.unit, bool(done.error)) for done in seen] == [(failed.unit, False)]
    mended, whole = kept(tmp_path / "broken"), kept(tmp_path / "unbroken")
    assert mended.keys() == whole.keys()  # there is no error left
    if defense == "static":
        check_chain(
            mended, whole, [unit for unit in units if unit.batch == failed.unit.batch], failed.unit
        )
    else:
        assert mended == whole


def check_chain(mended: dict[str, Any], whole: dict[str, Any], units: list[Unit], failed: Unit) -> None:
    """What followed a failed unit was given what all others left, as if that one had broken nothing."""
    chain = {unit: mended[f"units/{unit.file}"]["outcome"] for unit in units if unit.attack != "about"}
    standing, after = [True] * 4, False
    for unit, outcome in chain.items():
        if after:
            assert outcome["given"] == "".join("01"[point] for point in standing)
        if unit == failed:
            after = True
        else:
            standing = [
                one and bit == "1" for one, bit in zip(standing, outcome["correct"], strict=True)
            ]
    followers = {f"units/{unit.file}" for unit in [*chain][[*chain].index(failed) + 1 :]}
    differ = {name for name in whole if name.startswith("units/") and mended[name] != whole[name]}
    broke = "0" in whole[f"units/{failed.file}"]["outcome"]["correct"]
    assert bool(differ) == broke  # what followed was given more, if it had broken anything
    assert differ <= followers


def test_an_attack_on_two_batches_at_a_time_is_missed_in_none(tmp_path: Path) -> None:
    results = evaluated(tmp_path, suite="adaptive", steps=1, n=12, defenses=["dent+:steps=1"])
    assert results.complete
    assert results.cells[0].scenarios["sorted labels"].n == 12  # of batches 0 and 1, and of 2 alone
    assert load_results(tmp_path).to_json() == results.to_json()
