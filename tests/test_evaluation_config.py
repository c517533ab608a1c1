"""What an evaluation is asked for: defenses as text, and YAML files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from cells import tiny
from hypothesis import given
from hypothesis import strategies as st

import dent
from dent.defense.dent.settings import PRESETS, Settings
from dent.defense.text import format_defense
from dent.evaluation import Evaluation, read_evaluation

NET = tiny()
EXAMPLE = Path(__file__).parent.parent / "examples" / "evaluate.yaml"
rates = st.one_of(st.floats(1e-9, 10), st.integers(1, 3))
OVERRIDES = st.fixed_dictionaries(
    {},
    optional={
        "lr": rates,
        "blur_lr": rates,
        "sigma": rates,
        "steps": st.integers(1, 40),
        "statistics": st.one_of(st.sampled_from(["train", "test", 0, 1]), st.floats(0, 1)),
        "blur": st.sampled_from(["off", "static", "dynamic"]),
        "covariance": st.sampled_from(["spherical", "diagonal", "full"]),
        "objective": st.sampled_from(["entropy", "information-maximization"]),
        "reduction": st.sampled_from(["mean", "sum"]),
        "betas": st.one_of(st.none(), st.tuples(st.floats(0, 0.99), st.sampled_from([0, 0.999]))),
        "gradient": st.sampled_from(["stale", "unrolled"]),
    },
)


@given(preset=st.sampled_from(["dent", "dent+", "dent-nominal"]), overrides=OVERRIDES, data=st.data())
def test_a_defense_has_one_text_that_says_all_of_it(
    preset: str, overrides: dict[str, Any], data: st.DataObject
) -> None:
    wanted = Settings(**vars(PRESETS[preset]) | overrides)
    text = format_defense({"preset": preset, **overrides})
    assert dent.defend(NET, text).settings == wanted
    assert format_defense(text) == text
    order = data.draw(st.permutations(list(overrides)))
    space = data.draw(st.sampled_from(["", " "]))
    typed = f",{space}".join(f"{name}{space}={space}{overrides[name]}" for name in order)
    assert format_defense(f"{preset}:{space}{typed}") == text
    as_yaml = yaml.safe_load(yaml.safe_dump({"preset": preset, **overrides} | {
        name: list(value) for name, value in overrides.items() if isinstance(value, tuple)
    }))  # fmt: skip
    assert format_defense(as_yaml) == text
    base, named = vars(PRESETS[preset]), text.partition(":")[2]
    assert all(f"{name}=" in f",{named}" for name in overrides if overrides[name] != base[name])
    assert bool(named) == any(value != base[name] for name, value in overrides.items())


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ("static", "static"),
        ("static:affine=off", "static"),
        (" dent+ ", "dent+"),
        ("dent:", "dent"),
        ("dent:steps=30,lr=1e-3", "dent"),
        ("dent:lr=1", "dent:lr=1.0"),
        ("dent:betas=[0.5, 0.9]", "dent:betas=(0.5,0.9)"),
        ({"preset": "dent", "lr": "1e-2"}, "dent:lr=0.01"),  # YAML takes 1e-2 for text
        ({"preset": "dent-nominal", "blur": False}, "dent-nominal:blur=off"),  # and off for false
        ("tent:predict=after,continual=False", "tent:continual=False,predict=after"),
    ],
)
def test_one_way_to_write_a_defense(asked: str | dict[str, Any], text: str) -> None:
    assert format_defense(asked) == text == format_defense(text)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("dentt", "unknown defense 'dentt'; did you mean 'dent'"),
        ("", "unknown defense ''"),
        (
            "dent:step=3,lrr=1",
            "unknown settings of the defense: step, lrr; did you mean 'steps' or 'lr'",
        ),
        ("dent:steps", "expected a text such as dent"),
        ("dent:steps=3,steps=4", "got steps twice"),
        ("dent:steps=-1,lr=x", r"(?s)2 wrong settings.*lr: .* got 'x'.*steps: .* got -1"),
        ("static:steps=3", "3 updates of nothing"),
        ("tent", "every batch starts from a clean state; evaluate tent:continual=False,predict=after"),
        ("dent:continual=True", "every batch starts from a clean state"),
        ({"steps": 3}, "expected a defense with its preset, got {'steps': 3}"),
        (5, "expected a defense such as dent.*, got 5"),
        (None, "expected a defense such as dent.*, got None"),
    ],
)
def test_defenses_that_are_none(asked: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        format_defense(asked)
    with pytest.raises(
        ValueError, match=r"2 wrong settings of the evaluation:\n  defenses.1: .*\n  n: "
    ):
        Evaluation(defenses=["static", asked], n=-1)


def test_a_defense_by_text_is_the_defense() -> None:
    net, inputs = tiny(), torch.rand(3, 3, 8, 8)
    made, by_hand = dent.defend(net, "dent:lr=0.1,steps=2"), dent.defend(net, "dent", lr=0.1, steps=2)
    assert torch.equal(made(inputs), by_hand(inputs))
    assert dent.defend(net, "static").settings.steps == 0


def test_the_example_loads_and_flags_override_it() -> None:
    asked = read_evaluation(EXAMPLE)
    assert asked.defenses == ("static", "dent:steps=10", "dent+:steps=3")
    assert (asked.n, asked.batch_size, asked.eps, asked.seed) == (256, 32, 8 / 255, 0)
    other = read_evaluation(EXAMPLE, n=64, defenses=("dent",), eps="1/255", suite="standard")
    assert (other.n, other.defenses, other.eps, other.suite) == (64, ("dent",), 1 / 255, "standard")
    assert other.models == asked.models


def test_what_was_asked_can_be_asked_again(tmp_path: Path) -> None:
    asked = Evaluation(
        models=["resnet20-at"], defenses=[{"preset": "dent", "betas": [0.8, 0.9]}], n=0, eps="2/255",
        norm="l2", steps=0, queries=0, protocol=True, exhaustive=True, seed=3, battle=False,
        attacks=["fab", "denying updates:attacks=apgd-ce,apgd-t", "mixed (a b):share=0.25"],
    )  # fmt: skip
    path = tmp_path / "asked.yaml"
    path.write_text(yaml.safe_dump(asked.to_json()))
    assert read_evaluation(path) == asked
    assert asked.n is None


FAULTS: dict[str, tuple[str, ...]] = {
    "n: many": ("n: expected an integer >= 1, got 'many'",),
    "n: -1": ("n: expected an integer >= 1, got -1",),
    "n: false": ("n: expected an integer >= 1, got False",),
    "n: 1.5": ("n: expected an integer >= 1, got 1.5",),
    "eps: [1]": ("eps: expected a number >= 0, got [1]",),
    "eps: 8/0": ("eps: expected a number such as 0.5 or 8/255, got '8/0'",),
    "eps: -1": ("eps: expected a number >= 0, got -1",),
    "eps: .nan": ("eps: expected a number >= 0, got nan",),
    "models: 3": ("models: expected a list, got 3",),
    "models: null": ("models: expected a list, got None",),
    "models: []": ("models: expected 1 or more entries, got ()",),
    "models: [3, null]": ("expected the name of a model, got 3", "got None"),
    "defenses: {preset: dent}": ("defenses: expected a list, got {'preset': 'dent'}",),
    "defenses: [5, dentt]": ("such as dent+ or dent:steps=10, got 5", "unknown defense 'dentt'"),
    "suite: null": ("suite: expected one of quick, standard,", "got None"),
    "suite: [quick]": ("got ['quick']",),
    "norm: l3": ("norm: expected one of linf, l2, l1, got 'l3'",),
    "data: 10": ("data: expected text, got 10",),
    "device: 0": ("device: expected text, got 0",),
    "protocol: 1": ("protocol: expected true or false, got 1",),
    "exhaustive: all": ("exhaustive: expected true or false, got 'all'",),
    "battle: 3": ("battle: expected true or false, got 3",),
    "attacks: null": ("attacks: expected a list, got None",),
    "attacks: [5, fabb]": ("attacks.0: expected an attack such as", "unknown attack 'fabb'"),
    "sweet: quick\n2: 3": ("unknown settings of the evaluation: sweet, 2;", "Expected any of: models,"),
    "- suite: quick": ("expected settings in", "got list"),
    "quick": ("expected settings in", "got str"),
    "n: [1": ("is no YAML file",),
    "n: 1\nn 2": ("is no YAML file",),
    "n: \x01": ("is no YAML file",),
    "seed: -1\nbatch_size: 0\nsteps: 0.5\nqueries: true\nmodels: 3\nn: 0\nsuite: x": (
        "6 wrong settings of the evaluation",  # n: 0 is all
        "seed:", "batch_size:", "steps:", "queries:", "models:", "suite:",
    ),
}  # fmt: skip


@pytest.mark.parametrize("text", list(FAULTS))
def test_a_wrong_file_is_refused_once_with_all_its_faults(text: str, tmp_path: Path) -> None:
    path = tmp_path / "asked.yaml"
    path.write_text(text)
    with pytest.raises((ValueError, TypeError)) as error:
        read_evaluation(path)
    assert [part for part in FAULTS[text] if part not in str(error.value)] == []


def test_files_that_are_empty_or_not_there(tmp_path: Path) -> None:
    path = tmp_path / "asked.yaml"
    for nothing in ("", "null", "# nothing\n"):
        path.write_text(nothing)
        assert read_evaluation(path) == Evaluation()
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"asked.yaml is no YAML file"):
        read_evaluation(path)
    with pytest.raises(OSError, match=r"missing.yaml"):
        read_evaluation(tmp_path / "missing.yaml")
    with pytest.raises(OSError, match=r"directory"):
        read_evaluation(tmp_path)


def test_every_setting_is_documented() -> None:
    assert all(one.description for one in Evaluation.model_fields.values())


def test_radii_and_defenses_that_suit_the_model() -> None:
    cells = Evaluation().cells()
    assert [(cell.model, cell.defense) for cell in cells] == [
        ("resnet20-at", "static"), ("resnet20-at", "dent:steps=10"), ("resnet20-at", "dent+"),
        ("resnet20-nominal", "static"), ("resnet20-nominal", "dent-nominal"),
    ]  # fmt: skip
    assert {cell.model: cell.eps for cell in cells} == {
        "resnet20-at": 8 / 255, "resnet20-nominal": 1.5 / 255
    }  # fmt: skip
    for norm, eps in {"linf": 8 / 255, "l2": 0.5, "l1": 12.0}.items():
        other = Evaluation(models="mine.pt", norm=norm).cells()
        assert [(cell.defense, cell.eps, cell.norm) for cell in other] == [
            (defense, eps, norm) for defense in ("static", "dent", "dent+")
        ]
        (given,) = Evaluation(models="resnet20-at", defenses="norm", norm=norm, eps=0).cells()
        assert given.eps == 0
