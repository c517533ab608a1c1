"""The paper's claims with their verdicts, and the numbers behind each."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import takewhile

from dent.intervals import LEAST_BATCHES
from dent.paper.claims import Judgment
from dent.paper.tables import tables
from dent.paper.verdicts import (
    FAILS,
    HOLDS,
    OPEN,
    SERIES,
    SHARES,
    SMALLER,
    Difference,
    Evidence,
    Verdict,
)
from dent.report.blocks import EMPTY, Group, Note, Table, Tone, Value
from dent.report.format import format_count, format_n, format_percent, format_points

CLAIM_NOTES = (
    Note("by the 95 % interval of the difference, on the same images.", "here"),
    Note("the same with attacks made for adaptation, which the paper did not run.", "worst case"),
    Note("by the paper's own numbers, as it prints them.", "published"),
    Note(
        "the difference may be zero, and its interval lies below half of the published difference.",
        "far smaller",
    ),
    Note(
        f"this n is too small, a number is missing, or images that depend on their batch are in fewer "
        f"than {LEAST_BATCHES} batches. The number of images that would tell assumes "
        "the same difference.",
        "cannot be told",
    ),
    Note(
        "the verdict covers one of three conditions; the others need models or settings that are not "
        "measured here.",
        "1 of 3",
    ),
)
MOST_IMAGES = 10_000  # as CIFAR's test sets have
TONES: dict[Verdict, Tone] = {HOLDS: "good", FAILS: "bad", SMALLER: "bad"}
# How many claims have a verdict, in the order of a summary.
COUNTED: dict[Verdict, str] = {
    HOLDS: "hold",
    FAILS: "do not hold",
    SMALLER: "show far less than published",
    OPEN: "cannot be told",
}


def claim_table(judgments: Sequence[Judgment]) -> Table:
    """Return a row for each claim, with its verdicts."""
    rows = []
    for one in judgments:
        claim = Value(one.claim.text, details=(one.claim.where,))
        ours = [verdict_value(verdict, one) for verdict in (one.verdict, one.worst_verdict)]
        rows.append([claim, *ours, verdict_value(one.published_verdict)])
    columns = ("claim", "here", "worst case", "published")
    return Table("What the paper says, and what holds", columns, [Group(rows)], CLAIM_NOTES)


def verdict_value(verdict: Verdict | None, judgment: Judgment | None = None) -> Value:
    """Return a verdict as a cell, with how many conditions it is of if some are left out."""
    if verdict is None:
        return EMPTY
    tone = TONES.get(verdict, "")
    details: tuple[str, ...] = ()
    if judgment and judgment.left_out:
        total = len(judgment.claim.conditions)
        details = (f"{total - judgment.left_out} of {total}",)
    return Value(verdict, details=details, strong=bool(tone), tone=tone)


def summarize_claims(judgments: Sequence[Judgment]) -> list[str]:
    """Return how many claims hold, under the paper's attacks and in the worst case."""
    here: Counter[Verdict] = Counter(one.verdict for one in judgments)
    worst: Counter[Verdict] = Counter(one.worst_verdict for one in judgments if one.worst_verdict)
    if set(here) == {OPEN}:
        return ["Nothing can be told about the paper's claims yet."]
    lines = [
        f"Of {here.total()} claims of the paper, under its own kind of attack: {count_verdicts(here)}."
    ]
    if worst:
        lines.append(
            f"Of the {worst.total()} claims on robustness, in the worst case over attacks made for "
            f"adaptation: {count_verdicts(worst)}."
        )
    return lines


def count_verdicts(counts: Mapping[Verdict, int]) -> str:
    """Return how many claims have each verdict."""
    return ", ".join(f"{counts[verdict]} {words}" for verdict, words in COUNTED.items())


def write_evidence(one: Judgment) -> str:
    """Return a claim with the numbers behind its verdicts."""
    note = f" {one.claim.note}" if one.claim.note else ""
    worst = "; ".join(evidence_lines(one.worst_evidence))
    if one.left_out:
        note += f" {one.left_out} of its {len(one.claim.conditions)} conditions are not measured here."
    end = f" In the worst case: {worst}." if worst else ""
    return f"{one.claim.text}{note} Here: {'; '.join(evidence_lines(one.evidence))}.{end}"


def evidence_lines(evidence: Sequence[Evidence]) -> list[str]:
    """Return a line for each condition; conditions with the same numbers share a line."""
    places: dict[str, dict[str, None]] = {}
    for one in evidence:
        place, line = _describe_evidence(one)
        places.setdefault(line, {})[place] = None
    return [": ".join(filter(None, (_join_places(own), line))) for line, own in places.items()]


def format_needed(needed: float | None) -> str:
    """Return about how many images would tell, or nothing if it is not known.

    >>> format_needed(612.4), format_needed(25_000)
    ('; about 620 images would tell', '; more than 10,000 images would be needed to tell')
    """
    if needed is None:
        return ""
    if needed > MOST_IMAGES:
        return f"; more than {format_count(MOST_IMAGES)} images would be needed to tell"
    unit = 10 if needed < 1000 else 100
    return f"; about {format_count(math.ceil(needed / unit) * unit)} images would tell"


