"""Scales: what stands for the paper's models, what is run for its numbers, and what that costs."""

from __future__ import annotations

import re
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from dent.attacks.autoattack import VERSIONS
from dent.data import DATA, PREPROCESSING, open_data
from dent.defense.dent.settings import Settings, make_settings
from dent.defense.text import format_defense
from dent.evaluation.attacks import find_attack
from dent.evaluation.plan import Plan
from dent.evaluation.spec import Cell
from dent.evaluation.suites import ADAPTIVE, format_attack, parse_attacks, select_attacks
from dent.models import MODELS, load_model
from dent.models.robustbench import ROBUSTBENCH, resolve_id
from dent.models.shipped import read_cards
from dent.paper.scales import Scale, Work, find_scale, read_scale, resolve, scales
from dent.paper.tables import FOLDER, MEASURES, Ask, find_number, tables
from dent.texts import parse_text
from dent.training.recipe import RECIPES
from dent.training.train import CHECKPOINT

SCALES = scales()
TABLES = tables()
PER_SECOND = 1500  # images through a static ResNet-20
ASK = Ask("madry-26-4", "dent:statistics=test,steps=10", "linf", 8 / 255, "autoattack")


def settings(defense: str) -> Settings:
    preset, overrides = parse_text(defense, "dent")
    return make_settings(preset, **overrides)


def works(table: str, scale: Scale) -> set[Work]:
    """What is run for a table."""
    numbers = TABLES[table].references().values()
    return {
        resolve(number.ask, scale, table) for number in numbers if not scale.skips(table, number.column)
    }


def forwards(work: Work) -> float:
    """Images through the static model, as a run plans it; ResNet-50 in forwards of ResNet-20."""
    cell, chosen = Cell(work.model, work.defense, work.eps, work.norm), settings(work.defense)
    suite = parse_attacks(work.attacks)
    attacks = select_attacks(suite, updates=chosen.steps, independent=chosen.independent)
    assert work.n is not None
    plan = Plan(
        attacks={cell: attacks}, updates={cell: chosen.steps}, answers={cell: chosen.forwards},
        randomized={},
        independent={cell: False}, not_run={}, n=work.n, batch_size=work.batch_size, seed=0,
    )  # fmt: skip
    # By their multiplications: ResNet-50 has 84 million at 32 pixels, ResNet-20 has 41 million.
    return sum(map(plan.forwards, plan.units())) * (84 / 41 if "resnet50" in work.model else 1)


# The budget


@pytest.mark.parametrize("name", TABLES)
def test_a_table_takes_a_quarter_of_an_hour_at_most(name: str) -> None:
    assert sum(map(forwards, works(name, SCALES["cpu"]))) < 15 * 60 * PER_SECOND


def test_the_whole_paper_takes_about_an_hour_and_a_half() -> None:
    everything = {work for name in TABLES for work in works(name, SCALES["cpu"])}
    assert sum(map(forwards, everything)) < 8e6


def test_smoke_is_a_handful() -> None:
    everything = {work for name in TABLES for work in works(name, SCALES["smoke"])}
    assert len(everything) <= 60
    assert sum(map(forwards, everything)) < 20_000
    assert max(settings(work.defense).steps for work in everything) == 1
    assert {work.n for work in everything} == {4}
    assert {work.batch_size for work in everything} == {1, 2, 4}


# What stands for what


@pytest.mark.parametrize("name", SCALES)
def test_every_number_has_its_work(name: str) -> None:
    scale = SCALES[name]
    for table in TABLES.values():
        for number in table.references().values():
            work = resolve(number.ask, scale, table.name)
            assert format_defense(work.defense) == work.defense
            assert tuple(map(format_attack, work.attacks)) == work.attacks
            names = list(parse_attacks(work.attacks))
            if number.ask.measure not in MEASURES:
                assert number.ask.measure in names
            if number.ask.measure == "adversarial":
                assert find_attack(names[0]).kind == "direct"
                assert find_attack(names[-1]).kind == "adaptive"
                assert "denying updates" in names
    asked = {one.ask.model for table in TABLES.values() for one in table.references().values()}
    assert asked == set(scale.models)


