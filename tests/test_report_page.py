"""Reports as one file: what they say, that it is all there, and that nothing in it can do harm."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from importlib import resources

import numpy as np
from battles import CLASSES, demo, plots_of
from hypothesis import given
from hypothesis import strategies as st
from made_up import example

from dent.evaluation.battle import list_recordings
from dent.evaluation.results import MissingUnit, Results
from dent.report.blocks import (
    EMPTY,
    Battle,
    Gallery,
    Glossary,
    Group,
    Page,
    Plot,
    Table,
    Text,
    Value,
    count_value,
)
from dent.report.evaluation import (
    evaluation_page,
    explain_attacks,
    results_markdown,
    results_text,
)
from dent.report.evaluation_tables import result_tables
from dent.report.html import page_html, script_json
from dent.theme import theme


def report_html(results: Results) -> str:
    return page_html(evaluation_page(results))


HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&"


class Elements(HTMLParser):
    """Every element with its attributes, and the words of each table row."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.rows: list[list[str]] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th") and self.rows:
            self.rows[-1].append("")

    def handle_data(self, data: str) -> None:
        if self.rows and self.rows[-1]:
            self.rows[-1][-1] += data

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.found if name == tag]


def embedded(html: str) -> dict[str, object]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.S)
    assert found is not None
    content: dict[str, object] = json.loads(found[1])
    return content


def test_the_headline_says_what_is_claimed_and_what_stands() -> None:
    lead = evaluation_page(demo()).lead
    assert lead[0] == (
        "dent+ (resnet20-at, linf 8/255) claims 63.3 %; at most 38.3 % stands, 3.9 percentage points "
        "above the static model (no p; the table says why)."
    )
    assert lead[1].startswith(
        "dent-nominal (resnet20-nominal, linf 1.5/255) claims 33.6 %; at most 0.8 % stands"
    )


def test_the_main_table_is_first_and_has_every_number() -> None:
    results = demo()
    assert isinstance(evaluation_page(results).blocks[0], Table)
    rows = Elements(report_html(results)).rows
    assert rows[0] == [
        "defense", "natural", "claimed", "worst case", "gap", "vs static", "cost", "submitted",
    ]  # fmt: skip
    plus = next(row for row in rows if row[0] == "dent+")
    bound = "\N{LESS-THAN OR EQUAL TO} 38.3"
    assert plus[1:] == ["71.9", "63.3", bound, "25.0", "+3.9", "13x", "38.3"]  # one batch: no interval
    static = next(row for row in rows if row[0] == "static")
    assert static[1] == "78.1 70\N{EN DASH}84"


def test_no_number_of_the_tables_is_lost() -> None:
    results = example()
    shown = [
        set(re.findall(r"\d+(?:\.\d+)?", " ".join(row))) for row in Elements(report_html(results)).rows
    ]
    for table in result_tables(results):
        for group in table.groups:
            for row in group.rows:
                texts = [text for cell in row for text in (cell.text, *cell.list_details())]
                numbers = set(re.findall(r"\d+(?:\.\d+)?", " ".join(texts)))
                assert any(numbers <= found for found in shown), row


def hostile(results: Results, name: str) -> Results:
    """The same with this name for everything that has one."""
    cells = []
    for one in results.cells:
        attacks = {f"{name} {key}": score for key, score in one.attacks.items()}
        kinds = {f"{name} {key}": kind for key, kind in one.kinds.items()}
        alone = None if one.alone is None else {f"{name} {k}": count for k, count in one.alone.items()}
        finding = {"name": name, "message": name, "figures": {name: 1.0}}
        hostile = {"classes": [name] * 10, "attack": name, "norm": name}
        battle = {"recordings": [made | hostile for made in list_recordings(one.battle)]}
        cell = replace(one.cell, model=name + one.cell.model, defense=name + one.cell.defense)
        cells.append(
            replace(
                one, cell=cell, attacks=attacks, kinds=kinds, alone=alone, battle=battle,
                findings=(finding,), missing=(MissingUnit(name),),
            )
        )  # fmt: skip
    return Results(tuple(cells), {"asked": {"data": name, "suite": name}, name: name})


def test_hostile_names_make_no_elements() -> None:
    harmless, harmful = (
        [
            (tag, set(attributes))
            for tag, attributes in Elements(report_html(hostile(demo(), name))).found
        ]
        for name in ("n" * len(HOSTILE), HOSTILE)
    )
    assert harmful == harmless  # and no attribute was broken out of


@given(st.recursive(st.text() | st.integers() | st.none(), lambda inner: st.lists(inner, max_size=4)))
def test_json_in_a_script_says_the_same_and_cannot_end_it(value: object) -> None:
    text = script_json(value)
    assert json.loads(text) == value
    assert text.isascii()
    assert not set("<>&\n") & set(text)


