"""The page of a reproduction: what it shows, that its plots are right, and how a browser takes it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import vl_convert
from browsing import NEEDS_CHROMIUM, chromium, eventually
from reproductions import OTHERS, failed, other, reproduction
from test_report_page import HOSTILE, Elements

from dent.paper.claims import judge_claims
from dent.paper.results import Reproduction
from dent.paper.tables import tables
from dent.report.blocks import Battle, Page, Plot, Table, Text
from dent.report.claims import summarize_claims
from dent.report.format import NOTHING, format_number
from dent.report.headlines import list_sentences
from dent.report.html import page_html
from dent.report.paper import paper_markdown, paper_page, title_table
from dent.report.write import paper_spec, write_page, write_paper

TABLES = tables()


@pytest.fixture(scope="module")
def full() -> Reproduction:
    return reproduction("cpu")


@pytest.fixture(scope="module")
def page(full: Reproduction) -> Page:
    return paper_page(full)


@pytest.mark.parametrize("name", OTHERS)
def test_any_becomes_a_page(name: str, tmp_path: Path) -> None:
    found = other(name)
    write_paper(found, tmp_path)
    assert (tmp_path / "report.md").read_text() == paper_markdown(found)
    html = (tmp_path / "report.html").read_text()
    assert html == page_html(paper_page(found))
    text = re.sub(r"<script.*?</script>", "", html, flags=re.S)
    assert not re.search(r"\b(nan|None)\b", text)
    places = re.findall('<(?:section|details class="chapter") id="([^"]+)">(?:<summary>)?<h2>', text)
    assert len(re.findall("<h2>", text)) == len(set(places)) > 1


def test_hostile_texts_are_shown_as_text() -> None:
    found = failed()
    first = next(iter(found.cells))
    hostile = replace(
        found,
        scale=found.scale.replace(summary=HOSTILE),
        cells={first: replace(found.cells[first], missing=(HOSTILE,))},
        troubles=dict.fromkeys(found.troubles, f"{HOSTILE}\n| a | b |"),
    )
    html = page_html(paper_page(hostile))
    elements = Elements(html)
    assert not elements.of("img")
    assert len(elements.of("script")) == len(Elements(page_html(paper_page(found))).of("script"))
    assert html.count("alert(1)&lt;/script&gt;") >= 3


# The page


def test_the_page_has_every_number(full: Reproduction, page: Page) -> None:
    rows = Elements(page_html(page)).rows
    for table in full.list_begun():
        for measured in full.measure_table(table):
            for numbers in measured:
                if all(one.is_left_out for one in numbers):
                    continue
                ours = ["" if one.ours is None else format_number(one.ours) for one in numbers]
                shown = ["here", *ours]
                assert any(
                    len(row) == len(shown) and all(map(str.startswith, row, shown)) for row in rows
                ), table.name


def test_the_summary_counts_the_claims(full: Reproduction, page: Page) -> None:
    judgments = judge_claims(full)
    counts = {word: sum(one.verdict == word for one in judgments) for word in ("holds", "does not hold")}
    *sentences, here, worst, _ = page.lead
    assert f"Of {len(judgments)} claims" in here
    assert f"{counts['holds']} hold, {counts['does not hold']} do not hold" in here
    assert "worst case" in worst
    assert [here, worst] == summarize_claims(judgments)
    assert sentences == list(list_sentences(full))
    (nominal,) = (one for one in sentences if one.startswith("Nominal training (resnet20-nominal)"))
    table = full.by_reference(TABLES["table-4"])
    kept = table["table-4/nominal ResNet-26-4/static Sigma/linf 1.5/255"]
    assert f"a static Sigma {kept.ours:.1f} %" in nominal


def test_the_page_opens_on_an_overview_that_links_to_every_chapter(
    page: Page, full: Reproduction
) -> None:
    overview = page.blocks[0]
    assert isinstance(overview, Table)
    chapters = [block.title for block in page.blocks[1:] if block.level == 2]
    rows = {row[0].text: row for row in overview.groups[0].rows}
    assert list(rows) == chapters
    for table in full.list_begun():
        numbers = full.by_reference(table).values()
        assert rows[title_table(table)][2].number == sum(one.ours is not None for one in numbers)
    elements = Elements(page_html(page))
    folded = [one for one in elements.of("details") if one.get("class") == "chapter"]
    assert len(folded) == len(chapters)
    assert not any("open" in one for one in folded)
    names = [f"#{one['id']}" for one in folded]
    assert [one["href"] for one in elements.of("a") if one["href"] in names] == names * 2  # and contents


def test_claims_come_next_with_a_word_and_a_color(page: Page, full: Reproduction) -> None:
    first = next(place for place, one in enumerate(page.blocks[1:], 1) if isinstance(one, Table))
    table = page.blocks[first]
    assert isinstance(table, Table)
    for row, one in zip(table.groups[0].rows, judge_claims(full), strict=True):
        assert row[0].text == one.claim.text
        assert [value.text for value in row[1:]] == [
            one.verdict, one.worst_verdict or NOTHING, one.published_verdict,
        ]  # fmt: skip
        tones = {"holds": "good", "does not hold": "bad", "far smaller": "bad"}
        for value in row[1:]:
            assert value.tone == tones.get(value.text, "")
    behind = page.blocks[first + 1]
    assert isinstance(behind, Text)
    assert len(behind.items) == len(judge_claims(full))


def test_a_curve_is_the_numbers_that_were_measured(full: Reproduction, page: Page) -> None:
    """Every number of a table that goes across something is drawn, where it belongs, and no other."""
    plots = {block.title: block for block in page.blocks if isinstance(block, Plot)}
    drawn = 0
    for table in TABLES.values():
        for part, measured in zip(table.parts, full.measure_table(table), strict=True):
            for title, numbers in zip(part.rows, measured, strict=True):
                if not table.across or all(one.is_left_out for row in measured for one in row):
                    continue
                place = f"{table.name.replace('-', ' ').capitalize()}, {part.name}, across"
                values = [
                    value
                    for name, plot in plots.items()
                    if name.startswith(place)
                    for value in plot.spec["data"]["values"]
                ]
                factor = 255 if table.name == "figure-4" and part.name == "linf" else 1
                for at, one in zip(part.at, numbers, strict=True):
                    expected = {"here": one.ours, "published": one.number.published}
                    expected["worst case"] = one.worst.percent if one.worst else None
                    for kind, figure in expected.items():
                        found = [
                            value
                            for value in values
                            if value["series"].endswith(f", {kind}")
                            and (title in value["series"] or value["series"].startswith("all rows"))
                            and value["x"] == pytest.approx(factor * at)
                        ]
                        assert len(found) == (figure is not None), (place, title, at, kind)
                        if figure is not None:
                            drawn += 1
                            assert found[0]["y"] == pytest.approx(figure)
                            if kind == "here" and one.score:
                                ends = one.score.interval or (None, None)
                                assert (found[0].get("low"), found[0].get("high")) == ends
                                counts = one.score.n, one.score.batches
                                assert (found[0]["n"], found[0]["batches"]) == counts
    assert drawn > 200
    for plot in plots.values():
        (rows,) = plot.numbers.groups
        assert len(rows.rows) == len(plot.spec["data"]["values"])


def test_a_row_without_a_model_has_its_published_line_alone(page: Page) -> None:
    (plot,) = [one for one in page.blocks if one.title == "Table 7, dent, across updates"]
    assert isinstance(plot, Plot)
    names = list(dict.fromkeys(value["series"] for value in plot.spec["data"]["values"]))
    assert sorted(names) == [
        "carmon2019, published", "ding2020, here", "ding2020, published", "ding2020, worst case",
        "wong2020, published",
    ]  # fmt: skip
    colors = plot.spec["layer"][0]["encoding"]["color"]["scale"]
    assert colors["domain"] == names
    by_name = dict(zip(names, colors["range"], strict=True))
    assert by_name["ding2020, here"] == by_name["ding2020, published"]
    assert len({by_name[f"{row}, published"] for row in ("carmon2019", "wong2020", "ding2020")}) == 3


def test_seconds_and_multiples_are_not_on_one_axis(page: Page) -> None:
    titles = [one.title for one in page.blocks if one.title.startswith("Table 14, ")]
    assert [title.rpartition(", ")[2] for title in titles] == [
        "seconds for a batch", "multiples of the static model",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("title", "labels"),
    [
        ("Figure 4, linf, across eps", ["0.5", "1.5", "2", "8"]),
        ("Table 7, dent, across updates", ["0", "30", "40"]),
        ("Table 6, train statistics, across share of adversarial inputs", ["0.0625", "0.25", "0.5"]),
        ("Table 10, linf 8/255, across attack steps", ["1", "2", "13", "100", "800"]),
    ],
)
def test_axes_name_the_places_of_the_columns(page: Page, title: str, labels: list[str]) -> None:
    """Drawn by Vega itself: what it makes of a format depends on the values."""
    (plot,) = [one for one in page.blocks if one.title == title]
    assert isinstance(plot, Plot)
    svg = vl_convert.vegalite_to_svg(paper_spec(plot.spec))
    across = svg.partition("X-axis")[2].partition("Y-axis")[0]
    shown = re.findall(r"<text[^>]*>([^<]+)</text>", across)
    assert set(labels) <= set(shown)
    places = {value["x"] for value in plot.spec["data"]["values"]}
    assert {float(text) for text in shown[:-1]} <= places  # the last is the axis' title


def test_the_battle_is_named_by_its_cell(page: Page) -> None:
    (battle,) = [block for block in page.blocks if isinstance(block, Battle)]
    assert battle.records[0].name.startswith("resnet20-at, dent:statistics=test,steps=10, linf 8/255")
    assert battle.records[0].defense == "dent:statistics=test,steps=10"


# In a browser


@pytest.mark.browser
@NEEDS_CHROMIUM
def test_the_page_in_a_browser(full: Reproduction, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write_page(full, path)
    wrong: list[str] = []
    asked: list[str] = []
    with chromium() as browser:
        shown: Any = browser.new_page(viewport={"width": 1280, "height": 900})
        shown.set_default_timeout(60_000)
        shown.on("console", lambda said: wrong.append(said.text))
        shown.on("pageerror", lambda error: wrong.append(str(error)))
        shown.on("request", lambda request: asked.append(request.url))
        shown.goto(path.as_uri())
        assert shown.evaluate("document.documentElement.scrollHeight") < 5000  # folded
        assert not shown.locator(".battle").is_visible()
        chapter = shown.locator("details.chapter").nth(2)
        title = chapter.locator("summary h2").inner_text()
        shown.locator("table a", has_text=title).first.click()
        assert chapter.locator("table").first.is_visible()
        eventually(
            shown, "Math.abs(document.querySelector('.chapter[open]').getBoundingClientRect().top) < 300"
        )
        shown.locator("details.chapter").evaluate_all(
            "all => all.forEach((one) => { one.open = true; })"
        )
        eventually(
            shown, "[...document.querySelectorAll('.plot')].every((plot) => plot.querySelector('svg'))"
        )
        drawn = [block for block in paper_page(full).blocks if isinstance(block, Plot)]
        assert shown.locator(".plot").count() == len(drawn) > 10
        for number, plot in enumerate(drawn):
            box = shown.locator(".plot").nth(number)
            points = box.locator(".mark-symbol.role-mark path").count()
            assert points == len(plot.spec["data"]["values"]), plot.title
            labels = box.locator(".role-axis-label text").all_text_contents()
            assert labels
            assert not any("e+" in label for label in labels)
            names = {value["series"] for value in plot.spec["data"]["values"]}
            assert set(box.locator(".role-legend-label text").all_text_contents()) == names

        table = shown.locator("details.chapter table").first
        head = table.locator("thead th").nth(1)
        head.locator("button").click()
        assert head.get_attribute("aria-sort") == "ascending"
        verdicts = table.locator("tbody tr td:nth-child(2)").all_text_contents()
        words = [re.sub(r"\s*\d+ of \d+", "", text) for text in verdicts]
        assert words == sorted(one.verdict for one in judge_claims(full))
        assert shown.locator(".battle .side").count() == 2

        shown.set_viewport_size({"width": 360, "height": 740})
        shown.locator("main details").evaluate_all("all => all.forEach((one) => { one.open = true; })")
        assert shown.evaluate("document.documentElement.scrollWidth") <= 360
        browser.close()
    assert wrong == []
    assert asked == [path.as_uri()]
