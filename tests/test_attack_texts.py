"""Attacks as text: one way to write each, options that are really taken, faults before any work."""

from __future__ import annotations

from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from cells import labeled, sources_of, tiny
from hypothesis import given
from hypothesis import strategies as st

from dent.attacks import adaptive
from dent.attacks.adaptive.transfer import OFFLINE
from dent.attacks.losses import LOSSES
from dent.attacks.targets import ORDERS
from dent.evaluation import Evaluation, evaluate, read_evaluation
from dent.evaluation.attacks import ATTACKS
from dent.evaluation.execute import Task, attack_batch, find_points
from dent.evaluation.plan import Unit, make_plan
from dent.evaluation.suites import (
    ABOUT,
    ADAPTIVE,
    BATTLE,
    NATURAL,
    SUITE_NOTES,
    find_suite,
    format_attack,
    parse_attacks,
)

# Two values of each option, which must lead to something else.
VALUES: dict[str, tuple[Any, Any]] = {
    "step_size": (0.004, 0.02),
    "loss": ("ce", "margin"),
    "attacks": ("(apgd-ce)", "(apgd-dlr)"),
    "share": (0.25, 0.75),
    "steps": (1, 3),
    "queries": (1, 4),
    "updates": (0, 2),
    "points": (1, 3),
    "every": (1, 2),
    "order": ("logits", "distance"),
    "sharpness": (0, 5),
}
FEW: dict[str, Any] = {"rounds": 2, "steps": 3, "queries": 3, "points": 2, "targets": 1}
OPTIONS = {name: list(attack.options) for name, attack in ATTACKS.items()}
NEEDED = {
    name: option
    for name, attack in ATTACKS.items()
    for option, (_, default) in attack.options.items()
    if default is ...
}
CASES = [
    (attack, option)
    for attack, options in OPTIONS.items()
    for option in options
    # In `found_by` the static model has the lowest margins, so that it does not matter how often the
    # states of the trajectory follow; `test_adaptive_chains.py` counts them.
    if (attack, option) != ("trajectory", "every")
]


def found_by(text: str, updates: int = 2) -> tuple[torch.Tensor, int, int, int]:
    """What an attack makes of a batch, and how much it asked, when it is given as text."""
    net = tiny()
    sources = sources_of(
        net, labeled(net, 8), f"dent:lr=0.1,steps={updates}", attacks=[text], batch_size=8, steps=None,
        queries=None,
    )  # fmt: skip
    plan = make_plan(sources)
    (unit,) = [unit for unit in plan.units() if unit.attack not in (NATURAL, ABOUT)]
    attack = sources.attack(unit.attack, plan.options(unit))
    inputs, labels = sources.read(find_points(unit, attack, sources.batches()))
    everyone = torch.ones_like(labels, dtype=torch.bool)
    subject, task = sources.subject(unit.cell), Task(unit, plan.options(unit))
    result, _ = attack_batch(task, attack, subject, inputs, labels, everyone, sources.evaluation)
    part = getattr(result, "part", everyone)
    return result.inputs, result.queries, result.gradients, int(part.sum())


def test_a_poisoned_batch_keeps_a_natural_member() -> None:
    _, _, _, natural = found_by("poisoning:share=0.99,steps=1")
    assert natural == 1


@pytest.mark.parametrize(("attack", "option"), CASES, ids=[": ".join(case) for case in CASES])
def test_every_option_is_taken_and_changes_something(attack: str, option: str) -> None:
    few = {name: value for name, value in FEW.items() if name in OPTIONS[attack]}
    few |= {NEEDED[attack]: {"share": 0.5, "points": 2}[NEEDED[attack]]} if attack in NEEDED else {}
    small, large = (
        found_by(
            f"{attack}:{','.join(f'{key}={one}' for key, one in (few | {option: value}).items())}",
            updates=4 if option == "share" else 2,  # of which it may be a share
        )
        for value in VALUES.get(option, (1, 2))
    )
    assert small[1:] != large[1:] or not torch.equal(small[0], large[0])
    if option not in ("step_size", "loss", "attacks", "share", "updates", "every", "order"):
        assert large[1:3] > small[1:3]  # more of these is more work