def test_the_page_names_nothing_outside_itself() -> None:
    page = Elements(report_html(demo()))
    addresses = [attributes.get(name) for _, attributes in page.found for name in ("src", "href")]
    inside = {f"#{attributes['id']}" for _, attributes in page.found if attributes.get("id")}
    assert {one for one in addresses if one} <= inside
    policy = next(
        str(one["content"])
        for one in page.of("meta")
        if one.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy.startswith("default-src 'none'")
    assert "unsafe-eval" not in policy
    assert not re.search(r"https?:", policy)
    own = resources.files("dent.report").joinpath("assets")
    texts = [own.joinpath(name).read_text(encoding="utf-8") for name in ("page.css", "page.js")]
    for text in (*texts, theme("theme.css"), theme("theme.js")):
        assert not re.search(r"url\(|@import|fetch\(|XMLHttp|https?://(?!www\.w3\.org/2000/svg)", text)


def test_every_title_has_a_place_of_its_own() -> None:
    blocks = [Text("same"), Text("same"), Text("Same!"), Text("<b>"), Text("")]
    page = Elements(page_html(Page("title", blocks=blocks)))
    names = [one["id"] for one in page.of("section")]
    assert len(set(names)) == len(blocks)
    assert [one["href"] for one in page.of("a")] == [f"#{name}" for name in names[:4]]


def test_empty_runs_say_so() -> None:
    html = report_html(Results(()))
    assert "Nothing was evaluated." in html
    assert "vegaEmbed = " not in html  # which is large, and has nothing to draw
    assert embedded(html) == {"plots": [], "battles": []}


def test_partial_runs_say_what_is_missing_first() -> None:
    results = example(failed=frozenset({("fpa", 1), ("denying", 2)}))
    page = evaluation_page(results)
    (alert,) = page.alerts
    assert alert.title == "The run is not complete: of its units, 2 failed."
    assert len(alert.items) == 2
    assert all("no memory" in item for item in alert.items)
    html = page_html(page)
    assert html.index("The run is not complete") < html.index("<table")
    assert not evaluation_page(example()).alerts


def test_what_is_known_of_a_run_without_a_worst_case_is_drawn() -> None:
    results = demo(failed=["fpa"], battles=False)
    assert evaluation_page(results).lead == ["No worst case is known yet."]
    plots = plots_of(results)
    assert len(plots) == 2
    rows = [row for plot in plots.values() for row in plot.spec["data"]["values"]]
    shown = {row["what"] for row in rows if not row["heading"]}
    assert shown == {"natural", "apgd-ce", "denying updates"}


def test_runs_of_which_everything_failed_still_have_a_report() -> None:
    results = demo(failed=["natural", "apgd-ce", "denying updates", "fpa"], battles=False)
    page = evaluation_page(results)
    assert page.alerts[0].title == "The run is not complete: of its units, 20 failed."
    assert not [block for block in page.blocks if isinstance(block, Plot)]
    assert "nan" not in re.sub(r"<script.*?</script>", "", page_html(page), flags=re.S)


def test_battles_are_shown_twice_and_kept_once() -> None:
    results = demo()
    blocks = evaluation_page(results).blocks
    assert [type(block) for block in blocks if isinstance(block, Battle | Gallery)] == [Battle, Gallery]
    html = report_html(results)
    shown = [made for one in results.cells for made in list_recordings(one.battle)]
    kept = embedded(html)["battles"]
    assert isinstance(kept, list)
    assert len(kept) == len(shown) == 6
    assert all(one in shown for one in kept)
    without = evaluation_page(demo(battles=False)).blocks
    assert not [block for block in without if isinstance(block, Battle | Gallery)]


def test_the_gallery_says_who_is_right() -> None:
    results = demo()
    html = report_html(results)
    strongest = [made[0] for one in results.cells if (made := list_recordings(one.battle))]
    marks = {"right": 0, "wrong": 0}
    for battle in strongest:
        assert battle["shared"]
        for image in battle["images"]:
            answers = [image[side]["frames"][0]["probabilities"] for side in ("static", "defended")]
            answers += image["static"]["answers"].values()
            for answer in answers:
                marks["right" if int(np.argmax(answer)) == image["label"] else "wrong"] += 1
    assert {word: html.count(f'<li class="{word}">') for word in marks} == marks
    assert min(marks.values()) > 0
    assert any(f"{name} " in html for name in CLASSES)


def test_the_gallery_of_a_direct_attack_has_an_image_for_each_model() -> None:
    results = demo()
    cells = tuple(
        replace(one, battle={"recordings": list_recordings(one.battle)[1:]}) for one in results.cells
    )
    html = report_html(replace(results, cells=cells))
    for side in ("static", "defended"):
        assert html.count(f"<figcaption>apgd-ce on the {side} model<ul>") == 12
    assert "<figcaption>denying updates<ul>" in report_html(results)


def test_the_battle_opens_on_the_defense_of_the_headline_and_on_the_strongest_attack() -> None:
    results = demo()
    page = evaluation_page(results)
    (battle,) = [block for block in page.blocks if isinstance(block, Battle)]
    assert page.lead[0].startswith("dent+ (resnet20-at, linf 8/255)")
    assert battle.records[0].name == "resnet20-at, dent+, linf 8/255"
    assert sorted(one.defense for one in battle.records) == ["dent+", "dent-nominal", "dent:steps=10"]
    for record in battle.records:
        assert [one["attack"] for one in record.recordings] == ["denying updates", "apgd-ce"]
        assert record.captions == [
            "Both models get the images that APGD makes on the static model. 10 steps on a batch of 32 "
            f"images; at the end, the static model is right on 3, {record.defense} on 9.",
            "Each model gets the images that APGD makes on that model itself. 10 steps on a batch of 32 "
            f"images; at the end, the static model is right on 3, {record.defense} on 9.",
        ]
    assert "Why 32 images" in str(battle.notes[1])


def test_names_of_attacks_link_to_a_line_that_explains_them() -> None:
    page = Elements(report_html(demo()))
    lines = {str(one.get("id")) for one in page.of("div") if str(one.get("id")).startswith("about-")}
    assert lines == {"about-apgd-ce", "about-denying-updates", "about-fpa", "about-apgd"}
    linked = {str(one["href"]) for one in page.of("a") if "#about-" in str(one.get("href"))}
    assert linked == {f"#{one}" for one in lines - {"about-apgd"}}
    (glossary,) = [block for block in evaluation_page(demo()).blocks if isinstance(block, Glossary)]
    texts = {one.term: one.text for one in glossary.entries}
    assert texts["fpa"].startswith("Fixed point: attack the model as adapted to the last attack.")
    assert "Made for defenses that adapt" in texts["fpa"]


def test_variants_share_the_line_of_their_attack_and_own_attacks_have_one() -> None:
    glossary = explain_attacks(["fpa", "fpa (x2)", "mixed (10 %)", "mine"], {"fpa": "rounds=3"})
    assert [one.term for one in glossary.entries] == ["fpa", "mixed", "mine", "APGD"]
    assert glossary.entries[0].text.endswith("In this run: rounds=3.")
    assert glossary.entries[2].text == "An attack of your own."
    table = Table("T", ["defense", "fpa (x2)"], [Group([[Value("fpa"), Value("1.0", 1.0)]])])
    page = Elements(page_html(Page("t", blocks=[table, glossary])))
    assert [one["href"] for one in page.of("a")] == ["#about-fpa"]  # rows are defenses


def test_a_page_names_the_attacks_that_were_chosen_or_their_suite() -> None:
    results = demo()

    def name_attacks(**chosen: object) -> tuple[object, bool]:
        asked = results.about["asked"] | {"suite": "quick", "attacks": []} | chosen
        given = replace(results, about=results.about | {"asked": asked})
        shown = [text for name, text in evaluation_page(given).facts if name == "attacks"]
        return shown, "suite: " in results_markdown(given)

    assert name_attacks() == (["quick"], True)
    assert name_attacks(attacks=["square"]) == (["square"], False)


def test_what_was_not_given_is_what_was_used() -> None:
    results = demo()
    asked = results.about["asked"] | {"defenses": [], "attacks": [], "eps": None, "n": None}
    asked |= {"steps": None, "queries": None, "protocol": None}
    about = results.about | {"asked": asked, "plan": {"n": 128}, "defenses_sha256": {}}
    results = replace(results, about=about)
    rows = dict(row for row in Elements(report_html(results)).rows if len(row) == 2)
    assert rows["defenses"] == "static, dent:steps=10, dent+, dent-nominal"
    assert rows["attacks"] == "apgd-ce, denying updates, fpa"
    assert rows["eps"] == "8/255 (resnet20-at), 1.5/255 (resnet20-nominal)"
    assert rows["n"] == "128"
    assert rows["steps"] == rows["queries"] == "each attack's own"
    assert rows["protocol"] == "no"
    assert "not given" not in report_html(results)
    assert "not given" not in results_markdown(results)


def test_readers_meet_images_not_points() -> None:
    text = re.sub(r"<script.*?</script>|<style.*?</style>", "", report_html(demo()), flags=re.S)
    text = re.sub(r'(id|href)="[^"]*"', "", text)
    for shown in (text, results_markdown(demo()), results_text(demo())):
        assert not re.search(r"(?<!percentage )(?<!fixed )\bpoints?\b", " ".join(shown.split()), re.I)
        assert "images" in shown


def test_tables_sort_by_numbers_and_leave_out_what_is_none() -> None:
    rows = [
        [Value("b"), count_value(1200), Value("-3.5", -3.54, details=("p = 0.1",))],
        [Value("a"), EMPTY, Value("< 0.001", 0.0004)],
    ]
    page = Elements(page_html(Page("t", blocks=[Table("T", ["name", "n", "x"], [Group(rows)])])))
    assert [one.get("data-sort") for one in page.of("td")] == ["1200", "-3.54", None, "0.0004"]
    assert [one.get("aria-sort") for one in page.of("th") if one.get("scope") == "col"] == ["none"] * 3
    assert page.rows[1] == ["b", "1,200", "\N{MINUS SIGN}3.5 p = 0.1"]


def test_a_report_is_the_same_every_time() -> None:
    assert report_html(demo()) == report_html(demo())