def _describe_evidence(one: Evidence) -> tuple[str, str]:
    """Return what the references of a condition have in common, and what their numbers say."""
    condition = one.condition
    place, names = shorten_references(condition.references)
    short = dict(zip(condition.references, names, strict=True))
    first, last = names[0], names[-1]
    known = {name: value for name, value in one.values.items() if not isinstance(value, str)}
    if condition.kind == "value_near" and one.ratio is not None:
        asked = f"{condition.bound:g}, within a factor of {condition.factor:g}"
        return place, f"{format_percent(one.ratio)} (required: {asked})"
    if one.difference is None:
        if one.reason:
            pair = f"{first} and {last} " if condition.kind != "value_near" else ""
            return place, f"{pair}{one.reason}"
        ends = (condition.references[0], condition.references[-1])
        needed = ends if condition.kind in SERIES else condition.references
        lacking = [(short[name], one.values[name]) for name in needed if name not in known]
        return place, "; ".join(": ".join(filter(None, (name, str(why)))) for name, why in lacking)
    if condition.kind in SERIES:
        shown = ", ".join(f"{format_percent(value)} ({short[name]})" for name, value in known.items())
        line = f"{shown}; {first} to {last} {format_difference(one.difference)}"
        if one.against:
            early, late, step = one.against
            line += f"; but {short[early]} to {short[late]} {format_difference(step)}"
        return place, line + _format_published(one) + format_needed(one.needed)
    share, required = condition.bound if condition.kind in SHARES else 1.0, ""
    if condition.kind == "same":
        required = f" (required: within {condition.bound:g})"
    elif condition.kind == "more" and condition.bound:
        required = f" (required: more than {condition.bound:g})"
    numbers = [format_percent(value) for value in (one.difference.first, one.difference.second)]
    other = last if share == 1 else f"{share:g} x {last}"
    difference = f"{format_difference(one.difference)}{required}{_format_published(one)}"
    difference += format_needed(one.needed)
    sign = " = " if share != 1 else " "
    return place, f"{first} {numbers[0]}, {other}{sign}{numbers[1]}: {difference}"


def _format_published(one: Evidence) -> str:
    """Return the published difference if ours is far smaller."""
    return f" (published: {format_points(one.published, sign='+')})" if one.verdict == SMALLER else ""


def format_difference(difference: Difference) -> str:
    """Return a difference with its interval and n.

    >>> format_difference(Difference(70.0, 50.0, (12.0, 27.4), 100, 5))
    '+20.0 [12.0, 27.4], n = 100, 5 batches'
    """
    text = format_points(difference.value, sign="+")
    if difference.n is None:
        return text
    if difference.interval is not None:
        text += f" [{', '.join(map(format_points, difference.interval))}]"
    return f"{text}, {format_n(difference.n, difference.batches)}"


def shorten_references(references: Sequence[str]) -> tuple[str, list[str]]:
    """Return what references have in common, and a short name for each.

    >>> shorten_references(["table-7/dent+/ding2020/6", "table-7/dent/ding2020/40"])
    ('table-7 ding2020', ['dent+ 6', 'dent 40'])
    >>> shorten_references(["figure-4/linf/dent/8/255", "figure-4/linf/dent/4/255"])
    ('figure-4 linf dent', ['8/255', '4/255'])
    """
    paths = [_reference_paths().get(one) or tuple(one.split("/")) for one in references]
    if len({len(one) for one in paths}) > 1:
        return "", list(references)
    common = [len(set(words)) == 1 for words in zip(*paths, strict=True)]
    place = " ".join(word for word, same in zip(paths[0], common, strict=True) if same)
    return place, [
        " ".join(word for word, same in zip(one, common, strict=True) if not same) for one in paths
    ]


@cache
def _reference_paths() -> dict[str, tuple[str, ...]]:
    """Return the table, part, row and column of every reference; their names may contain slashes."""
    paths = [
        (table.name, part.name, row, column)
        for table in tables().values()
        for part in table.parts
        for row in part.rows
        for column in part.columns
    ]
    return {"/".join(path): path for path in paths}


def _join_places(places: Iterable[str]) -> str:
    """Return several places as one text, with what they begin with once.

    >>> _join_places(["table-1 linf carmon2019", "table-1 linf wong2020"])
    'table-1 linf carmon2019, wong2020'
    """
    words = [place.split(" ") for place in places]
    columns = zip(*words, strict=False)  # as far as the shortest goes
    shared = [column[0] for column in takewhile(lambda column: len(set(column)) == 1, columns)]
    rests = (" ".join(one[len(shared) :]) for one in words)
    return " ".join([*shared, ", ".join(filter(None, rests))]).strip()
