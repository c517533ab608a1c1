"""The page on which a person tries what is served."""

from __future__ import annotations

import json
from importlib import resources

from dent.serving.settings import Serving
from dent.theme import theme

_ABOUT = '<script type="application/json" id="about">{}</script>'


def page_html(serving: Serving) -> str:
    """The page, told what is served: it fetches nothing, and asks `predict` beside it.

    >>> '"model": "resnet20-at"' in page_html(Serving())
    True
    """
    page = resources.files("dent.serving").joinpath("assets", "page.html").read_text(encoding="utf-8")
    about = {
        "model": serving.model,
        "defense": serving.defense,
        "size": serving.size,
        "classes": serving.classes,
    }
    text = json.dumps(about).replace("<", "\\u003c")  # so that no name can end the script element
    for name in ("theme.css", "theme.js"):
        page = page.replace(f"/* {name} */\n", theme(name))
    return page.replace(_ABOUT, _ABOUT.replace("{}", text))
