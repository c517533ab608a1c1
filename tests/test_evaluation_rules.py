"""The rules of evaluation: whole batches, clean submissions, the ball, chains, seeds, closed forms."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cells import EPS, INDEPENDENT, Watched, labeled, outcomes, sources_of, tiny, units_of_kind
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import dent
from dent.attacks import AttackResult
from dent.attacks.checks import InvalidPointsError
from dent.evaluation import evaluate
from dent.evaluation.attacks import ATTACKS
from dent.evaluation.plan import Unit, make_plan
from dent.evaluation.sources import cut_batches
from dent.evaluation.spec import Cell
from dent.evaluation.store import UnitResult
from dent.evaluation.suites import ABOUT, BATTLE, NATURAL


@given(n=st.integers(1, 60), size=st.integers(1, 70), seed=st.integers(0, 5))
def test_batches_are_a_partition_by_seed_and_size(n: int, size: int, seed: int) -> None:
    batches = cut_batches(n, size, seed=seed)
    assert sorted(torch.cat(batches).tolist()) == list(range(n))
    assert {len(batch) for batch in batches[:-1]} <= {size}
    assert len(batches) == -(-n // size)
    assert all(map(torch.equal, batches, cut_batches(n, size, seed=seed)))
    if n > 12:
        assert not torch.equal(torch.cat(batches), torch.cat(cut_batches(n, size, seed=seed + 1)))


@pytest.mark.parametrize(
    ("suite", "norm"), [("standard", "linf"), ("adaptive", "linf"), ("plus", "l2"), ("rand", "linf")]
)
def test_a_dependent_defense_is_asked_for_whole_batches_and_scored_once_at_last(
    suite: str, norm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = tiny()
    images, labels = labeled(net, 10)
    sources = sources_of(net, (images, labels), "dent:steps=1", suite=suite, norm=norm)
    plan = make_plan(sources)
    units = units_of_kind(plan, "direct", "adaptive")
    assert {unit.batch for unit in units} == {0, 1, 2}
    assert [len(batch) for batch in plan.points] == [4, 4, 2]
    watched = Watched(monkeypatch)
    fresh = dent.defend(tiny(), "dent", steps=1)
    for unit in units:
        watched.asked.clear()
        watched.ended.clear()
        outcome = outcomes(plan, sources, [unit])[unit]
        members = plan.points[unit.batch]
        for _, inputs, _ in watched.asked:
            # A perturbed image is still nearest to its own: who is in the batch, and in which order.
            nearest = torch.cdist(inputs.flatten(1), images.flatten(1)).argmin(1)
            assert torch.equal(nearest, members)
        ((before, result),) = watched.ended
        scoring = list(watched.asked)[before:]
        assert [what for what, _, _ in scoring] == ["adapt", "predict"]  # once, after the attack
        assert all(torch.equal(inputs, result.inputs) for _, inputs, _ in scoring)
        logits = scoring[-1][2]
        assert logits is not None
        assert torch.equal(logits, fresh(result.inputs))  # bit for bit: a clean state
        assert outcome.points == tuple(members.tolist())
        assert outcome.correct == tuple((logits.argmax(1) == labels[members]).tolist())
        assert all(outcome.given)


def lying(change: Callable[[Tensor, Tensor], Tensor], *, says: bool) -> Callable[..., AttackResult]:
    """An attack that returns changed inputs, and says of all that they are broken, or that none is."""

    def run(subject: Any, inputs: Tensor, labels: Tensor, **_: Any) -> AttackResult:
        success = torch.full_like(labels, says, dtype=torch.bool)
        return AttackResult(change(inputs, labels), success, torch.zeros(len(inputs), 4), 0, 0)

    return run


@pytest.mark.parametrize("says", [True, False])
@pytest.mark.parametrize("defense", ["static", "dent:steps=1"])
def test_what_an_attack_says_of_itself_is_not_believed(
    says: bool, defense: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = tiny()
    sources = sources_of(net, labeled(net, 8, wrong=3), defense, suite="standard")
    monkeypatch.setitem(
        ATTACKS, "apgd-ce", replace(ATTACKS["apgd-ce"], run=lying(lambda inputs, _: inputs, says=says))
    )
    plan = make_plan(sources)
    natural, attacked = (
        outcomes(plan, sources, [unit for unit in plan.units() if unit.attack == name])
        for name in (NATURAL, "apgd-ce")
    )
    right = [outcome.correct for outcome in natural.values()]
    assert right == [outcome.correct for outcome in attacked.values()]
    assert {True, False} == {one for bits in right for one in bits}


def pushed(inputs: Tensor, norm: str, share: float) -> Tensor:
    """Inputs moved by a share of eps in the norm, every value alike."""
    each = inputs[0].numel() ** -{"linf": 0.0, "l2": 0.5, "l1": 1.0}[norm]
    return inputs.add(each * EPS[norm] * share)


def replaced(inputs: Tensor, value: float) -> Tensor:
    points = inputs.clone()
    points[-1, 0, 0, 0] = value
    return points


BREACHES: dict[str, Callable[[Tensor, str], Tensor]] = {
    "out of the ball": lambda inputs, norm: pushed(inputs, norm, 1.02),
    "one of them": lambda inputs, norm: torch.cat([inputs[:-1], pushed(inputs[-1:], norm, 1.02)]),
    "nan": lambda inputs, norm: replaced(inputs, float("nan")),
    "below 0": lambda inputs, norm: replaced(inputs, -0.001),
    "above 1": lambda inputs, norm: replaced(inputs, 1.001),
}


@pytest.mark.parametrize("norm", list(EPS))
@pytest.mark.parametrize("breach", [*BREACHES, None])
def test_what_leaves_the_ball_or_the_range_stops_the_run(
    norm: str, breach: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    net = tiny()
    images, labels = labeled(net, 4)
    images = images / 2 + 0.25
    # Where a value is at the border, a little beyond it is still in the ball.
    images[:, 0, 0, 0] = {"below 0": 0.0, "above 1": 1.0}.get(str(breach), 0.5)
    change = BREACHES[breach] if breach else (lambda inputs, norm: pushed(inputs, norm, 0.9999))
    run = lying(lambda inputs, _: change(inputs, norm), says=False)
    monkeypatch.setitem(ATTACKS, "apgd-t", replace(ATTACKS["apgd-t"], run=run))
    done: list[UnitResult] = []
    asked: dict[str, Any] = {
        "data": (images, labels), "suite": "standard", "norm": norm, "eps": EPS[norm], "steps": 1,
        "queries": 1, "out": tmp_path / "run", "on_unit": done.append,
    }  # fmt: skip
    unit = Unit(Cell("net", "static", EPS[norm], norm), 0, "apgd-t")
    kept = tmp_path / "run" / "units" / unit.file
    if breach is None:
        results = evaluate({"net": net}, "static", **asked)
        assert results.complete
        assert kept.exists()
        return
    with pytest.raises(InvalidPointsError, match=r"apgd-t, batch 0: .* left .*; nothing is scored"):
        evaluate({"net": net}, "static", **asked)
    assert [one.unit.attack for one in done] == [NATURAL, "apgd-ce"]  # what was before is kept
    assert sorted(path.name for path in kept.parent.iterdir()) == sorted(
        Path(one.unit.file).name for one in done
    )


def test_later_attacks_get_what_stands_where_inputs_are_independent_and_all_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The worst case is the same either way where attacks are direct: all that they draw is drawn for
    the whole batch by the unit's seed, so what happens to a point does not depend on who else is there.
    (It need not be for attacks that keep the strongest batch whole: they weigh what they are given.)
    """
    net, watched = tiny(), Watched(monkeypatch)
    data, worst = labeled(net, 24, wrong=3), []
    for exhaustive in (False, True):
        watched.masks.clear()
        done: list[UnitResult] = []
        results = evaluate(
            {"net": net}, ["static", INDEPENDENT, "dent:steps=1"], data=data, batch_size=8, steps=3,
            suite="standard", queries=30, eps=0.025, exhaustive=exhaustive, on_unit=done.append,
        )  # fmt: skip
        assert results.complete
        standing: dict[tuple[Cell, int], list[bool]] = {}
        masks = iter(watched.masks)
        shares = []
        for one in done:
            assert one.outcome is not None
            if one.unit.attack in (ABOUT, BATTLE):
                continue
            at = one.unit.cell, one.unit.batch
            left = standing.setdefault(at, [True] * 8)
            dependent = one.unit.cell.defense.startswith("dent:")
            expected = tuple([True] * 8 if exhaustive or dependent else left)
            if one.unit.attack == NATURAL:
                expected = (True,) * 8
            elif any(expected):
                assert next(masks)[2] == expected
            assert one.outcome.given == expected
            pairs = list(zip(one.outcome.correct, expected, strict=True))
            assert (True, False) not in pairs  # what was not attacked is broken already
            standing[at] = [a and b for a, b in zip(left, one.outcome.correct, strict=True)]
            shares.append(sum(expected))
        assert next(masks, None) is None
        assert (min(shares) < 8) != exhaustive
        for cell in results.cells:
            every = [right for at, bits in standing.items() if at[0] == cell.cell for right in bits]
            assert cell.worst.correct == sum(every)
            assert 0 < cell.worst.correct < cell.natural.correct
        worst.append([cell.points for cell in results.cells])
    assert worst[0] == worst[1]


