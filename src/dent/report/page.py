"""A report as one HTML file that needs nothing else: the building blocks, and how they are written."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from html import escape
from importlib import resources
from typing import Any

from dent.report.blocks import (
    Battle,
    Block,
    Gallery,
    Page,
    Plot,
    Record,
    Rows,
    Table,
    Text,
    Value,
)
from dent.report.markup import Data, block_html, lead_html, text_html
from dent.report.plots import look
from dent.theme import theme

__all__ = ["Battle", "Block", "Gallery", "Page", "Plot", "Record", "Rows", "Table", "Text", "Value"]
__all__ += ["page_html"]

LONG = 4  # sections that are worth a table of contents
POLICY = "; ".join(
    [
        "default-src 'none'",
        "style-src 'unsafe-inline'",
        "script-src 'unsafe-inline'",  # without 'unsafe-eval': Vega's expressions are interpreted
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
    ]
)


def page_html(page: Page) -> str:
    """The file: it fetches nothing, and all that comes from data is shown as text.

    >>> html = page_html(Page("A < B", lead=["Nothing yet."]))
    >>> "<h1>A &lt; B</h1>" in html
    True
    """
    data, names = Data(), anchors(block.title for block in page.blocks)
    blocks = "\n".join(
        block_html(block, name, data) for block, name in zip(page.blocks, names, strict=True)
    )
    chapters = [
        (block.title, name)
        for block, name in zip(page.blocks, names, strict=True)
        if block.level == 2 and block.title
    ]
    alerts = "".join(f'<div class="alert" role="note">{text_html(one)}</div>' for one in page.alerts)
    facts = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(text)}</dd></div>" for name, text in page.facts
    )
    scripts = (
        f"<script>{_inside_script(vega())}</script>\n" if data.plots else ""
    ) + f'<script type="application/json" id="data">{script_json(_content(data))}</script>\n'
    made_with = "Plots: Vega-Lite (BSD-3-Clause), part of this file." if data.plots else ""
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(page.title)}</title>
<style>
{theme("theme.css")}{_asset("page.css")}</style>
</head>
<body>
{_contents(chapters)}
<main>
<header>
<button type="button" id="theme" aria-label="Switch between light and dark">dark</button>
<h1>{escape(page.title)}</h1>
{alerts}{lead_html(page.lead)}
{f'<dl class="facts">{facts}</dl>' if facts else ""}
</header>
{blocks}
<footer>Written by dent. {made_with}</footer>
</main>
{scripts}<script>
{_inside_script(theme("theme.js") + _asset("page.js"))}</script>
</body>
</html>
"""


def anchors(titles: Iterable[str]) -> list[str]:
    """A name for each, to link to.

    >>> anchors(["The gap, in %", "The gap in %", "?"])
    ['the-gap-in', 'the-gap-in-2', 'part']
    """
    names: list[str] = []
    for title in titles:
        name = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-") or "part"
        count = 1
        while (numbered := name if count == 1 else f"{name}-{count}") in names:
            count += 1
        names.append(numbered)
    return names


def script_json(value: Any) -> str:
    r"""JSON that may stand in a script element: nothing in it can end it.

    >>> print(script_json(["</script>", float("nan")]))
    ["\u003c/script\u003e",null]
    """
    text = json.dumps(_finite(value), separators=(",", ":"), allow_nan=False)  # ASCII: no line ends
    for sign in "<>&":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text


@cache
def vega() -> str:
    """Vega, Vega-Lite and Vega-Embed as one script."""
    import vl_convert

    snippet = "window.vegaEmbed = vegaEmbed;"
    return vl_convert.javascript_bundle(snippet)


def _content(data: Data) -> dict[str, Any]:
    content: dict[str, Any] = {"plots": data.plots, "battles": data.battles}
    return content | ({"config": look()} if data.plots else {})


def _contents(chapters: Sequence[tuple[str, str]]) -> str:
    if len(chapters) < LONG:
        return ""
    links = "".join(f'<li><a href="#{name}">{escape(title)}</a></li>' for title, name in chapters)
    listed = f"<details><summary>Contents</summary><ol>{links}</ol></details>"
    return f'<nav aria-label="Contents">{listed}</nav>'


def _inside_script(text: str) -> str:
    return text.replace("</script", "<\\/script").replace("<!--", "<\\!--")


def _asset(name: str) -> str:
    return resources.files("dent.report").joinpath("assets", name).read_text(encoding="utf-8")


def _finite(value: Any) -> Any:
    """JSON has no nan."""
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value
