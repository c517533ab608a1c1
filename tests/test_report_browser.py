"""The report in a real browser: it draws, sorts, steps and fits, and asks nobody for anything."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from battles import demo
from browsing import NEEDS_CHROMIUM, check_theme, chromium, eventually, ground

from dent.evaluation.battle import list_recordings
from dent.evaluation.results import Results
from dent.report.evaluation import evaluation_page
from dent.report.html import page_html

pytestmark = [
    pytest.mark.browser,
    NEEDS_CHROMIUM,
]
START = datetime(2026, 1, 1, tzinfo=UTC)
SCRIPT = "<script>alert(1)</script>"
Open = Callable[..., Any]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as running:
        yield running


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(page_html(evaluation_page(demo())), encoding="utf-8")
    return path


@pytest.fixture
def opened(browser: Any, file: Path) -> Iterator[Open]:
    """Opens a report and, at the end, refuses errors, dialogs and requests of any page it opened."""
    pages: list[Any] = []
    wrong: list[str] = []
    asked_for: list[tuple[str, str]] = []

    def opening(path: Path = file, **options: Any) -> Any:
        page = browser.new_page(**{"viewport": {"width": 1280, "height": 900}, **options})
        pages.append(page)
        page.set_default_timeout(10_000)
        page.on("console", lambda said: wrong.append(f"{said.type}: {said.text}"))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("dialog", lambda dialog: dialog.dismiss())
        page.on("dialog", lambda dialog: wrong.append(dialog.message))
        page.on("request", lambda asked: asked_for.append((asked.url, path.as_uri())))
        page.goto(path.as_uri())
        drawn = "[...document.querySelectorAll('.plot')].every((plot) => plot.querySelector('svg'))"
        eventually(page, drawn)
        return page

    yield opening
    for page in pages:
        page.close()
    assert wrong == []
    assert asked_for
    assert all(asked == own for asked, own in asked_for)


def test_plots_are_drawn(opened: Open) -> None:
    page = opened()
    assert page.locator(".plot").count() == 4
    bars = page.locator(".plot").first.locator(".mark-rect path")
    assert bars.count() == 15  # three defenses with natural, three attacks and worst case
    texts = page.locator(".plot").first.locator(".mark-text text").all_text_contents()
    assert {"78.1", "63.3", "38.3", "denying updates", "dent+"} <= set(texts)
    for plot in page.locator(".plot").all():
        assert plot.locator("svg").bounding_box()["width"] > 500


def test_marks_tell_n_and_interval_and_the_legend_picks(opened: Open) -> None:
    page = opened()
    plot = page.locator(".plot").first
    bars = plot.locator(".mark-rect path")
    bars.nth(11).hover()
    shown = page.locator("#vg-tooltip-element")
    shown.locator("text=95 % interval").wait_for()
    text = shown.inner_text()
    assert all(part in text for part in ("dent+", "63.3 %"))
    assert re.search(r"n\s+128", text)
    assert not re.search(r"\d to \d", text)  # one batch supports no interval where inputs depend on it
    bars.nth(0).hover()
    shown.locator("text=static").first.wait_for()
    assert re.search(r"\d to \d", shown.inner_text())

    def opacities() -> list[str]:
        found: list[str] = bars.evaluate_all("bars => bars.map((bar) => bar.getAttribute('opacity'))")
        return found

    assert set(opacities()) == {"0.9"}
    plot.locator(".role-legend-label text", has_text="adaptive").click()
    eventually(page, "document.querySelectorAll(\".plot path[opacity='0.12']\").length > 0")
    assert opacities().count("0.9") == 4  # two adaptive attacks on two defenses; a static model has none


def test_a_click_on_a_heading_sorts(opened: Open) -> None:
    page = opened()
    table = page.locator("table").first
    head = table.locator("thead th").nth(3)

    def column(number: int) -> list[list[str]]:
        script = """(table, number) => [...table.tBodies].map((body) =>
            [...body.rows].slice(1).map((row) => row.cells[number].dataset.sort))"""
        found: list[list[str]] = table.evaluate(script, number)
        return found

    def accuracies() -> list[list[float]]:
        return [[round(float(key), 1) for key in group] for group in column(3)]

    assert accuracies() == [[34.4, 25.8, 38.3], [2.3, 0.8]]
    head.locator("button").click()
    assert head.get_attribute("aria-sort") == "descending"
    assert accuracies() == [[38.3, 34.4, 25.8], [2.3, 0.8]]
    head.locator("button").focus()
    page.keyboard.press("Enter")
    assert head.get_attribute("aria-sort") == "ascending"
    assert accuracies() == [[25.8, 34.4, 38.3], [0.8, 2.3]]
    page.locator("table").first.locator("thead button").first.click()
    assert column(0) == [["dent:steps=10", "dent+", "static"], ["dent-nominal", "static"]]
    assert head.get_attribute("aria-sort") == "none"
    versus = table.locator("thead button", has_text="vs static")
    for _ in range(2):  # the static models have none: last in both orders
        versus.click()
        assert [group[-1] for group in column(5)] == [None, None]
    assert (
        table.locator(".heading").first.inner_text() == "resnet20-at, linf 8/255, n = 128, batches = 1"
    )


def seen(page: Any) -> tuple[str, list[str]]:
    """Which step of the battle, and the probabilities of both sides."""
    return page.locator(".battle output").inner_text(), page.locator(
        ".battle .share"
    ).all_text_contents()


def test_the_battle_steps_by_slider_keys_and_buttons(opened: Open) -> None:
    page = opened()
    battle = list_recordings(demo().cells[2].battle)[0]  # of dent+, which the headline is about

    def expected(number: int, image: int = 0) -> list[str]:
        sides = (battle["images"][image][side]["frames"] for side in ("static", "defended"))
        return [f"{100 * p:.1f} %" for frames in sides for p in frames[number]["probabilities"]]

    assert page.locator(".side.defended h3").inner_text() == "dent+"
    assert seen(page) == ("step 10 of 10", expected(10))  # it opens at the end
    page.locator(".battle input").fill("6")
    assert seen(page) == ("step 6 of 10", expected(6))
    page.locator(".battle input").press("ArrowRight")
    assert seen(page) == ("step 7 of 10", expected(7))
    page.locator(".battle").focus()
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    assert seen(page) == ("step 5 of 10", expected(5))
    page.get_by_label("One step on").click()
    assert seen(page) == ("step 6 of 10", expected(6))
    page.get_by_label("One step back").click()
    assert seen(page) == ("step 5 of 10", expected(5))
    page.locator(".thumbs button").nth(2).click()
    assert seen(page) == ("step 10 of 10", expected(10, 2))
    assert "It does not adapt." in page.locator(".side.static").inner_text()
    assert "over 6 updates" in page.locator(".side.defended").inner_text()


def test_the_battle_plays_to_its_end(opened: Open) -> None:
    page = opened()
    page.clock.install(time=START)
    page.clock.pause_at(START + timedelta(minutes=1))  # time passes only where the test says so
    before = seen(page)[1]
    page.get_by_role("button", name="play", exact=True).click()
    assert seen(page)[0] == "step 0 of 10"  # from the start: it opens at the end
    page.clock.run_for(1300)
    assert seen(page)[0] == "step 2 of 10"
    assert seen(page)[1] != before
    page.get_by_role("button", name="pause").click()
    page.clock.run_for(3000)
    assert seen(page)[0] == "step 2 of 10"
    page.get_by_role("button", name="play", exact=True).click()
    page.clock.run_for(9000)
    assert seen(page)[0] == "step 10 of 10"
    page.get_by_role("button", name="play", exact=True).click()  # from the start again
    page.clock.run_for(700)
    assert seen(page)[0] == "step 1 of 10"


def test_another_cell_has_its_own_battle(opened: Open) -> None:
    page = opened()
    before = seen(page)[1]
    page.get_by_label("Model and defense").select_option(
        label="resnet20-nominal, dent-nominal, linf 1.5/255"
    )
    assert page.locator(".side.defended h3").inner_text() == "dent-nominal"
    assert "Sigma" in page.locator(".side.defended").inner_text()
    assert seen(page)[1] != before


def test_another_attack_is_shown_on_the_same_image(opened: Open) -> None:
    page = opened()
    _, direct = list_recordings(demo().cells[2].battle)
    choose = page.get_by_label("Attack", exact=True)
    assert choose.locator("option").all_text_contents() == ["denying updates", "apgd-ce"]
    assert "APGD makes on the static model" in page.locator(".battle .about").inner_text()
    page.locator(".thumbs button").nth(1).click()
    canvases = page.locator(".sides .frames > div:first-child canvas")
    one, other = (pixels(canvas) for canvas in canvases.all())
    assert (one == other).all()  # both models get the same image
    assert "Given this image" not in page.locator(".battle").inner_text()
    choose.select_option(label="apgd-ce")
    assert "APGD makes on that model itself" in page.locator(".battle .about").inner_text()
    assert page.locator(".thumbs button").nth(1).get_attribute("aria-pressed") == "true"
    expected = [
        f"{100 * p:.1f} %"
        for side in ("static", "defended")
        for p in direct["images"][1][side]["frames"][-1]["probabilities"]
    ]
    assert seen(page) == ("step 10 of 10", expected)
    one, other = (pixels(canvas) for canvas in canvases.all())
    assert (one != other).any()
    assert "Given this image, the defended model says" in page.locator(".side.static").inner_text()


def test_the_name_of_an_attack_leads_to_its_line(opened: Open) -> None:
    page = opened()
    link = page.locator("thead a", has_text="fpa").first
    link.click()
    target = page.locator(":target")
    assert target.locator("dt").inner_text() == "fpa"
    assert target.is_visible()
    column = page.locator("th:has(> a)", has_text="fpa").first
    column.get_by_label("Sort by fpa").click()
    assert column.get_attribute("aria-sort") == "descending"


def pixels(canvas: Any) -> Any:
    script = (
        "canvas => [...canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data]"
    )
    return np.array(canvas.evaluate(script)).reshape(32, 32, 4)


def test_images_are_natural_plus_perturbation(opened: Open) -> None:
    page = opened()
    page.get_by_label("Attack", exact=True).select_option(label="apgd-ce")
    image = list_recordings(demo().cells[2].battle)[1]["images"][0]
    natural = np.frombuffer(base64.b64decode(image["natural"]), np.uint8).reshape(32, 32, 3)
    frame = image["defended"]["frames"][1]
    whole = np.frombuffer(base64.b64decode(frame["delta"]), np.int8).reshape(32, 32, 3) / 127
    page.locator(".battle input").fill("1")
    attacked, perturbation = (pixels(one) for one in page.locator(".side.defended canvas").all())
    assert (pixels(page.locator(".thumbs canvas").first)[..., :3] == natural).all()
    expected = np.clip(natural + 255 * frame["scale"] * whole, 0, 255)
    assert np.abs(attacked[..., :3] - expected).max() <= 0.5 + 1e-6
    largest = max(one["scale"] for one in image["static"]["frames"] + image["defended"]["frames"])
    magnified = 127.5 + 127.5 * frame["scale"] / largest * whole
    assert np.abs(perturbation[..., :3] - magnified).max() <= 0.5 + 1e-6
    assert (attacked[..., 3] == 255).all()


def test_dark_and_light_follow_the_system_and_the_button(opened: Open) -> None:
    dark = check_theme(opened)
    followed = opened(color_scheme="light")
    followed.emulate_media(color_scheme="dark")
    assert ground(followed) == dark
    ink = "getComputedStyle(document.querySelector('.plot .role-axis-label text')).fill"
    body = "getComputedStyle(document.body).color"
    assert followed.evaluate(ink) == followed.evaluate(body)


@pytest.mark.parametrize("width", [320, 360, 768, 1280])
def test_no_page_is_wider_than_its_screen(opened: Open, width: int) -> None:
    page = opened(viewport={"width": width, "height": 740})
    page.locator("main details").evaluate_all("all => all.forEach((one) => { one.open = true; })")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    for plot in page.locator(".plot svg").all():
        assert plot.bounding_box()["width"] <= width
    outside = page.locator(".plot text, .battle *, figure *").evaluate_all(
        "(all, width) => all.filter((one) => one.getBoundingClientRect().right > width + 1).length",
        width,
    )
    assert outside == 0


def test_plots_follow_the_width(opened: Open) -> None:
    page = opened()
    page.set_viewport_size({"width": 500, "height": 740})
    widths = (
        "[...document.querySelectorAll('.plot svg')].map((one) => one.getBoundingClientRect().width)"
    )
    eventually(page, f"{widths}.every((width) => width <= 500)")


def test_the_numbers_of_a_plot_open_as_a_table(opened: Open) -> None:
    page = opened()
    details = page.locator("section:has(.plot) > details").first
    assert not details.locator("table").is_visible()
    details.locator("summary").click()
    assert details.locator("table").is_visible()
    assert details.locator("tbody tr").count() == 15
    details.locator("thead button", has_text="accuracy").click()
    assert details.locator("tbody tr").first.locator("td").nth(2).inner_text() == "78.1\n70\N{EN DASH}84"


def test_names_are_shown_as_text(opened: Open, tmp_path: Path) -> None:
    results = demo(model=SCRIPT)
    cells = tuple(
        replace(
            one,
            battle={
                "recordings": [made | {"classes": [SCRIPT] * 10} for made in list_recordings(one.battle)]
            },
        )
        for one in results.cells
    )
    path = tmp_path / "hostile.html"
    path.write_text(page_html(evaluation_page(replace(results, cells=cells))), encoding="utf-8")
    page = opened(path)
    assert SCRIPT in page.locator("h1").inner_text()
    assert SCRIPT in page.locator(".says").first.inner_text()
    assert page.locator(".plot text", has_text=SCRIPT).count() > 0
    page.locator(".plot").nth(2).locator("g.mark-symbol path").first.hover()
    page.locator("#vg-tooltip-element", has_text=SCRIPT).wait_for()


def test_empty_and_failed_runs_open(opened: Open, tmp_path: Path) -> None:
    failed = demo(failed=["natural", "apgd-ce", "denying updates", "fpa"], battles=False)
    partial = demo(failed=["fpa"])
    for name, results in {"empty": Results(()), "failed": failed, "partial": partial}.items():
        path = tmp_path / f"{name}.html"
        path.write_text(page_html(evaluation_page(results)), encoding="utf-8")
        page = opened(path)
        assert page.locator(".battle").count() == (name == "partial")
        assert page.locator(".alert").count() == (name != "empty")


def test_paper_has_the_light_colors_and_no_controls(opened: Open) -> None:
    page = opened(color_scheme="dark")
    page.emulate_media(media="print", color_scheme="dark")
    assert ground(page) == "rgb(255, 255, 255)"
    for control in ("#theme", "nav", ".battle", "summary"):
        assert not page.locator(control).first.is_visible()