class Noisy(nn.Module):
    """A model that draws random numbers by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.net = tiny()

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.net(inputs)
        return logits + 0.5 * torch.rand_like(logits)


@pytest.mark.parametrize("net", [tiny(), Noisy()], ids=["plain", "random"])
def test_an_outcome_depends_on_seed_cell_batch_and_attack_alone(net: nn.Module) -> None:
    data, asked = labeled(tiny(), 6, wrong=1), ("static", "dent:steps=1")
    settings: dict[str, Any] = {"suite": "quick", "batch_size": 3, "steps": 1}
    plan = make_plan(sources_of(net, data, *asked, **settings))
    units = list(plan.units())
    assert len({unit.seed(0) for unit in units} | {unit.seed(1) for unit in units}) == 2 * len(units)
    first = outcomes(plan, sources_of(net, data, *asked, **settings), units)
    torch.manual_seed(99)
    torch.rand(5)
    backwards = outcomes(plan, sources_of(net, data, *asked, **settings), reversed(units))
    assert backwards == first
    for unit in units[::5]:
        torch.rand(3)
        assert outcomes(plan, sources_of(net, data, *asked, **settings), [unit])[unit] == first[unit]
    other = outcomes(plan, sources_of(net, data, *asked, **settings, seed=1), units)
    assert [one.points for one in other.values()] != [one.points for one in first.values()]


def least_margin(net: nn.Linear, images: Tensor, labels: Tensor, eps: float, norm: str) -> Tensor:
    """By how much the label's logit leads, at worst in the ball and in [0, 1], over every other."""
    weight, bias = net.weight.detach().double(), net.bias.detach().double()
    inputs = images.flatten(1).double()
    direction = weight[labels, None] - weight[None]  # (N, classes, inputs)
    if norm == "linf":  # every value goes to its end of the interval
        low, high = (inputs - eps).clamp(min=0), (inputs + eps).clamp(max=1)
        ends = torch.where(direction > 0, low[:, None], high[:, None])
        lead = (direction * ends).sum(2)
    else:
        dual = {"l2": 2.0, "l1": torch.inf}[norm]
        lead = torch.einsum("nkd,nd->nk", direction, inputs) - eps * direction.norm(dual, 2)
    lead = lead + bias[labels, None] - bias[None]
    return lead.scatter(1, labels[:, None], torch.inf).amin(1)


