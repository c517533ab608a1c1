"""Plots: their data are the scores, their colors can be told apart, and papers can have them."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import vl_convert
from battles import demo, plots_of
from made_up import example
from numpy.typing import NDArray

from dent.evaluation.results import CellResult, Results
from dent.report.blocks import Page, Plot
from dent.report.evaluation import evaluation_page
from dent.report.plots import PALETTE, SHAPES, Look, claims, curve
from dent.report.write import write_pictures
from dent.theme import theme


def test_every_number_stands_under_a_title() -> None:
    for plot in plots_of(example()).values():
        for group in plot.numbers.groups:
            assert {len(row) for row in group.rows} == {len(plot.numbers.columns)}, plot.title


def kind_of(cell: CellResult, attack: str) -> str:
    """Every attack on a static model is direct."""
    return "direct" if cell.cell.static else cell.kinds[attack]


def test_attack_bars_have_the_scores_and_so_has_their_table() -> None:
    results = example()
    plot = plots_of(results)["Attacks on net-a, linf 8/255"]
    drawn = {
        (row["group"].rstrip("*"), row["what"]): row
        for row in plot.spec["data"]["values"]
        if not row["heading"]
    }
    expected = {
        (cell.cell.defense, name): (score, kind)
        for cell in results.cells[:3]
        for name, score, kind in [
            ("natural", cell.natural, "natural"),
            *((name, score, kind_of(cell, name)) for name, score in cell.attacks.items()),
            ("worst case", cell.worst, "worst case"),
        ]
    }
    assert drawn.keys() == expected.keys()
    for key, (score, kind) in expected.items():
        row = drawn[key]
        assert (row["percent"], (row["low"], row["high"])) == (score.percent, score.interval)
        assert (row["kind"], row["n"], row["batches"]) == (kind, score.n, 5)
    assert len(plot.numbers.groups[0].rows) == len(expected)


def test_claims_and_gains_are_drawn_for_every_defense() -> None:
    results = demo()
    shown = plots_of(results)
    falls = {
        (row["series"].split(",")[0], row["label"]): (row["natural"], row["claimed"], row["worst"])
        for row in shown["Natural and robust accuracy"].spec["data"]["values"]
    }
    assert falls == {
        (one.cell.model, one.cell.defense): (
            one.natural.percent, one.claimed.percent if one.claimed else None, one.worst.percent,
        )
        for one in results.cells
    }  # fmt: skip
    gains = {row["label"]: row for row in shown["Cost and gain"].spec["data"]["values"]}
    assert {name: row["cost"] for name, row in gains.items()} == {
        "dent:steps=10": 21, "dent+": 13, "dent-nominal": 21,
    }  # fmt: skip
    assert gains["dent+"]["gain"] == pytest.approx(100 * 5 / 128)


def test_marks_upon_one_another_move_apart_around_their_place() -> None:
    naturals = [50.0, 70.0, 70.0, 90.0, 90.0, 90.0]
    rows = [
        {"series": "m", "label": str(i), "natural": x, "worst": 10.0, "claimed": None}
        for i, x in enumerate(naturals)
    ]
    shifts = {row["label"]: row["shift"] for row in claims(rows)["data"]["values"]}
    assert shifts["0"] == 0
    assert shifts["1"] == -shifts["2"] < 0
    assert (shifts["3"], shifts["4"]) == (-shifts["5"], 0)
    assert shifts["5"] > shifts["2"]


def test_several_radii_make_a_curve_from_natural_on() -> None:
    one = example().cells[0]
    cells = tuple(replace(one, cell=replace(one.cell, eps=eps / 255)) for eps in (4, 8, 16))
    plot = plots_of(Results(cells))["Worst case against eps, linf"]
    points = [(row["x"], row["y"]) for row in plot.spec["data"]["values"]]
    worst = one.worst.percent
    expected = [(0, one.natural.percent), *((eps, worst) for eps in (4, 8, 16))]
    np.testing.assert_allclose(points, expected)
    assert "Worst case against eps, linf" not in plots_of(example())


def test_curves_take_any_names_and_leave_out_what_is_missing() -> None:
    rows = [
        {"x": x, "y": y, "series": series, "low": 1.0, "high": 2.0}
        for x, y, series in [(1, 5.0, "p"), (800, 6.0, "p"), (8, None, "p"), (8, 7.0, "q")]
    ]
    looks = {"p": Look(PALETTE[0], SHAPES[0]), "q": Look(PALETTE[1], SHAPES[1], (5, 4))}
    spec = curve(rows, "a.b[c]'", "y", looks=looks)
    drawn = [(row["x"], row["y"], row["series"]) for row in spec["data"]["values"]]
    assert drawn == [(1, 5.0, "p"), (800, 6.0, "p"), (8, 7.0, "q")]
    scales = [layer["encoding"]["x"]["scale"].get("type") for layer in spec["layer"]]
    assert scales == ["log"] * 3
    (dashes,) = [
        one["encoding"]["strokeDash"] for one in spec["layer"] if "strokeDash" in one["encoding"]
    ]
    assert dashes["scale"] == {"domain": ["p", "q"], "range": [[1, 0], [5, 4]]}
    assert ">a.b[c]'</text>" in vl_convert.vegalite_to_svg(spec | {"width": 300})
    few = curve([{"x": 0, "y": 1.0, "series": "p"}, {"x": 30, "y": 2.0, "series": "p"}], "x", "y")
    assert all("type" not in layer["encoding"]["x"]["scale"] for layer in few["layer"])


def linear(color: str) -> NDArray[np.float64]:
    shares = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(shares <= 0.04045, shares / 12.92, ((shares + 0.055) / 1.055) ** 2.4)


def contrast(one: str, other: str) -> float:
    """As WCAG 2 has it."""
    lights = [float(linear(color) @ [0.2126, 0.7152, 0.0722]) + 0.05 for color in (one, other)]
    return max(lights) / min(lights)


def lab(rgb: NDArray[np.float64]) -> NDArray[np.float64]:
    """CIE L*a*b* of linear sRGB, white D65."""
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    x, y, z = np.cbrt(np.clip(to_xyz @ rgb, 1e-9, None) / [0.9505, 1.0, 1.089])
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


# Machado, Oliveira and Fernandes 2009, severity 1: how protanopes and deuteranopes see linear sRGB.
SEEN_BY = {
    "all": np.eye(3),
    "protanopes": np.array(
        [[0.1523, 1.0526, -0.2049], [0.1145, 0.7863, 0.0992], [-0.0039, -0.0481, 1.052]]
    ),
    "deuteranopes": np.array(
        [[0.3673, 0.8606, -0.228], [0.2801, 0.6725, 0.0474], [-0.0118, 0.0429, 0.9689]]
    ),
}  # fmt: skip


def test_colors_stand_out_from_both_grounds() -> None:
    css = theme("theme.css")
    pairs = dict(re.findall(r"--([\w-]+): light-dark\(((?:#\w+, ){1}#\w+)\)", css))
    grounds = pairs["ground"].split(", ")
    for color, ground in itertools.product(PALETTE, grounds):
        assert contrast(color, ground) >= 3, (color, ground)  # WCAG: graphics
    for name in ("ink", "quiet", "accent", "wrong"):
        for text, ground in zip(pairs[name].split(", "), grounds, strict=True):
            assert contrast(text, ground) >= 4.5, (name, ground)  # WCAG: text


@pytest.mark.parametrize("who", SEEN_BY)
def test_colors_can_be_told_apart_by(who: str) -> None:
    seen = [lab(np.clip(SEEN_BY[who] @ linear(color), 0, 1)) for color in PALETTE]
    assert min(np.linalg.norm(a - b) for a, b in itertools.combinations(seen, 2)) > 15


def test_pictures_for_papers(tmp_path: Path) -> None:
    page = evaluation_page(example())
    plots = [block for block in page.blocks if isinstance(block, Plot)]
    written = write_pictures(page, tmp_path / "plots")
    assert len(written) == 2 * len(plots) == len(list((tmp_path / "plots").iterdir()))
    for path in written:
        if path.suffix == ".png":
            assert path.read_bytes().startswith(b"\x89PNG")
        else:
            text = path.read_text(encoding="utf-8")
            assert ElementTree.fromstring(text).tag.endswith("svg")
            assert "currentColor" not in text
            assert 'fill="white"' in text
    assert write_pictures(Page("empty"), tmp_path / "none") == []
