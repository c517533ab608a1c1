"""The plots of a reproduction: what was found and what was published, across steps, sizes, radii."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dent.paper.measured import COSTS, Measured
from dent.paper.tables import Ask, Part, Table
from dent.report import page, plots
from dent.report.page import Plot, Rows, Value
from dent.report.paper import heading, number_text

KINDS = {  # of the lines of a plot: shape, and dashes
    "here": ("circle", [1, 0]),
    "worst case": ("triangle-down", [2, 3]),
    "published": ("diamond", [7, 4]),
}


def curves(table: Table, part: Part, rows: Sequence[Sequence[Measured]]) -> Iterator[Plot]:
    """A plot for each unit of a part's numbers, if the table is a curve."""
    units: dict[str, list[tuple[str, Sequence[Measured]]]] = {}
    for title, numbers in zip(part.rows, rows, strict=True):
        units.setdefault(unit_of(numbers[0].number.ask), []).append((title, numbers))
    x, at = str(table.across), list(part.at)
    if x == "eps" and rows[0][0].number.ask.norm == "linf":
        x, at = "eps in 1/255", [round(255 * place, 6) for place in at]
    for unit, own in units.items() if table.across else ():
        points = list(_points(own, at))
        if any(one["kind"] != "published" for one in points):
            name = f", {unit}" if len(units) > 1 else ""
            title = f"{heading(table).partition(':')[0]}, {part.title}, across {table.across}{name}"
            yield _curve(title, points, x, unit)


def unit_of(ask: Ask) -> str:
    """What an axis of such numbers is called."""
    if ask.measure == "seconds":
        return "seconds for a batch"
    if ask.measure in COSTS:
        return "multiples of the static model"
    return "accuracy in %" if ask.minus is None else "percentage points"


def _points(
    rows: Sequence[tuple[str, Sequence[Measured]]], at: Sequence[float]
) -> Iterator[dict[str, Any]]:
    """What is to be drawn; rows that are one and the same measurement, once for all of them."""
    same: dict[Any, list[str]] = {}
    for title, numbers in rows:
        same.setdefault(_measurement(numbers), []).append(title)
    for place, (title, numbers) in enumerate(rows):
        together = same[_measurement(numbers)]
        name = "all rows" if 1 < len(together) == len(rows) else ", ".join(together)
        for x, one in zip(at, numbers, strict=True):
            row = {"x": x, "row": place}
            if one.number.published is not None:
                yield row | {"series": title, "kind": "published", "y": one.number.published}
            if together[0] != title:
                continue
            for kind, score in (("here", one.score), ("worst case", one.worst)):
                if score:
                    ends = {"low": score.low, "high": score.high, "n": score.n}
                    yield row | {"series": name, "kind": kind, "y": score.percent} | ends
            if one.value is not None:
                yield row | {"series": name, "kind": "here", "y": one.value}


def _measurement(numbers: Sequence[Measured]) -> tuple[Any, ...]:
    return tuple((one.work, one.number.ask.measure, one.number.ask.minus) for one in numbers)


def _curve(title: str, points: Sequence[Mapping[str, Any]], x: str, y: str) -> Plot:
    """A color for each row; shape and dashes say whether it is ours."""
    points = sorted(points, key=lambda one: (one["row"], list(KINDS).index(one["kind"])))
    drawn: list[dict[str, Any]] = []
    rows: dict[str, int] = {}
    kinds: dict[str, str] = {}
    for one in points:
        name = f"{one['series']}, {one['kind']}"
        rows[name], kinds[name] = one["row"], one["kind"]
        rest = {key: one[key] for key in ("low", "high", "n") if key in one}
        drawn.append({x: one["x"], y: one["y"], "series": name, **rest})
    spec = plots.curve(drawn, x, y, "series", "low", "high", percent="%" in y)
    styles = {
        "color": [plots.PALETTE[row % len(plots.PALETTE)] for row in rows.values()],
        "shape": [KINDS[kind][0] for kind in kinds.values()],
    }
    dashes = {"domain": list(KINDS), "range": [dash for _, dash in KINDS.values()]}
    for value in spec["data"]["values"]:
        value["line"] = kinds[value["series"]]
    for layer in spec["layer"]:
        layer["encoding"]["x"]["axis"]["format"] = ".6~g"  # without digits told, Vega may round
        for channel, style in styles.items():
            if channel in layer["encoding"]:
                layer["encoding"][channel]["scale"] = {"domain": list(rows), "range": style}
        if "strokeDash" in layer["encoding"]:
            layer["encoding"]["strokeDash"]["scale"] = dashes
    lines = [
        [Value(one["series"]), Value(f"{one[x]:g}"), Value(number_text(one[y]), _detail(one))]
        for one in drawn
    ]
    return Plot(title, spec, page.Table("", ["series", x, y], [Rows(lines)]), level=3)


def _detail(one: Mapping[str, Any]) -> str:
    return f"{one['low']:.1f} to {one['high']:.1f}, n = {one['n']:,}" if "low" in one else ""
