"""Write reports as files: a page that needs nothing else, Markdown, and plots for papers."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dent.evaluation.results import Results
from dent.evaluation.store import explain_full_disk
from dent.paper.reasons import read_reasons
from dent.paper.results import Reproduction
from dent.report.blocks import Page, Plot
from dent.report.evaluation import evaluation_page, results_markdown
from dent.report.html import make_anchors, page_html
from dent.report.paper import paper_markdown, paper_page
from dent.report.paper_pages import make_pages
from dent.report.plots import INK, look
from dent.storage import replace_file

PAPER_INK = "#222222"
PAPER_FONT = "Helvetica, Arial, sans-serif"
PLOT_WIDTH = 480  # in points
DOTS = 3.0  # pixels of a PNG for each point


def write_page(results: Results | Reproduction, file: Path, *, pictures: Path | None = None) -> None:
    """Write the page of a run. pictures: a folder for its plots as PNG and SVG."""
    page = evaluation_page(results) if isinstance(results, Results) else paper_page(results)
    _write(file, page_html(page))
    if pictures is not None:
        write_pictures(page, pictures)


def write_markdown(results: Results, folder: Path) -> None:
    """Write report.md into the folder of an evaluation."""
    with explain_full_disk(folder):
        _write(folder / "report.md", results_markdown(results))


def write_paper(reproduction: Reproduction, folder: Path) -> None:
    """Write report.html and report.md of a reproduction."""
    write_page(reproduction, folder / "report.html")
    _write(folder / "report.md", paper_markdown(reproduction))


def write_paper_pages(reproductions: Sequence[Reproduction], file: Path) -> Path:
    """Write reproductions side by side as Markdown: the overview to a file.md, all else to a folder.

    The folder is named as the file. It gets a page for the claims and for each table, and the stores
    SCALE.json, which have every number of the pages. Its `why.yaml` says why claims do not hold.
    """
    folder = file.with_suffix("")
    repeated = [
        name for name, count in Counter(one.scale.name for one in reproductions).items() if count > 1
    ]
    if repeated:
        raise ValueError(f"expected each scale once, got several of scale {repeated[0]}")
    reasons = read_reasons(folder, reproductions)
    for name, text in make_pages(reproductions, reasons, folder=folder.name).items():
        _write(folder / name if name else file, text)
    for one in reproductions:
        _write(folder / f"{one.scale.name}.json", json.dumps(one.to_json()) + "\n")
    return folder


def _write(file: Path, text: str) -> None:
    with replace_file(file) as out:
        out.write(text.encode())


def write_pictures(page: Page, folder: Path) -> list[Path]:
    """Write each plot as PNG and SVG, on white, named by its title; return the files."""
    import vl_convert

    plots = [block for block in page.blocks if isinstance(block, Plot)]
    written = []
    for plot, name in zip(plots, make_anchors(plot.title for plot in plots), strict=True):
        folder.mkdir(parents=True, exist_ok=True)
        spec = paper_spec(plot.spec)
        svg, png = folder / f"{name}.svg", folder / f"{name}.png"
        svg.write_text(vl_convert.vegalite_to_svg(spec), encoding="utf-8")
        png.write_bytes(vl_convert.vegalite_to_png(spec, scale=DOTS))
        written += [png, svg]
    return written


def paper_spec(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return a plot for paper: of a fixed width, dark on white.

    >>> made = paper_spec({"width": "container", "mark": {"type": "bar", "color": "currentColor"}})
    >>> made["width"], made["mark"]["color"], made["background"]
    (480, '#222222', 'white')
    """
    inked: dict[str, Any] = _replace_ink(spec)
    config = look(PAPER_INK, PAPER_FONT)
    widest = spec.get("usermeta", {}).get("legend", PLOT_WIDTH)
    config["legend"]["columns"] = max(1, PLOT_WIDTH // widest)
    return inked | {"width": PLOT_WIDTH, "background": "white", "config": config}


def _replace_ink(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _replace_ink(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_replace_ink(item) for item in value]
    return PAPER_INK if value == INK else value
