"""The plots of a report as files for papers: PNG and SVG, on white."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dent.report.page import Page, Plot, anchors
from dent.report.plots import INK, look

PAPER_INK = "#222222"
PAPER_FONT = "Helvetica, Arial, sans-serif"
WIDTH = 480  # of a plot, in points
DOTS = 3.0  # of a PNG for each of these


def write_pictures(page: Page, folder: Path) -> list[Path]:
    """Each plot twice, named by its title; returns where they are."""
    import vl_convert

    plots = [block for block in page.blocks if isinstance(block, Plot)]
    written = []
    for plot, name in zip(plots, anchors(plot.title for plot in plots), strict=True):
        folder.mkdir(parents=True, exist_ok=True)
        spec = paper_spec(plot.spec)
        svg, png = folder / f"{name}.svg", folder / f"{name}.png"
        svg.write_text(vl_convert.vegalite_to_svg(spec), encoding="utf-8")
        png.write_bytes(vl_convert.vegalite_to_png(spec, scale=DOTS))
        written += [png, svg]
    return written


def paper_spec(spec: Mapping[str, Any]) -> dict[str, Any]:
    """The same plot of a fixed width, dark on white, and without what is only for a screen.

    >>> made = paper_spec({"width": "container", "mark": {"type": "bar", "color": "currentColor"}})
    >>> made["width"], made["mark"]["color"], made["background"]
    (480, '#222222', 'white')
    """
    inked: dict[str, Any] = _inked(spec)
    config = look(PAPER_INK, PAPER_FONT)
    config["legend"]["columns"] = max(1, WIDTH // spec.get("usermeta", {}).get("legend", WIDTH))
    return inked | {"width": WIDTH, "background": "white", "config": config}


def _inked(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _inked(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_inked(item) for item in value]
    return PAPER_INK if value == INK else value
