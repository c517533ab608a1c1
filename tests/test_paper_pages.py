"""The pages of the paper's results: every number is traced to a store, every claim to its verdicts."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from reproductions import reproduction

from dent.paper.claims import judge_claims
from dent.paper.reasons import REASONS, read_reasons
from dent.paper.results import COSTS, Measurement, Reproduction, load_reproduction
from dent.paper.tables import PaperTable, tables
from dent.paper.verdicts import FAILS, HOLDS, OPEN, SMALLER
from dent.report.format import NOTHING
from dent.report.headlines import HEADLINES, SENTENCES
from dent.report.paper_pages import WHY_UNKNOWN, make_pages, name_size
from dent.report.write import write_paper_pages

TABLES = tables()
DOCS = Path(__file__).parents[1] / "docs"
STORES = sorted((DOCS / "results").glob("cpu*.json"))


@pytest.fixture(scope="module")
def both() -> list[Reproduction]:
    return [reproduction("cpu"), reproduction("cpu-large")]


@pytest.fixture(scope="module")
def written(both: list[Reproduction], tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("docs") / "results.md"
    write_paper_pages(both, file)
    return file


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def rows_of(text: str) -> Iterator[list[list[str]]]:
    """The tables of a page, each as its lines of cells, without the rules."""
    lines: list[list[str]] = []
    for line in [*text.splitlines(), ""]:
        if line.startswith("|"):
            lines.append(cells(line))
        elif lines:
            yield [line for line in lines if set(line) - {"---", "---:"}]
            lines = []


# Numbers, from the bits of a store to the cells of a page


def percent_of(store: dict[str, Any], one: Measurement, key: str, names: Sequence[str]) -> float:
    """An accuracy from the digits of the file: the points that are correct under all of these names."""
    judged = store["found"][key]["judged"]
    bits = [judged[name] if isinstance(judged[name], str) else judged[name]["correct"] for name in names]
    correct = [all(bit == "1" for bit in point) for point in zip(*bits, strict=True)]
    assert len(correct) == one.n
    return 100 * sum(correct) / len(correct)


def names_of(store: dict[str, Any], one: Measurement, key: str) -> list[str]:
    """The judgments that a number is made of."""
    measure, judged = one.number.ask.measure, list(store["found"][key]["judged"])
    if measure == "adversarial":
        return ["protocol" if "protocol" in judged else "direct"]
    if measure in ("apgd-ce", "apgd-t", "fab-t", "square"):  # all attacks up to this one
        return judged[: judged.index(measure) + 1]
    return [{"joint": "direct"}.get(measure, measure)]


def is_close(text: str, value: float) -> bool:
    return abs(float(text) - value) < 0.0501


def trace_table(
    text: str, table: PaperTable, found: Sequence[Reproduction], stores: Sequence[dict[str, Any]]
) -> int:
    """Find every number of a table's page in a store, or in the paper; return how many."""
    count = 0
    for place, (part, lines) in enumerate(zip(table.parts, rows_of(text), strict=True)):
        assert lines[0][2:] == list(part.columns)
        rows: dict[str, dict[str, list[str]]] = {}
        row = ""
        for label, kind, *values in lines[1:]:
            row = label or row
            rows.setdefault(row, {})[kind] = values
        assert list(rows) == list(part.rows)
        for number, title in enumerate(part.rows):
            shown = dict(rows[title])
            published = shown.pop("published", [NOTHING] * len(part.columns))
            for value, expected in zip(published, part.numbers[number], strict=True):
                assert (None if value == NOTHING else float(value)) == expected.published
                count += value != NOTHING
            for each, store in zip(found, stores, strict=True):
                count += trace_row(shown, each.measure_table(table)[place][number], each, store)
            assert shown == {}, f"{table.name}: lines of no store"
    return count


