"""A model that adapts is recognized: a defended one is taken apart, any other is called dynamic."""

from __future__ import annotations

import json
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from cells import labeled, tiny
from commands import run
from own_defenses import (
    Centered,
    ChangesModel,
    Drifting,
    Each,
    Inside,
    NotPicklable,
    OneRow,
    OtherCall,
    Remembers,
    Tented,
)
from torch import Tensor, nn

import dent
from dent.data import from_arrays
from dent.evaluation import CellResult, Evaluation, Results
from dent.evaluation.cost import count_flops
from dent.evaluation.sources import Sources, cut_batches
from dent.report.evaluation import results_markdown, results_text

NET = tiny()
DATA = labeled(NET, 8)
SMALL: dict[str, Any] = {"data": DATA, "eps": 0.03, "batch_size": 4, "steps": 2, "queries": 4}
BOTH = ["apgd-ce", "square", "denying updates", "fpa"]


def figures(cell: CellResult) -> dict[str, Any]:
    return cell.to_json(points=True) | {"cost": cell.cost and cell.cost.flops}


def defenses(results: Results) -> list[str]:
    assert results.complete
    return [cell.cell.defense for cell in results.cells]


@pytest.mark.parametrize("text", ["dent+:steps=2", "hedge:steps=2", "views"])
def test_a_defended_model_is_a_defense_of_its_static_model(text: str) -> None:
    given = dent.evaluate(dent.defend(NET, text), **SMALL)
    asked = dent.evaluate(NET, ["static", text], **SMALL)
    assert defenses(given) == ["static", text]
    assert list(map(figures, given.cells)) == list(map(figures, asked.cells))
    assert all(cell.cell.model == "Sequential" for cell in given.cells)


def test_any_object_with_adapt_predict_and_a_model_is_taken_apart() -> None:
    results = dent.evaluate(Centered(NET), **SMALL)
    assert defenses(results) == ["static", "Centered"]
    assert results.cells[1].versus_static is not None
    several = dent.evaluate({"one": Centered(NET), "two": NET}, ["static", "views"], **SMALL)
    assert [str(cell.cell).rpartition(", ")[0] for cell in several.cells] == [
        *("one, static", "one, views", "one, Centered"),
        *("two, static", "two, views"),
    ]


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        ("own_defenses:make_defended", ["static", "hedge:steps=2"]),
        ("own_defenses:make_centered", ["static", "Centered"]),
        ("own_defenses:make_inside", ["dynamic"]),
    ],
)
def test_a_function_may_return_such_a_model(function: str, expected: list[str], tmp_path: Any) -> None:
    results = dent.evaluate(function, out=tmp_path, **SMALL)
    assert defenses(results) == expected
    again = dent.evaluate(function, out=tmp_path, **SMALL)  # resumed: nothing is left to do
    assert list(map(figures, again.cells)) == list(map(figures, results.cells))


def test_the_command_line_says_dynamic_and_not_static(tmp_path: Any) -> None:
    np.savez(tmp_path / "data.npz", images=DATA[0].numpy(), labels=DATA[1].numpy())
    asked = ["--model", "own_defenses:make_inside", "--data", str(tmp_path / "data.npz"), "--n", "8"]
    asked += ["--steps", "2", "--eps", "0.03", "--out", str(tmp_path / "run"), "--json"]
    (cell,) = json.loads(run("evaluate", *asked).stdout)["cells"]
    assert cell["defense"] == "dynamic"
    assert cell["cost"]["backward_passes"] == 1


def test_a_module_that_adapts_in_forward_is_dynamic_with_its_true_cost() -> None:
    results = dent.evaluate(Inside(NET), attacks=BOTH, **SMALL)
    (cell,) = results.cells
    assert defenses(results) == ["dynamic"]
    assert results.to_json()["cells"][0]["defense"] == "dynamic"
    assert not cell.independent
    assert not cell.cumulative  # the batch stays whole
    assert set(cell.attacks) == {"apgd-ce", "square"}
    assert cell.cost is not None
    # Two forwards, and a backward to the inputs, which costs as much as a forward.
    assert cell.cost.flops == 3 * count_flops(NET, DATA[0][:1])
    assert cell.cost.times_flops is None
    assert cell.cost.backward_passes == 1
    assert "give it and the defense separately" in cell.not_run["denying updates"]
    assert "give it both" in cell.not_run["fpa"]
    for text in (results_text(results), results_markdown(results)):
        assert "dynamic†" in text
        assert "1 backward" in text
        assert "1x" not in text.replace("the static model costs 1x", "")


def test_a_dynamic_module_shown_to_be_independent_may_lose_points() -> None:
    (cell,) = dent.evaluate(Each(NET), **SMALL).cells
    assert cell.cell.is_dynamic
    assert cell.independent
    assert cell.cumulative


