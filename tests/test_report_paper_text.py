"""A reproduction as Markdown: all numbers, all claims, and of others than full ones what is missing."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

import pytest
from reproductions import OTHERS, failed, other, reproduction
from test_report_page import HOSTILE

from dent.paper.claims import Judgment, judge_claims
from dent.paper.results import Reproduction
from dent.paper.tables import PaperTable, tables
from dent.report.blocks import Battle, Gallery, Plot, Table, Text
from dent.report.format import NOTHING
from dent.report.paper import (
    label_row,
    list_notes,
    paper_markdown,
    paper_page,
    part_tables,
    table_rows,
    title_table,
)

TABLES = tables()


@pytest.fixture(scope="module")
def full() -> Reproduction:
    return reproduction("cpu")


@pytest.fixture(scope="module")
def markdown(full: Reproduction) -> str:
    return paper_markdown(full)


def notes(found: Reproduction, table: PaperTable) -> list[str]:
    return list(map(str, list_notes(found, table)))


def rows_of(text: str) -> Iterator[list[str]]:
    """The tables of Markdown, each as its lines."""
    lines: list[str] = []
    for line in [*text.splitlines(), ""]:
        if line.startswith("|"):
            lines.append(line)
        elif lines:
            yield lines
            lines = []


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


# Markdown


@pytest.mark.parametrize("name", TABLES)
def test_every_published_number_stands_beside_ours(full: Reproduction, markdown: str, name: str) -> None:
    """Read back from the Markdown, line by line, against the numbers themselves."""
    table = TABLES[name]
    if table not in full.list_begun():
        assert {one.is_left_out for one in full.by_reference(table).values()} == {True}
        assert f"- {title_table(table)}: not measured (" in markdown
        return
    section = markdown.partition(f"## {title_table(table)}\n")[2].partition("\n## ")[0]
    for part, measured, lines in zip(
        table.parts, full.measure_table(table), rows_of(section), strict=True
    ):
        assert cells(lines[0])[2:] == list(part.columns)
        shown = [cells(line) for line in lines[2:]]
        starts = [place for place, line in enumerate(shown) if line[0]]
        assert [shown[place][0] for place in starts] == list(map(label_row, part.rows, measured))
        for numbers, start, end in zip(measured, starts, [*starts[1:], len(shown)], strict=True):
            found = {line[1]: line[2:] for line in shown[start:end]}
            for place, one in enumerate(numbers):
                said = {kind: texts[place] for kind, texts in found.items()}
                published = said.get("published", NOTHING)
                assert (None if published == NOTHING else float(published)) == one.number.published
                assert (one.ours is None) == one.is_left_out
                if one.ours is None:
                    assert said.get("here", NOTHING) == NOTHING
                    continue
                assert float(said["here"]) == pytest.approx(one.ours, abs=0.0501)
                if one.difference is not None:
                    assert float(said["difference"]) == pytest.approx(one.difference, abs=0.0501)
                worst = said.get("worst case", NOTHING)
                assert (worst == NOTHING) == (one.worst is None)
                if one.worst is not None:
                    assert float(worst) == pytest.approx(one.worst.percent, abs=0.0501)
                    interval = said.get("95 % interval", NOTHING)
                    assert (interval == NOTHING) == (one.interval is None)
                    if one.interval is not None:
                        low, high = map(float, interval.split(" to "))
                        assert low <= one.ours <= high
                    assert float(worst) <= float(said["here"])


@pytest.mark.parametrize("name", ["full", *OTHERS])
def test_tables_are_well_formed(full: Reproduction, name: str) -> None:
    text = paper_markdown(full if name == "full" else other(name))
    found = list(rows_of(text))
    assert found
    for lines in found:
        widths = {len(cells(line)) for line in lines}
        assert len(widths) == 1, lines[0]
        assert re.fullmatch(r"\|(---:?\|)+", lines[1])
    assert "nan" not in text.lower().split()
    assert "None" not in text
    assert not re.search(r"\n{3,}", text)


def test_every_claim_has_its_verdicts(full: Reproduction, markdown: str) -> None:
    judgments = judge_claims(full)
    claims = [cells(line) for line in list(rows_of(markdown))[-1][2:]]
    assert claims == [
        [
            f"{one.claim.text} ({one.claim.where})",
            one.verdict + _share(one),
            one.worst_verdict + _share(one) if one.worst_verdict else NOTHING,
            one.published_verdict,
        ]
        for one in judgments
    ]
    assert any(map(_share, judgments))


def _share(one: Judgment) -> str:
    """How many conditions a verdict is of, where that is not all."""
    total = len(one.claim.conditions)
    return f" ({total - one.left_out} of {total})" if one.left_out else ""


def test_the_same_results_make_the_same_text() -> None:
    """Whatever order sets of texts have in a process."""
    found = reproduction("cpu", chosen=[TABLES["table-10"]])
    (said,) = [note for note in notes(found, TABLES["table-10"]) if note.startswith("Attacks: ")]
    assert said == "Attacks: apgd-ce:steps=1 to apgd-ce:steps=400."
    said_of_11 = notes(reproduction("cpu", chosen=[TABLES["table-11"]]), TABLES["table-11"])
    assert "Attacks: apgd-ce:steps=10 or apgd-ce:restarts=2,steps=10; apgd-dlr:steps=10." in said_of_11


def test_notes_say_what_the_numbers_are_of(full: Reproduction) -> None:
    said = notes(full, TABLES["table-3"])
    assert any("for CIFAR-100, stands in for madry-26-4-cifar100." in note for note in said)
    assert "n = 160, in 5 batches." in said
    assert "Batches of 32 images, where the paper has 128." in said
    assert not any(note.startswith("No interval") for note in said)
    assert "Attacks: apgd-ce:steps=10." in said
    assert any(note.startswith("For the worst case also: denying updates") for note in said)
    without = "not measured (no model trained by TRADES comes with dent)."
    assert f"Missing, 8 of 24 numbers: {without}" in said
    assert not any("Incomplete" in note for note in said)
    assert "n = 160, in 5 to 160 batches." in notes(full, TABLES["table-9"])
    limit = (
        "The budget of every attack, the reference's too, is limited to 2 steps and 10 queries of Square"
    )
    assert any(note.startswith(limit) for note in notes(full, TABLES["text-protocol"]))
    few = notes(reproduction("cpu-large", chosen=[TABLES["text-protocol"]]), TABLES["text-protocol"])
    assert any(note.startswith("No interval: images of one batch are not independent") for note in few)
    paper = notes(reproduction("paper", chosen=[TABLES["table-1"]]), TABLES["table-1"])
    assert any("the reference AutoAttack, re-batching included; apgd-ce;" in note for note in paper)
    assert not any("stands in" in note for note in paper)
    smoke = notes(reproduction("smoke", chosen=[TABLES["table-1"]]), TABLES["table-1"])
    assert "At this scale, updates are at most 1." in smoke
    assert not any("at most" in note for note in said)


def test_the_label_of_a_row_says_which_model_stands_in(full: Reproduction) -> None:
    table = part_tables(full, TABLES["table-1"])[0]
    assert [group.labels["model"] for group in table.groups] == [
        "carmon2019 (not measured)", "wong2020 (not measured)", "ding2020 (resnet20-at)",
    ]  # fmt: skip
    for group in table.groups[:2]:  # once, with its published numbers
        (line,) = group.rows
        assert line[0].text == "published"
    mixed = part_tables(full, TABLES["table-8"])[0].groups[0]
    models = {line[0].text: [value.text for value in line[1:]] for line in mixed.rows}["model"]
    assert models == ["resnet20-nominal", "resnet20-nominal", "resnet20-at", "resnet20-at-l2"]
    own = reproduction("paper", chosen=[TABLES["table-1"]])
    labels = [group.labels["model"] for group in part_tables(own, TABLES["table-1"])[0].groups]
    assert labels == ["carmon2019", "wong2020", "ding2020"]


def test_rows_are_called_models_where_they_are() -> None:
    found = reproduction("cpu", chosen=[])
    for name, label in (("table-1", "model"), ("table-5", "")):  # static-dent is no model
        table = part_tables(found, TABLES[name])[0]
        assert {tuple(group.labels) for group in table.groups} == {(label,)}


# What is not there


def test_an_empty_one_says_so() -> None:
    found = other("empty")
    text = paper_markdown(found)
    for table in TABLES.values():
        if table.name != "text-imagenet":  # of which the scale asks for nothing
            assert f"- {title_table(table)}: not run." in text
    made = paper_page(found)
    assert made.lead[0] == "Nothing can be told about the paper's claims yet."
    assert not [block for block in made.blocks if isinstance(block, Plot | Battle | Gallery)]
    assert len([block for block in made.blocks if isinstance(block, Table)]) == 2  # overview, claims
    assert made.alerts == ()
    assert {row["here"] for row in table_rows(found)} == {0}


def test_a_partial_one_says_what_is_missing() -> None:
    found = other("partial")
    table = TABLES["table-7"]
    measured = found.by_reference(table).values()
    missing = sum(one.missing == "not run" for one in measured)
    assert 0 < missing < len(measured)
    assert f"Missing, {missing} of {len(measured)} numbers: not run." in notes(found, table)
    text = paper_markdown(found)
    assert f"- Missing, {missing} of {len(measured)} numbers: not run." in text
    assert f"- {title_table(TABLES['table-10'])}: not run." in text
    assert "## Not measured" in text
    (absent,) = [one for one in paper_page(found).blocks if one.title == "Not measured"]
    assert isinstance(absent, Text)
    assert f"{title_table(TABLES['table-10'])}: not run." in absent.items


def test_a_failed_one_says_why() -> None:
    found = failed()
    (alert,) = paper_page(found).alerts
    assert any(item.startswith("weights are not there") for item in alert.items)
    assert any("apgd-ce: RuntimeError: no memory, and 1 more" in item for item in alert.items)
    said = " ".join(notes(found, TABLES["table-12"]))
    assert "numbers: weights are not there." in said
    assert "numbers: batch 0, apgd-ce: RuntimeError: no memory." in said
    assert "Incomplete, 1 of 4 evaluations: batch 0, apgd-ce: RuntimeError: no memory." in said
    assert said in " ".join(re.sub(r"^- ", "", line) for line in paper_markdown(found).splitlines())


def test_an_unfinished_worst_case_is_said_although_the_number_is_there() -> None:
    found = reproduction("smoke", chosen=[TABLES["table-10"]])
    ((key, one),) = found.cells.items()
    judged = {name: points for name, points in one.judged.items() if name != "worst"}
    broken = replace(one, judged=judged, missing=("denying updates: not done",))
    found = replace(found, cells={key: broken})
    numbers = found.by_reference(TABLES["table-10"]).values()
    assert all(one.missing is None and one.worst is None for one in numbers)
    assert "Incomplete, 1 of 1 evaluations: denying updates: not done." in notes(
        found, TABLES["table-10"]
    )


def test_hostile_texts_are_shown_as_text() -> None:
    found = failed()
    first = next(iter(found.cells))
    hostile = replace(
        found,
        cells={first: replace(found.cells[first], missing=(HOSTILE,))},
        troubles=dict.fromkeys(found.troubles, f"{HOSTILE}\n| a | b |"),
    )
    text = paper_markdown(hostile)
    assert text.count("&lt;img") >= 3
    assert "<script" not in text
    assert "<img" not in text
    assert "\n| a |" not in text
    for lines in rows_of(text):
        assert len({len(cells(line)) for line in lines}) == 1
