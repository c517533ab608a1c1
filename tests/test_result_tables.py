"""Tables of results: every number is where its header is, in text, Markdown, CSV and color."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from made_up import MadeUp, cut, example, summary

from dent.evaluation.results import COLUMNS, Cost, Results
from dent.evaluation.units import NATURAL, Cell
from dent.report.evaluation import show_results
from dent.report.sections import Section, marks, sections
from dent.report.table import markdown, section_text, text

UNDER_EACH = "Accuracy in % under each attack"
PARTIAL = frozenset({("apgd-ce", 1), ("fpa", 2)})


def fields(line: str) -> list[str]:
    """Columns have two spaces between them, words one."""
    return re.split(r" {2,}", line.strip())


def row_of(defense: str, lines: list[str]) -> list[str]:
    (line,) = [line for line in lines if line.startswith(f"  {defense} ")]
    return fields(line)


def section(results: Results, title: str) -> Section:
    (found,) = [one for one in sections(results) if one.title == title]
    return found


def part(results: Results, title: str, width: int = 100) -> list[str]:
    return section_text(section(results, title), width).splitlines()


def test_the_main_table() -> None:
    results = example()
    lines = part(results, "Accuracy in %")
    assert lines[1].split() == ["95", "%"]
    assert fields(lines[2]) == [
        "defense", "natural", "claimed", "worst case", "interval", "submitted", "gap", "vs static",
        "cost",
    ]  # fmt: skip
    assert lines[3] == "net-a, linf 8/255, n = 200"
    dent = results.cells[1]
    assert dent.versus_static is not None
    assert dent.protocol is not None
    found = fields(lines[5])
    assert found[:3] == ["dent:steps=10", f"{dent.natural.percent:.1f}", f"{dent.protocol.percent:.1f}"]
    assert found[3].split()[-1] == f"{dent.worst.percent:.1f}"
    assert found[4] == f"{dent.worst.low:.0f} to {dent.worst.high:.0f}"
    assert found[5:7] == [f"{dent.submitted.percent:.1f}", f"{dent.gap:.1f}"]
    assert found[7].startswith(f"{dent.versus_static.difference:+.1f} (p ")
    assert found[8] == "13x"
    assert fields(lines[4])[-1] == "1x"


def test_columns_end_where_their_header_ends() -> None:
    for section in sections(example()):
        lines = section_text(section).splitlines()
        header = next(line for line in lines if line.startswith("defense"))
        ends = {match.end() for match in re.finditer(r"\S+( \S+)*", header)} - {len("defense")}
        labels = {label for group in section.groups for row in group.rows for label in [row["defense"]]}
        shown = [line for line in lines if line.startswith("  ") and fields(line)[0] in labels]
        assert len(shown) == sum(len(group.rows) for group in section.groups)
        for line in shown:
            assert {match.end() for match in re.finditer(r"\S+( \S+)*", line)} - ends == {
                2 + len(fields(line)[0])
            }


@pytest.mark.parametrize("width", [45, 60, 100])
def test_what_is_too_wide_goes_on_below(width: int) -> None:
    results = example(failed=PARTIAL)
    lines = text(results, width).splitlines()
    assert max(map(len, lines)) <= width
    whole, cut_up = (
        {word for line in part(results, "Accuracy in %", one) for word in fields(line)}
        for one in (500, width)
    )
    numbers = {word for word in whole if re.fullmatch(r"[a-z ]*[\d.]+x?", word)}
    assert len(numbers) > 15
    assert numbers <= cut_up


def test_attacks_in_order_and_chains_marked() -> None:
    results = example()
    lines = part(results, UNDER_EACH)
    header = fields(lines[2])
    assert header == ["defense", "apgd-ce", "square", "direct", "denying", "fpa"]
    static, dent = results.cells[:2]
    expected = [*dent.attacks.values()]
    expected.insert(2, dent.direct)
    assert fields(lines[5]) == ["dent:steps=10", *(f"{one.percent:.1f}" for one in expected)]
    assert fields(lines[4])[0] == "static*"
    assert static.attacks["square"] == static.direct  # in a chain, what stands after all so far
    assert any(line.startswith("*: each attack was given only") for line in lines)
    assert any(line.startswith("made for adaptation: denying, fpa;") for line in lines)


def test_attacks_are_in_the_order_of_the_cell_that_has_most() -> None:
    bits = np.ones(4, bool)
    few = MadeUp(cut(4, 4), dict.fromkeys([NATURAL, "apgd-ce", "fpa"], bits))
    most = dict.fromkeys([NATURAL, "apgd-ce", "denying", "fpa"], bits)
    results = summary(few, MadeUp(cut(4, 4), most, Cell("net", "dent", 8 / 255, "linf")))
    (group,) = section(results, UNDER_EACH).groups
    assert [list(row) for row in group.rows] == [["defense", "apgd-ce", "denying", "fpa"]] * 2
    assert row_of("dent+", part(results, UNDER_EACH))[2] == "-"


def test_what_one_attack_alone_breaks_is_a_share() -> None:
    results = example()
    lines = part(results, "Points that one attack alone breaks, in %")
    alone = results.cells[1].alone
    assert alone is not None
    assert fields(lines[3]) == ["dent:steps=10", *(f"{count / 2:.1f}" for count in alone.values())]
    assert "static" not in "".join(lines)  # a chain: nobody knows what the later ones would have broken


def test_scenarios_have_their_own_n() -> None:
    lines = part(example(), "Accuracy in % in other batches")
    assert lines[-1] == "Each on points of its own; they are no part of the worst case."
    assert "  dent+          56.2 (n = 80)" in lines
    assert "net-a, linf 8/255" in lines  # without the n of the others


def test_best_and_worst_are_of_a_model_in_a_ball() -> None:
    made = []
    for defense, eps, count in [
        ("static", 1, 5),
        ("a", 1, 7),
        ("b", 1, 6),
        ("c", 1, 7),
        ("static", 2, 1),
    ]:
        bits = {NATURAL: np.arange(10) < 9, "apgd-ce": np.arange(10) < count}
        made.append(MadeUp(cut(10, 5), bits, Cell("net", defense, eps, "l2")))
    results = summary(*made)
    assert [marks(results).get(one.cell, "") for one in results.cells] == [
        "worst",
        "best",
        "",
        "best",
        "",
    ]
    found = [row["worst case"] for group in sections(results)[0].groups for row in group.rows]
    assert found == ["worst 50.0", "best 70.0", "60.0", "best 70.0", "10.0"]
    assert marks(summary(made[1], made[3])) == {}  # the same: neither
    missing = replace(made[0], failed=frozenset({("apgd-ce", 0)}))
    assert marks(summary(missing, made[1])) == {}  # on other points they are not compared


def test_a_run_that_is_not_complete_says_of_how_many_points_it_speaks() -> None:
    results = example(failed=PARTIAL)
    lines = part(results, "Accuracy in %", 150)
    assert fields(lines[1 + ["95 %" in line for line in lines].index(True)])[-1] == "n"
    static, dent = fields(lines[4]), fields(lines[5])
    assert (static[-1], dent[-1]) == ("200", "120")
    assert dent[1] == f"{results.cells[1].natural.percent:.1f} (n = 200)"
    whole = text(results)
    assert "Missing: 2 units failed or were not done" in whole
    assert "- net-a, dent:steps=10, linf 8/255, apgd-ce, batch 1: RuntimeError: no memory" in whole
    assert "**The run is not complete**" in markdown(results)


def test_missing_units_are_told_but_not_all() -> None:
    natural = np.ones(40, bool)
    failed = frozenset((NATURAL, batch) for batch in range(40))
    lines = text(summary(MadeUp(cut(40, 1), {NATURAL: natural}, failed=failed))).splitlines()
    assert lines[-1] == "- and 30 more; results.json has all"
    assert sum("no memory" in line for line in lines) == 10
    (cell,) = summary(MadeUp(cut(2, 1), {NATURAL: natural})).cells
    mixed = Results((replace(cell, missing=("a: not done", "b: RuntimeError")),))
    assert text(mixed).splitlines()[-2:] == ["- b: RuntimeError", "- a: not done"]


def test_findings_are_told_once_with_their_cells() -> None:
    lines = " ".join(text(example()).splitlines())
    assert lines.count("randomized: the same inputs differ") == 1
    where = re.search(r"randomized: the same inputs differ \[(.*?)\]", " ".join(lines.split()))
    assert where is not None
    cells = ["net-a, dent:steps=10", "net-a, dent+", "net-b, dent+"]
    assert where[1] == "; ".join(f"{cell}, linf 8/255 (largest 0.5)" for cell in cells)


def test_nothing_is_a_table_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert text(Results(())) == "Nothing was evaluated."
    assert Results(()).to_csv() == ",".join(COLUMNS) + "\n"
    show_results(Results(()))
    assert capsys.readouterr().out == "Nothing was evaluated.\n"
    begun = MadeUp(cut(4, 4), {NATURAL: np.ones(4, bool)}, failed=frozenset({(NATURAL, 0)}))
    assert row_of("dent+", part(summary(begun), "Accuracy in %")) == ["dent+", *["-"] * 5]


def test_every_cell_has_every_attack() -> None:
    results = example()
    groups = section(results, UNDER_EACH).groups
    assert [(group.model, group.ball, group.n) for group in groups] == [
        ("net-a", "linf 8/255", "200"),
        ("net-b", "linf 8/255", "200"),
    ]
    rows = [row for group in groups for row in group.rows]
    for row, cell in zip(rows, results.cells, strict=True):
        assert row["defense"].rstrip("*") == cell.cell.defense
        assert row["all direct"] == f"{cell.direct.percent:.1f}"
        assert {name: row[name] for name in cell.attacks} == {
            name: f"{one.percent:.1f}" for name, one in cell.attacks.items()
        }


def test_what_is_claimed_is_said() -> None:
    assert "claimed: under the paper's own protocol" in text(example())
    results = example(protocol=False)
    assert "claimed: under the attacks on the defended model itself" in text(results)
    assert fields(part(results, "Accuracy in %")[5])[2] == f"{results.cells[1].direct.percent:.1f}"
    some = replace(example(), cells=(example().cells[0], *results.cells[1:]))
    assert (
        fields(part(some, "Accuracy in %", 150)[5])[2]
        == f"{results.cells[1].direct.percent:.1f} (direct)"
    )


def test_without_direct_attacks_nothing_is_claimed() -> None:
    results = summary(MadeUp(cut(4, 4), {NATURAL: np.ones(4, bool), "fpa": np.arange(4) < 2}))
    lines = part(results, "Accuracy in %")
    assert not any("claimed" in line or "gap" in line for line in lines)
    assert row_of("dent+", lines) == ["dent+", "100.0", "50.0", "15 to 85", "50.0", "-"]


def test_markdown_tables_are_tables() -> None:
    results = example()
    report = markdown(results)
    tables = re.findall(r"(?:^\|.*\|\n)+", report, re.MULTILINE)
    assert len(tables) == len(sections(results)) == 4
    for table in tables:
        header, rule, *lines = [re.split(r"(?<!\\)\|", line)[1:-1] for line in table.splitlines()]
        assert {len(line) for line in (rule, *lines)} == {len(header)}
        assert set("".join(rule)) == set(" -:")
    main = [[cell.strip() for cell in line.split("|")[1:-1]] for line in tables[0].splitlines()]
    dent = dict(zip(main[0], main[3], strict=True))
    natural = results.cells[1].natural
    assert dent["natural"] == f"{natural.percent:.1f} ({natural.low:.0f} to {natural.high:.0f})"
    assert (dent["model"], dent["ball"], dent["n"]) == ("net-a", "linf 8/255", "200")
    assert "- data: digits" in report
    assert "## How to read it" in report


def test_markdown_of_names_with_signs() -> None:
    cell = Cell("my|net", "dent", 0.5, "l2")
    report = markdown(summary(MadeUp(cut(2, 2), {NATURAL: np.ones(2, bool)}, cell), note="a*b"))
    assert "| my\\|net |" in report
    assert "- note: a\\*b" in report


def test_what_was_asked_is_in_the_report_and_the_plan_is_not() -> None:
    results = Results(
        (), {"asked": {"suite": "quick", "eps": None}, "plan": {"n": 1}, "data_sha256": "ab"}
    )
    assert markdown(results).splitlines()[2:5] == [
        "- suite: quick",
        "- eps: not given",
        "- data_sha256: ab",
    ]


def test_cost_is_shown_where_it_was_measured() -> None:
    results = example()
    unknown = tuple(replace(one, cost=None) for one in results.cells)
    assert "cost" not in text(replace(results, cells=unknown))
    some = replace(
        results, cells=(replace(results.cells[0], cost=Cost(seconds=1.0)), *results.cells[1:])
    )
    assert fields(part(some, "Accuracy in %")[4])[-1] == "-"


def test_the_terminal_shows_the_same_text(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    results = example(failed=PARTIAL)
    show_results(results)
    assert capsys.readouterr().out.strip() == text(results)
    complete = example()
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "70")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    show_results(complete)
    shown = capsys.readouterr().out
    plain = re.sub(r"\x1b\[[\d;]*m", "", shown)
    assert plain.strip() == text(complete, 70)
    colored = dict(re.findall(r"\x1b\[1;(3[12])m ((?:best|worst) [\d.]+)\x1b", shown))
    found = [row["worst case"] for row in sections(complete)[0].groups[0].rows]
    assert colored == {
        "32": next(one for one in found if one.startswith("best")),
        "31": next(one for one in found if one.startswith("worst")),
    }