@pytest.mark.parametrize("name", SCALES)
def test_every_model_is_one_that_can_be_loaded_or_made(name: str) -> None:
    for standing in SCALES[name].models.values():
        if standing.model.startswith("robustbench:"):
            assert resolve_id(standing.model.removeprefix("robustbench:")) in ROBUSTBENCH
        elif standing.model.endswith(".pt"):
            made_by = re.search(r"dent train (\S+) --recipe (\S+)(.*)", standing.note)
            assert made_by is not None
            architecture, recipe, rest = made_by.groups()
            assert architecture in MODELS
            assert standing.architecture == architecture
            assert recipe in RECIPES
            folder = re.search(r"--out (\S+)", rest)
            made = folder[1] if folder else f"runs/{architecture}-{recipe}"
            assert standing.model == f"{made}/{CHECKPOINT}"
            assert ("--data cifar100" in rest) == (standing.data == "cifar100")
        elif ":" in standing.model:
            assert len(open_data(standing.data)) == 16
        else:
            assert standing.model in read_cards()
        data, _, cut = standing.data.partition("#")
        assert data in DATA or ":" in data
        assert cut in ("", *PREPROCESSING)
        assert standing.stands_in == (name != "paper")
        assert standing.note or standing.model.startswith("robustbench:")


def test_balls_of_the_papers_models_are_those_they_were_trained_for() -> None:
    """A ball of the paper's scale beside RobustBench's table, or the recipe of a training."""
    for table in TABLES.values():
        for number in table.references().values():
            model = SCALES["paper"].models[number.ask.model].model
            if model.startswith("robustbench:"):
                norm = resolve_id(model.removeprefix("robustbench:")).split("/")[1].lower()
            elif model.endswith(".pt") and "nominal" not in model:
                (recipe,) = re.findall(r"-(at-l2|at|trades)(?:-cifar100)?/", model)
                norm = RECIPES[recipe].norm
            else:
                continue
            assert number.ask.norm == norm


def test_the_papers_attacks_are_whole() -> None:
    paper = SCALES["paper"]
    assert parse_attacks(paper.attacks["autoattack"]) == VERSIONS["standard"]
    assert parse_attacks(paper.attacks["autoattack-plus"]) == VERSIONS["plus"]
    assert list(paper.adaptive) == [name for name in ADAPTIVE if find_attack(name).kind == "adaptive"]
    for name, options in parse_attacks(paper.attacks["mixed"]).items():
        assert options == ADAPTIVE[name]
    (pgd,) = parse_attacks(paper.attacks["pgd"]).values()
    assert pgd["steps"] == 30
    assert pgd["restarts"] == 5
    assert pgd["step_size"] == pytest.approx(0.1 * 4 / 255, rel=1e-6)
    assert paper.n is None
    assert [name for name in TABLES if paper.tables.get(name)] == []


def test_the_reference_is_run_where_the_paper_ran_it() -> None:
    asked = resolve(ASK, SCALES["paper"], "table-3")
    plus = resolve(replace(ASK, attack="autoattack-plus"), SCALES["paper"], "table-11")
    assert (asked.protocol, plus.protocol) == (True, False)
    assert not resolve(ASK, SCALES["cpu"], "table-3").protocol


