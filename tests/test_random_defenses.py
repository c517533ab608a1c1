"""Random defenses: found by asking, attacked over several draws, judged once and by majority."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from cells import labeled, tiny
from own_defenses import Coin, LyingCoin, SharedCoin, UndeclaredCoin
from torch import Tensor

import dent
from dent.attacks import adaptive
from dent.evaluation.plan import SUBMISSIONS, Unit
from dent.evaluation.sources import cut_batches
from dent.evaluation.spec import Cell
from dent.evaluation.store import Outcome, UnitResult
from dent.evaluation.suites import DRAWS
from dent.evaluation.tally import Tally
from dent.report.evaluation import evaluation_page, results_markdown, results_text, write_headlines

NET = tiny()
DATA = labeled(NET, 32)
SMALL: dict[str, Any] = {"data": DATA, "eps": 0.03, "batch_size": 16, "steps": 2, "queries": 4}


@pytest.mark.parametrize("make", [Coin, UndeclaredCoin, SharedCoin])
def test_verdicts_are_those_of_submissions_with_seeds_of_the_unit(make: type[Coin]) -> None:
    (cell,) = dent.evaluate(NET, {"coin": make}, suite="none", **SMALL).cells
    assert cell.majority is not None
    defense, one, most = make(NET), 0, 0
    for number, batch in enumerate(cut_batches(32, 16, seed=0)):
        seed = Unit(cell.cell, number, "natural").seed(0)
        votes = []
        for submission in range(SUBMISSIONS):
            torch.manual_seed(seed + 1 + submission)
            votes.append(defense(DATA[0][batch]).argmax(1) == DATA[1][batch])
        one += int(votes[0].sum())
        most += int((torch.stack(votes).float().mean(0) > 0.5).sum())
    assert (cell.natural.correct, cell.majority.natural.correct) == (one, most)
    assert one != most


def test_what_is_not_random_has_no_majority() -> None:
    results = dent.evaluate(NET, ["static", "hedge:steps=2"], **SMALL)
    assert all(cell.majority is None for cell in results.cells)
    assert all(cell["majority"] is None for cell in results.to_json()["cells"])
    assert "majority" not in results_text(results)


def test_gradient_attacks_average_over_draws_in_one_call_if_inputs_are_independent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes: list[int] = []
    predict = Coin.predict

    def watch(self: Coin, inputs: Tensor, state: Tensor) -> Tensor:
        sizes.append(len(inputs) if inputs.requires_grad else 0)
        return predict(self, inputs, state)

    monkeypatch.setattr(Coin, "predict", watch)
    asked = SMALL | {"exhaustive": True}
    dent.evaluate(NET, {"coin": UndeclaredCoin}, attacks=["apgd-ce"], **asked)
    assert max(sizes) > 16  # what stands of a batch, several times
    assert max(sizes) % DRAWS == 0
    sizes.clear()
    dent.evaluate(NET, {"coin": UndeclaredCoin}, attacks=["apgd-ce:draws=3"], **asked)
    assert max(sizes) > 16
    assert max(sizes) % 3 == 0


def test_a_view_is_averaged_over_draws() -> None:
    calls = 0

    class Counted(Coin):
        def adapt(self, inputs: Tensor, **options: Any) -> Tensor:
            nonlocal calls
            calls += 1
            return inputs.detach().mean((1, 2, 3), keepdim=True)

    asked: dict[str, Any] = {"eps": 0.03, "steps": 2, "seed": 0}
    counts = []
    for draws in (1, 4):
        calls = 0
        result = adaptive.unrolled(Counted(NET), *DATA, draws=draws, **asked)
        counts.append(result.gradients)
    assert counts[1] == 4 * counts[0]


def test_a_joint_random_defense_keeps_its_batch() -> None:
    (cell,) = dent.evaluate(NET, {"coin": SharedCoin}, attacks=["apgd-ce", "square"], **SMALL).cells
    assert not cell.missing
    assert not cell.independent
    assert not cell.cumulative
    (finding,) = [one for one in cell.findings if one["name"] == "randomized"]
    assert "square follows one draw" in finding["message"]


def test_independence_that_is_not_true_is_refused_for_random_defenses_too() -> None:
    with pytest.raises(ValueError, match="declares independent = True"):
        dent.evaluate(NET, {"coin": LyingCoin}, **SMALL)


def test_a_point_leaves_a_chain_only_when_it_is_broken_once_and_by_majority() -> None:
    cell = Cell("net", "coin", 0.1, "linf")
    attacks = ("natural", "apgd-ce", "square")
    tally = Tally(
        cell, [[0, 1, 2, 3]], {name: [0] for name in attacks},
        {"apgd-ce": "direct", "square": "direct"},
        cumulative=True, independent=True, randomized=True,
    )  # fmt: skip
    everyone, points = (True,) * 4, (0, 1, 2, 3)
    natural = Outcome(points, (True, True, False, False), everyone, majority=(True, False, True, False))
    tally.add(UnitResult(Unit(cell, 0, "natural"), natural))
    assert tally.find_standing(Unit(cell, 0, "apgd-ce")) == (True, True, True, False)
    # The first point now falls in one submission, and the second one stands in it.
    given = (True, True, True, False)
    first = Outcome(points, (False, True, True, False), given, majority=(True, True, False, False))
    tally.add(UnitResult(Unit(cell, 0, "apgd-ce"), first))
    assert tally.find_standing(Unit(cell, 0, "square")) == (True, True, False, False)
    assert tally.find_correct(attacks[:2]).tolist() == [False, True, False, False]
    assert tally.by_majority().find_correct(attacks[:2]).tolist() == [True, False, False, False]


def test_both_verdicts_are_stored_resumed_and_shown(tmp_path: Path) -> None:
    asked: dict[str, Any] = SMALL | {"suite": "quick", "out": tmp_path}
    defenses = {"static": "static", "coin": Coin}
    results = dent.evaluate(NET, defenses, **asked)
    coin = results.cells[1]
    assert results.complete
    assert coin.majority is not None
    assert coin.majority.worst.correct <= coin.majority.direct.correct <= coin.majority.natural.correct
    again = dent.load_results(tmp_path).cells[1]
    assert again.majority == coin.majority
    assert (again.worst, again.natural) == (coin.worst, coin.natural)
    content = results.to_json()["cells"][1]
    assert content["randomized"] is True
    assert content["majority"]["worst"]["correct"] == coin.majority.worst.correct
    assert "worst case by majority" in results.to_csv()
    for text in (results_text(results), results_markdown(results)):
        assert "Random defenses" in text
        assert f"correct in most of {SUBMISSIONS} submissions" in text
    assert any("by majority" in line for line in write_headlines(results))
    titles = [getattr(block, "title", "") for block in evaluation_page(results).blocks]
    assert any("by majority" in title for title in titles)


def test_a_gain_of_adaptive_attacks_by_luck_alone_is_no_finding() -> None:
    class Lucky(Coin):  # wrong once in a while, whatever is asked
        share = 0.8

    nothing = SMALL | {"eps": 0.0}  # no attack can do anything
    attacks = ["apgd-ce", "denying updates", "high confidence"]
    (cell,) = dent.evaluate(NET, {"lucky": Lucky}, attacks=attacks, **nothing).cells
    assert cell.majority is not None
    assert cell.worst.correct < cell.direct.correct  # by luck
    assert cell.majority.direct.correct - cell.majority.worst.correct == 0
    assert "adaptive is stronger" not in [one["name"] for one in cell.findings]
