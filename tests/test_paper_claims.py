"""The paper's claims: what becomes of one, and the claims themselves beside the paper's own numbers."""

from __future__ import annotations

import re

import pytest

from dent.evaluation.paired import JudgedPoints, pair_points
from dent.paper.claims import Claim, Judgment, claims, judge, judge_published, read_claims
from dent.paper.results import Measurement
from dent.paper.scales import Work
from dent.paper.tables import MEASURES, Ask, PublishedNumber, tables
from dent.paper.verdicts import FAILS, HOLDS, OPEN, Verdict
from dent.report.claims import evidence_lines

ASK = Ask("madry-26-4", "dent", "linf", 8 / 255, "autoattack")
COSTS = {"seconds", "times seconds", "times flops"}
NUMBERS: dict[str, PublishedNumber] = {
    name: one for table in tables().values() for name, one in table.references().items()
}


def share(correct: int, n: int) -> JudgedPoints:
    """The first so many points are correct: of two such numbers, one has what the other has."""
    return JudgedPoints({i: i < correct for i in range(n)})


# Claims


def work(model: str = "resnet20-at", *, stands_in: bool = True) -> Work:
    attacks = ("apgd-ce",)
    return Work(model, "cifar10", "dent", "linf", 8 / 255, attacks, 4, 4, False, stands_in=stands_in)


LOADED = work()


def made(
    judged: JudgedPoints | None = None, worst: JudgedPoints | None = None, *,
    value: float | None = None, missing: str | None = None, published: float | None = None,
    by: Work | None = LOADED,
) -> Measurement:  # fmt: skip
    """Made-up evidence."""
    number = PublishedNumber("row", "column", published, ASK)
    return Measurement(number, by, value=value, missing=missing, judged=judged, worst_judged=worst)


def claim(*conditions: str, more: str = "") -> Claim:
    """Conditions as YAML, with a, b, c for the references t/p/a, t/p/b, t/p/c."""
    lines = [re.sub(r"\b([abc])\b", r"t/p/\1", one) for one in conditions]
    text = f"[{{text: dent helps, where: Table 1, conditions: [{', '.join(lines)}]{more}}}]"
    return read_claims(text)[0]


def measured(**every: Measurement) -> dict[str, Measurement]:
    return {f"t/p/{name}": one for name, one in every.items()}


MORE, ALSO = "{more: [a, b]}", "{more: [a, c]}"


@pytest.mark.parametrize(
    ("b", "c", "expected"),
    [(50, 50, HOLDS), (50, 90, FAILS), (50, 69, OPEN), (69, 90, FAILS), (90, 90, FAILS), (69, 69, OPEN)],
)
def test_all_comparisons_have_to_hold(b: int, c: int, expected: Verdict) -> None:
    found = {name: made(share(n, 100)) for name, n in (("a", 70), ("b", b), ("c", c))}
    assert judge(claim(MORE, ALSO), measured(**found)).verdict == expected
    assert judge(claim(ALSO, MORE), measured(**found)).verdict == expected


def test_evidence_can_be_read() -> None:
    found = judge(claim(MORE), measured(a=made(share(81, 128)), b=made(share(43, 128))))
    ends = pair_points(share(43, 128), share(81, 128)).interval
    assert ends is not None
    assert evidence_lines(found.evidence) == [
        f"t p: a 63.3, b 33.6: +29.7 [{ends[0]:.1f}, {ends[1]:.1f}], n = 128"
    ]
    series = judge(
        claim("{rises: [a, b, c]}"),
        measured(a=made(share(80, 100)), b=made(share(55, 100)), c=made(share(40, 100))),
    )
    assert evidence_lines(series.evidence)[0].startswith(
        "t p: 80.0 (a), 55.0 (b), 40.0 (c); a to c -40.0 ["
    )
    assert "; but a to c -40.0 [" in evidence_lines(series.evidence)[0]  # the largest of the three falls
    cost = judge(claim("{value_near: a, value: 20}"), measured(a=made(value=22.0)))
    assert evidence_lines(cost.evidence) == ["t p a: 22.0 (required: 20, within a factor of 1.25)"]
    assert cost.verdict == HOLDS