def test_every_attack_has_its_options_and_every_suite_uses_them() -> None:
    assert NEEDED == {"mixed": "share", "one among": "points", "poisoning": "share"}
    for name in SUITE_NOTES:
        for norm in ("linf", "l2", "l1"):
            for attack, options in find_suite(name, norm).items():
                assert options.keys() <= set(OPTIONS[attack.partition(" (")[0]])


def default_of(run: Any, option: str) -> Any:
    """The default that the function of an attack has for an option, wherever it is declared."""
    function: Any = run
    for _ in range(4):
        if isinstance(function, partial):
            if option in function.keywords:
                return function.keywords[option]
            function = (
                function.args[0] if function.args and callable(function.args[0]) else function.func
            )
    found = signature(function).parameters.get(option)
    return signature(adaptive.gmsa if found is None else function).parameters[option].default


@pytest.mark.parametrize(
    "name",
    [
        "pgd",
        "apgd-ce",
        "apgd-dlr",
        "apgd-t",
        "fab",
        "fab-t",
        "square",
        "denying updates",
        "high confidence",
        "fpa",
        "gmsa-avg",
        "gmsa-min",
        "trajectory",
        "chained",
        "balanced",
    ],
)
def test_defaults_of_the_table_are_those_of_the_functions(name: str) -> None:
    """They are stated for estimates, and must not drift apart."""
    for option, (_, default) in ATTACKS[name].options.items():
        own = default_of(ATTACKS[name].run, option)
        assert own == default or (option == "targets" and own is None), option


whole = st.integers(1, 10**6)
OF_KIND: dict[str, st.SearchStrategy[Any]] = {
    "share": st.floats(0, 1, exclude_min=True, exclude_max=True),
    "step_size": st.one_of(st.floats(1e-9, 1e9), st.integers(1, 9)),
    "loss": st.sampled_from(sorted(LOSSES)),
    "order": st.sampled_from(sorted(ORDERS)),
    "attacks": st.lists(st.sampled_from(sorted(OFFLINE)), min_size=1, max_size=3, unique=True),
}
labels_of_variants = st.text("abcXYZ 019%.", min_size=1, max_size=8)


@st.composite
def asked(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """Any attack, or a variant of it, with any of its options."""
    kind = draw(st.sampled_from(sorted(OPTIONS)))
    keys = draw(st.lists(st.sampled_from(OPTIONS[kind]), unique=True))
    keys += [NEEDED[kind]] if kind in NEEDED and NEEDED[kind] not in keys else []
    label = draw(st.one_of(st.none(), labels_of_variants))
    return (
        kind if label is None else f"{kind} ({label})",
        {key: draw(OF_KIND.get(key, whole)) for key in draw(st.permutations(keys))},
    )


def typed(value: Any, space: str) -> str:
    return f"({f',{space}'.join(value)})" if isinstance(value, list) else str(value)


@given(asked(), st.sampled_from(["", " "]))
def test_a_text_says_all_of_an_attack_and_says_it_once(
    attack: tuple[str, dict[str, Any]], space: str
) -> None:
    name, options = attack
    pairs = [f"{key}{space}={space}{typed(value, space)}" for key, value in options.items()]
    text = format_attack(f"{space}{name}{space}:{space}{f',{space}'.join(pairs)}")
    assert format_attack(text) == text
    wanted = {key: tuple(one) if isinstance(one, list) else one for key, one in options.items()}
    assert parse_attacks([text]) == {name: ADAPTIVE.get(name, {}) | wanted}
    turned = f"{name}:{','.join(reversed(pairs))}"
    assert format_attack(turned) == text  # in whatever order
    assert Evaluation(attacks=[turned, text]).attacks == (text,)


DENYING = "denying updates:attacks=(apgd-ce,apgd-t)"


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("apgd-ce", "apgd-ce"),
        (" apgd-ce: ", "apgd-ce"),
        ("pgd:step_size=1", "pgd:step_size=1.0"),
        ("pgd:step_size=2e-3,loss=dlr", "pgd:loss=dlr,step_size=0.002"),
        ("denying updates:attacks=apgd-t", "denying updates:attacks=(apgd-t)"),
        ("denying updates:attacks=('apgd-ce','apgd-t')", DENYING),
        ("denying updates: attacks = [ 'apgd-ce', 'apgd-t' ]", DENYING),
        ("denying updates:attacks=apgd-ce,apgd-t", DENYING),
        ("mixed (10 %)", "mixed (10 %)"),
        ("gmsa-min:targets=0", "gmsa-min:targets=0"),
    ],
)
def test_one_way_to_write_an_attack(given: str, text: str) -> None:
    assert format_attack(given) == text == format_attack(text)


