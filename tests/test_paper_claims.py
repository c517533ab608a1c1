"""The paper's claims: what becomes of one, and the claims themselves beside the paper's own numbers."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import pytest

from dent.evaluation.paired import paired
from dent.paper.claims import Claim, claims, judge, published_verdict, read_claims
from dent.paper.tables import MEASURES, Number, tables
from dent.paper.verdicts import FAILS, HOLDS, OPEN, Points, Verdict

COSTS = {"seconds", "times seconds", "times flops"}
NUMBERS: dict[str, Number] = {
    name: one for table in tables().values() for name, one in table.references().items()
}


def share(correct: int, n: int) -> Points:
    """The first so many points are correct: of two such numbers, one has what the other has."""
    return {i: i < correct for i in range(n)}


# Claims


@dataclass(frozen=True)
class Printed:
    published: float | None = None


@dataclass(frozen=True)
class Loaded:
    model: str = "resnet20-at"
    stands_in: bool = True


@dataclass(frozen=True)
class Made:
    """Made-up evidence."""

    points: Points = field(default_factory=dict)
    worst_points: Points = field(default_factory=dict)
    value: float | None = None
    missing: str | None = None
    number: Printed = Printed()
    work: Loaded | None = Loaded()


def claim(*comparisons: str, more: str = "") -> Claim:
    """Comparisons as YAML, with a, b, c for the references t/p/a, t/p/b, t/p/c."""
    lines = [re.sub(r"\b([abc])\b", r"t/p/\1", one) for one in comparisons]
    text = f"[{{text: dent helps, where: Table 1, comparisons: [{', '.join(lines)}]{more}}}]"
    return read_claims(text)[0]


def measured(**made: Made) -> dict[str, Made]:
    return {f"t/p/{name}": one for name, one in made.items()}


MORE, ALSO = "{more: [a, b]}", "{more: [a, c]}"


@pytest.mark.parametrize(
    ("b", "c", "expected"),
    [(50, 50, HOLDS), (50, 90, FAILS), (50, 69, OPEN), (69, 90, FAILS), (90, 90, FAILS), (69, 69, OPEN)],
)
def test_all_comparisons_have_to_hold(b: int, c: int, expected: Verdict) -> None:
    found = {name: Made(share(n, 100)) for name, n in (("a", 70), ("b", b), ("c", c))}
    assert judge(claim(MORE, ALSO), measured(**found)).verdict == expected
    assert judge(claim(ALSO, MORE), measured(**found)).verdict == expected


def test_evidence_can_be_read() -> None:
    found = judge(claim(MORE), measured(a=Made(share(81, 128)), b=Made(share(43, 128))))
    pair = paired(share(43, 128), share(81, 128))
    assert found.evidence == (f"t p: a 63.3, b 33.6: +29.7 [{pair.low:.1f}, {pair.high:.1f}], n = 128",)
    series = judge(
        claim("{rises: [a, b, c]}"),
        measured(a=Made(share(80, 100)), b=Made(share(55, 100)), c=Made(share(40, 100))),
    )
    assert series.evidence[0].startswith("t p: 80.0 (a), 55.0 (b), 40.0 (c); a to c -40.0 [")
    assert "; but a to c -40.0 [" in series.evidence[0]  # the largest of the three falls
    cost = judge(claim("{value_near: a, value: 20}"), measured(a=Made(value=22.0)))
    assert cost.evidence == ("t p a: 22.0 (asked for: 20, within a factor of 1.25)",)
    assert cost.verdict == HOLDS


def test_the_worst_case_is_judged_beside() -> None:
    """Dent is better under the paper's attacks, and not under those made for it."""
    dent = Made(share(70, 100), share(30, 100))
    static = Made(share(50, 100), share(50, 100))
    found = judge(claim(MORE), measured(a=dent, b=static))
    assert (found.verdict, found.worst_verdict) == (HOLDS, FAILS)
    assert found.evidence[0].startswith("t p: a 70.0, b 50.0: +20.0")
    assert found.worst_evidence[0].startswith("t p: a 30.0, b 50.0: -20.0")
    attacks = judge(claim(MORE, more=", worst: false"), measured(a=dent, b=static))
    assert (attacks.verdict, attacks.worst_verdict, attacks.worst_evidence) == (HOLDS, None, ())


def test_natural_accuracy_has_no_worst_case() -> None:
    natural = measured(a=Made(share(70, 100)), b=Made(share(50, 100)))
    assert judge(claim(MORE), natural).worst_verdict is None
    ratio = claim("{at_least: a, share: 0.9, of: b}")
    found = judge(ratio, measured(a=Made(share(80, 100), share(20, 100)), b=Made(share(81, 100))))
    assert (found.verdict, found.worst_verdict) == (HOLDS, FAILS)


