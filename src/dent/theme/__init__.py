"""How pages look, light and dark: what those of reports and of the server have in common."""

from __future__ import annotations

from importlib.resources import files


def theme(name: str) -> str:
    """The contents of theme.css, or of theme.js: how elements are made, and the button for dark.

    >>> "function setUpTheme()" in theme("theme.js")
    True
    """
    return files("dent.theme").joinpath(name).read_text(encoding="utf-8")