WRONG: dict[Any, str] = {
    "apgd": "unknown attack 'apgd'; did you mean",
    "": "unknown attack ''",
    "natural": "unknown attack 'natural'",
    "battle": "unknown attack 'battle'",
    "apgd-ce:step=3": r"unknown settings of the attack apgd-ce: step; did you mean 'steps'",
    "fpa:steps=010": r"1 wrong setting of the attack fpa:\s+steps: expected an integer >= 0, got '010'",
    "square:steps=3": "unknown settings of the attack square: steps; Expected any of: queries, restarts",
    "apgd-ce (2):rounds=3": "unknown settings of the attack apgd-ce: rounds; Expected any of: steps",
    "apgd-ce:steps": "expected a text such as apgd-ce or fpa:rounds=3,steps=10, got 'apgd-ce:steps'",
    "apgd-ce:steps=3,steps=4": "expected each setting once, got steps twice",
    "apgd-ce:steps=-1": r"attack apgd-ce:\s+steps: expected an integer >= 0, got -1",
    "apgd-ce:steps=1.5": r"attack apgd-ce:\s+steps: expected an integer >= 0, got 1.5",
    "apgd-ce:steps=True": r"attack apgd-ce:\s+steps: expected an integer >= 0, got True",
    "apgd-ce:restarts=0": r"attack apgd-ce:\s+restarts: expected an integer >= 1, got 0",
    "apgd-t:targets=0,draws=0": r"attack apgd-t:\s+draws: .* got 0\s+targets: expected .* >= 1, got 0",
    "mixed (a):share=1": r"attack mixed:\s+share: expected a number > 0 and < 1, got 1",
    "pgd:step_size=fast": r"attack pgd:\s+step_size: expected a number.*, got 'fast'",
    "pgd:step_size=0": r"attack pgd:\s+step_size: expected a number.*, got 0",
    "pgd:loss=cee": r"attack pgd:\s+loss: unknown name 'cee'; did you mean 'ce'",
    "denying updates:attacks=(apgd-ce,fab)": "attacks.*: unknown name 'fab'",
    "denying updates:attacks=()": r"attack denying updates:\s+attacks: expected 1 or more entries",
    "denying updates:attacks=3": r"attack denying updates:\s+attacks: expected a list.*, got 3",
    "mixed": r"attack mixed:\s+share: expected a number > 0 and < 1",
    "one among (3):companions=3": r"attack one among:\s+points: expected an integer >= 1",
    "pgd (a) b": r"expected a variant of pgd as pgd \(other\), got 'pgd \(a\) b'",
    "pgd (a": r"expected a variant of pgd as pgd \(other\)",
    5: "expected an attack such as apgd-ce .*, got 5",
    None: "expected an attack such as apgd-ce .*, got None",
}


