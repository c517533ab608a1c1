"""Scales: what stands for the paper's models, what is run for its numbers, and what that costs."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import yaml

from dent.attacks.autoattack import VERSIONS
from dent.data import DATA, PREPROCESSING, open_data
from dent.defense.dent.settings import PRESETS, Settings
from dent.defense.text import format_defense
from dent.evaluation.attacks import find_attack
from dent.evaluation.plan import sketch_plan
from dent.evaluation.suites import ADAPTIVE, PROTOCOL, format_attack, parse_attacks
from dent.models import MODELS, load_model
from dent.models.robustbench import ROBUSTBENCH, resolve_id
from dent.models.shipped import read_cards
from dent.paper.results import count_forwards, make_work_evaluation
from dent.paper.scales import Scale, Work, find_scale, read_scale, resolve, scales
from dent.paper.tables import FOLDER, MEASURES, Ask, AttackSet, find_number, tables
from dent.texts import parse_text
from dent.training.recipe import RECIPES
from dent.training.train import CHECKPOINT

SCALES = scales()
TABLES = tables()
ASK = Ask("madry-26-4", "dent:statistics=test,steps=10", "linf", 8 / 255, "autoattack")


def settings(defense: str) -> Settings:
    preset, overrides = parse_text(defense, "dent")
    return PRESETS[preset].replace(**overrides)


def works(table: str, scale: Scale) -> set[Work]:
    """What is run for a table."""
    numbers = TABLES[table].references().values()
    return {
        resolve(number.ask, scale, table)
        for number in numbers
        if scale.explain_left_out(table, number) is None
    }


def hours(works: Iterable[Work]) -> float:
    """The time of work on two cores, by the upper bound of its forwards."""
    return sum(count_forwards(work) * core_seconds(work) for work in works) / 2 / 3600


def core_seconds(work: Work) -> float:
    """Of a forward or a backward, for each image; ResNet-50 by its multiplications at 32 pixels."""
    known = {"resnet26-4": 2.2 / 256, "resnet20": 0.15 / 256, "resnet50": 0.15 / 256 * 84 / 41}
    (found,) = [seconds for name, seconds in known.items() if name in work.model]
    return found


# The budget


@pytest.mark.parametrize("name", TABLES)
def test_a_table_takes_a_quarter_of_an_hour_at_most(name: str) -> None:
    assert hours(works(name, SCALES["cpu"])) < 0.25


@pytest.mark.parametrize(("scale", "most"), [("cpu", 1.5), ("cpu-large", 10.5)])
def test_the_whole_paper_takes_the_hours_that_its_scale_says(scale: str, most: float) -> None:
    everything = {work for name in TABLES for work in works(name, SCALES[scale])}
    assert most / 2 < hours(everything) < most
    said = {"cpu": "about an hour and a half on two cores", "cpu-large": "about ten hours on two cores"}
    assert SCALES[scale].takes == said[scale]
    assert said[scale] in SCALES[scale].describe()


def test_smoke_is_a_handful() -> None:
    everything = {work for name in TABLES for work in works(name, SCALES["smoke"])}
    assert len(everything) <= 65
    assert sum(map(count_forwards, everything)) < 30_000
    assert max(settings(work.defense).steps for work in everything) == 1
    assert {work.n for work in everything} == {4}
    assert {work.batch_size for work in everything} == {1, 2, 4}


# What stands for what


@pytest.mark.parametrize("name", SCALES)
def test_every_number_has_its_work(name: str) -> None:
    scale = SCALES[name]
    for table in TABLES.values():
        for number in table.references().values():
            if scale.explain_left_out(table.name, number):
                continue
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
    assert asked == {*scale.models, *scale.without}
    assert not scale.models.keys() & scale.without.keys()


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
    first, second = "table-1/linf 8/255/ding2020", "table-3/CIFAR-10 ResNet-26-4/madry2018"
    assert same(scale, f"{first}/natural", f"{first}/static")
    assert not same(scale, f"{first}/static", f"{first}/dent")
    assert same(scale, f"{second}/natural dent", f"{second}/adversarial dent")
    nominal = "table-4/nominal ResNet-26-4/Delta, dynamic Sigma, 10 updates"
    assert same(scale, f"{nominal}/time", f"{nominal}/natural", f"{nominal}/linf 1.5/255")
    assert same(
        scale, *(f"table-6/test statistics/10 updates/{share}" for share in ("1", "10 %", "90 %"))
    )
    assert same(scale, *(f"table-9/train statistics/{row}/4" for row in ("natural", "adversarial")))
    if "resnet50-imagenet" in SCALES[scale].models:
        rows = ("absolute (s)", "operations (x)")
        assert same(scale, *(f"table-14/ResNet-50/{row}/5" for row in rows))
    assert same(scale, "figure-3/linf 8/255/dent/0", "figure-3/linf 8/255/dent/1")


@pytest.mark.parametrize("scale", SCALES)
def test_tables_share_their_work(scale: str) -> None:
    assert same(
        scale,
        "table-3/CIFAR-10 ResNet-26-4/madry2018/adversarial dent",
        "table-5/denying updates/dent-dent/adversarial linf 8/255",
        "table-8/ResNet-26-4/both/adversarial linf 8/255",
        "table-12/ResNet-26-4/nominal/natural minent",
    )
    nominal = ["table-4/nominal ResNet-26-4/static/l2 0.2", "figure-4/l2/static/0.2"]
    nominal += ["table-8/ResNet-26-4/neither/nominal l2 0.2"]
    assert same(scale, *nominal)


def test_notes_do_not_keep_work_apart() -> None:
    other = SCALES["cpu"].models["madry-26-4"].replace(note="another note")
    scale = SCALES["cpu"].replace(models={**SCALES["cpu"].models, "madry-26-4": other})
    one, same_work = (resolve(ASK, each, "table-3") for each in (SCALES["cpu"], scale))
    assert one == same_work
    assert hash(one) == hash(same_work)
    assert one.note != same_work.note


# Stand-ins


@pytest.mark.parametrize("name", ["cpu", "cpu-large"])
@pytest.mark.parametrize("table", TABLES)
def test_no_number_stands_under_two_names_of_a_table(name: str, table: str) -> None:
    """One model of ours stands in for one model of the paper."""
    names: dict[str, set[str]] = {}
    for number in TABLES[table].references().values():
        if SCALES[name].explain_left_out(table, number) is None:
            work = resolve(number.ask, SCALES[name], table)
            names.setdefault(work.model, set()).add(number.ask.model)
    assert all(len(stands_for) == 1 for stands_for in names.values()), names


@pytest.mark.parametrize("name", ["cpu", "cpu-large"])
def test_every_number_is_on_the_data_of_its_row(name: str) -> None:
    for asked, loaded in SCALES[name].models.items():
        published = SCALES["paper"].models[asked].data
        if "untrained" not in loaded.data:  # noise, for costs
            assert loaded.data == published
        card = read_cards().get(loaded.model)
        assert card is None or card.data["name"] == loaded.data


@pytest.mark.parametrize("name", ["cpu", "cpu-large"])
def test_most_numbers_are_of_five_batches(name: str) -> None:
    for table in TABLES:
        for work in works(table, SCALES[name]):
            if table not in ("table-14", "text-protocol"):
                assert work.n is not None
                assert work.n >= 5 * work.batch_size, (table, work)


@pytest.mark.parametrize("name", ["cpu", "cpu-large"])
def test_the_protocol_has_the_budget_of_the_joint_attack(name: str) -> None:
    """Batch-wise and sample-wise, with both kinds of training."""
    chosen = works("text-protocol", SCALES[name])
    models = {SCALES[name].models[one].model for one in ("madry-26-4", "nominal-26-4")}
    kinds = {(work.model, settings(work.defense).affine) for work in chosen}
    assert kinds == {(model, affine) for model in models for affine in ("batch", "sample")}
    for work in chosen:
        evaluation = make_work_evaluation(work, seed=0, device="cpu")
        plan = sketch_plan(evaluation, 64)
        (cell,) = plan.cells.values()
        limits = {"steps": work.steps, "queries": work.queries}
        assert evaluation.has_protocol
        assert cell.attacks[PROTOCOL] == limits
        for attack in VERSIONS["standard"]:
            given = cell.attacks[attack]
            assert given.items() <= limits.items()
            assert given


# Made-up scales


def made_up() -> dict[str, Any]:
    sets = get_args(AttackSet)
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
    number = find_number("table-1/linf 8/255/ding2020/dent+")
    assert scale.explain_left_out("table-1", number) == "left out at this scale"
    assert scale.explain_left_out("table-2", number) is None
    assert scale.explain_left_out("table-1", replace(number, column="dent")) is None
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
    with pytest.raises(
        ValueError, match="unknown scale 'laptop'; Expected one of: paper, cpu-large, cpu, smoke"
    ):
        find_scale("laptop")
    assert {path.stem for path in (FOLDER / "scales").glob("*.yaml")} == set(SCALES)