def test_what_is_missing_is_said() -> None:
    found = judge(claim(MORE, ALSO), measured(a=Made(share(70, 100)), b=Made(missing="no model")))
    assert found.verdict == OPEN
    assert found.evidence == ("t p: b: no model", "t p: c: not measured")
    refuted = measured(a=Made(share(50, 100)), b=Made(share(70, 100)))
    assert judge(claim(MORE, ALSO), refuted).verdict == FAILS  # one is enough
    assert judge(claim(MORE), {}).verdict == OPEN
    assert judge(claim(MORE), measured(a=Made(), b=Made())).evidence == (
        "t p: a: no points; b: no points",
    )
    apart = measured(a=Made({1: True}), b=Made({2: False}))
    assert judge(claim(MORE), apart).evidence == ("t p: a and b have no points in common",)


def test_one_piece_of_work_is_not_compared_with_itself() -> None:
    points = share(500, 1000)
    equal = claim("{same: [a, b], within: 2}")
    assert judge(equal, measured(a=Made(points), b=Made(points))).verdict == OPEN
    assert judge(equal, measured(a=Made(points), b=Made(dict(points)))).verdict == HOLDS
    series = claim("{falls: [a, b, c]}")
    assert judge(series, measured(a=Made(points), b=Made(points), c=Made(points))).verdict == OPEN


def test_a_stand_in_says_nothing_of_what_is_about_the_papers_own() -> None:
    own = claim(MORE, more=", stand_ins: false")
    for stands_in, expected in ((True, OPEN), (False, HOLDS)):
        work = Loaded("net", stands_in)
        found = judge(
            own, measured(a=Made(share(70, 100), work=work), b=Made(share(50, 100), work=work))
        )
        assert found.verdict == expected
        assert ("net stands in for it" in found.evidence[0]) == stands_in


def test_the_same_comparison_is_shown_once() -> None:
    """One model stands in for two of the paper's."""
    both = read_claims(
        "[{text: t, where: w, comparisons: [{more: [t/p/*/dent, t/p/*/static], for: [wong, ding]}]}]"
    )[0]
    dent, static = Made(share(70, 100)), Made(share(50, 100))
    wong = {"t/p/wong/dent": dent, "t/p/wong/static": static}
    found = judge(both, wong | {"t/p/ding/dent": dent, "t/p/ding/static": static})
    assert (len(both.comparisons), len(found.evidence)) == (2, 1)
    assert found.evidence[0].startswith("t p wong, ding: dent 70.0, static 50.0: +20.0")


def test_published_numbers_are_compared_as_they_are() -> None:
    series = claim("{rises: [a, b, c]}")
    for numbers, expected in (
        ((49.0, 49.5, 49.4), HOLDS),  # a tenth of a point is chance
        ((49.0, 55.3, 49.4), FAILS),
        ((49.4, 49.5, 49.0), FAILS),
        ((49.0, None, 49.4), HOLDS),
        ((49.0, 49.4, None), OPEN),
    ):
        published = dict(zip(series.references, numbers, strict=True))
        assert published_verdict(series, published) == expected
        made = {name: Made(share(5, 10), number=Printed(one)) for name, one in published.items()}
        assert judge(series, made).published_verdict == expected


def test_a_judgment_as_json() -> None:
    found = judge(claim(MORE, more=", note: hm"), measured(a=Made(share(7, 9)), b=Made(share(3, 9))))
    assert found.to_json() == {
        "text": "dent helps",
        "where": "Table 1",
        "note": "hm",
        "verdict": found.verdict,
        "worst_verdict": None,
        "evidence": list(found.evidence),
        "worst_evidence": [],
        "published_verdict": OPEN,
    }


# The claims of the paper


def test_every_reference_is_a_number_of_a_table() -> None:
    unknown = {one for claim in claims() for one in claim.references} - set(NUMBERS)
    assert not unknown
    assert {one for claim in claims() for one in claim.tables} == set(tables())


def test_accuracies_are_compared_with_accuracies() -> None:
    assert set(MEASURES) > COSTS
    for one in (part for claim in claims() for part in claim.comparisons):
        asks = [NUMBERS[name].ask for name in one.references]
        kinds = {ask.measure if ask.measure in COSTS else "accuracy" for ask in asks}
        assert len(kinds) == 1, one
        assert not any(ask.minus for ask in asks), one
        assert (one.kind == "value_near") <= (kinds <= COSTS), one
        # Points are paired by their place in a data set, which must be the same.
        assert len({re.search("cifar100|imagenet|$", ask.model)[0] for ask in asks}) == 1, one  # type: ignore[index]


