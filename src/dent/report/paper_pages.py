"""The results of the paper as Markdown pages: an overview, the claims, and a page for each table.

The pages put reproductions at several scales side by side. Every number of theirs comes from a store.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from dent.paper.claims import Judgment, judge_claims
from dent.paper.results import Measurement, Reproduction
from dent.paper.tables import PaperTable, tables
from dent.paper.verdicts import FAILS, HOLDS, SMALLER
from dent.report.blocks import EMPTY, Group, Note, Table, Value
from dent.report.claims import CLAIM_NOTES, evidence_lines, summarize_claims, verdict_value
from dent.report.format import NOT_MEASURED, format_percent
from dent.report.headlines import describe_n, headline_table, list_sentences
from dent.report.paper import (
    label_row,
    list_notes,
    name_models,
    name_table,
    our_value,
    title_table,
    worst_value,
)
from dent.report.text import markdown_list, table_markdown

SIZES = {"cpu": "small", "cpu-large": "large"}  # what the pages call a scale
CHAPTERS: dict[str, tuple[str, ...]] = {
    "Adversarial training": ("table-1", "table-2", "table-3", "table-7", "table-11"),
    "Nominal training": ("table-4", "table-5"),
    "Ablations": ("table-6", "table-8", "table-9", "table-10", "table-12", "table-13", "table-14"),
    "Figures and text": ("figure-3", "figure-4", "text-imagenet", "text-protocol"),
}
MOST = 3  # claims of a kind that the overview lists
NOT_YET = "not measured yet"
WHY_UNKNOWN = "No measurement says why yet."
PUBLISHED = Note("as the paper prints it.", "published")
HERE = "the same number on our models, under the attacks in the notes, with its 95 % interval."
WORST = Note(
    "what stands when attacks made for adaptation are added; the paper did not run these.", "worst case"
)


def name_size(reproduction: Reproduction) -> str:
    """Return what the pages call a reproduction: small, large, or the name of its scale."""
    return SIZES.get(reproduction.scale.name, reproduction.scale.name)


def make_pages(
    reproductions: Sequence[Reproduction],
    reasons: Mapping[tuple[str, str], str],
    *,
    folder: str,
) -> dict[str, str]:
    """Return Markdown by the name of its file: the overview as "", the others in the folder.

    reasons: why a claim does not hold, by scale and claim.
    """
    judgments = {name_size(one): judge_claims(one) for one in reproductions}
    pages = {"": _write_overview(reproductions, judgments, folder)}
    pages["claims.md"] = _write_claims(reproductions, judgments, reasons)
    for table in tables().values():
        pages[f"{table.name}.md"] = _write_table(reproductions, table)
    return pages


# The overview


def _write_overview(
    reproductions: Sequence[Reproduction], judgments: Mapping[str, Sequence[Judgment]], folder: str
) -> str:
    sizes = {name_size(one): one for one in reproductions}
    sentences = [text for size, one in sizes.items() for text in list_sentences(one, size)]
    parts = ["# The paper, reproduced", markdown_list(sentences)]
    parts.append(table_markdown(headline_table(sizes)))
    parts += [*_list_verdicts(judgments), "## Every number"]
    parts.append(markdown_list([*_list_links(folder), f"[All claims]({folder}/claims.md)"]))
    parts += [
        f"**{name_size(one).capitalize()}** is scale `{one.scale.name}`: {one.scale.describe()}. "
        + " ".join([_count_numbers(one), *summarize_claims(judgments[name_size(one)])])
        for one in reproductions
    ]
    return _join(parts)


def _list_links(folder: str) -> Iterator[str]:
    """Yield the links to the pages of the tables, a line for each chapter."""
    for chapter, names in CHAPTERS.items():
        links = [f"[{_name_link(tables()[name])}]({folder}/{name}.md)" for name in names]
        yield f"{chapter}: {', '.join(links)}"


def _name_link(table: PaperTable) -> str:
    return table.caption if table.name.startswith("text-") else name_table(table)


def _count_numbers(reproduction: Reproduction) -> str:
    """Return how many numbers of the paper are measured, not run yet, and not part of the scale."""
    found = [one for table in tables().values() for one in reproduction.by_reference(table).values()]
    published = [one for one in found if one.number.published is not None]
    left_out = sum(one.is_left_out for one in published)
    measured = sum(one.ours is not None for one in published)
    more = sum(one.ours is not None for one in found) - measured
    waiting = sum(one.ours is None and not one.is_left_out for one in found)
    return (
        f"It has {measured} of the {len(published)} numbers that the paper prints, and {more} that the "
        f"paper does not print; {left_out} are of models or settings that the scale does not have"
        + (f"; {waiting} are not measured yet." if waiting else ".")
    )


def _list_verdicts(judgments: Mapping[str, Sequence[Judgment]]) -> Iterator[str]:
    """Yield what holds and what does not, in the words of the claims."""
    kinds: dict[str, dict[str, list[str]]] = {
        "Holds": {},
        "Does not hold in the worst case": {},
        "Does not hold under the paper's kind of attack": {},
        "Shows far less than published": {},
    }
    for size, own in judgments.items():
        for one in own:
            if kind := _name_kind(one):
                kinds[kind].setdefault(one.claim.text, []).append(_describe_size(size, one))
    for title, found in kinds.items():
        items = [f"{text} ({', '.join(sizes)})" for text, sizes in found.items()]
        cut = f"{MOST} of " * (len(items) > MOST)
        yield f"## {title} ({cut}{len(items)})"
        yield markdown_list(items[:MOST])


def _name_kind(one: Judgment) -> str | None:
    """Return under which heading of the overview a claim stands; None if nothing can be told."""
    verdicts = (one.verdict, one.worst_verdict)
    if one.worst_verdict == FAILS:
        return "Does not hold in the worst case"
    if one.verdict == FAILS:
        return "Does not hold under the paper's kind of attack"
    if SMALLER in verdicts:
        return "Shows far less than published"
    return "Holds" if HOLDS in verdicts else None


def _describe_size(size: str, one: Judgment) -> str:
    """Return the scale, with both verdicts if they differ.

    The first is of the attacks that the paper ran, or of smaller ones of the same kind.
    """
    if one.worst_verdict in (None, one.verdict):
        return size
    return f"{size}: {one.verdict}; in the worst case: {one.worst_verdict}"


# The claims


def _write_claims(
    reproductions: Sequence[Reproduction],
    judgments: Mapping[str, Sequence[Judgment]],
    reasons: Mapping[tuple[str, str], str],
) -> str:
    table = side_by_side(judgments)
    parts = ["# Claims of the paper's text", table_markdown(table), markdown_list(table.notes)]
    scales = {name_size(one): one.scale.name for one in reproductions}
    failed = [
        f"**{one.claim.text}** ({_describe_size(size, one)}) "
        + reasons.get((scales[size], one.claim.text), WHY_UNKNOWN)
        for size, own in judgments.items()
        for one in own
        if FAILS in (one.verdict, one.worst_verdict)
    ]
    if failed:
        parts += ["## Why claims do not hold", *failed]
    parts.append("## The numbers behind each claim")
    for same in zip(*judgments.values(), strict=True):
        claim = same[0].claim
        parts.append(f"**{claim.text}** {claim.note}".strip())
        parts.append(markdown_list(_list_evidence(dict(zip(judgments, same, strict=True)))))
    return _join(parts)


def side_by_side(judgments: Mapping[str, Sequence[Judgment]]) -> Table:
    """Return a row for each claim, with its verdicts at each scale."""
    columns = ["claim"]
    for size in judgments:
        columns += [size, f"{size}, worst case"]
    rows = []
    for same in zip(*judgments.values(), strict=True):
        row = [Value(same[0].claim.text, details=(same[0].claim.where,))]
        for one in same:
            row += [verdict_value(one.verdict, one), verdict_value(one.worst_verdict, one)]
        rows.append([*row, verdict_value(same[0].published_verdict)])
    here = replace(CLAIM_NOTES[0], term=", ".join(judgments))
    return Table("", [*columns, "published"], [Group(rows)], (here, *CLAIM_NOTES[1:]))


def _list_evidence(same: Mapping[str, Judgment]) -> Iterator[str]:
    """Yield the numbers behind the verdicts at each scale, a line for each condition."""
    for size, one in same.items():
        yield from (f"{size}: {line}" for line in evidence_lines(one.evidence))
        yield from (f"{size}, worst case: {line}" for line in evidence_lines(one.worst_evidence))


# The tables


def _write_table(reproductions: Sequence[Reproduction], table: PaperTable) -> str:
    parts = [f"# {title_table(table)}"]
    measured = [one.measure_table(table) for one in reproductions]
    for place, part in enumerate(table.parts):
        groups = [
            _make_group(title, [(name_size(one), found[place][row]) for one, found in zip(
                reproductions, measured, strict=True)])
            for row, title in enumerate(part.rows)
        ]  # fmt: skip
        parts += [f"**{part.name}**", table_markdown(Table("", ("", *part.columns), groups))]
    sizes = ", ".join(map(name_size, reproductions))
    numbers = [one for found in measured for part in found for row in part for one in row]
    shown = {
        PUBLISHED: any(one.number.published is not None for one in numbers),
        Note(HERE, sizes): True,
        WORST: any(one.worst for one in numbers),
    }
    parts.append(markdown_list([note for note, is_shown in shown.items() if is_shown]))
    for one in reproductions:
        notes = [note for note in list_notes(one, table) if note.text != table.note]
        parts += [f"**{name_size(one).capitalize()}**", markdown_list(notes)]
    return _join([*parts, table.note])


def _make_group(title: str, rows: Sequence[tuple[str, Sequence[Measurement]]]) -> Group:
    """Return the lines of a row: published, then each scale under the label of its model."""
    first = rows[0][1]
    lines = []
    if any(one.number.published is not None for one in first):
        published = [one.number.published for one in first]
        lines.append([Value("published"), *(Value(format_percent(one), one) for one in published)])
    for size, numbers in rows:
        if all(one.is_left_out for one in numbers):
            lines.append([Value(f"{size}: {NOT_MEASURED}"), *[EMPTY] * len(numbers)])
            continue
        if all(one.ours is None for one in numbers):
            lines.append([Value(f"{label_row(size, numbers)}: {NOT_YET}"), *[EMPTY] * len(numbers)])
            continue
        label = label_row(size, numbers)
        if names := name_models(numbers):
            lines.append([Value(f"{size}, model"), *names])
        lines.append([Value(label), *map(our_value, numbers)])
        if any(one.worst for one in numbers):
            lines.append([Value(f"{size}, worst case"), *map(worst_value, numbers)])
        if any(one.n for one in numbers):
            lines.append([Value(f"{size}, n (batches)"), *(Value(describe_n(one)) for one in numbers)])
    return Group(lines, {"row": title})


def _join(parts: Sequence[str]) -> str:
    return "\n\n".join(filter(None, parts)) + "\n"
