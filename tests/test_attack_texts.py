"""Attacks as text: one way to write each, options that are really taken, faults before any work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from cells import labeled, sources_of, tiny
from hypothesis import given
from hypothesis import strategies as st

from dent.attacks.adaptive.transfer import OFFLINE
from dent.attacks.losses import LOSSES
from dent.evaluation import evaluate, make_evaluation, read_evaluation
from dent.evaluation.attacks import ATTACKS
from dent.evaluation.perform import Task, attacked, points_of
from dent.evaluation.plan import make_plan
from dent.evaluation.suites import (
    ADAPTIVE,
    NEEDED,
    OPTIONS,
    SUITE_NOTES,
    attack_text,
    chosen_attacks,
    suite_attacks,
)
from dent.evaluation.units import ABOUT, BATTLE, NATURAL, Unit

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
    "every": (1, 3),
}
FEW: dict[str, Any] = {"rounds": 2, "steps": 3, "queries": 3, "points": 2, "targets": 1}
CASES = [(attack, option) for attack, options in OPTIONS.items() for option in options]


def found_by(text: str) -> tuple[torch.Tensor, int, int, int]:
    """What an attack makes of a batch, and how much it asked, when it is given as text."""
    net = tiny()
    sources = sources_of(
        net, labeled(net, 8), "dent:steps=2", attacks=[text], batch_size=8, steps=None, queries=None
    )
    plan = make_plan(sources)
    (unit,) = [unit for unit in plan.units() if unit.attack not in (NATURAL, ABOUT)]
    inputs, labels = sources.read(points_of(unit, sources.batches()))
    everyone = torch.ones_like(labels, dtype=torch.bool)
    subject, task = sources.subject(unit.cell), Task(unit, plan.settings(unit))
    result, _ = attacked(task, subject, inputs, labels, everyone, seed=0)
    part = getattr(result, "part", everyone)
    return result.inputs, result.queries, result.gradients, int(part.sum())


@pytest.mark.parametrize(("attack", "option"), CASES, ids=[": ".join(case) for case in CASES])
def test_every_option_is_taken_and_changes_something(attack: str, option: str) -> None:
    few = {name: value for name, value in FEW.items() if name in OPTIONS[attack]}
    few |= {NEEDED[attack]: {"share": 0.5, "points": 2}[NEEDED[attack]]} if attack in NEEDED else {}
    small, large = (
        found_by(f"{attack}:{','.join(f'{key}={one}' for key, one in (few | {option: value}).items())}")
        for value in VALUES.get(option, (1, 2))
    )
    assert small[1:] != large[1:] or not torch.equal(small[0], large[0])
    if option not in ("step_size", "loss", "attacks", "share", "updates", "every"):
        assert large[1:3] > small[1:3]  # more of these is more work


def test_every_attack_has_its_options_and_every_suite_uses_them() -> None:
    assert OPTIONS.keys() == ATTACKS.keys()
    assert NEEDED.keys() <= OPTIONS.keys()
    for name in SUITE_NOTES:
        for norm in ("linf", "l2", "l1"):
            for attack, options in suite_attacks(name, norm).items():
                assert options.keys() <= set(OPTIONS[attack.partition(" (")[0]])


whole = st.integers(1, 10**6)
OF_KIND: dict[str, st.SearchStrategy[Any]] = {
    "share": st.floats(0, 1, exclude_min=True, exclude_max=True),
    "step_size": st.one_of(st.floats(1e-9, 1e9), st.integers(1, 9)),
    "loss": st.sampled_from(sorted(LOSSES)),
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
    text = attack_text(f"{space}{name}{space}:{space}{f',{space}'.join(pairs)}")
    assert attack_text(text) == text
    wanted = {key: tuple(one) if isinstance(one, list) else one for key, one in options.items()}
    assert chosen_attacks([text]) == {name: ADAPTIVE.get(name, {}) | wanted}
    turned = f"{name}:{','.join(reversed(pairs))}"
    assert attack_text(turned) == text  # in whatever order
    assert make_evaluation(attacks=[turned, text]).attacks == (text,)


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
    assert attack_text(given) == text == attack_text(text)


WRONG: dict[Any, str] = {
    "apgd": "unknown attack 'apgd'; did you mean",
    "": "unknown attack ''",
    "natural": "unknown attack 'natural'",
    "battle": "unknown attack 'battle'",
    "apgd-ce:step=3": r"unknown options of apgd-ce: step; did you mean 'steps'\? Expected any of: dra",
    "fpa:steps=010": "expected steps of fpa as an integer >= 0, got '010'",
    "square:steps=3": "unknown options of square: steps; Expected any of: queries, restarts",
    "apgd-ce (2):rounds=3": r"unknown options of apgd-ce \(2\): rounds; Expected any of: draws, steps",
    "apgd-ce:steps": "expected a text such as apgd-ce or fpa:rounds=3,steps=10, got 'apgd-ce:steps'",
    "apgd-ce:steps=3,steps=4": "expected each setting once, got steps twice",
    "apgd-ce:steps=-1": "expected steps of apgd-ce as an integer >= 0, got -1",
    "apgd-ce:steps=1.5": "expected steps of apgd-ce as an integer >= 0, got 1.5",
    "apgd-ce:steps=True": "expected steps of apgd-ce as an integer >= 0, got True",
    "apgd-ce:restarts=0": "expected restarts of apgd-ce as an integer >= 1, got 0",
    "apgd-t:targets=0": "expected targets of apgd-t as an integer >= 1, got 0",
    "mixed (a):share=1": r"expected share of mixed \(a\) as a number in \(0, 1\), got 1",
    "pgd:step_size=fast": r"expected step_size of pgd as a number in \(0, inf\), got 'fast'",
    "pgd:loss=cee": "unknown loss of pgd 'cee'; did you mean 'ce'",
    "denying updates:attacks=(apgd-ce,fab)": "unknown attacks of denying updates 'fab'",
    "denying updates:attacks=()": r"expected attacks of denying updates as \(apgd-ce,apgd-t\), got \(\)",
    "denying updates:attacks=3": "expected attacks of denying updates as .*, got 3",
    "mixed": "expected share of mixed, got none; write mixed:share=",
    "one among (3):companions=3": r"expected points of one among \(3\), got none",
    "pgd (a) b": r"expected a variant of pgd as pgd \(other\), got 'pgd \(a\) b'",
    "pgd (a": r"expected a variant of pgd as pgd \(other\)",
    5: "expected an attack such as apgd-ce .*, got 5",
    None: "expected an attack such as apgd-ce .*, got None",
}


@pytest.mark.parametrize("text", list(WRONG))
def test_what_is_wrong_is_said_before_any_work(
    text: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dent.evaluation.run.run", lambda *_, **__: pytest.fail("a run began"))
    with pytest.raises((ValueError, TypeError), match=WRONG[text]):
        attack_text(text)
    with pytest.raises(
        ValueError, match=f"(?s)wrong settings? of the evaluation.*attacks: {WRONG[text]}"
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
        make_evaluation(attacks=[first, second])
    kind = first.partition(" (")[0].partition(":")[0]
    both = make_evaluation(attacks=[first, f"{kind} (other):steps=2"]).attacks_in("linf")
    assert [name.partition(" (")[0] for name in both] == [kind, kind]
    cell = make_evaluation(models="net").cells()[0]
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
    assert not evaluation.with_protocol  # of the suite that is not run
    assert read_evaluation(path, attacks=()).with_protocol
    assert make_evaluation(attacks="fab").attacks == ("fab",)
    path.write_text("attacks: {fab: 3}")
    with pytest.raises(ValueError, match="attacks: expected a list of names, got {'fab': 3}"):
        read_evaluation(path)
    sources = sources_of(
        tiny(), labeled(tiny(), 4), "static", "norm", "dent:steps=1",
        attacks=evaluation.attacks, steps=7, queries=5, battle=True,
    )  # fmt: skip
    static, norm, dent = make_plan(sources).attacks.values()
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
    texts = [attack_text(f"{name}:steps=2") for name in suite_attacks("quick", "linf")]
    texts[1] = "denying updates:attacks=(apgd-ce,apgd-dlr),steps=2"
    texts[2] = "fpa:rounds=3,steps=2"
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
