"""A user's own attacks are run and scored as those of dent: in memory, by name, on Ray, resumed."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import own_attacks
import pytest
import torch
from cells import labeled, numbers, only, tiny
from commands import run, run_script
from own_attacks import fgsm, frozen, random_signs
from own_defenses import Inside
from torch import Tensor

import dent
from dent.attacks.adaptive import denying_updates
from dent.attacks.checks import InvalidPointsError
from dent.attacks.own import run_own
from dent.evaluation import Evaluation
from dent.evaluation.digests import digest_object
from dent.evaluation.plan import Unit, make_plan
from dent.evaluation.sources import Sources, cut_batches

NET = tiny()
IMAGES, LABELS = labeled(NET, 8)
EPS = 0.1
SMALL: dict[str, Any] = {"data": (IMAGES, LABELS), "eps": EPS, "batch_size": 4, "battle": False}
PATH = "own_attacks:fgsm"


def find_right(
    model: Callable[[Tensor], Tensor], attacked: Callable[[Tensor], Tensor]
) -> dict[int, bool]:
    """Which points a model gets right when `fgsm` on another is submitted to it, batch by batch."""
    right: dict[int, bool] = {}
    for batch in cut_batches(len(LABELS), 4, seed=0):
        inputs, labels = IMAGES[batch], LABELS[batch]
        points = fgsm(attacked, inputs.clone(), labels, eps=EPS, norm="linf").detach()
        with torch.no_grad():
            both = [model(each).argmax(1) == labels for each in (inputs, points)]
        right |= dict(zip(batch.tolist(), (both[0] & both[1]).tolist(), strict=True))
    return right


def test_an_own_attack_is_scored_as_computed_by_hand_in_memory_and_by_name() -> None:
    expected = find_right(NET, NET)
    assert 0 < sum(expected.values()) < len(expected)
    asked: list[Any] = [fgsm, [fgsm], {"mine": fgsm}, PATH, [PATH], {"mine": PATH}, {PATH: PATH}]
    names = ["fgsm", "fgsm", "mine", PATH, PATH, "mine", PATH]
    for attacks, name in zip(asked, names, strict=True):
        cell = only(dent.evaluate(NET, "static", attacks=attacks, **SMALL))
        assert list(cell.attacks) == [name]
        assert cell.kinds == {name: "direct"}
        assert cell.points == expected


def test_a_defense_that_depends_on_its_batch_gets_the_whole_batch_once() -> None:
    defended = dent.defend(NET, "dent:steps=1")
    cell = only(dent.evaluate(NET, "dent:steps=1", attacks=fgsm, **SMALL))
    assert cell.points == find_right(defended, defended)


def test_own_attacks_stand_beside_those_of_the_list_and_take_options_and_the_budget() -> None:
    attacks = ["apgd-ce", random_signs, "own_attacks:random_signs:steps=3", fgsm]
    results = dent.evaluate(NET, "static", attacks=attacks, **SMALL)
    names = ["apgd-ce", "random_signs", "own_attacks:random_signs", "fgsm"]
    assert list(only(results).attacks) == names
    assert [list(cell["attacks"])[2:] for cell in results.about["plan"]["cells"]] == [names]
    plan = results.about["plan"]["cells"][0]["attacks"]
    assert plan["own_attacks:random_signs"] == {"steps": 3}
    budget = dent.evaluate(NET, "static", attacks=attacks, steps=2, **SMALL)
    plan = budget.about["plan"]["cells"][0]["attacks"]
    assert [plan[name] for name in names] == [{"steps": 2}] * 3 + [{}]
    bound = {"mine": "own_attacks:random_signs:steps=3", "other": partial(random_signs, steps=3)}
    bound |= {"apgd-ce": "apgd-ce:steps=3", f"{PATH} (again)": f"{PATH} (again)"}
    assert list(only(dent.evaluate(NET, "static", attacks=bound, **SMALL)).attacks) == list(bound)


def test_a_suite_and_an_own_attack_run_together() -> None:
    cell = only(dent.evaluate(NET, "static", attacks=["quick", fgsm], steps=1, **SMALL))
    assert list(cell.attacks) == ["apgd-ce", "denying updates", "fpa", "fgsm"]
    assert Evaluation(attacks=["full", PATH]).has_protocol
    assert not Evaluation(attacks=[PATH], suite="full").has_protocol
    with pytest.raises(ValueError, match="expected a name of its own for each attack, got apgd-ce and"):
        Evaluation(attacks=["quick", "apgd-ce:steps=50"])


@pytest.mark.parametrize("defense", ["static", "dent:steps=1"])
def test_an_attack_gets_the_model_as_deployed_and_what_it_accepts(defense: str) -> None:
    seen: list[dict[str, Any]] = []

    def watch(
        model: Any, inputs: Tensor, labels: Tensor, *, eps: float, norm: str, **others: Any
    ) -> Tensor:
        seen.append({"model": model, "eps": eps, "norm": norm, **others})
        return inputs

    def plain(model: Any, inputs: Tensor, labels: Tensor, eps: float, norm: str, mask: Tensor) -> Tensor:
        seen.append({"mask": mask})
        return inputs

    results = dent.evaluate(NET, defense, attacks={"watch": watch, "plain": plain}, **SMALL)
    cell = only(results).cell
    first = next(one for one in seen if "seed" in one)
    assert set(first) == {"model", "eps", "norm", "seed", "mask", "joint"}
    assert (first["eps"], first["norm"], first["joint"]) == (EPS, "linf", defense != "static")
    assert {one["seed"] for one in seen if "seed" in one} == {
        Unit(cell, batch, "watch").seed(0) for batch in (0, 1)
    }
    assert hasattr(first["model"], "adapt") is (defense != "static")
    assert all(one["mask"].all() for one in seen)  # all images are right, and nothing was broken


def test_an_adaptive_attack_gets_adapt_and_predict_and_is_not_part_of_the_claim() -> None:
    asked = {"static": "static", "adapts": "dent:steps=1", "inside": Inside}
    results = dent.evaluate(NET, asked, attacks=[frozen, "own_attacks:frozen", fgsm], **SMALL)
    static, adapts, inside = results.cells
    assert results.complete
    kinds = {"frozen": "adaptive", "own_attacks:frozen": "adaptive", "fgsm": "direct"}
    assert static.kinds == adapts.kinds == kinds
    assert static.points == find_right(NET, NET)  # a static model has nothing to freeze
    assert list(inside.attacks) == ["fgsm"]
    assert set(inside.not_run) == {"frozen", "own_attacks:frozen"}
    alone = dent.evaluate(NET, "dent:steps=1", attacks=[fgsm], **SMALL)
    assert adapts.direct == only(alone).worst


def test_denying_updates_submits_the_points_of_own_attacks_on_the_static_model(tmp_path: Path) -> None:
    defended = dent.defend(NET, "dent:steps=1")
    text = f"denying updates:attacks=({PATH})"
    results = dent.evaluate(NET, "dent:steps=1", attacks=[text], out=tmp_path / "run", **SMALL)
    assert only(results).points == find_right(defended, NET)
    about = json.loads((tmp_path / "run" / "run.json").read_text())
    assert about["attacks_sha256"] == {PATH: digest_object(fgsm)}
    mask = torch.arange(8) % 2 == 0
    points = fgsm(NET, IMAGES.clone(), LABELS, eps=EPS, norm="linf").detach()
    for attacks in ([fgsm], [PATH]):
        result = denying_updates(defended, NET, IMAGES, LABELS, eps=EPS, attacks=attacks, mask=mask)
        assert torch.equal(result.inputs[mask], points[mask])
        assert torch.equal(result.inputs[~mask], IMAGES[~mask])
        torch.testing.assert_close(result.logits, defended(result.inputs))
    alone = denying_updates(defended, NET, IMAGES, LABELS, eps=EPS, attacks=["apgd-ce"], steps=2)
    both = denying_updates(defended, NET, IMAGES, LABELS, eps=EPS, attacks=["apgd-ce", fgsm], steps=2)
    assert both.success.sum() >= alone.success.sum()
    with pytest.raises(ValueError, match="expected attacks with names of their own, got two as 'fgsm'"):
        denying_updates(defended, NET, IMAGES, LABELS, eps=EPS, attacks=[fgsm, partial(fgsm).func])
    with pytest.raises(InvalidPointsError, match="^far: a perturbation of 0.2 left the ball of 0.1"):
        denying_updates(defended, NET, IMAGES, LABELS, eps=EPS, attacks=[own_attacks.far])


BROKEN = {
    "nothing": r"expected a tensor \(4, 3, 8, 8\) or an AttackResult from the attack, got NoneType",
    "flat": r"expected points of the inputs' shape, \(4, 3, 8, 8\), from the attack, got \(4, 192\)",
    "double": "expected points of the inputs' dtype, torch.float32, from the attack, got torch.float64",
    "undefined": "NaN or infinity in 4 of 4 points",
    "far": "a perturbation of 0.2 left the ball of 0.1",
    "bright": r"values from .* to 1.* left \[0, 1\]",
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_breaks_the_rules_stops_the_run_and_is_named(name: str, tmp_path: Path) -> None:
    for attack in (getattr(own_attacks, name), f"own_attacks:{name}"):
        with pytest.raises(
            InvalidPointsError, match=rf"^(own_attacks:)?{name}: {BROKEN[name]}.*scored$"
        ):
            dent.evaluate(NET, "static", attacks=["apgd-ce:steps=1", attack], **SMALL)


def test_an_attack_that_raises_is_a_unit_that_failed() -> None:
    results = dent.evaluate(NET, "static", attacks=[fgsm, own_attacks.failing], **SMALL)
    assert not results.complete
    assert "RuntimeError: no idea" in str(results.cells[0].missing)
    results = dent.evaluate(NET, "static", attacks=["own_attacks:failing"], **SMALL)
    assert "own_attacks:failing raised RuntimeError: no idea" in str(results.cells[0].missing)


def needs_more(
    model: Any, inputs: Tensor, labels: Tensor, *, eps: float, norm: str, more: int
) -> Tensor:
    return inputs


def needs_less(model: Any, inputs: Tensor, labels: Tensor) -> Tensor:
    return inputs


def of_another_kind(model: Any, inputs: Tensor, labels: Tensor, *, eps: float, norm: str) -> Tensor:
    return inputs


of_another_kind.kind = "scenario"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (dent.attacks.pgd, "expected another name for your own attack: 'pgd' is of dent's list"),
        ({"natural": fgsm}, "'natural' is of dent's list"),
        ({"quick": fgsm}, "'quick' is of dent's list"),
        ([fgsm, fgsm], "expected each attack in memory under a name of its own, got two as 'fgsm'"),
        (
            [lambda model, inputs, labels, eps, norm: inputs],
            "expected a name for a lambda; give attacks",
        ),
        ({"mine": 3}, "mine: expected an attack: a function .*, got int"),
        ({"mine": "apgd-ce"}, r"got 'apgd-ce' as 'mine'; name a variant as 'apgd-ce \(mine\)'"),
        ([fgsm, 3], "attacks.1: expected an attack such as apgd-ce .*, got 3"),
        ("own_attacks:missing", "'own_attacks' has no 'missing'"),
        ("no_such_module:attack", "no module 'no_such_module'"),
        (
            f"{PATH}:steps=3",
            "own_attacks:fgsm: expected a function .* got an unexpected keyword .*steps",
        ),
        (f"{PATH}:eps=3", "expected no option eps, which the evaluation gives to attacks"),
        (f"{PATH}:steps", "expected a text such as package.module:function:steps=10"),
        ([PATH, f"{PATH}:steps=3"], "expected a name of its own for each attack"),
        (needs_more, "needs_more: expected a function .*missing a required .*more"),
        (needs_less, "needs_less: expected a function .*unexpected keyword argument 'eps'"),
        (of_another_kind, "expected `kind` of the attack as direct or adaptive, got 'scenario'"),
        ("denying updates:attacks=(own_attacks:missing)", "'own_attacks' has no 'missing'"),
        ("denying updates:attacks=(fgsm)", "unknown name 'fgsm'"),
    ],
)
def test_what_is_no_attack_is_refused_before_any_work(asked: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dent.evaluate(
            NET, "static", attacks=asked, on_unit=lambda one: pytest.fail(f"{one.unit} was run"), **SMALL
        )


def test_inputs_outside_of_the_mask_stay_natural() -> None:
    mask = torch.tensor([True, False] * 4)
    result = run_own(fgsm, "fgsm", NET, IMAGES, LABELS, eps=EPS, norm="linf", mask=mask)
    assert torch.equal(result.inputs[~mask], IMAGES[~mask])
    assert not (result.inputs[mask] == IMAGES[mask]).flatten(1).all(1).any()
    assert not result.inputs.requires_grad
    assert not IMAGES.requires_grad


STEP = 2


def scale(inputs: Tensor) -> Tensor:
    return inputs * STEP


def test_a_digest_tells_code_settings_and_surroundings_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(rate: float) -> Callable[..., Any]:
        def attack(inputs: Tensor, steps: Any = STEP) -> Tensor:
            return rate * scale(inputs)

        return attack

    def make_other(rate: float) -> Callable[..., Any]:
        def attack(inputs: Tensor, steps: Any = STEP) -> Tensor:
            return rate + scale(inputs)

        return attack

    class Held:
        def __init__(self, rate: float) -> None:
            self.rate = rate

        def attack(self, inputs: Tensor) -> Tensor:
            return self.rate * inputs

    assert digest_object(make(1.0)) == digest_object(make(1.0))
    assert digest_object(Held(1.0).attack) == digest_object(Held(1.0).attack)
    made = [make(1.0), make(2.0), make_other(1.0), partial(make(1.0), steps=3), fgsm]
    made += [Held(1.0).attack, Held(2.0).attack]
    digests = [digest_object(one) for one in made]
    assert len(set(digests)) == len(made)
    monkeypatch.setitem(globals(), "STEP", 3)  # used by a function that the attack uses
    assert digest_object(made[0]) != digests[0]


RUN = """
import sys
import dent
from cells import tiny, labeled
net = tiny()
results = dent.evaluate(
    net, ["static", "dent:steps=1"], data=labeled(net, 8), eps=0.1, batch_size=4, battle=False,
    attacks=["own_attacks:mortal", "own_attacks:random_signs", "apgd-ce:steps=2"], out=sys.argv[1],
)
"""


def test_a_killed_run_of_an_own_attack_resumes_to_the_same_numbers(tmp_path: Path) -> None:
    broken = run_script(RUN, tmp_path / "broken", DIE_AT="3")
    assert broken.returncode == -signal.SIGKILL, broken.stderr
    assert list((tmp_path / "broken" / "units").rglob("*mortal*.json"))
    resumed, whole = (run_script(RUN, tmp_path / name) for name in ("broken", "whole"))
    assert resumed.returncode == whole.returncode == 0, resumed.stderr + whole.stderr
    ours, theirs = (dent.load_results(tmp_path / name) for name in ("broken", "whole"))
    assert ours.complete
    assert numbers(ours) == numbers(theirs)
    about = json.loads((tmp_path / "whole" / "run.json").read_text())
    assert list(about["attacks_sha256"]) == ["own_attacks:mortal", "own_attacks:random_signs"]


def test_another_attack_is_another_run_and_results_need_no_code(tmp_path: Path) -> None:
    asked: dict[str, Any] = SMALL | {"out": tmp_path}
    done = dent.evaluate(NET, "static", attacks={"mine": random_signs, "frozen": frozen}, **asked)
    dent.evaluate(NET, "static", attacks={"mine": random_signs, "frozen": frozen}, **asked)
    with pytest.raises(ValueError, match="holds another run: attacks_sha256.mine"):
        dent.evaluate(NET, "static", attacks={"mine": fgsm, "frozen": frozen}, **asked)
    assert dent.load_results(tmp_path).to_json() == done.to_json()
    evaluation = Evaluation(own_attacks=("mine",), attacks=("mine",), models="resnet20-at", n=2)
    with pytest.raises(ValueError, match="mine is an attack in the memory of another program"):
        make_plan(Sources(evaluation))


def test_ray_gives_own_attacks_the_same_numbers() -> None:
    pytest.importorskip("ray")
    rate = 0.5

    def local(model: Any, inputs: Tensor, labels: Tensor, *, eps: float, norm: str) -> Tensor:
        return fgsm(model, inputs, labels, eps=rate * eps, norm=norm)  # sent by value

    asked = {"local": local, "mine": fgsm, "own_attacks:random_signs": "own_attacks:random_signs"}
    asked |= {"denying updates": f"denying updates:attacks=({PATH})"}
    settings: dict[str, Any] = SMALL | {"attacks": asked, "threads": 1}
    there = dent.evaluate(NET, ["static", "dent:steps=1"], engine="ray", workers=1, **settings)
    here = dent.evaluate(NET, ["static", "dent:steps=1"], **settings)
    assert there.complete
    assert numbers(there) == numbers(here)


def test_the_command_line_and_files_take_own_attacks(tmp_path: Path) -> None:
    flags = ["--model", "runs:model", "--data", "runs:images", "--n", 8, "--batch-size", 4]
    flags += ["--eps", "5/255", "--defense", "static"]
    text = "own_attacks:random_signs:steps=3"
    chosen = ["--attack", "apgd-ce:steps=1", "--attack", text]
    done = run(
        "evaluate", *flags, *chosen, "--threads", 1, "--out", tmp_path / "run", "--json", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    (cell,) = json.loads(done.stdout)["cells"]
    assert list(cell["attacks"]) == ["apgd-ce", "own_attacks:random_signs"]
    assert "own_attacks:random_signs" in (tmp_path / "run" / "report.html").read_text()
    (tmp_path / "asked.yaml").write_text(f"attacks:\n  - apgd-ce:steps=1\n  - {text}\n")
    again = run(
        "evaluate",
        "asked.yaml",
        *flags,
        "--threads",
        1,
        "--out",
        tmp_path / "run",
        "--json",
        cwd=tmp_path,
    )
    assert json.loads(again.stdout)["cells"] == json.loads(done.stdout)["cells"]
    planned = run("evaluate", *flags, *chosen, "--dry-run", cwd=tmp_path)
    assert "unknown" in planned.stdout
    assert "the cost of 2 units of your own attacks or defenses is unknown" in planned.stdout
    made = run("attack", *flags[1:2], *flags[2:8], "--attack", text, "--json", cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    assert json.loads(made.stdout)["attacked"]["n"] == 8
    broken = run("attack", *flags[1:2], *flags[2:8], "--attack", "own_attacks:far", cwd=tmp_path)
    assert broken.returncode == 2
    assert "own_attacks:far: a perturbation of" in broken.stderr