@pytest.mark.parametrize("text", list(WRONG))
def test_what_is_wrong_is_said_before_any_work(
    text: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "dent.evaluation.pipeline.run_evaluation", lambda *_, **__: pytest.fail("a run began")
    )
    with pytest.raises((ValueError, TypeError), match=WRONG[text]):
        format_attack(text)
    with pytest.raises(
        ValueError, match=f"(?s)wrong settings? of the evaluation.*attacks.1: .*{WRONG[text]}"
    ):
        evaluate(tiny(), "static", data=labeled(tiny(), 2), attacks=["fab", text], out=tmp_path / "run")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("first", "second"),
    [("fpa:steps=1", "fpa:steps=2"), ("pgd (a)", "pgd (a):steps=2"), ("pgd (A b)", "pgd (a_b)")],
)
def test_two_attacks_of_one_name_are_refused_with_what_to_do(first: str, second: str) -> None:
    """Also where only their files would be the same."""
    with pytest.raises(
        ValueError, match=r"attacks: expected a name of its own .* and .*; name a variant"
    ):
        Evaluation(attacks=[first, second])
    kind = first.partition(" (")[0].partition(":")[0]
    both = Evaluation(attacks=[first, f"{kind} (other):steps=2"]).find_attacks()
    assert [name.partition(" (")[0] for name in both] == [kind, kind]
    cell = Evaluation(models="net").cells()[0]
    assert len({Unit(cell, 0, name).file for name in both}) == 2


def test_a_file_lists_attacks_in_their_order(tmp_path: Path) -> None:
    path = tmp_path / "asked.yaml"
    path.write_text(
        "suite: full\nattacks:\n  - square:queries=9\n  - 'mixed (20 %): share=0.2'\n"
        "  - gmsa-avg\n  - square (two):restarts=2,queries=9\n"
    )
    evaluation = read_evaluation(path)
    assert evaluation.attacks == (
        "square:queries=9", "mixed (20 %):share=0.2", "gmsa-avg", "square (two):queries=9,restarts=2",
    )  # fmt: skip
    assert not evaluation.has_protocol  # of the suite that is not run
    assert read_evaluation(path, attacks=()).has_protocol
    assert Evaluation(attacks="fab").attacks == ("fab",)
    path.write_text("attacks: {fab: 3}")
    with pytest.raises(ValueError, match="attacks: expected a list, got {'fab': 3}"):
        read_evaluation(path)
    sources = sources_of(
        tiny(), labeled(tiny(), 4), "static", "norm", "dent:steps=1",
        attacks=evaluation.attacks, steps=7, queries=5, battle=True,
    )  # fmt: skip
    static, norm, dent = (one.attacks for one in make_plan(sources).cells.values())
    squares = {"square": {"queries": 5}, "square (two)": {"queries": 5, "restarts": 2}}
    others = {"mixed (20 %)": {"share": 0.2, "steps": 7}, "gmsa-avg": {"steps": 7}}
    assert static == {NATURAL: {}, ABOUT: {}} | squares
    assert dent == {NATURAL: {}, ABOUT: {}, BATTLE: {}} | squares | others
    assert list(dent)[3:] == ["square", "mixed (20 %)", "gmsa-avg", "square (two)"]
    assert norm.keys() == dent.keys() - {"gmsa-avg"}


def test_chosen_attacks_are_run_as_those_of_a_suite_are(tmp_path: Path) -> None:
    net = tiny()
    told: dict[str, Any] = {"batch_size": 4, "eps": 0.03, "exhaustive": True, "battle": False}
    told |= {"data": labeled(net, 8, wrong=1)}
    texts = [format_attack(f"{name}:steps=2") for name in find_suite("quick", "linf")]
    texts[1] = "denying updates:attacks=(apgd-ce,apgd-dlr),steps=2"
    texts[-1] = "fpa:rounds=3,steps=2"
    defenses = ["static", "dent:steps=1"]
    by_suite = evaluate({"net": net}, defenses, suite="quick", steps=2, **told)
    by_text = evaluate({"net": net}, defenses, attacks=texts, out=tmp_path / "run", **told)
    assert by_text.complete
    for one, other in zip(by_suite.cells, by_text.cells, strict=True):
        assert (one.attacks, one.kinds, one.points) == (other.attacks, other.kinds, other.points)
    spaced = [text.replace(":", " : ").replace(",s", ", s") for text in texts]
    again = evaluate(  # the same attacks in other words are the same run
        {"net": net}, defenses, attacks=spaced, out=tmp_path / "run",
        on_unit=lambda done: pytest.fail(f"{done.unit} was done again"), **told,
    )  # fmt: skip
    assert again.to_json() == by_text.to_json()
