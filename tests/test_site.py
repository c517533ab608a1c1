"""The documentation site builds without a warning, and its pages load nothing from other hosts."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from browsing import NEEDS_CHROMIUM, chromium

ROOT = Path(__file__).parents[1]
IS_MISSING = find_spec("material") is None or find_spec("mkdocstrings") is None
pytestmark = pytest.mark.skipif(IS_MISSING, reason="needs the extra docs")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site as `make docs` does. A link that leads nowhere ends the build."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment
    )
    assert built.returncode == 0, built.stderr
    assert "WARNING" not in built.stderr
    return folder


class Parts(HTMLParser):
    """What a page loads, where its links lead, and the names that links may lead to."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.links: list[str] = []
        self.names: set[str] = set()
        self.feed(page.read_text("utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        known = {name: value or "" for name, value in attrs}
        self.names.add(known.get("id", ""))
        if tag == "a":
            self.links.append(known.get("href", ""))
        self.loads += [known[name] for name in ("src", "srcset", "data", "poster") if name in known]
        if tag == "link" and known.get("rel") not in ("next", "prev", "canonical"):
            self.loads.append(known.get("href", ""))


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Parts]:
    return {page: Parts(page) for page in site.rglob("*.html")}


def test_every_file_of_the_docs_is_a_page(pages: dict[Path, Parts], site: Path) -> None:
    names = {str(page.relative_to(site).with_suffix("")) for page in pages}
    for page in (ROOT / "docs").rglob("*.md"):
        assert str(page.relative_to(ROOT / "docs").with_suffix("")) in names
    assert {f"examples/{path.stem}" for path in (ROOT / "examples").glob("*.py")} <= names
    assert {f"examples/{path.stem}" for path in (ROOT / "examples").glob("*.ipynb")} <= names
    assert {"changelog", "contributing"} <= names


def test_links_within_the_site_lead_somewhere(pages: dict[Path, Parts]) -> None:
    checked = 0
    for page, parts in pages.items():
        if page.name == "404.html":  # its links are for a server's root
            continue
        for link in parts.links:
            target = urlsplit(link)
            if target.scheme or target.netloc:
                continue
            place = (page.parent / unquote(target.path)).resolve() if target.path else page
            place = place / "index.html" if place.is_dir() else place
            assert place.exists(), f"{page.name}: {link}"
            if target.fragment and place in pages:
                assert unquote(target.fragment) in pages[place].names, f"{page.name}: {link}"
            checked += 1
    assert checked > 500


def test_pages_load_nothing_from_other_hosts(pages: dict[Path, Parts], site: Path) -> None:
    for page, parts in pages.items():
        assert parts.loads
        for address in parts.loads:
            target = urlsplit(address)
            assert target.scheme in ("", "data"), f"{page.name} loads {address[:80]}"
            assert not target.netloc, f"{page.name} loads {address[:80]}"
    for sheet in site.rglob("*.css"):
        assert not re.search(r"(url\(|@import)[\s'\"]*(https?:)?//", sheet.read_text("utf-8")), sheet


def test_the_reference_has_what_dent_offers(site: Path) -> None:
    from dent import api

    shown = "".join(page.read_text("utf-8") for page in (site / "api").glob("*.html"))
    headings = set(re.findall(r'class="doc doc-heading">\s*dent\.(\w+)\s', shown))
    offered = {name for name in api.__all__ if callable(getattr(api, name))}
    assert offered - headings == set()
    assert "&gt;&gt;&gt;" in shown  # examples are code, not quotes
    assert "<blockquote>" not in shown


def test_pictures_of_notebooks_are_shown(site: Path) -> None:
    for notebook in (ROOT / "examples").glob("*.ipynb"):
        cells = json.loads(notebook.read_text())["cells"]
        outputs = [output for cell in cells for output in cell.get("outputs", ())]
        pictures = [output for output in outputs if "image/png" in output.get("data", {})]
        page = (site / "examples" / f"{notebook.stem}.html").read_text()
        assert page.count("data:image/png;base64") == len(pictures) >= 2


@pytest.mark.browser
@NEEDS_CHROMIUM
def test_search_works_from_a_folder_without_a_network(site: Path) -> None:
    with chromium() as browser:
        page = browser.new_page()
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        problems: list[Any] = []
        page.on("pageerror", lambda error: problems.append(error))
        page.goto((site / "index.html").as_uri())
        page.locator(".md-search__input").click()
        page.keyboard.type("poisoning")
        found = page.locator(".md-search-result__link").first
        found.wait_for(timeout=30_000)
        found.click()
        page.wait_for_url(lambda url: "index.html" not in url, timeout=30_000)
        assert {urlsplit(url).scheme for url in asked} <= {"file", "blob", "data", "about"}
        assert not problems


@pytest.mark.browser
@NEEDS_CHROMIUM
@pytest.mark.parametrize("width", [1280, 390])
def test_no_page_is_wider_than_its_window(width: int, site: Path) -> None:
    with chromium() as browser:
        page = browser.new_page(viewport={"width": width, "height": 800})
        for path in sorted(site.rglob("*.html")):
            page.goto(path.as_uri())
            wider = page.evaluate("document.documentElement.scrollWidth - innerWidth")
            assert wider <= 0, path.name
