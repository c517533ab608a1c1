"""The look of all pages, light and dark: those of reports and that of the server."""

from __future__ import annotations

from importlib.resources import files


def theme(name: str) -> str:
    """Return the contents of theme.css or theme.js: colors, `make`, and the button for dark.

    >>> "function setUpTheme()" in theme("theme.js")
    True
    """
    return files("dent.theme").joinpath(name).read_text(encoding="utf-8")