@pytest.mark.parametrize("make", [Tented, Drifting])
def test_state_carried_from_call_to_call_is_found_and_every_batch_starts_clean(
    make: type[nn.Module],
) -> None:
    module = make(tiny()).eval()
    before = deepcopy(module.state_dict())
    results = dent.evaluate(module, attacks=BOTH, **SMALL)
    (cell,) = results.cells
    assert defenses(results) == ["dynamic"]
    assert all(torch.equal(module.state_dict()[name], value) for name, value in before.items())
    assert "state kept" in [one["name"] for one in cell.findings]
    # Each batch is answered by the module as it was given.
    for batch in cut_batches(8, 4, seed=0):
        answers = deepcopy(module)(DATA[0][batch]).argmax(1)
        for point, answer in zip(batch.tolist(), answers.tolist(), strict=True):
            assert cell.verdicts["natural"][point] == (answer == int(DATA[1][point]))


@pytest.mark.parametrize("make", [Inside, Tented])
def test_a_forward_only_defense_beside_its_static_model_is_attacked_directly_and_by_transfer(
    make: Any,
) -> None:
    results = dent.evaluate(
        NET, {"static": "static", "mine": lambda model: make(deepcopy(model)).eval()},
        attacks=BOTH, **SMALL,
    )  # fmt: skip
    static, mine = results.cells
    assert results.complete
    assert set(mine.attacks) == {"apgd-ce", "square", "denying updates"}
    assert set(mine.not_run) == {"fpa"}
    assert not mine.independent
    assert "optimization inside" in [one["name"] for one in mine.findings]
    assert mine.cost is not None
    assert static.cost is not None
    assert static.cost.times_flops == 1
    assert mine.cost.times_flops is not None
    assert mine.cost.times_flops > 2.5


def test_no_other_defense_is_put_on_a_model_that_adapts() -> None:
    with pytest.raises(ValueError, match=r"no other defense for Inside.*got dent\+"):
        dent.evaluate(Inside(NET), ["static", "dent+"], **SMALL)
    with pytest.raises(ValueError, match="carries its adaptation from batch to batch"):
        dent.evaluate(dent.defend(NET, "tent"), **SMALL)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Remembers, "breaks a promise: clean state: expected a call to return the same"),
        (ChangesModel, "unchanged model: expected the model as it was"),
        (OtherCall, "breaks a promise: adapt and predict: expected predict"),
        (OneRow, r"breaks a promise: logits: expected floats.*got .*\(1, 4\)"),
    ],
)
def test_a_broken_promise_is_named_before_any_attack(make: Any, message: str) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("a unit was done")

    for asked in ({"mine": make(deepcopy(NET))}, {"mine": lambda net: make(deepcopy(net))}):
        with pytest.raises(ValueError, match=message):
            dent.evaluate(NET, asked, on_unit=refuse, **SMALL)


def test_a_state_that_cannot_be_sent_is_refused_for_workers_alone() -> None:
    defense = NotPicklable(NET)
    assert dent.evaluate(NET, {"mine": defense}, suite="none", **SMALL).complete
    asked = Evaluation(models="net", own=("mine",), defenses=("mine",), n=None)
    sources = Sources(asked, {"net": NET}, from_arrays(*DATA), {"mine": defense})
    with pytest.raises(ValueError, match="picklable state: expected a state that pickle can store"):
        sources.check_states()


def test_a_random_model_is_not_taken_for_a_dynamic_one() -> None:
    class Noisy(nn.Module):
        def forward(self, inputs: Tensor) -> Tensor:
            logits: Tensor = NET(inputs + 0.01 * torch.randn_like(inputs))
            return logits

    (cell,) = dent.evaluate(Noisy(), ["static"], suite="none", **SMALL).cells
    assert cell.cell.static


def test_an_own_defense_by_path_works_with_attack_compare_and_report(tmp_path: Any) -> None:
    np.savez(tmp_path / "data.npz", images=DATA[0].numpy(), labels=DATA[1].numpy())
    small = ["--data", tmp_path / "data.npz", "--n", "8", "--eps", "0.03", "--steps", "2"]
    net, mine = "own_defenses:make_net", "own_defenses:make"
    made = tmp_path / "made.npz"
    done = run("attack", net, "--attack", "fpa", "--defense", mine, "--out", made, *small)
    assert done.returncode == 0, done.stderr
    images = torch.from_numpy(np.load(made)["images"])
    assert (images - DATA[0]).abs().max() <= 0.03 + 1e-6
    for model in ("own_defenses:make_defended", "own_defenses:make_centered"):  # they bring their own
        done = run("attack", model, "--attack", "unrolled", "--out", made, *small)
        assert done.returncode == 0, done.stderr
    assert "Centered" in done.stdout
    for name in ("one", "two"):
        out = ["--out", tmp_path / name]
        done = run("evaluate", "--model", net, "--defense", mine, *small, *out, "--no-battle")
        assert done.returncode == 0, done.stderr
    done = run("compare", tmp_path / "one", tmp_path / "two", "--json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert rows
    assert all(row["difference"] == 0 for row in rows)
    (tmp_path / "one" / "report.html").unlink()
    done = run("report", tmp_path / "one")
    assert done.returncode == 0, done.stderr
    assert mine in (tmp_path / "one" / "report.html").read_text()