def trace_row(
    shown: dict[str, list[str]],
    numbers: Sequence[Measurement],
    found: Reproduction,
    store: dict[str, Any],
) -> int:
    """Find the lines of a store in a row, and take them out."""
    size, count = name_size(found), 0
    if all(one.is_left_out for one in numbers):
        assert set(shown.pop(f"{size}: not measured")) == {NOTHING}
        return 0
    if all(one.ours is None for one in numbers):
        (label,) = [kind for kind in shown if re.fullmatch(rf"{size}( \(.+\))?: not measured yet", kind)]
        assert set(shown.pop(label)) == {NOTHING}
        return 0
    models = {one.work.model.rpartition(":")[2] for one in numbers if one.work}
    named = shown.pop(f"{size}, model", None)
    (label,) = [kind for kind in shown if re.fullmatch(rf"{size}( \(.+\))?", kind)]
    assert (label == f"{size} ({models.copy().pop()})") == (len(models) == 1)
    ours, empty = shown.pop(label), [NOTHING] * len(numbers)
    worst = shown.pop(f"{size}, worst case", empty)
    counts = shown.pop(f"{size}, n (batches)", empty)
    for place, one in enumerate(numbers):
        if named is not None:
            assert named[place] == (one.work.model if one.work else NOTHING)
        if one.ours is None:
            assert (ours[place], worst[place], counts[place]) == (NOTHING,) * 3
            continue
        assert one.work is not None
        key, text = found.key(one.work), ours[place].partition(" ")[0]
        if one.number.ask.measure in COSTS:
            assert is_close(text, one.ours)
        elif one.number.ask.minus is None:
            assert is_close(text, percent_of(store, one, key, names_of(store, one, key)))
        assert (worst[place] == NOTHING) == (one.worst is None)
        if one.worst:
            assert is_close(worst[place].partition(" ")[0], percent_of(store, one, key, ["worst"]))
            count += 1
        if one.n:
            assert counts[place] == f"{one.n} ({one.batches})"
            assert one.batches == -(-one.n // one.work.batch_size) or one.n < (one.work.n or 0)
        count += 1
    return count


def trace_pages(file: Path, stores: Sequence[Path]) -> None:
    found = [load_reproduction(path) for path in stores]
    raw = [json.loads(path.read_text()) for path in stores]
    count = 0
    for table in TABLES.values():
        page = (file.with_suffix("") / f"{table.name}.md").read_text()
        count += trace_table(page, table, found, raw)
    assert count > 300
    trace_overview(file.read_text(), found)


def trace_overview(text: str, found: Sequence[Reproduction]) -> None:
    (lines,) = rows_of(text)
    for (title, row, names), shown in zip(HEADLINES, lines[1:], strict=True):
        table = TABLES[row.partition("/")[0]]
        expected = [title]
        numbers = [table.references()[f"{row}/{name}"].published for name in names]
        expected.append(" / ".join(f"{number:.1f}" for number in numbers))
        for each in found:
            ours = [each.by_reference(table)[f"{row}/{name}"] for name in names]
            if all(one.ours is None for one in ours):
                expected += ["not measured", NOTHING, NOTHING]
                continue
            expected.append(" / ".join(f"{one.ours:.1f}" for one in ours))
            expected.append(" / ".join(f"{one.worst.percent:.1f}" for one in ours if one.worst))
            models = dict.fromkeys(one.work.model for one in ours if one.work)
            expected.append(
                ", ".join([*models, *dict.fromkeys(f"{one.n} ({one.batches})" for one in ours)])
            )
        assert shown == expected
    said = [line for line in text.splitlines() if "under attacks on the defense itself" in line]
    for number, (training, references) in enumerate(SENTENCES):
        for each, line in zip(found, said[number :: len(SENTENCES)], strict=True):
            measured = [
                each.by_reference(TABLES[name.partition("/")[0]])[name] for name in references.values()
            ]
            values = [one.ours for one in measured]
            values += [one.worst.percent for one in measured if one.worst]
            shown = re.findall(r"(?<![\w.-])\d+\.\d", line)
            assert f", {training} (" in line
            assert shown == [f"{value:.1f}" for value in values if value is not None], line
    kinds = {
        HOLDS: "hold",
        FAILS: "do not hold",
        SMALLER: "show far less than published",
        OPEN: "cannot be told",
    }
    for each in found:
        judged = judge_claims(each)
        for name in ("verdict", "worst_verdict"):
            verdicts = [getattr(one, name) for one in judged]
            counts = ", ".join(f"{verdicts.count(kind)} {word}" for kind, word in kinds.items())
            assert counts in text


def test_every_number_of_the_pages_is_in_a_store(written: Path) -> None:
    folder = written.with_suffix("")
    trace_pages(written, [folder / "cpu.json", folder / "cpu-large.json"])


@pytest.mark.skipif(not STORES, reason="docs/results has no stores")
def test_every_number_of_the_docs_is_in_a_store(tmp_path: Path) -> None:
    """And the pages are what the command makes of the stores."""
    trace_pages(DOCS / "results.md", STORES)
    found = [load_reproduction(path) for path in STORES]
    reasons = read_reasons(DOCS / "results", found)
    for name, text in make_pages(found, reasons, folder="results").items():
        path = DOCS / "results" / name if name else DOCS / "results.md"
        assert path.read_text() == text, path
    for path, one in zip(STORES, found, strict=True):
        assert one.scale.name == path.stem
        assert one.troubles == {}


def test_a_wrong_number_is_found(written: Path, both: list[Reproduction]) -> None:
    page = (written.with_suffix("") / "table-1.md").read_text()
    stores = [one.to_json() for one in both]
    assert trace_table(page, TABLES["table-1"], both, stores) > 0
    (first,) = re.findall(r"small \(resnet20-at\) \| ([\d.]+)", page)
    wrong = page.replace(f"(resnet20-at) | {first}", f"(resnet20-at) | {float(first) + 1:.1f}")
    with pytest.raises(AssertionError):
        trace_table(wrong, TABLES["table-1"], both, stores)


# What a reader meets


def test_the_overview_is_one_screen_and_leads_to_every_page(written: Path) -> None:
    text, folder = written.read_text(), written.with_suffix("")
    assert len(text.splitlines()) < 50
    links = re.findall(r"\]\(results/([^)]+)\)", text)
    assert sorted(links) == sorted(path.name for path in folder.glob("*.md"))
    assert "**Small** is scale `cpu`: " in text
    assert "**Large** is scale `cpu-large`: " in text


def test_the_overview_lists_what_fails_in_the_worst_case_first(
    both: list[Reproduction], written: Path
) -> None:
    judged = [one for each in both for one in judge_claims(each)]
    fails = {one.claim.text for one in judged if one.worst_verdict == FAILS}
    holds = {
        one.claim.text
        for one in judged
        if HOLDS in (one.verdict, one.worst_verdict)
        and not {FAILS, SMALLER} & {one.verdict, one.worst_verdict}
    }
    for title, claims in {"Does not hold in the worst case": fails, "Holds": holds}.items():
        (section,) = re.findall(
            rf"^## {title} \((?:\d+ of )?(\d+)\)\n\n(.*?)\n\n",
            written.read_text(),
            re.MULTILINE | re.DOTALL,
        )
        count, lines = section
        assert int(count) == len(claims) > 0
        for line in lines.splitlines():
            assert any(line.startswith(f"- {text} (") for text in claims), line


def test_a_model_that_is_not_there_is_shown_once_with_what_was_published(written: Path) -> None:
    page = (written.with_suffix("") / "table-3.md").read_text()
    lines = [line for table in rows_of(page) for line in table]
    place = next(number for number, line in enumerate(lines) if line[0] == "zhang2019")
    assert [line[1] for line in lines[place : place + 3]] == [
        "published", "small: not measured", "large: not measured",
    ]  # fmt: skip
    numbers = [
        tuple(line[2:]) for line in lines if re.match(r"(small|large) \(", line[1])
    ]  # no number stands under two names
    assert len(numbers) == len(set(numbers)) == 4


def test_claims_of_both_sizes_stand_side_by_side(both: list[Reproduction], written: Path) -> None:
    page = (written.with_suffix("") / "claims.md").read_text()
    lines = next(rows_of(page))
    assert lines[0] == ["claim", "small", "small, worst case", "large", "large, worst case", "published"]
    small, large = map(judge_claims, both)
    for line, one, other in zip(lines[1:], small, large, strict=True):
        assert line[0] == f"{one.claim.text} ({one.claim.where})"
        expected = [one.verdict, one.worst_verdict, other.verdict, other.worst_verdict]
        for text, verdict in zip(line[1:], [*expected, one.published_verdict], strict=True):
            assert text.startswith(verdict or NOTHING)
    assert page.count("\n- ") > len(small)


# Why


def failing(one: Reproduction) -> str:
    return next(
        each.claim.text for each in judge_claims(one) if FAILS in (each.verdict, each.worst_verdict)
    )


def why(folder: Path, *entries: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "measured.json").write_text(json.dumps([{"updates": 30, "accuracy": 68.04, "n": 1280}]))
    (folder / REASONS).write_text(json.dumps(entries))  # JSON is YAML
    return folder


def test_a_claim_that_fails_has_its_sentence(both: list[Reproduction], tmp_path: Path) -> None:
    claim = failing(both[0])
    sentence = "After 30 updates, 68.0 % of 1,280 images are right."
    entry = {"claim": claim, "scale": "cpu", "why": sentence, "source": "measured.json"}
    folder = why(tmp_path / "results", entry | {"where": {"updates": 30}})
    write_paper_pages(both, tmp_path / "results.md")
    page = (folder / "claims.md").read_text()
    assert re.search(rf"\n\*\*{re.escape(claim)}\*\* \(small[^)]*\) {re.escape(sentence)}", page)
    failed = [
        one for each in both for one in judge_claims(each) if FAILS in (one.verdict, one.worst_verdict)
    ]
    assert page.count(WHY_UNKNOWN) == len(failed) - 1


def test_a_sentence_may_be_of_numbers_of_the_tables(both: list[Reproduction], tmp_path: Path) -> None:
    reference = "table-1/linf 8/255/ding2020/dent+"
    one = both[1].by_reference(TABLES["table-1"])[reference]
    assert one.worst is not None
    sentence = f"The worst case of dent+ is {one.worst.percent:.1f} %."
    entry = {"claim": failing(both[1]), "scale": "cpu-large", "why": sentence, "references": [reference]}
    assert list(read_reasons(why(tmp_path, entry), both).values()) == [sentence]
    wrong = entry | {"why": f"The worst case of dent+ is {one.worst.percent + 3:.1f} %."}
    with pytest.raises(ValueError, match="is none of the numbers that were measured"):
        read_reasons(why(tmp_path, wrong), both)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"why": "68.1 % are right."}, "68.1 is none of the numbers that were measured"),
        ({"why": "It fails. It does."}, "expected one sentence"),
        ({"why": "it fails"}, "expected one sentence"),
        ({"why": "68.0 % are right.", "where": {"updates": 10}}, "68.0 is none of the numbers"),
        ({"source": None}, "expected a source or references"),
        ({"source": "nowhere.json"}, "nowhere.json"),
        ({"claim": "Dent helps."}, "unknown claim 'Dent helps.'"),
        ({"scale": "paper"}, "unknown scale with results 'paper'"),
        ({"scale": 3}, "scale: expected text"),
        ({"reference": "x"}, "unknown settings of the reason: reference; did you mean"),
        ({"references": ["table-1/x"]}, "unknown number 'table-1/x'"),
    ],
)
def test_wrong_reasons_are_refused(
    both: list[Reproduction], tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    entry = {"claim": failing(both[0]), "scale": "cpu", "why": "It fails.", "source": "measured.json"}
    folder = why(
        tmp_path, {name: value for name, value in (entry | change).items() if value is not None}
    )
    with pytest.raises(ValueError, match=f"(?s)1 wrong setting of .*reason 1: .*{message}"):
        read_reasons(folder, both)
    with pytest.raises(ValueError, match="(?s)2 wrong settings.*reason 1: .*reason 2: expected claim"):
        read_reasons(why(tmp_path, {"claim": 3}, "x"), both)


def test_without_a_file_there_are_no_reasons(both: list[Reproduction], tmp_path: Path) -> None:
    assert read_reasons(tmp_path, both) == {}


def test_a_scale_is_shown_once(both: list[Reproduction], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected each scale once, got several of scale cpu"):
        write_paper_pages([both[0], both[0]], tmp_path / "results.md")
    assert not list(tmp_path.iterdir())
