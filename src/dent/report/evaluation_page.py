"""The report of an evaluation: what is claimed, what stands, and how it was found."""

from __future__ import annotations

from collections.abc import Iterator

from dent.evaluation.results import CellResult, Results
from dent.report.evaluation_plots import evaluation_plots
from dent.report.page import Battle, Block, Gallery, Page, Record, Rows, Table, Text, Value, page_html
from dent.report.sections import Section, sections
from dent.report.table import HOW_TO_READ, remarks
from dent.report.wording import NOTHING, ball_text, p_text, points_text, value_text

FACTS = {"data": "data", "n": "points", "batch_size": "batch size", "suite": "attacks", "seed": "seed"}
INTERVAL = "95 % interval"
NOT_DONE = ": not done"
BATTLE = (
    "One image, one attack, step by step: against the static model, and against the defended one, which "
    "adapts to the whole batch at every step. Choose an image, then play it, or use the arrow keys."
)
GALLERY = (
    "The same images at the end: as they are, attacked for the static model, attacked for the defended "
    "one, and what both models say to each. Perturbations are magnified; gray is no change."
)


def report_html(results: Results) -> str:
    """The report as a file that needs nothing else."""
    return page_html(evaluation_page(results))


def evaluation_page(results: Results) -> Page:
    """All that the results hold, whatever of it there is."""
    asked = results.about.get("asked", {})
    facts = [
        (title, value_text(value))
        for name, title in FACTS.items()
        if (value := asked.get(name, results.about.get(name))) is not None
    ]
    models = dict.fromkeys(cell.cell.model for cell in results.cells)
    return Page(
        title="Evaluation" + (f" of {', '.join(models)}" if models else ""),
        lead=headlines(results),
        facts=facts,
        blocks=tuple(_blocks(results)),
        alerts=tuple(_alerts(results)),
    )


def headlines(results: Results) -> list[str]:
    """For each model in a ball what its best defense claims, and what of that stands; the best first."""
    places: dict[tuple[str, str], list[CellResult]] = {}
    for cell in results.cells:
        if cell.worst.n:
            places.setdefault((cell.cell.model, ball_text(cell.cell)), []).append(cell)
    best = [
        max(cells, key=lambda cell: (not cell.cell.static, cell.worst.percent))
        for cells in places.values()
    ]
    best.sort(key=lambda cell: -cell.worst.percent)
    if not best:
        return ["No worst case is known yet." if results.cells else "Nothing was evaluated."]
    return [_headline(cell) for cell in best]


def _headline(cell: CellResult) -> str:
    place = f"{cell.cell.model}, {ball_text(cell.cell)}"
    name = f"{'The static model' if cell.cell.static else cell.cell.defense} ({place})"
    stands = f"{cell.worst.percent:.1f} % stands"
    text = f"{name}: {stands}"
    if cell.claimed is not None and cell.claimed.n:
        text = f"{name} claims {cell.claimed.percent:.1f} %; {stands}"
    versus = cell.versus_static
    if cell.cell.static or versus is None or not versus.n:
        return f"{text}."
    by = points_text(abs(versus.difference))
    over = "above" if versus.difference > 0 else "below"
    than = "as the static model" if by == "0.0" else f"{by} points {over} the static model"
    if versus.p is None:
        return f"{text}, {than} (no p: {versus.why_no_p})."
    p = f"p {'' if versus.p < 0.001 else '= '}{p_text(versus.p)}"
    return f"{text}, {than} ({p}{'' if versus.p < 0.05 else ': may be chance'})."


def _alerts(results: Results) -> Iterator[Text]:
    missing = [name for cell in results.cells for name in cell.missing]
    missing.sort(key=lambda name: name.endswith(NOT_DONE))  # errors first
    if not missing:
        return
    undone = sum(name.endswith(NOT_DONE) for name in missing)
    counts = [f"{len(missing) - undone:,} failed"] * (undone < len(missing))
    counts += [f"{undone:,} {'was' if undone == 1 else 'were'} not done"] * (undone > 0)
    said = "Each number below is of the batches that have all it needs. The same command does the rest."
    title = f"The run is not complete: of its units, {' and '.join(counts)}."
    yield Text(title, (said,), missing[:200], folded=True)


def _blocks(results: Results) -> Iterator[Block]:
    tables = [_table(section) for section in sections(results, intervals=True)]
    if not tables:
        return
    yield tables[0]
    yield Text("How to read it", (HOW_TO_READ,), level=3)
    yield from evaluation_plots(results)
    records = [
        Record(str(cell.cell), battle, cell.cell.defense)
        for cell in results.cells
        if (battle := cell.battle) and battle.get("images")
    ]
    if records:
        yield Battle("The battle", records, (BATTLE,))
        yield Gallery("Gallery", records, (GALLERY,))
    yield from tables[1:]
    for title, lines in remarks(results):
        if not title.startswith("Missing"):  # which stands at the top
            yield Text(title, items=lines)
    yield _about(results)


def _table(section: Section) -> Table:
    """Intervals, n and p below their numbers; groups as in the terminal."""
    columns = [name for name in section.groups[0].rows[0] if name != INTERVAL]
    columns.sort(key=lambda name: name == "submitted")  # the least asked for is last
    groups = []
    for group in section.groups:
        rows: list[tuple[Value | str, ...]] = []
        for row in group.rows:
            values = {name: Value.of(row[name]) for name in columns[1:]}
            if INTERVAL in row and row[INTERVAL] != NOTHING:
                worst = values["worst case"]
                detail = ", ".join(filter(None, [row[INTERVAL], worst.detail]))
                values["worst case"] = Value(worst.text, detail, worst.mark, strong=True)
            rows.append((row[columns[0]], *values.values()))
        groups.append(Rows(rows, group.heading))
    return Table(section.title, columns, groups, section.notes)


def _about(results: Results) -> Table:
    about = results.about.get("asked", {}) | {
        name: value for name, value in results.about.items() if name not in ("asked", "plan")
    }
    rows = [(name.replace("_", " "), value_text(value)) for name, value in about.items()]
    return Table("How it was run", ("setting", "value"), [Rows(rows)])
