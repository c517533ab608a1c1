"""Tables of results: every number is where its header is, in text, Markdown, CSV and color."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from made_up import MadeUp, cut, example, summary

from dent.evaluation.results import COLUMNS, Cost, MissingUnit, Results
from dent.evaluation.spec import Cell
from dent.evaluation.suites import NATURAL
from dent.report.blocks import EMPTY, Table, Value
from dent.report.evaluation import results_markdown, results_text
from dent.report.evaluation_tables import mark_extremes, result_tables
from dent.report.terminal import show_results
from dent.report.text import table_text

UNDER_EACH = "Accuracy in % under each attack"
PARTIAL = frozenset({("apgd-ce", 1), ("fpa", 2)})


def fields(line: str) -> list[str]:
    """Columns have two spaces between them, words one."""
    return re.split(r" {2,}", line.strip())


def row_of(defense: str, lines: list[str]) -> list[str]:
    (line,) = [line for line in lines if line.startswith(f"  {defense} ")]
    return fields(line)


def section(results: Results, title: str) -> Table:
    (found,) = [one for one in result_tables(results) if one.title == title]
    return found


def column(table: Table, title: str) -> list[Value]:
    place = table.columns.index(title)
    return [row[place] for group in table.groups for row in group.rows]


def part(results: Results, title: str, width: int = 100) -> list[str]:
    return table_text(section(results, title), width).splitlines()


def test_the_main_table() -> None:
    results = example()
    lines = part(results, "Accuracy in %")
    assert lines[1].split() == ["worst", "95", "%"]  # no cell is marked: all may be chance
    assert fields(lines[2]) == [
        "defense", "natural", "claimed", "case", "interval", "gap", "vs static", "cost",
        "submitted",
    ]  # fmt: skip
    assert lines[3] == f"net-a, linf 8/255, n = 200, batches = {results.cells[0].batches}"
    dent = results.cells[1]
    assert dent.versus_static is not None
    assert dent.protocol is not None
    found = fields(lines[5])
    assert found[:3] == ["dent:steps=10", f"{dent.natural.percent:.1f}", f"{dent.protocol.percent:.1f}"]
    assert found[3] == f"\N{LESS-THAN OR EQUAL TO} {dent.worst.percent:.1f}"
    assert dent.worst.interval is not None
    assert found[4] == "{:.0f} to {:.0f}".format(*dent.worst.interval)
    assert found[5] == f"{dent.gap:.1f}"
    assert found[6].startswith(f"{dent.versus_static.difference:+.1f} (p ")
    assert found[7:] == ["13x", f"{dent.submitted.percent:.1f}"]
    assert fields(lines[4])[-2] == "1x"


def test_columns_end_where_their_header_ends() -> None:
    for section in result_tables(example()):
        lines = table_text(section).splitlines()
        header = next(line for line in lines if line.startswith("defense"))
        ends = {match.end() for match in re.finditer(r"\S+( \S+)*", header)} - {len("defense")}
        labels = {row[0].text for group in section.groups for row in group.rows}
        shown = [line for line in lines if line.startswith("  ") and fields(line)[0] in labels]
        assert len(shown) == sum(len(group.rows) for group in section.groups)
        for line in shown:
            assert {match.end() for match in re.finditer(r"\S+( \S+)*", line)} - ends == {
                2 + len(fields(line)[0])
            }


@pytest.mark.parametrize("width", [45, 60, 100])
def test_what_is_too_wide_goes_on_below(width: int) -> None:
    results = example(failed=PARTIAL)
    lines = results_text(results, width).splitlines()
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
    assert any(line.startswith("*: each attack got only") for line in lines)
    assert any(line.startswith("made for adaptation: denying, fpa;") for line in lines)


def test_attacks_are_in_the_order_of_the_cell_that_has_most() -> None:
    bits = np.ones(4, bool)
    few = MadeUp(cut(4, 4), dict.fromkeys([NATURAL, "apgd-ce", "fpa"], bits))
    most = dict.fromkeys([NATURAL, "apgd-ce", "denying", "fpa"], bits)
    results = summary(few, MadeUp(cut(4, 4), most, Cell("net", "dent", 8 / 255, "linf")))
    table = section(results, UNDER_EACH)
    assert table.columns == ["defense", "apgd-ce", "denying", "fpa"]
    assert [len(row) for row in table.groups[0].rows] == [4, 4]
    assert row_of("dent+", part(results, UNDER_EACH))[2] == "-"


def test_what_one_attack_alone_breaks_is_a_share() -> None:
    results = example()
    lines = part(results, "Images that one attack alone breaks, in %")
    alone = results.cells[1].alone
    assert alone is not None
    assert fields(lines[3]) == ["dent:steps=10", *(f"{count / 2:.1f}" for count in alone.values())]
    assert "static" not in "".join(lines)  # a chain: nobody knows what the later ones would have broken


def test_scenarios_have_their_own_n() -> None:
    lines = part(example(), "Accuracy in % in other batches")
    assert lines[-1] == "Each accuracy is on images of its own, and is no part of the worst case."
    assert "  dent+          56.2 (n = 80, 5 batches)" in lines
    assert "net-a, linf 8/255" in lines  # without the n of the others


def made_with(defense: str, eps: float, counts: list[int], size: int = 10) -> MadeUp:
    """A cell of which so many points of each batch stand."""
    batches = [list(range(size * place, size * (place + 1))) for place in range(len(counts))]
    stand = np.concatenate([np.arange(size) < count for count in counts])
    survives = {NATURAL: np.ones_like(stand), "apgd-ce": stand}
    return MadeUp(batches, survives, Cell("net", defense, eps, "l2"))


def test_best_and_worst_are_beyond_chance_and_of_a_model_in_a_ball() -> None:
    static, high, same = made_with("static", 1, [5] * 8), [9] * 7 + [8], [9] * 8
    low = [6, 5, 5, 4, 5, 5, 5, 6]  # as the static model, but for chance
    made = [static, made_with("a", 1, high), made_with("b", 1, low), made_with("static", 2, [1] * 8)]
    results = summary(*made)
    found = [(one.mark, one.number) for one in column(result_tables(results)[0], "worst case")]
    assert found == [("", 50.0), ("best", 88.75), ("", 51.25), ("", 10.0)]
    clear = summary(static, made[1], made_with("b", 1, [7] * 8))
    assert [mark_extremes(clear).get(one.cell, "") for one in clear.cells] == ["worst", "best", ""]
    assert mark_extremes(summary(static, made[1], made_with("c", 1, same))) == {
        static.cell: "worst"  # of two that are alike, none is the best
    }
    few = [made_with("static", 1, [5] * 4), made_with("a", 1, [9] * 4)]
    assert mark_extremes(summary(*few)) == {}  # no p, no mark
    missing = replace(static, failed=frozenset({("apgd-ce", 0)}))
    assert mark_extremes(summary(missing, made[1])) == {}  # on other points they are not compared


def test_a_run_that_is_not_complete_says_of_how_many_points_it_speaks() -> None:
    results = example(failed=PARTIAL)
    lines = part(results, "Accuracy in %", 150)
    header = fields(lines[1 + ["95 %" in line for line in lines].index(True)])
    assert header[-2:] == ["n", "batches"]
    static, dent = fields(lines[4]), fields(lines[5])
    assert (static[-2:], dent[-2:]) == (["200", "5"], ["120", "3"])
    assert dent[1] == f"{results.cells[1].natural.percent:.1f} (n = 200, 5 batches)"
    whole = results_text(results)
    assert "Missing: 2 units failed or were not done" in whole
    assert "- net-a, dent:steps=10, linf 8/255, apgd-ce, batch 1: RuntimeError: no memory" in whole
    assert "**The run is not complete.**" in results_markdown(results)


def test_missing_units_are_told_but_not_all() -> None:
    natural = np.ones(40, bool)
    failed = frozenset((NATURAL, batch) for batch in range(40))
    lines = results_text(summary(MadeUp(cut(40, 1), {NATURAL: natural}, failed=failed))).splitlines()
    assert lines[-1] == "- and 30 more; results.json has all"
    assert sum("no memory" in line for line in lines) == 10
    (cell,) = summary(MadeUp(cut(2, 1), {NATURAL: natural})).cells
    mixed = Results((replace(cell, missing=(MissingUnit("a"), MissingUnit("b", "RuntimeError"))),))
    assert results_text(mixed).splitlines()[-2:] == ["- b: RuntimeError", "- a: not done"]


def test_findings_are_told_once_with_their_cells() -> None:
    lines = " ".join(results_text(example()).splitlines())
    assert lines.count("randomized: the same inputs differ") == 1
    where = re.search(r"randomized: the same inputs differ \[(.*?)\]", " ".join(lines.split()))
    assert where is not None
    cells = ["net-a, dent:steps=10", "net-a, dent+", "net-b, dent+"]
    assert where[1] == "; ".join(f"{cell}, linf 8/255 (largest 0.5)" for cell in cells)


def test_nothing_is_a_table_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert results_text(Results(())) == "Nothing was evaluated."
    assert Results(()).to_csv() == ",".join(COLUMNS) + "\n"
    show_results(Results(()))
    assert capsys.readouterr().out == "Nothing was evaluated.\n"
    begun = MadeUp(cut(4, 4), {NATURAL: np.ones(4, bool)}, failed=frozenset({(NATURAL, 0)}))
    assert row_of("dent+", part(summary(begun), "Accuracy in %")) == ["dent+", *["-"] * 5]


def test_every_cell_has_every_attack() -> None:
    results = example()
    groups = section(results, UNDER_EACH).groups
    batches = str(results.cells[0].batches)
    assert [group.labels for group in groups] == [
        {"model": model, "ball": "linf 8/255", "n": "200", "batches": batches}
        for model in ("net-a", "net-b")
    ]
    columns = section(results, UNDER_EACH).columns
    rows = [dict(zip(columns, row, strict=True)) for group in groups for row in group.rows]
    for row, cell in zip(rows, results.cells, strict=True):
        assert row["defense"].text.rstrip("*") == cell.cell.defense
        direct = cell.worst if cell.cell.static else cell.direct
        assert row["all direct"].text == f"{direct.percent:.1f}"
        for name, one in cell.attacks.items():
            shown = Value(f"{one.percent:.1f}", one.percent, one.interval)
            is_hidden = cell.cell.static and cell.kinds[name] == "adaptive"
            assert row[name] == (EMPTY if is_hidden else shown)


def test_what_is_claimed_is_said() -> None:
    assert "claimed: under the paper's own protocol" in results_text(example())
    results = example(protocol=False)
    assert "claimed: under the attacks on the defended model itself" in results_text(results)
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
    bound = "\N{LESS-THAN OR EQUAL TO} 50.0"
    assert row_of("dent+", lines) == ["dent+", "100.0", bound, "-", "-", "50.0"]  # one batch


def test_markdown_tables_are_tables() -> None:
    results = example()
    report = results_markdown(results)
    tables = re.findall(r"(?:^\|.*\|\n)+", report, re.MULTILINE)
    assert len(tables) == len(result_tables(results)) == 6
    for table in tables:
        header, rule, *lines = [re.split(r"(?<!\\)\|", line)[1:-1] for line in table.splitlines()]
        assert {len(line) for line in (rule, *lines)} == {len(header)}
        assert set("".join(rule)) == set("-:")
    main = [[cell.strip() for cell in line.split("|")[1:-1]] for line in tables[0].splitlines()]
    dent = dict(zip(main[0], main[3], strict=True))
    natural = results.cells[1].natural
    assert natural.interval is not None
    assert dent["natural"] == "{:.1f} ({:.0f} to {:.0f})".format(natural.percent, *natural.interval)
    static = dict(zip(main[0], main[2], strict=True))  # the first of its group
    assert (static["model"], static["ball"], static["n"]) == ("net-a", "linf 8/255", "200")
    assert (dent["model"], dent["defense"]) == ("", "dent:steps=10")
    assert "- data: digits" in report
    assert "## How to read it" in report


def test_markdown_of_names_with_signs() -> None:
    cell = Cell("my|net", "dent", 0.5, "l2")
    report = results_markdown(summary(MadeUp(cut(2, 2), {NATURAL: np.ones(2, bool)}, cell), note="a*b"))
    assert "| my\\|net |" in report
    assert "- note: a\\*b" in report


def test_what_was_asked_is_in_the_report_and_the_plan_is_not() -> None:
    results = Results(
        (), {"asked": {"suite": "quick", "eps": None}, "plan": {"n": 1}, "data_sha256": "ab"}
    )
    assert results_markdown(results).splitlines()[2:5] == [
        "- suite: quick",
        "- eps: not given",
        "- data_sha256: ab",
    ]


def test_cost_is_shown_where_it_was_measured() -> None:
    results = example()
    unknown = tuple(replace(one, cost=None) for one in results.cells)
    assert "cost" not in results_text(replace(results, cells=unknown))
    some = replace(
        results, cells=(replace(results.cells[0], cost=Cost(seconds=1.0)), *results.cells[1:])
    )
    assert fields(part(some, "Accuracy in %")[4])[-2] == "-"


def test_the_terminal_shows_the_same_text(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    results = example(failed=PARTIAL)
    show_results(results)
    assert capsys.readouterr().out.strip() == results_text(results)
    complete = example()
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "70")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    show_results(complete)
    shown = capsys.readouterr().out
    plain = re.sub(r"\x1b\[[\d;]*m", "", shown)
    assert plain.strip() == results_text(complete, 70)
    colored = re.findall(r"\x1b\[1;(3[12])m((?:best|worst) \W [\d.]+)\x1b", shown)
    cells = column(result_tables(complete)[0], "worst case")[:3]
    colors = {"best": "32", "worst": "31"}
    assert sorted(colored) == sorted(
        (colors[one.mark], f"{one.mark} {one.text}") for one in cells if one.mark
    )