@pytest.mark.parametrize(
    ("condition", "shares"),
    [
        ("{more: [a, b]}", (0.53, 0.50)),
        ("{more: [a, b], by: 8}", (0.55, 0.50)),
        ("{same: [a, b], within: 4}", (0.53, 0.50)),
        ("{at_least: a, share: 0.9, of: b}", (0.48, 0.50)),
        ("{falls: [a, b]}", (0.53, 0.50)),
    ],
)
def test_as_many_images_as_are_needed_would_tell(condition: str, shares: tuple[float, float]) -> None:
    def judge_by(n: int) -> Judgment:
        points = {name: made(share(round(part * n), n)) for name, part in zip("ab", shares, strict=True)}
        return judge(claim(condition), measured(**points))

    (few,) = judge_by(100).evidence
    assert few.verdict == OPEN
    assert few.needed is not None
    assert "images would tell" in evidence_lines([few])[0]
    assert judge_by(round(0.7 * few.needed)).verdict == OPEN
    told = judge_by(round(1.4 * few.needed))
    assert told.verdict != OPEN
    assert told.evidence[0].needed is None


def test_the_worst_case_is_judged_beside() -> None:
    """Dent is better under the paper's attacks, and not under those made for it."""
    dent = made(share(70, 100), share(30, 100))
    static = made(share(50, 100), share(50, 100))
    found = judge(claim(MORE), measured(a=dent, b=static))
    assert (found.verdict, found.worst_verdict) == (HOLDS, FAILS)
    assert evidence_lines(found.evidence)[0].startswith("t p: a 70.0, b 50.0: +20.0")
    assert evidence_lines(found.worst_evidence)[0].startswith("t p: a 30.0, b 50.0: -20.0")
    attacks = judge(claim(MORE, more=", worst: false"), measured(a=dent, b=static))
    assert (attacks.verdict, attacks.worst_verdict, attacks.worst_evidence) == (HOLDS, None, ())


def test_natural_accuracy_has_no_worst_case() -> None:
    natural = measured(a=made(share(70, 100)), b=made(share(50, 100)))
    assert judge(claim(MORE), natural).worst_verdict is None
    ratio = claim("{at_least: a, share: 0.9, of: b}")
    found = judge(ratio, measured(a=made(share(80, 100), share(20, 100)), b=made(share(81, 100))))
    assert (found.verdict, found.worst_verdict) == (HOLDS, FAILS)


def test_what_is_missing_is_said() -> None:
    found = judge(claim(MORE, ALSO), measured(a=made(share(70, 100)), b=made(missing="no model")))
    assert found.verdict == OPEN
    assert evidence_lines(found.evidence) == ["t p: b: no model", "t p: c: not measured"]
    refuted = measured(a=made(share(50, 100)), b=made(share(70, 100)))
    assert judge(claim(MORE, ALSO), refuted).verdict == FAILS  # one is enough
    assert judge(claim(MORE), {}).verdict == OPEN
    empty = judge(claim(MORE), measured(a=made(), b=made()))
    assert evidence_lines(empty.evidence) == ["t p: a: no images; b: no images"]
    apart = measured(a=made(JudgedPoints({1: True})), b=made(JudgedPoints({2: False})))
    assert evidence_lines(judge(claim(MORE), apart).evidence) == [
        "t p: a and b have no images in common"
    ]


def test_what_a_scale_leaves_out_leaves_the_rest_to_judge() -> None:
    """A model that nobody has here says nothing against or for a claim."""
    absent = made(missing="not measured (no model)", by=None)
    a, b = made(share(70, 100)), made(share(50, 100))
    found = judge(claim(MORE, ALSO), measured(a=a, b=b, c=absent))
    assert (found.verdict, found.left_out, len(found.evidence)) == (HOLDS, 1, 1)
    none = judge(claim(ALSO), measured(a=a, b=b, c=absent))
    assert (none.verdict, none.left_out) == (OPEN, 1)
    assert evidence_lines(none.evidence) == ["t p: c: not measured (no model)"]
    failed = judge(claim(MORE, ALSO), measured(a=a, b=b, c=made(missing="no memory")))
    assert (failed.verdict, failed.left_out) == (OPEN, 0)  # it was asked for


