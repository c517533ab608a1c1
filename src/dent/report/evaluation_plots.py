"""The plots of an evaluation, those for which it has data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dent.evaluation.results import CellResult, Results, Score
from dent.report import plots
from dent.report.page import Plot, Rows, Table, Value
from dent.report.wording import NOTHING, ball_text, cost_text, interval_text, p_text, points_text

MODEL = {"label": "defense", "series": "model"}  # columns of tables, by the names of the rows
BESIDE = "Marks that would lie upon one another stand side by side."


def evaluation_plots(results: Results) -> Iterator[Plot]:
    """Attacks, natural against robust, cost against gain, and accuracy against eps."""
    places: dict[str, list[CellResult]] = {}
    for cell in results.cells:
        if any(score.n for score in (cell.natural, *cell.attacks.values())):
            places.setdefault(f"{cell.cell.model}, {ball_text(cell.cell)}", []).append(cell)
    for place, cells in places.items():
        yield _attacks(f"Attacks on {place}", cells)
    known = [cell for cell in results.cells if cell.natural.n and cell.worst.n]
    if len(known) > 1:
        yield _claims(known)
    if gains := [row for cell in known if (row := _gain(cell))]:
        yield _costs(gains)
    for norm in dict.fromkeys(cell.cell.norm for cell in known):
        yield from _against_eps(norm, [cell for cell in known if cell.cell.norm == norm])


def _attacks(title: str, cells: Sequence[CellResult]) -> Plot:
    rows = []
    for cell in cells:
        scores = {"natural": cell.natural} | cell.attacks | {"worst case": cell.worst}
        kinds = {"natural": "natural", "worst case": "worst case"} | cell.kinds
        rows += [
            {
                "group": cell.cell.defense + "*" * cell.cumulative,
                "what": name,
                "kind": kinds.get(name, "direct"),
                "percent": score.percent,
                "low": score.low,
                "high": score.high,
                "figure": f"{score.percent:.1f}",
                "accuracy": f"{score.percent:.1f} %",
                "interval": interval_text(score),
                "n": score.n,
            }
            for name, score in scores.items()
            if score.n
        ]
    columns = {"group": "defense", "what": "under", "kind": "kind", "figure": "accuracy in %"}
    notes = [
        "adaptive: made for defenses that adapt. Lines: 95 % intervals. Click a kind to see it alone."
    ]
    if any(cell.cumulative for cell in cells):
        notes.append("*: each attack was given only what those before it left standing.")
    numbers = _numbers(rows, columns | {"interval": "95 % interval", "n": "n"})
    return Plot(title, plots.attack_bars(rows), numbers, notes)


def _claims(cells: Sequence[CellResult]) -> Plot:
    rows: list[dict[str, Any]] = [
        _named(cell)
        | {
            "natural": cell.natural.percent,
            "worst": cell.worst.percent,
            "claimed": cell.claimed.percent if cell.claimed and cell.claimed.n else None,
            "natural_text": _text(cell.natural),
            "claimed_text": _text(cell.claimed),
            "worst_text": _text(cell.worst),
            "n": cell.worst.n,
        }
        for cell in cells
    ]
    columns = {
        "natural_text": "natural",
        "claimed_text": "claimed",
        "worst_text": "worst case",
        "n": "n",
    }
    notes = (
        "Ring: what is claimed. Filled: what stands in the worst case. Up and to the right is better.",
        BESIDE,
    )
    return Plot(
        "Natural and robust accuracy", plots.claims(rows), _numbers(rows, MODEL | columns), notes
    )


def _gain(cell: CellResult) -> dict[str, Any] | None:
    versus, cost = cell.versus_static, cell.cost
    if cell.cell.static or versus is None or not versus.n or cost is None or cost.times_flops is None:
        return None
    return _named(cell) | {
        "cost": cost.times_flops,
        "gain": versus.difference,
        "low": versus.low,
        "high": versus.high,
        "cost_text": cost_text(cost),
        "gain_text": points_text(versus.difference, sign="+"),
        "interval": f"{versus.low:+.1f} to {versus.high:+.1f}",
        "p": p_text(versus.p),
        "n": versus.n,
    }


def _costs(rows: Sequence[dict[str, Any]]) -> Plot:
    columns = {"cost_text": "cost", "gain_text": "gain", "interval": "95 % interval", "p": "p", "n": "n"}
    notes = (
        "gain: worst case minus that of the static model, in percentage points on the same points.",
        "cost: operations of an answer, in multiples of the static model's.",
        BESIDE,
    )
    return Plot("Cost and gain", plots.cost_gain(rows), _numbers(rows, MODEL | columns), notes)


def _against_eps(norm: str, cells: Sequence[CellResult]) -> Iterator[Plot]:
    """A line for each model with a defense that was attacked in balls of several sizes."""
    lines: dict[tuple[str, str], list[CellResult]] = {}
    for cell in cells:
        lines.setdefault((cell.cell.model, cell.cell.defense), []).append(cell)
    lines = {key: found for key, found in lines.items() if len({one.cell.eps for one in found}) > 1}
    if not lines:
        return
    eps = f"eps ({norm}, of 255)" if norm == "linf" else f"eps ({norm})"
    rows = []
    for (model, defense), found in lines.items():
        scores = {0.0: found[0].natural} | {one.cell.eps: one.worst for one in found}
        rows += [
            {
                eps: size * 255 if norm == "linf" else size,
                "accuracy in %": score.percent,
                "of": f"{model}, {defense}",
                "low": score.low,
                "high": score.high,
                "n": score.n,
                "figure": f"{score.percent:.1f}",
                "interval": interval_text(score),
                "eps_text": f"{size * 255 if norm == 'linf' else size:g}",
            }
            for size, score in sorted(scores.items())
        ]
    spec = plots.curve(rows, eps, "accuracy in %", "of", "low", "high")
    columns = {"of": "model, defense", "eps_text": eps, "figure": "accuracy in %"}
    numbers = _numbers(rows, columns | {"interval": "95 % interval", "n": "n"})
    yield Plot(f"Worst case against eps, {norm}", spec, numbers, ("eps = 0: natural accuracy.",))


def _named(cell: CellResult) -> dict[str, Any]:
    return {"series": f"{cell.cell.model}, {ball_text(cell.cell)}", "label": cell.cell.defense}


def _text(score: Score | None) -> str:
    return NOTHING if score is None or not score.n else f"{score.percent:.1f} ({interval_text(score)})"


def _numbers(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str]) -> Table:
    """The rows of a plot as a table: these columns, under these names."""
    lines = [
        [f"{one:,}" if isinstance(one := row[name], int) else Value.of(str(one)) for name in columns]
        for row in rows
    ]
    return Table("The numbers as a table", list(columns.values()), [Rows(lines)])
