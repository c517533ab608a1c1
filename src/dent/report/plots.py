"""Plots as Vega-Lite specifications, made from plain rows; `look` is the configuration of all plots.

Text and axes take the color of the text around them. The other colors differ enough on a light and on a
dark ground, also for people who see fewer colors; shapes or labels say the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from dent.report.format import format_interval

Spec = dict[str, Any]
Row = Mapping[str, Any]

INK = "currentColor"
PALETTE = ("#2f6fd6", "#d9701e", "#1c7a5b", "#bb4fa8", "#756c2c", "#8b939c")
SHAPES = ("circle", "square", "triangle-up", "diamond", "cross", "triangle-down")
KINDS = {"natural": PALETTE[5], "direct": PALETTE[0], "adaptive": PALETTE[1], "worst case": PALETTE[3]}
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
FADED = 0.12
BESIDE: Spec = {"xOffset": {"expr": "datum.shift"}}  # see `_beside`
LABEL: Spec = {
    "align": {"expr": "datum.side < 0 ? 'right' : 'left'"},
    "dx": {"expr": "10 * datum.side"},
    "fontSize": {"expr": "width < 330 ? 10 : 12"},
}
HAS_INTERVAL: Spec = {"filter": "isValid(datum.low) && isValid(datum.high)"}
DOUBLINGS = 5  # if x doubles so often from its least to its largest value, its axis is logarithmic


def look(ink: str = INK, font: str = FONT) -> Spec:
    """Return the configuration of every plot."""
    text = {"labelColor": ink, "titleColor": ink, "labelFontSize": 12, "titleFontSize": 12}
    text |= {"labelFontWeight": "normal", "titleFontWeight": "normal"}
    axis = {"gridColor": ink, "gridOpacity": 0.1, "domainColor": ink, "domainOpacity": 0.35}
    axis |= {"tickColor": ink, "tickOpacity": 0.35, "labelLimit": 190, "titlePadding": 10}
    legend = {"orient": "top", "title": None, "labelLimit": 260, "symbolStrokeWidth": 2, "offset": 12}
    legend |= {"columnPadding": 18, "rowPadding": 4}
    return {
        "background": None,
        "font": font,
        "axis": text | axis,
        "legend": text | legend,
        "text": {"color": ink, "fontSize": 12},
        "rule": {"color": ink},
        "view": {"stroke": None},
    }


def attack_bars(rows: Sequence[Row]) -> Spec:
    """Return bars of the accuracy under each attack, with intervals; groups have headings.

    rows: group, what, kind (see `KINDS`), percent, low and high or None; for labels and tooltips the
    texts `figure`, `accuracy` and `interval`, and `n` and `batches`.
    """
    data: list[dict[str, Any]] = []
    for group in dict.fromkeys(row["group"] for row in rows):
        data.append({"line": f"{len(data):03d}+{group}", "heading": True})
        for row in rows:
            if row["group"] == group:
                end = row["percent"] if row["high"] is None else row["high"]
                place = {"line": f"{len(data):03d} {row['what']}", "heading": False, "end": end}
                data.append({**row, **place})
    lines = [row["line"] for row in data]
    bold = {"condition": {"test": "slice(datum.value, 3, 4) == '+'", "value": "bold"}}
    y = {
        "field": "line",
        "type": "nominal",
        "sort": lines,
        "axis": {
            "title": None,
            "labelExpr": "slice(datum.label, 4)",
            "labelFontWeight": bold | {"value": "normal"},
            "ticks": False,
            "domain": False,
            "labelPadding": 8,
        },
    }
    x = {"field": "percent", "type": "quantitative", "scale": {"domain": [0, 100]}}
    x["axis"] = {"values": [0, 20, 40, 60, 80, 100]}
    kinds = [kind for kind in KINDS if any(row["kind"] == kind for row in rows)]
    color = {"field": "kind", "type": "nominal", "scale": _range(kinds, [KINDS[k] for k in kinds])}
    tooltip = _tooltip(group="defense", what="under", kind="kind", accuracy="accuracy")
    tooltip += _tooltip(interval="95 % interval", n="n", batches="batches")
    bars = _layer({"type": "bar", "height": {"band": 0.66}, "cornerRadiusEnd": 2}, y=y, tooltip=tooltip)
    bars["encoding"] |= {"x": x | {"title": "accuracy in %"}, "color": color, "opacity": _picked(0.9)}
    bars["params"] = [_legend_click("kind")]
    shown = [{"filter": "!datum.heading"}]
    low, high = {**x, "field": "low"}, {"field": "high"}
    interval = _layer({"type": "rule", "strokeWidth": 1.5}, y=y, x=low, x2=high, opacity=_picked(0.75))
    text = {"type": "text", "align": "left", "dx": 6}
    figure = _layer(text, y=y, x={**x, "field": "end"}, text={"field": "figure"}, opacity=_picked(1))
    layers = [part | {"transform": shown} for part in (bars, interval, figure)]
    layers[1]["transform"] = [*shown, HAS_INTERVAL]
    headed = {"mark": {"type": "point", "opacity": 0}, "encoding": {"y": y}}  # gives headings a line
    return _spec(data, [*layers, headed], height=21 * len(data), names=kinds)


def claims(rows: Sequence[Row]) -> Spec:
    """Return natural against robust accuracy: from what is claimed (a ring) to what stands (a dot).

    rows: series, label, natural, worst, claimed or None; for tooltips the texts `natural_text`,
    `claimed_text` and `worst_text`, and `n` and `batches`.
    """
    natural = [row["natural"] for row in rows]
    room = max(10.0, 0.35 * (max(natural) - min(natural)))  # for labels
    ends = [max(0, 5 * math.floor((min(natural) - room) / 5)), 5 * math.ceil((max(natural) + room) / 5)]
    x: Spec = {"field": "natural", "type": "quantitative", "title": "natural accuracy in %"}
    x["scale"] = {"domain": ends, "nice": False}
    x["axis"] = {"values": [tick for tick in range(ends[0], min(100, ends[1]) + 1) if tick % 10 == 0]}
    top = max(max(row["worst"], row["claimed"] or 0) for row in rows)
    y: Spec = {"type": "quantitative", "title": "robust accuracy in %"}
    y["scale"] = {"domain": [0, min(110, 10 * math.ceil((top + 8) / 10))], "nice": False}
    color = _series(rows)
    tooltip = _tooltip(series="model", label="defense", natural_text="natural", claimed_text="claimed")
    tooltip += _tooltip(worst_text="worst case", n="n", batches="batches")
    both = {"x": x, "color": color, "tooltip": tooltip, "opacity": _picked(1)}
    claimed, worst = {**y, "field": "claimed"}, {**y, "field": "worst"}
    fall = _layer(
        {"type": "rule", "strokeWidth": 2.5, **BESIDE}, **both, y=claimed, y2={"field": "worst"}
    )
    ring = _layer({"type": "point", "size": 80, "strokeWidth": 2, **BESIDE}, **both, y=claimed)
    dot = _layer({"type": "point", "filled": True, "size": 120, **BESIDE}, **both, y=worst)
    dot["encoding"]["shape"] = {**color, "scale": _range(color["scale"]["domain"], SHAPES)}
    dot["params"] = [_legend_click("series")]
    for part in (fall, ring):
        part["transform"] = [{"filter": "isValid(datum.claimed)"}]
    name = _layer({"type": "text", **LABEL, **BESIDE}, x=x, text={"field": "label"}, opacity=_picked(1))
    name["encoding"]["y"] = {**y, "field": "upper"}
    name["transform"] = [{"calculate": "max(datum.worst, datum.claimed)", "as": "upper"}]
    near = (ends[1] - ends[0]) / 40
    return _spec(_beside(rows, "natural", near), [fall, ring, dot, name], height=320)


def cost_gain(rows: Sequence[Row]) -> Spec:
    """Return the cost of defenses against their gain over the static model, the line at zero.

    rows: series, label, cost (a multiple of the static model's), gain (in points), low and high or
    None; for tooltips the texts `cost_text`, `gain_text`, `interval` and `p`, and `n` and `batches`.
    """
    x: Spec = {"field": "cost", "type": "quantitative", "title": "cost of an answer, static model = 1"}
    x["scale"] = {"domain": [0, 1.3 * max(row["cost"] for row in rows)], "nice": False}
    x["axis"] = {"tickCount": 6}
    y = {"type": "quantitative", "title": "worst case minus static, in percentage points"}
    color = _series(rows)
    tooltip = _tooltip(series="model", label="defense", cost_text="cost", gain_text="gain")
    tooltip += _tooltip(interval="95 % interval", p="p", n="n", batches="batches")
    both = {"x": x, "color": color, "tooltip": tooltip, "opacity": _picked(1)}
    zero: Spec = {"data": {"values": [{"zero": 0}]}, "mark": {"type": "rule", "strokeDash": [4, 4]}}
    zero["encoding"] = {"y": {"field": "zero", "type": "quantitative"}, "opacity": {"value": 0.6}}
    bar = _layer({"type": "rule", "strokeWidth": 2, **BESIDE}, **both, y={**y, "field": "low"})
    bar["encoding"]["y2"] = {"field": "high"}
    bar["transform"] = [HAS_INTERVAL]
    dot = _layer(
        {"type": "point", "filled": True, "size": 110, **BESIDE}, **both, y={**y, "field": "gain"}
    )
    dot["encoding"]["shape"] = {**color, "scale": _range(color["scale"]["domain"], SHAPES)}
    dot["params"] = [_legend_click("series")]
    text = {"type": "text", **LABEL, **BESIDE}
    name = _layer(text, x=x, y={**y, "field": "gain"}, text={"field": "label"}, opacity=_picked(1))
    near = x["scale"]["domain"][1] / 40
    return _spec(_beside(rows, "cost", near), [zero, bar, dot, name], height=280)


def worst_case_path(rows: Sequence[Row]) -> Spec:
    """Return the worst case against the cost of all attacks so far, a line of steps for each series.

    rows: series, cost (> 0), percent; for tooltips `attack`, `n`, `batches`, and the texts `cost_text`
    and `accuracy`.
    """
    x: Spec = {"field": "cost", "type": "quantitative", "scale": {"type": "log", "nice": False}}
    x["scale"]["padding"] = 8  # pixels
    x["title"] = "cost of attacks so far (log)"
    x["axis"] = {"grid": False, "labelOverlap": True, "format": "~s"}
    y = {"field": "percent", "type": "quantitative", "title": "worst case in %", "scale": {"zero": True}}
    color = _series(rows)
    both = {"x": x, "y": y, "color": color, "opacity": _picked(1)}
    line = _layer({"type": "line", "strokeWidth": 2, "interpolate": "step-after"}, **both)
    dot = _layer({"type": "point", "filled": True, "size": 60}, **both)
    dot["encoding"]["shape"] = {**color, "scale": _range(color["scale"]["domain"], SHAPES)}
    dot["encoding"]["tooltip"] = _tooltip(series="defense", attack="after", cost_text="cost so far")
    dot["encoding"]["tooltip"] += _tooltip(accuracy="worst case in %", n="n", batches="batches")
    dot["params"] = [_legend_click("series")]
    return _spec(rows, [line, dot], height=300)


class Look(NamedTuple):
    """How a line is drawn."""

    color: str
    shape: str
    dash: Sequence[int] = (1, 0)


def curve(
    rows: Sequence[Row],
    x: str,
    y: str,
    *,
    looks: Mapping[str, Look] | None = None,
    percent: bool = True,
) -> Spec:
    """Return lines of y over x, one for each series, with intervals where they are known.

    rows: x, y, series, and optionally low, high, n, batches; rows without x or y are left out.
    x, y: the titles of the axes. looks: how to draw each series; otherwise each has a color and a shape.
    The axis of x is logarithmic if its values double at least `DOUBLINGS` times.

    >>> spec = curve([{"x": 1, "y": 50.0, "series": "dent"}], "steps", "accuracy")
    >>> spec["data"]["values"]
    [{'x': 1, 'y': 50.0, 'series': 'dent', 'n': '', 'batches': '', 'interval': ''}]
    """
    data = [_curve_row(row) for row in rows if row["x"] is not None and row["y"] is not None]
    names = list(dict.fromkeys(row["series"] for row in data))
    values = sorted({row["x"] for row in data})
    log = bool(values) and values[0] > 0 and values[-1] / values[0] >= 2**DOUBLINGS
    across: Spec = {"field": "x", "type": "quantitative", "title": x}
    across["scale"] = (
        {"type": "log", "base": 2, "nice": False} if log else {"zero": False, "nice": False}
    )
    across["axis"] = {"grid": False, "labelOverlap": True, "format": ".6~g"}  # Vega may round else
    across["axis"] |= {"values": values} if len(values) <= 12 else {}
    up: Spec = {"type": "quantitative", "title": y, "scale": {"zero": percent}}
    looks = looks or {
        name: Look(PALETTE[place % len(PALETTE)], SHAPES[place % len(SHAPES)])
        for place, name in enumerate(names)
    }
    color = _series(data) | {"scale": _range(names, [looks[name].color for name in names])}
    shape = color | {"scale": _range(names, [looks[name].shape for name in names])}
    tooltip = _tooltip(series="series", x=x, y=y, interval="95 % interval", n="n", batches="batches")
    tooltip[2]["format"] = ".1f" if percent else "~g"
    both = {"x": across, "color": color, "opacity": _picked(1)}
    line = _layer({"type": "line", "strokeWidth": 2}, **both, y={**up, "field": "y"})
    dashes = _range(names, [list(looks[name].dash) for name in names])
    line["encoding"]["strokeDash"] = color | {"scale": dashes}
    dot = _layer({"type": "point", "filled": True, "size": 60}, **both, y={**up, "field": "y"})
    dot["encoding"] |= {"shape": shape, "tooltip": tooltip}
    dot["params"] = [_legend_click("series")]
    bar = _layer({"type": "rule", "strokeWidth": 1.2, "strokeOpacity": 0.6}, **both)
    bar["encoding"] |= {"y": {**up, "field": "low"}, "y2": {"field": "high"}}
    bar["transform"] = [HAS_INTERVAL]
    return _spec(data, [bar, line, dot], height=300)


def _curve_row(row: Row) -> dict[str, Any]:
    made = {name: row[name] for name in ("x", "y", "series")}
    made |= {name: row.get(name, "") for name in ("n", "batches")} | {"interval": ""}
    if row.get("low") is None or row.get("high") is None:
        return made
    made["interval"] = format_interval(row["low"], row["high"])
    return made | {"low": row["low"], "high": row["high"]}


def _beside(rows: Sequence[Row], x: str, near: float) -> list[dict[str, Any]]:
    """Return the rows with a shift in pixels for overlapping marks, and the side of each label."""
    made: list[dict[str, Any]] = []
    for row in sorted(rows, key=lambda row: float(row[x])):
        last = made[-1] if made else None
        place = last["place"] + 1 if last and row[x] - last[x] < near else 0
        made.append({**row, "place": place, "shift": 0})
    for number in range(len(made) - 1, -1, -1):
        is_last = number + 1 == len(made) or made[number + 1]["place"] == 0
        made[number]["of"] = made[number]["place"] if is_last else made[number + 1]["of"]
        made[number]["shift"] = 14 * (made[number]["place"] - made[number]["of"] / 2)
        made[number]["side"] = -1 if made[number]["shift"] < 0 else 1
    return made


def _spec(
    data: Sequence[Row], layers: Sequence[Spec], *, height: int, names: Sequence[str] = ()
) -> Spec:
    """Return a specification. names: those of the legend, whose widest sets its columns."""
    names = names or [str(row.get("series", "")) for row in data]
    widest = 7 * max(map(len, names), default=0) + 45
    values = [dict(row) for row in data]
    if not any(row.get("low") is not None for row in data):  # an empty layer has no scale
        layers = [layer for layer in layers if HAS_INTERVAL not in layer.get("transform", ())]
    spec = {"data": {"values": values}, "width": "container", "height": height, "layer": list(layers)}
    return spec | {"usermeta": {"legend": widest}}


def _layer(mark: Spec, **encoding: Any) -> Spec:
    return {"mark": mark, "encoding": encoding}


def _tooltip(**titles: str) -> list[Spec]:
    return [{"field": field, "title": title} for field, title in titles.items()]


def _range(domain: Sequence[Any], values: Sequence[Any]) -> Spec:
    """Return a scale from the domain to values, which repeat if there are too few."""
    return {"domain": list(domain), "range": [values[i % len(values)] for i in range(len(domain))]}


def _series(rows: Sequence[Row]) -> Spec:
    names = list(dict.fromkeys(row["series"] for row in rows))
    color: Spec = {"field": "series", "type": "nominal", "scale": _range(names, PALETTE)}
    return color if len(names) > 1 else color | {"legend": None}


def _legend_click(of: str) -> Spec:
    return {"name": "picked", "select": {"type": "point", "fields": [of]}, "bind": "legend"}


def _picked(opacity: float) -> Spec:
    return {"condition": {"param": "picked", "value": opacity}, "value": FADED}
