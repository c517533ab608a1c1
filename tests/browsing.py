"""A real browser for tests: which one, how it is started, and how to wait for what a page shows."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
NEEDS_CHROMIUM = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")


@contextmanager
def chromium() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    with sync_api.sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield running
        running.close()


def eventually(page: Any, expression: str, seconds: float = 60) -> None:
    """Wait until it is true.

    Playwright's own way is to evaluate text in the page again and again, which our pages forbid.
    """
    until = time.monotonic() + seconds
    while not page.evaluate(expression):
        assert time.monotonic() < until, f"expected {expression}"
        page.wait_for_timeout(20)


def ground(page: Any) -> str:
    color: str = page.evaluate("getComputedStyle(document.body).backgroundColor")
    return color


def check_theme(opened: Callable[..., Any]) -> str:
    """A page that is opened so follows the system and its button; the ground of the dark one."""
    page = opened(color_scheme="light")
    light = ground(page)
    page.locator("#theme").click()
    dark = ground(page)
    assert dark != light
    page.locator("#theme").click()
    assert ground(page) == light
    assert ground(opened(color_scheme="dark")) == dark
    return dark