def test_a_series_goes_on_without_what_is_left_out() -> None:
    absent = made(missing="left out at this scale", by=None)
    series = claim("{rises: [a, b, c]}")
    a, b, c = (made(share(n, 100)) for n in (30, 50, 70))
    for figures, names in (((a, b, absent), "ab"), ((absent, b, c), "bc"), ((a, absent, c), "ac")):
        found = judge(series, measured(**dict(zip("abc", figures, strict=True))))
        assert (found.verdict, found.left_out) == (HOLDS, 0)
        (evidence,) = found.evidence
        assert evidence.condition.references == tuple(f"t/p/{name}" for name in names)
    alone = judge(series, measured(a=a, b=absent, c=absent))
    assert (alone.verdict, alone.left_out) == (OPEN, 1)


def test_one_piece_of_work_is_not_compared_with_itself() -> None:
    points = share(500, 1000)
    equal = claim("{same: [a, b], within: 2}")
    assert judge(equal, measured(a=made(points), b=made(points))).verdict == OPEN
    assert judge(equal, measured(a=made(points), b=made(share(500, 1000)))).verdict == HOLDS
    series = claim("{falls: [a, b, c]}")
    assert judge(series, measured(a=made(points), b=made(points), c=made(points))).verdict == OPEN


def test_a_stand_in_says_nothing_of_what_is_about_the_papers_own() -> None:
    own = claim(MORE, more=", stand_ins: false")
    for stands_in, expected in ((True, OPEN), (False, HOLDS)):
        by = work("net", stands_in=stands_in)
        found = judge(own, measured(a=made(share(70, 100), by=by), b=made(share(50, 100), by=by)))
        assert found.verdict == expected
        assert ("net stands in for it" in evidence_lines(found.evidence)[0]) == stands_in


def test_the_same_comparison_is_shown_once() -> None:
    """One model stands in for two of the paper's."""
    both = read_claims(
        "[{text: t, where: w, conditions: [{more: [t/p/*/dent, t/p/*/static], each: [wong, ding]}]}]"
    )[0]
    dent, static = made(share(70, 100)), made(share(50, 100))
    wong = {"t/p/wong/dent": dent, "t/p/wong/static": static}
    found = judge(both, wong | {"t/p/ding/dent": dent, "t/p/ding/static": static})
    assert (len(both.conditions), len(evidence_lines(found.evidence))) == (2, 1)
    assert evidence_lines(found.evidence)[0].startswith("t p wong, ding: dent 70.0, static 50.0: +20.0")


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
        assert judge_published(series, published) == expected
        found = {name: made(share(5, 10), published=one) for name, one in published.items()}
        assert judge(series, found).published_verdict == expected


def test_a_judgment_as_json() -> None:
    found = judge(claim(MORE, more=", note: hm"), measured(a=made(share(7, 9)), b=made(share(3, 9))))
    assert found.to_json() == {
        "text": "dent helps",
        "where": "Table 1",
        "note": "hm",
        "verdict": found.verdict,
        "worst_verdict": None,
        "evidence": [found.evidence[0].to_json()],
        "worst_evidence": [],
        "published_verdict": OPEN,
        "left_out": 0,
    }


# The claims of the paper


def test_every_reference_is_a_number_of_a_table() -> None:
    unknown = {one for claim in claims() for one in claim.references} - set(NUMBERS)
    assert not unknown
    ours = {"text-protocol"}  # the paper has no such table
    assert {one for claim in claims() for one in claim.tables} == set(tables()) - ours


