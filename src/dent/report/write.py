"""Reports as files: a page that needs nothing else, Markdown, and plots for papers."""

from __future__ import annotations

from pathlib import Path

from dent.evaluation.results import Results
from dent.evaluation.store import room
from dent.paper.reproduction import Reproduction
from dent.report.evaluation_page import evaluation_page
from dent.report.page import page_html
from dent.report.paper import paper_markdown
from dent.report.paper_page import paper_page
from dent.report.pictures import write_pictures
from dent.report.table import markdown
from dent.storage import replace_file


def write_page(found: Results | Reproduction, file: Path, *, pictures: Path | None = None) -> None:
    """The page of a run of evaluate or reproduce; and its plots as PNG and SVG, if asked for."""
    page = evaluation_page(found) if isinstance(found, Results) else paper_page(found)
    _write(file, page_html(page))
    if pictures is not None:
        write_pictures(page, pictures)


def write_markdown(results: Results, folder: Path) -> None:
    """Write report.md into the folder of a run."""
    with room(folder):
        _write(folder / "report.md", markdown(results))


def write_paper(found: Reproduction, folder: Path) -> None:
    """What people read of a reproduction: report.html and report.md."""
    write_page(found, folder / "report.html")
    _write(folder / "report.md", paper_markdown(found))


def _write(file: Path, text: str) -> None:
    with replace_file(file) as out:
        out.write(text.encode())
