"""Any defense is evaluated as dent is: those of the list, and a user's own, in memory and by name."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from cells import labeled, numbers, only, tiny
from commands import run, run_script
from own_defenses import Centered, Inside, Lying, Mortal, Plain, make
from torch import Tensor, nn

import dent
from dent.defense.catalog import DEFENSES
from dent.evaluation import Evaluation
from dent.evaluation.defenses import digest_defense
from dent.evaluation.plan import make_plan
from dent.evaluation.sources import Sources
from dent.evaluation.suites import find_suite
from dent.report.evaluation import results_markdown, results_text, write_headlines

NET = tiny()
DATA = labeled(NET, 8)
SMALL: dict[str, Any] = {"data": DATA, "eps": 0.03, "batch_size": 4, "steps": 2, "queries": 4}
# Attacks that need `steps=` of adapt, and attacks that only need adapt and predict.
NEED_STEPS = {
    *("fpa", "gmsa-min", "averaged"),
    *("short", "short (quarter)", "denying most updates"),
}
NEED_ADAPT = {"lazy", "chained", "balanced"}


@pytest.mark.parametrize(
    "text",
    [
        "views:shifts=1",
        "memo",
        "anti-adversary",
        "hedge:steps=2",
        "energy:steps=2",
        "lame:steps=3",
        "medbn",
        "sar",
        "eata",
        "bn-mix",
    ],
)
def test_every_defense_of_the_list_is_evaluated_with_all_attacks_that_suit_it(text: str) -> None:
    defended = dent.defend(NET, text)
    cell = only(dent.evaluate(NET, text, suite="adaptive", **SMALL))
    assert cell.cell.defense == text
    assert cell.is_fully_attacked
    assert cell.battle is not None
    with torch.no_grad():
        right = defended(DATA[0]).argmax(1) == DATA[1]
    if cell.independent:
        assert cell.natural.correct == int(right.sum())
    suited = {"denying updates", "high confidence", "fpa"}
    if defended.updates:
        suited |= {"unrolled"} | NEED_STEPS | NEED_ADAPT
    assert set(cell.attacks) == suited
    assert bool(cell.scenarios) is not cell.independent
    # By the whole call, backward passes too; only what comes before the adapted layers is cheaper.
    assert cell.cost is not None
    assert cell.cost.times_flops is not None
    most = DEFENSES[text.partition(":")[0]].settings.replace(**_options(text)).forwards
    assert 0.4 * most <= cell.cost.times_flops <= 1.2 * most


def _options(text: str) -> dict[str, int]:
    _, _, rest = text.partition(":")
    return {key: int(value) for key, _, value in (one.partition("=") for one in rest.split(",") if one)}


def test_cost_counts_the_backward_passes_of_a_move_of_the_inputs_exactly() -> None:
    cell = only(dent.evaluate(NET, "energy:steps=3", suite="none", **SMALL))
    assert cell.cost is not None
    assert cell.cost.times_flops == 7  # three forwards, three backwards, and the answer


class Mirrored(nn.Module):
    """A linear model that answers an image and its mirror alike."""

    independent = True

    def __init__(self) -> None:
        super().__init__()
        half = torch.randn(3, 3, 4, 2, generator=torch.Generator().manual_seed(5))
        self.register_buffer("weight", torch.cat([half, half.flip(3)], 3).flatten(1))

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = inputs.flatten(1) @ self.weight.T  # type: ignore[operator]
        return logits


def test_views_of_a_symmetric_linear_model_stand_as_the_static_model_and_as_computed() -> None:
    model, eps = Mirrored().eval(), 0.02
    images = 0.5 + 0.1 * torch.randn(64, 3, 4, 4, generator=torch.Generator().manual_seed(6))
    images = images.clamp(2 * eps, 1 - 2 * eps)  # the ball stays in [0, 1]
    labels = model(images).argmax(1)
    asked: dict[str, Any] = {"data": (images, labels), "eps": eps, "batch_size": 16}
    attacks = ["apgd-t:steps=30,targets=2", "denying updates:steps=30,attacks=apgd-t"]
    static, views = dent.evaluate(model, ["static", "views"], attacks=attacks, **asked).cells
    # The nearest boundary of a linear model: the difference of logits over the L1 norm of the weights.
    weight = model.weight
    assert isinstance(weight, Tensor)
    logits = model(images)
    stands = torch.ones(64, dtype=torch.bool)
    for other in range(3):
        norms = (weight[labels] - weight[other]).abs().sum(1)
        own = logits.gather(1, labels[:, None]).squeeze(1)
        stands &= (labels == other) | (own - logits[:, other] > eps * norms)
    assert 0 < int(stands.sum()) < 64
    assert static.points == views.points == dict(enumerate(stands.tolist()))


def test_an_own_defense_in_memory_by_name_and_as_a_function_has_the_same_numbers(
    tmp_path: Path,
) -> None:
    made: list[Any] = [{"mine": Centered(NET)}, {"mine": Centered}, {"mine": make}, make]
    made += [["own_defenses:make"], "own_defenses:make", {"mine": "own_defenses:make"}]
    runs = [dent.evaluate(NET, one, suite="adaptive", **SMALL) for one in made]
    names = ["mine", "mine", "mine", "make", "own_defenses:make", "own_defenses:make", "mine"]
    assert [only(one).cell.defense for one in runs] == names
    cell = only(runs[0])
    assert cell.is_fully_attacked
    assert cell.independent
    assert {"fpa", "gmsa-min", "unrolled", "averaged", "short", "lazy"} <= set(cell.attacks)
    # Seeds are by name: with one name, all ways give the same numbers.
    assert all(numbers(one) == numbers(runs[0]) for one in (runs[1], runs[2], runs[6]))
    assert numbers(runs[4]) == numbers(runs[5])


def test_a_defended_model_is_a_defense_and_stands_beside_texts_and_static() -> None:
    asked = {"views": "views", "mine": dent.defend(NET, "views"), "static": "static"}
    results = dent.evaluate(NET, asked, **SMALL)
    by_text, mine, static = results.cells
    assert [cell.cell.defense for cell in results.cells] == ["views", "mine", "static"]
    assert static.cell.static
    assert mine.versus_static is not None
    assert by_text.natural == mine.natural
    assert by_text.cost
    assert mine.cost
    assert by_text.cost.flops == mine.cost.flops
    (alone,) = dent.evaluate(NET, [dent.defend(NET, "dent", steps=1)], suite="none", **SMALL).cells
    assert alone.cell.defense == "Dent"


def test_attacks_that_need_missing_parts_are_named_and_the_row_is_marked() -> None:
    results = dent.evaluate(
        NET, {"static": "static", "plain": Plain, "inside": Inside}, suite="adaptive", **SMALL
    )
    static, plain, inside = results.cells
    assert static.is_fully_attacked
    assert "takes no `steps`" in plain.not_run["fpa"]
    assert "takes no `gradient`" in plain.not_run["unrolled"]
    assert "no attribute `updates`" in plain.not_run["averaged"]
    assert set(plain.not_run) == {"unrolled"} | NEED_STEPS
    assert set(plain.attacks) == {"denying updates", "high confidence"} | NEED_ADAPT
    assert plain.independent
    assert not plain.missing
    assert not inside.independent
    assert not inside.missing
    assert set(inside.attacks) == {"denying updates", "high confidence"}
    adaptive = {name for name in find_suite("adaptive", "linf") if name in inside.not_run}
    assert adaptive == {"unrolled", "poisoning"} | NEED_STEPS | NEED_ADAPT
    assert all("no adapt(inputs) and predict" in why for why in inside.not_run.values())
    assert "mixed (50 %)" in inside.scenarios
    assert inside.cost is not None
    assert inside.cost.times_flops is not None
    assert inside.cost.times_flops > 2  # its own backward pass counts
    text = results_text(results)
    assert "plain†" in text
    assert "inside†" in text
    assert "static†" not in text
    assert "not fully attacked" in text
    markdown = results_markdown(results)
    assert "fpa, gmsa-min" in markdown
    assert "because adapt() of the defense" in markdown
    assert any("not fully attacked" in line for line in write_headlines(results))
    assert results.to_json()["cells"][1]["not_run"] == plain.not_run


def test_a_module_that_adapts_to_its_batch_is_asked_for_whole_batches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes: list[int] = []
    forward = Inside.forward

    def watch(self: Inside, inputs: Tensor) -> Tensor:
        sizes.append(len(inputs))
        return forward(self, inputs)

    monkeypatch.setattr(Inside, "forward", watch)

    def start(*_: Any) -> None:  # after the plan, which asks inputs one by one
        sizes.clear()

    attacks = ["apgd-ce", "square", "denying updates:attacks=apgd-ce"]
    only(dent.evaluate(NET, {"inside": Inside}, attacks=attacks, on_unit=start, **SMALL))
    assert set(sizes) <= {4}


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"mine": make(NET), "dent": make(NET)}, "'dent' is of dent's list"),
        ({"mine": 3}, "mine: expected a defense, a function"),
        ([lambda model: model], "expected a name for a lambda"),
        (["own_defenses:missing"], "has no 'missing'"),
        (["no_such_module:make"], "no module 'no_such_module'"),
        (["own_defenses:make_nothing"], "to return a defense.*got NoneType"),
        ({"mine": Lying}, "declares independent = True"),
        (["own_defenses:make_lying"], "declares independent = True"),
        ({"mine": dent.defend(NET, "tent")}, "carries its adaptation from batch to batch"),
        ("veiws", "unknown defense 'veiws'; did you mean 'views'"),
    ],
)
def test_what_is_no_defense_is_refused_before_any_work(asked: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dent.evaluate(NET, asked, **SMALL)


def test_one_defense_cannot_be_of_several_models() -> None:
    with pytest.raises(ValueError, match="mine: expected a function from the model"):
        dent.evaluate({"one": NET, "two": tiny()}, {"mine": Centered(NET)}, **SMALL)
    both = dent.evaluate({"one": NET, "two": tiny()}, {"mine": Centered}, suite="none", **SMALL)
    assert len(both.cells) == 2


def test_a_digest_tells_settings_weights_and_code_apart() -> None:
    def changed(**values: Any) -> str:
        defense = Centered(tiny())
        for name, value in values.items():
            setattr(defense, name, value)
        return digest_defense(defense)

    class Centered2(Centered):
        pass

    assert changed() == changed() == digest_defense(make(tiny()))
    other = tiny()
    with torch.no_grad():
        next(other.parameters()).add_(1)
    digests = {changed(), changed(rate=0.3), changed(updates=3), changed(model=other)}
    digests |= {digest_defense(Centered2(tiny())), digest_defense(Plain(tiny()))}
    assert len(digests) == 6
    used = dent.defend(tiny(), "dent")
    fresh = digest_defense(used)
    used(DATA[0])
    assert digest_defense(used) == fresh


def test_code_without_a_file_is_the_same_in_this_process_alone() -> None:
    script = (
        "import sys; sys.path.insert(0, 'tests'); from cells import tiny; import own_defenses\n"
        "class Mine(own_defenses.Centered): pass\n"
        "from dent.evaluation.defenses import digest_defense as digest\n"
        "assert digest(Mine(tiny())) == digest(Mine(tiny()))\n"
        "print(digest(Mine(tiny())), digest(own_defenses.Centered(tiny())))\n"
    )
    root = Path(__file__).parents[1]
    runs = [
        subprocess.run(
            [sys.executable, "-c", script], cwd=root, capture_output=True, text=True, check=True
        )
        for _ in range(2)
    ]
    (mine, centered), (again, centered_again) = (done.stdout.split() for done in runs)
    assert mine != again
    assert centered == centered_again == digest_defense(Centered(tiny()))


RUN = """
import json, sys
import dent
from cells import tiny, labeled
net = tiny()
results = dent.evaluate(
    net, ["own_defenses:make_mortal", "static"], data=labeled(net, 8), eps=0.03, batch_size=4, steps=2,
    suite="adaptive", battle=False, out=sys.argv[1],
)
"""


def test_a_killed_run_of_an_own_defense_resumes_to_the_same_numbers(tmp_path: Path) -> None:
    broken = run_script(RUN, tmp_path / "broken", DIE_AT="60")
    assert broken.returncode == -signal.SIGKILL, broken.stderr
    done = len(list((tmp_path / "broken" / "units").rglob("*.json")))
    assert done > 0
    resumed, whole = (run_script(RUN, tmp_path / name) for name in ("broken", "whole"))
    assert resumed.returncode == whole.returncode == 0, resumed.stderr + whole.stderr
    ours, theirs = (dent.load_results(tmp_path / name) for name in ("broken", "whole"))
    assert numbers(ours) == numbers(theirs)
    assert ours.complete
    about = json.loads((tmp_path / "whole" / "run.json").read_text())
    assert list(about["defenses_sha256"]) == ["Sequential, own_defenses:make_mortal"]


def test_another_setting_of_an_own_defense_is_another_run(tmp_path: Path) -> None:
    asked: dict[str, Any] = SMALL | {"suite": "none", "out": tmp_path}
    dent.evaluate(NET, {"mine": Centered(NET)}, **asked)
    dent.evaluate(NET, {"mine": Centered(NET)}, **asked)
    with pytest.raises(ValueError, match="holds another run: defenses_sha256"):
        dent.evaluate(NET, {"mine": Centered(NET, rate=0.3)}, **asked)


def test_ray_gives_an_own_defense_the_same_numbers(tmp_path: Path) -> None:
    pytest.importorskip("ray")

    class Local(Mortal):  # of this function alone: sent by value
        pass

    asked = {"local": Local(NET), "path": "own_defenses:make", "own_defenses:make": "own_defenses:make"}
    settings: dict[str, Any] = SMALL | {"attacks": ["fpa:rounds=2"], "battle": False, "threads": 1}
    there = dent.evaluate(NET, asked, engine="ray", workers=1, **settings)
    here = dent.evaluate(NET, asked, **settings)
    assert there.complete
    assert numbers(there) == numbers(here)


def test_the_command_line_takes_own_defenses_and_the_list(tmp_path: Path) -> None:
    flags = ["--model", "runs:model", "--data", "runs:images", "--n", 8, "--batch-size", 4]
    flags += ["--steps", 1, "--eps", "5/255", "--threads", 1, "--out", tmp_path / "run", "--json"]
    chosen = ["--defense", "own_defenses:Plain", "--defense", "views:shifts=1"]
    done = run("evaluate", *flags, *chosen, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    cells = json.loads(done.stdout)["cells"]
    assert [cell["defense"] for cell in cells] == ["own_defenses:Plain", "views:shifts=1"]
    assert list(cells[0]["not_run"]) == ["denying most updates", "fpa"]
    assert not cells[1]["not_run"]
    assert "own_defenses:Plain†" in (tmp_path / "run" / "report.html").read_text()
    refused = run(
        "attack", "runs:model", "--data", "runs:images", "--n", 8, "--attack", "fpa",
        "--defense", "own_defenses:Plain", cwd=tmp_path,
    )  # fmt: skip
    assert refused.returncode == 2
    assert "fpa cannot be run on own_defenses:Plain" in refused.stderr


def test_a_name_in_memory_cannot_be_read_from_a_file() -> None:
    evaluation = Evaluation(own=("mine",), defenses=("mine",), models="resnet20-at", n=2)
    assert evaluation.defenses == ("mine",)
    with pytest.raises(ValueError, match="mine is a defense in the memory of another program"):
        make_plan(Sources(evaluation))