def test_accuracies_are_compared_with_accuracies() -> None:
    assert set(MEASURES) > COSTS
    for one in (part for claim in claims() for part in claim.conditions):
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
        assert len(set(claim.conditions)) == len(claim.conditions), claim.text


def test_the_papers_own_numbers_support_its_text_but_for_what_is_noted() -> None:
    published = {name: one.published for name, one in NUMBERS.items()}
    verdicts = {claim.text: judge_published(claim, published) for claim in claims()}
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
    near = [one for claim in claims() for one in claim.conditions if one.kind == "value_near"]
    named = {one.references[0]: one.bound for one in near if len(one.references) == 1}
    assert named == {name: NUMBERS[name].published for name in named} != {}


def test_on_points_that_are_as_published_the_verdicts_are_those_of_the_paper() -> None:
    """10,000 images, of which each number has the published share correct."""
    found = {
        name: made(value=one.published, by=None)
        if one.ask.measure in COSTS
        else made(share(round(100 * one.published), 10_000), by=None)
        for name, one in NUMBERS.items()
        if one.published is not None and not one.ask.minus
    }
    published = {name: one.published for name, one in NUMBERS.items()}
    for claim in claims():
        assert judge(claim, found).verdict == judge_published(claim, published), claim.text


# Faults of the file


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("{more: [a, b], within: 2}", "unknown settings of the condition: within; .*: each, more, by"),
        ("{moer: [a, b]}", "expected a condition by one of more, same, .* got {'moer'"),
        ("{more: [a, b], same: [a, b]}", "expected a condition by one of more, same"),
        ("more", "expected a condition by one of more, same, .* got 'more'"),
        ("{more: a}", "more: expected a list, got 't/p/a'"),
        ("{more: [a]}", "more: expected 2 or more entries"),
        ("{more: [a, b, c]}", "more: expected 2 entries or fewer"),
        ("{rises: [a]}", "rises: expected 2 or more entries"),
        ("{more: [a, a]}", "more: expected each reference once"),
        ("{more: [a, 3]}", "more.1: expected string, got 3"),
        ("{more: [a, x]}", r"more.1: expected a reference such as table-7/dent\+/ding2020/6, got 'x'"),
        ("{more: [a, b], by: much}", "by: expected a number, got 'much'"),
        ("{more: [a, b], by: true}", "by: expected a number, got True"),
        ("{same: [a, b]}", "within: expected a number"),
        ("{at_least: a, share: 0.9}", "of: expected text"),
        ("{value_near: a}", "value: expected a number"),
        ("{more: [a, b], each: [x]}", r"more: expected names in `each` for the \* of its references"),
        ("{more: [a/*, b]}", r"more: expected names in `each` for the \* of its references"),
        ("{more: [a/*, b], each: []}", "each: expected 1 or more entries"),
    ],
)
def test_wrong_conditions_are_refused(fault: str, message: str) -> None:
    start = "1 wrong setting of the claims:\n  'dent helps': conditions: "
    with pytest.raises(ValueError, match=f"{start}.*{message}"):
        claim(fault)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("text: t", "expected a list of claims, got dict"),
        ("- t", "claim 1: expected text, where and conditions, got 't'"),
        ("- {text: t, were: w}", "'t': unknown settings of the claim: were; did you mean 'where'"),
        (
            "- {text: t}",
            "(?s)2 wrong settings.*'t': where: expected text.*'t': conditions: expected a list",
        ),
        ("- {text: t, where: w}", "'t': conditions: expected a list"),
        ("- {text: t, where: w, conditions: []}", r"'t': conditions: expected .*, got \[\]"),
        ("- {text: t, where: w, note: 3}", "'t': note: expected text, got 3"),
        ("- {text: t, where: w, worst: maybe}", "'t': worst: expected true or false, got 'maybe'"),
        ("- {text: t, where: w}\n- 3", "(?s)2 wrong settings of the claims:.*'t': .*claim 2: expected"),
    ],
)
def test_wrong_claims_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_claims(text)