def test_what_is_not_trained_is_the_same_each_time_and_answers() -> None:
    standing = SCALES["smoke"].models["resnet50-imagenet"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first, second = (load_model(standing.model) for _ in range(2))
    dataset, again = open_data(standing.data), open_data(standing.data)
    inputs = dataset.read(torch.arange(2))
    assert torch.equal(inputs, again.read(torch.arange(2)))
    assert all(
        torch.equal(one, other)
        for one, other in zip(first.state_dict().values(), second.state_dict().values(), strict=True)
    )
    with torch.no_grad():
        logits = first(inputs)
    assert logits.shape == (2, 1000)
    assert logits.isfinite().all()


# How work is shared


def same(scale: str, *references: str) -> bool:
    found = [resolve(find_number(one).ask, SCALES[scale], one.partition("/")[0]) for one in references]
    return len(set(found)) == 1


@pytest.mark.parametrize("scale", SCALES)
def test_numbers_of_one_cell_share_their_work(scale: str) -> None:
    first, second = "table-1/linf 8/255/carmon2019", "table-3/CIFAR-10 ResNet-26-4/madry2018"
    assert same(scale, f"{first}/natural", f"{first}/static")
    assert not same(scale, f"{first}/static", f"{first}/dent")
    assert same(scale, f"{second}/natural dent", f"{second}/adversarial dent")
    nominal = "table-4/nominal ResNet-26-4/Delta, dynamic Sigma, 10 updates"
    assert same(scale, f"{nominal}/time", f"{nominal}/natural", f"{nominal}/linf 1.5/255")
    assert same(
        scale, *(f"table-6/test statistics/10 updates/{share}" for share in ("1", "10 %", "90 %"))
    )
    assert same(scale, *(f"table-9/train statistics/{row}/4" for row in ("natural", "adversarial")))
    assert same(scale, *(f"table-14/ResNet-50/{row}/5" for row in ("absolute (s)", "operations (x)")))
    assert same(scale, "figure-3/linf 8/255/dent/0", "figure-3/linf 8/255/dent/1")


@pytest.mark.parametrize("scale", SCALES)
def test_tables_share_their_work(scale: str) -> None:
    assert same(
        scale,
        "table-3/CIFAR-10 ResNet-26-4/madry2018/adversarial dent",
        "table-5/denying updates/static-dent/adversarial linf 8/255",
        "table-5/denying updates/dent-dent/adversarial linf 8/255",
        "table-8/ResNet-26-4/both/adversarial linf 8/255",
        "table-12/ResNet-26-4/nominal/natural minent",
    )
    nominal = ["table-5/denying updates/static-static/nominal l2 0.2"]
    nominal += ["table-4/nominal ResNet-26-4/static/l2 0.2"]
    if scale != "cpu":  # where the figure has fewer images
        nominal.append("figure-4/l2/static/0.2")
    assert same(scale, *nominal)


def test_notes_do_not_keep_work_apart() -> None:
    one, other = (
        resolve(replace(ASK, model=model), SCALES["cpu"], "table-3")
        for model in ("madry-26-4", "madry-26-4-cifar100")
    )
    assert one == other
    assert hash(one) == hash(other)
    assert one.note != other.note


# Made-up scales


def made_up() -> dict[str, Any]:
    sets = ("autoattack", "autoattack-plus", "apgd-ce", "pgd", "mixed", "none")
    return {
        "name": "tiny",
        "summary": "made up",
        "n": 128,
        "models": {"madry-26-4": {"model": "net"}},
        "attacks": {key: [] for key in sets} | {"apgd-ce": ["apgd-ce:restarts=2"], "pgd": ["pgd"]},
        "adaptive": ["fpa: steps=3, rounds=2"],
    }


def read(folder: Path, content: Any) -> Scale:
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(content))
    return read_scale(path)


