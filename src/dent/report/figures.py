"""The plots of a report, with their numbers as tables: those of an evaluation, and of a reproduction."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from dent.evaluation.results import CellResult, Results, Score
from dent.paper.results import COSTS, Measurement
from dent.paper.tables import Ask, PaperTable, Part
from dent.report import plots
from dent.report.blocks import EMPTY, Group, Note, Plot, Table, Value, count_value
from dent.report.comparisons import difference_value, list_tests, p_value
from dent.report.evaluation_tables import score_value
from dent.report.format import (
    NOTHING,
    format_ball,
    format_cost,
    format_n,
    format_number,
    format_percent,
)

BESIDE = Note("Marks that would lie upon one another stand side by side.")
LINES = {  # the lines of a curve of the paper: shape, and dashes
    "here": ("circle", [1, 0]),
    "worst case": ("triangle-down", [2, 3]),
    "published": ("diamond", [7, 4]),
}


def draw_evaluation(results: Results) -> Iterator[Plot]:
    """Yield the plots for which there is data.

    They are: attacks, the worst case against the cost of attacks, natural against robust accuracy, cost
    against gain, and accuracy against eps.
    """
    places: dict[str, list[CellResult]] = {}
    for cell in results.cells:
        if any(score.n for score in (cell.natural, *cell.attacks.values())):
            places.setdefault(_name_place(cell), []).append(cell)
    for place, cells in places.items():
        yield _draw_attacks(f"Attacks on {place}", cells)
    for place, cells in places.items():
        if any(cell.convergence and cell.convergence.trace for cell in cells):
            yield _draw_convergence(f"Worst case against cost of attacks, {place}", cells)
    known = [cell for cell in results.cells if cell.natural.n and cell.worst.n]
    if len(known) > 1:
        yield _draw_claims(known)
    if any(_has_gain(cell) for cell in known):
        yield _draw_costs([cell for cell in known if _has_gain(cell)])
    for norm in dict.fromkeys(cell.cell.norm for cell in known):
        yield from _draw_against_eps(norm, [cell for cell in known if cell.cell.norm == norm])


def _draw_attacks(title: str, cells: Sequence[CellResult]) -> Plot:
    drawn, lines = [], []
    for cell in cells:
        defense = cell.cell.defense + "*" * cell.cumulative
        scores = {"natural": cell.natural} | cell.attacks | {"worst case": cell.worst}
        kinds = {"natural": "natural", "worst case": "worst case"}
        kinds |= {} if cell.cell.static else cell.kinds  # every attack on a static model is direct
        for name, score in scores.items():
            if score.n:
                kind, text = kinds.get(name, "direct"), format_percent(score.percent)
                place = {"group": defense, "what": name, "kind": kind, "figure": text}
                drawn.append(place | _describe_score(score) | {"accuracy": f"{text} %"})
                lines.append([Value(defense), Value(name), Value(kind), *_score_cells(score)])
    notes = [
        Note("made for defenses that adapt.", "adaptive"),
        Note("Lines are 95 % intervals. Click a kind to see it alone."),
    ]
    if any(cell.cumulative for cell in cells):
        left = "each attack got only the images that the attacks before it had left standing."
        notes.append(Note(left, "*"))
    columns = ("defense", "under", "kind", "accuracy in %", "n", "batches")
    return Plot(title, plots.attack_bars(drawn), _number_table(columns, lines), notes)


def _draw_convergence(title: str, cells: Sequence[CellResult]) -> Plot:
    drawn, lines = [], []
    known = [(cell, cell.convergence) for cell in cells if cell.convergence]
    for cell, found in known:
        defense, counts = cell.cell.defense, {"n": found.n, "batches": cell.batches}
        for one in found.trace:
            percent = Score(one.correct, found.n).percent
            place = {"series": defense, "attack": one.attack, "cost": one.cost}
            texts = {"cost_text": f"{one.cost:,.0f}", "accuracy": format_percent(percent)}
            drawn.append(place | {"percent": percent} | counts | texts)
            figures = Value(texts["cost_text"], one.cost), Value(texts["accuracy"], percent)
            row = [Value(defense), Value(one.attack), *figures]
            lines.append([*row, *map(count_value, counts.values())])
    notes = (
        Note("Each mark is the worst case once one more attack is done. A line that still falls at its "
             "end has not converged."),
        Note("of all attacks so far for each input, in forwards of the static model, at most; where "
             "broken images leave, they cost nothing more.", "cost"),
        Note("an attack with twice its budget.", "(x2)"),
    )  # fmt: skip
    columns = ("defense", "after", "cost so far", "worst case in %", "n", "batches")
    return Plot(title, plots.worst_case_path(drawn), _number_table(columns, lines), notes)


def _draw_claims(cells: Sequence[CellResult]) -> Plot:
    drawn: list[dict[str, Any]] = []
    lines = []
    for cell in cells:
        claimed = cell.claimed if cell.claimed and cell.claimed.n else None
        texts = {"natural": cell.natural, "claimed": claimed, "worst": cell.worst}
        drawn.append(
            _name_mark(cell)
            | {name: score.percent if score else None for name, score in texts.items()}
            | {f"{name}_text": _describe_accuracy(score) for name, score in texts.items()}
            | {"n": cell.worst.n, "batches": cell.batches}
        )
        values = map(score_value, texts.values())
        counts = map(count_value, (cell.worst.n, cell.batches))
        lines.append([*_name_cells(cell), *values, *counts])
    notes = (
        Note("what is claimed.", "Ring"),
        Note("what stands in the worst case. Up and to the right is better.", "Filled"),
        BESIDE,
    )
    columns = ("defense", "model", "natural", "claimed", "worst case", "n", "batches")
    spec = plots.claims(drawn)
    return Plot("Natural and robust accuracy", spec, _number_table(columns, lines), notes)


def _has_gain(cell: CellResult) -> bool:
    versus, cost = cell.versus_static, cell.cost
    known = versus is not None and versus.n and cost is not None and cost.times_flops is not None
    return not cell.cell.static and bool(known)


def _draw_costs(cells: Sequence[CellResult]) -> Plot:
    drawn, lines = [], []
    for cell in cells:
        versus, cost = cell.versus_static, cell.cost
        assert versus is not None
        assert cost is not None
        times, gain, p = cost.times_flops, difference_value(versus), p_value(versus.p_corrected)
        low, high = versus.interval or (None, None)
        drawn.append(
            _name_mark(cell)
            | {"cost": times, "gain": versus.difference, "low": low, "high": high}
            | {"cost_text": format_cost(times), "p": p.text}
            | {"n": versus.n, "batches": versus.batches}
            | {"gain_text": gain.text, "interval": gain.format_interval() or NOTHING}
        )
        counts = map(count_value, (versus.n, cell.batches))
        lines.append([*_name_cells(cell), Value(format_cost(times), times), gain, p, *counts])
    notes = (
        Note("worst case minus that of the static model, in percentage points on the same images.",
             "gain"),
        Note("operations of an answer; the static model costs 1x.", "cost"),
        BESIDE,
        *list_tests(cell.versus_static for cell in cells),
    )  # fmt: skip
    columns = ("defense", "model", "cost", "gain", "p", "n", "batches")
    return Plot("Cost and gain", plots.cost_gain(drawn), _number_table(columns, lines), notes)


def _draw_against_eps(norm: str, cells: Sequence[CellResult]) -> Iterator[Plot]:
    """Yield a plot with a line for each defense of a model that was attacked in several balls."""
    series: dict[tuple[str, str], list[CellResult]] = {}
    for cell in cells:
        series.setdefault((cell.cell.model, cell.cell.defense), []).append(cell)
    series = {key: own for key, own in series.items() if len({one.cell.eps for one in own}) > 1}
    if not series:
        return
    unit, title = (255, f"eps ({norm}, of 255)") if norm == "linf" else (1, f"eps ({norm})")
    drawn, lines = [], []
    for (model, defense), own in series.items():
        name = f"{model}, {defense}"
        scores = {0.0: own[0].natural} | {one.cell.eps: one.worst for one in own}
        for eps, score in sorted(scores.items()):
            drawn.append({"x": eps * unit, "y": score.percent, "series": name} | _describe_score(score))
            lines.append([Value(name), Value(f"{eps * unit:g}", eps), *_score_cells(score)])
    spec = plots.curve(drawn, title, "accuracy in %")
    numbers = _number_table(("model, defense", title, "accuracy in %", "n", "batches"), lines)
    notes = (Note("natural accuracy.", "eps = 0"),)
    yield Plot(f"Worst case against eps, {norm}", spec, numbers, notes)


def _name_place(cell: CellResult) -> str:
    return f"{cell.cell.model}, {format_ball(cell.cell.norm, cell.cell.eps)}"


def _name_mark(cell: CellResult) -> dict[str, Any]:
    return {"series": _name_place(cell), "label": cell.cell.defense}


def _name_cells(cell: CellResult) -> list[Value]:
    return [Value(cell.cell.defense), Value(_name_place(cell))]


def _describe_score(score: Score) -> dict[str, Any]:
    low, high = score.interval or (None, None)
    ends = {"low": low, "high": high, "interval": score_value(score).format_interval() or NOTHING}
    return {"percent": score.percent, "n": score.n, "batches": score.batches} | ends


def _describe_accuracy(score: Score | None) -> str:
    cell = score_value(score)
    return cell.text + (f" ({cell.format_interval()})" if cell.interval else "")


def _score_cells(score: Score) -> list[Value]:
    batches = EMPTY if score.batches is None else count_value(score.batches)
    return [score_value(score), count_value(score.n), batches]


def _number_table(columns: Sequence[str], lines: Sequence[Sequence[Value]]) -> Table:
    return Table("The numbers as a table", columns, [Group(lines)])


def draw_curves(
    table: PaperTable, part: Part, rows: Sequence[Sequence[Measurement]], title: str
) -> Iterator[Plot]:
    """Yield a plot for each unit of a part's numbers, if the table is a curve.

    title: the name of the table, such as "Figure 4".
    """
    units: dict[str, list[tuple[str, Sequence[Measurement]]]] = {}
    for name, numbers in zip(part.rows, rows, strict=True):
        units.setdefault(name_unit(numbers[0].number.ask), []).append((name, numbers))
    x, at = str(table.across), list(part.at)
    if x == "eps" and rows[0][0].number.ask.norm == "linf":
        x, at = "eps in 1/255", [round(255 * place, 6) for place in at]
    for unit, own in units.items() if table.across else ():
        points = list(_list_points(own, at))
        if any(one["kind"] != "published" for one in points):
            end = f", {unit}" if len(units) > 1 else ""
            yield _draw_curve(f"{title}, {part.name}, across {table.across}{end}", points, x, unit)


def name_unit(ask: Ask) -> str:
    """Return what an axis of such numbers is called."""
    if ask.measure == "seconds":
        return "seconds for a batch"
    if ask.measure in COSTS:
        return "multiples of the static model"
    return "accuracy in %" if ask.minus is None else "percentage points"


def _list_points(
    rows: Sequence[tuple[str, Sequence[Measurement]]], at: Sequence[float]
) -> Iterator[dict[str, Any]]:
    """Yield the points to draw. Rows that are one and the same measurement share a line."""
    same: dict[Any, list[str]] = {}
    for title, numbers in rows:
        same.setdefault(_identify(numbers), []).append(title)
    for place, (title, numbers) in enumerate(rows):
        together = same[_identify(numbers)]
        name = "all rows" if 1 < len(together) == len(rows) else ", ".join(together)
        for x, one in zip(at, numbers, strict=True):
            row = {"x": x, "row": place}
            if one.number.published is not None:
                yield row | {"series": title, "kind": "published", "y": one.number.published}
            if together[0] != title:
                continue
            for kind, score in (("here", one.score), ("worst case", one.worst)):
                if score:
                    low, high = score.interval or (None, None)
                    ends = {"low": low, "high": high, "n": score.n, "batches": score.batches}
                    yield row | {"series": name, "kind": kind, "y": score.percent} | ends
            if one.value is not None:
                yield row | {"series": name, "kind": "here", "y": one.value}


def _identify(numbers: Sequence[Measurement]) -> tuple[Any, ...]:
    return tuple((one.work, one.number.ask.measure, one.number.ask.minus) for one in numbers)


def _draw_curve(title: str, points: Sequence[Mapping[str, Any]], x: str, y: str) -> Plot:
    """Return a curve with a color for each row; shape and dashes say whether a number is ours."""
    points = sorted(points, key=lambda one: (one["row"], list(LINES).index(one["kind"])))
    looks = {}
    drawn, lines = [], []
    for one in points:
        name = f"{one['series']}, {one['kind']}"
        color = plots.PALETTE[one["row"] % len(plots.PALETTE)]
        looks[name] = plots.Look(color, *LINES[one["kind"]])
        drawn.append({**one, "series": name})
        number = Value(format_number(one["y"]), one["y"])
        if "n" in one:  # an accuracy
            number = Value(
                format_percent(one["y"]), one["y"], details=(format_n(one["n"], one["batches"]),)
            )
        if one.get("low") is not None:
            number = replace(number, interval=(one["low"], one["high"]))
        lines.append([Value(name), Value(f"{one['x']:g}", one["x"]), number])
    spec = plots.curve(drawn, x, y, looks=looks, percent="%" in y)
    return Plot(title, spec, Table("", ["series", x, y], [Group(lines)]), level=3)