def test_claims_are_told_once_and_in_one_sentence() -> None:
    texts = [claim.text for claim in claims()]
    assert len(set(texts)) == len(texts) > 40
    for claim in claims():
        assert claim.text.count(".") - len(re.findall(r"\d\.\d", claim.text)) == 1, claim.text
        assert claim.text.endswith("."), claim.text
        assert re.match("Abstract|Section|Appendix", claim.where), claim.where
        assert len(set(claim.comparisons)) == len(claim.comparisons), claim.text


def test_the_papers_own_numbers_support_its_text_but_for_what_is_noted() -> None:
    published = {name: one.published for name, one in NUMBERS.items()}
    verdicts = {claim.text: published_verdict(claim, published) for claim in claims()}
    contradicted = {text for text, verdict in verdicts.items() if verdict == FAILS}
    assert contradicted == {claim.text for claim in claims() if "The paper's own numbers" in claim.note}
    assert len(contradicted) == 3
    open_ones = [claim for claim in claims() if verdicts[claim.text] == OPEN]
    beside = "table-4"  # has the natural accuracy beside that in a large ball
    of_these = {table for claim in open_ones for table in claim.tables}
    assert of_these == {"figure-3", "figure-4", beside, "text-imagenet"}
    for claim in open_ones:
        assert any(published[name] is None for name in claim.references)


def test_times_that_are_named_are_those_of_the_table() -> None:
    near = [one for claim in claims() for one in claim.comparisons if one.kind == "value_near"]
    named = {one.references[0]: one.bound for one in near if len(one.references) == 1}
    assert named == {name: NUMBERS[name].published for name in named} != {}


def test_on_points_that_are_as_published_the_verdicts_are_those_of_the_paper() -> None:
    """10,000 images, of which each number has the published share correct."""
    made = {
        name: Made(value=one.published, work=None)
        if one.ask.measure in COSTS
        else Made(share(round(100 * one.published), 10_000), work=None)
        for name, one in NUMBERS.items()
        if one.published is not None and not one.ask.minus
    }
    published = {name: one.published for name, one in NUMBERS.items()}
    for claim in claims():
        assert judge(claim, made).verdict == published_verdict(claim, published), claim.text


# Faults of the file


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("{more: [a, b], within: 2}", "unknown keys of more: within; .*Expected any of: more, by, for"),
        ("{moer: [a, b]}", "expected a comparison by one of more, same, .* got {'moer'"),
        ("{more: [a, b], same: [a, b]}", "expected a comparison by one of more, same"),
        ("more", "expected a comparison by one of more, same, .* got 'more'"),
        ("{more: a}", "more: expected 2 references, got 1"),
        ("{more: [a, b, c]}", "more: expected 2 references, got 3"),
        ("{rises: [a]}", "rises: expected 2 to 99 references, got 1"),
        ("{more: [a, a]}", "more: expected each reference once"),
        (
            "{more: [a, 3]}",
            r"more: expected references as table-7/dent\+/ding2020/6, got \['t/p/a', 3\]",
        ),
        ("{more: [a, b], by: much}", "more: expected a number for by, got 'much'"),
        ("{more: [a, b], by: true}", "more: expected a number for by, got True"),
        ("{same: [a, b]}", "same: expected a number for within, got None"),
        ("{at_least: a, share: 0.9}", "at_least: expected references"),
        ("{value_near: a}", "value_near: expected a number for value, got None"),
        ("{more: [a, b], for: [x]}", r"more: expected names `for` the \* of its references"),
        ("{more: [a/*, b]}", r"more: expected names `for` the \* of its references"),
        ("{more: [a/*, b], for: []}", r"more: expected names `for` the \* of its references"),
    ],
)
def test_wrong_comparisons_are_refused(fault: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"1 wrong setting of the claims:\n  'dent helps': {message}"):
        claim(fault)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("text: t", "expected a list of claims, got dict"),
        ("- t", "claim 1: expected text, where and comparisons, got 't'"),
        ("- {text: t, were: w}", "'t': unknown keys of a claim: were; did you mean 'where'"),
        ("- {text: t}", "'t': expected a text for where, got None"),
        ("- {text: t, where: w}", "'t': expected a list of comparisons, got None"),
        ("- {text: t, where: w, comparisons: []}", r"'t': expected a list of comparisons, got \[\]"),
        ("- {text: t, where: w, note: 3}", "'t': expected a text for note, got 3"),
        ("- {text: t, where: w, worst: maybe}", "'t': expected true or false for worst, got 'maybe'"),
        ("- {text: t}\n- 3", "(?s)2 wrong settings of the claims:.*'t': expected.*claim 2: expected"),
    ],
)
def test_wrong_claims_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_claims(text)