@pytest.mark.parametrize("norm", list(EPS))
def test_the_worst_case_of_a_linear_model_is_the_closed_form(norm: str) -> None:
    net = nn.Sequential(nn.Flatten(), linear := nn.Linear(48, 3))
    images = torch.rand(40, 3, 4, 4)
    if norm != "linf":
        images = 0.4 + 0.2 * images  # so that the border is out of reach
    linear.bias.data = -linear.weight.data @ images.flatten(1).mean(0)  # so that boundaries are not
    labels = net(images).argmax(1)
    labels[:4] = (labels[:4] + 1) % 3
    counts = []
    for share in (0.0, 0.5, 1.0, 2.0):
        eps = share * {"linf": 0.02, "l2": 0.03, "l1": 0.1}[norm]
        results = evaluate(
            {"linear": net}, "static", data=(images, labels), suite="standard", eps=eps, norm=norm,
            batch_size=16, steps=20, queries=5,
        )  # fmt: skip
        margin = least_margin(linear, images, labels, eps, norm)
        assert float(margin.abs().min()) > 1e-5  # what rounding does decides nothing
        (cell,) = results.cells
        assert cell.points == dict(enumerate((margin > 0).tolist()))
        counts.append(cell.worst.correct)
    assert counts[0] == 36
    assert counts == sorted(counts, reverse=True)
    assert len(set(counts)) == 4


@pytest.mark.parametrize(
    ("defense", "labels", "size", "expected"),
    [
        ("dent+:steps=1", [0, 1, 2, 0, 1], 4, {"batch of one": 1.0}),
        ("dent+:steps=1", [0, 1, 2, 0], 1, {"batch of one": 4.0}),
        ("dent+:steps=1", [2, 2, 2, 2, 2], 2, {"batch of one": 1.0, "batch of one class": 2.0}),
        ("dent+:steps=1", [0, 1, 2, 0], 4, {}),
        ("dent:steps=1", [2, 2, 2, 2, 2], 2, {}),
        ("static", [2, 2, 2, 2, 2], 2, {}),
    ],
)
def test_batches_that_information_maximization_cannot_use_are_a_finding(
    defense: str, labels: list[int], size: int, expected: dict[str, float]
) -> None:
    net = tiny()
    data = (labeled(net, len(labels))[0], torch.tensor(labels))
    results = evaluate(
        {"net": net}, [defense], data=data, suite="none", batch_size=size, eps=0.01, seed=1
    )
    (cell,) = results.cells
    found = {one["name"]: one["figures"].get("batches") for one in cell.findings}
    assert {name: count for name, count in found.items() if name.startswith("batch of")} == expected