def test_caps_and_sizes(tmp_path: Path) -> None:
    content = made_up() | {"most_updates": 3, "most_attack_steps": 5, "tables": {"table-7": {"n": 64}}}
    scale = read(tmp_path, content)
    ask = replace(ASK, attack="apgd-ce", attack_steps=7)
    work = resolve(ask, scale, "table-1")
    assert work.defense == "dent:statistics=test,steps=3"
    assert work.attacks == ("apgd-ce:restarts=2,steps=5", "fpa:rounds=2,steps=3")
    assert resolve(replace(ask, attack_steps=2), scale, "table-1").attacks[0] == (
        "apgd-ce:restarts=2,steps=2"
    )
    sizes = {1: (128, 1), 128: (128, 128), 256: (256, 256)}
    for size, expected in sizes.items():
        work = resolve(replace(ask, batch_size=size), scale, "table-1")
        assert (work.n, work.batch_size) == expected
    # Less than a usual batch is one batch of what there is.
    for size, batch in {1: 1, 128: 64, 256: 64}.items():
        work = resolve(replace(ask, batch_size=size), scale, "table-7")
        assert (work.n, work.batch_size) == (64, batch)
    everything = scale.replace(n=None)
    work = resolve(replace(ask, batch_size=256), everything, "table-1")
    assert (work.n, work.batch_size) == (None, 256)


def test_a_table_may_have_its_own(tmp_path: Path) -> None:
    own = {"attacks": {"pgd": ["pgd:steps=3"]}, "adaptive": [], "skip": ["dent+"]}
    scale = read(tmp_path, made_up() | {"tables": {"table-1": own}, "protocol": ["pgd"]})
    ask = replace(ASK, attack="pgd")
    work, usual = (resolve(ask, scale, name) for name in ("table-1", "table-2"))
    assert (work.attacks, work.n) == (("pgd:steps=3",), 128)
    assert usual.attacks == ("pgd", "fpa:rounds=2,steps=3")
    assert work.protocol
    assert resolve(replace(ask, attack="mixed"), scale, "table-2").attacks == ()
    assert scale.skips("table-1", "dent+")
    assert not scale.skips("table-1", "dent")
    assert not scale.skips("table-2", "dent+")
    with pytest.raises(ValueError, match="unknown model of the paper 'madry-26'; did you mean"):
        resolve(replace(ask, model="madry-26"), scale, "table-1")


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"names": "x"}, "tiny.yaml: unknown settings of the scale: names; did you mean 'name'"),
    ({"name": "small"}, "tiny.yaml: expected the name of the file, tiny, got 'small'"),
    ({"n": 0}, "tiny.yaml: .*n: expected an integer >= 1, got 0"),
    ({"most_updates": True}, "tiny.yaml: .*most_updates: expected an integer >= 1"),
    ({"adaptive": ["fpaa"]}, "tiny.yaml: .*unknown attack 'fpaa'; did you mean 'fpa'"),
    ({"attacks": {"pgd": []}}, "expected all sets of attacks, got none for autoattack, autoattack-plus"),
    ({"models": {"a": {"data": "cifar10"}}}, "tiny.yaml: .*models.a: model: expected text"),
    ({"models": {"a": "net"}}, "tiny.yaml: .*models.a: expected keys and values, got 'net'"),
    ({"models": ["net"]}, "tiny.yaml: .*models: expected keys and values, got .'net'."),
    ({"tables": {"table-77": {}}}, "tiny.yaml: .*unknown table 'table-77'"),
    ({"tables": {"table-1": {"skip": ["dent++"]}}}, "table-1 has no column 'dent\\+\\+' to skip"),
    ({"tables": {"table-1": {"attacks": {"pdg": []}}}}, "tables.table-1: attacks.pdg.*'pgd'"),
    ({"n": 0, "models": {"a": {"modle": "x"}}}, "2 wrong settings .*n: .*models.a: .*'model'"),
]


@pytest.mark.parametrize(("wrong", "message"), WRONG)
def test_wrong_files_are_refused(wrong: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"(?s){message}"):
        read(tmp_path, made_up() | wrong)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    content = made_up()
    del content["summary"]
    with pytest.raises(ValueError, match="(?s)tiny.yaml: .*summary: expected text"):
        read(tmp_path, content)
    with pytest.raises(ValueError, match="unknown scale 'laptop'; Expected one of: paper, cpu, smoke"):
        find_scale("laptop")
    assert {path.stem for path in (FOLDER / "scales").glob("*.yaml")} == set(SCALES)
