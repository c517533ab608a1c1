"""The report of an evaluation: as text, as Markdown, and as a page."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from dent.evaluation.attacks import ATTACKS
from dent.evaluation.results import CellResult, MissingUnit, Results
from dent.evaluation.spec import Cell, format_eps
from dent.intervals import LEAST_BATCHES
from dent.report.battle import make_record, show_records
from dent.report.blocks import Block, Glossary, Group, Note, Page, Record, Table, Text, Value
from dent.report.evaluation_tables import group_cells, is_upper_bound, result_tables
from dent.report.figures import draw_evaluation
from dent.report.format import (
    capitalize,
    format_ball,
    format_count,
    format_p,
    format_percent,
    format_points,
    format_setting,
)
from dent.report.text import (
    WIDTH,
    escape_markdown,
    fold_lines,
    markdown_list,
    table_markdown,
    table_text,
)

FACTS = {"data": "data", "n": "images", "batch_size": "batch size"}
FACTS |= {"attacks": "attacks", "suite": "attacks"}  # the name of a suite stands for its attacks
FACTS |= {"suite_version": "suite version", "seed": "seed", "mixed_precision": "searched in bfloat16"}
NOT_RUN = "Not run: attacks that need what the defense lacks"
NOTHING_EVALUATED = "Nothing was evaluated."
KIND_NOTES = {
    "direct": "Direct: an attack on the defended model itself, as papers report it",
    "adaptive": "Made for defenses that adapt",
    "scenario": "Another batch than the deployed one; in no worst case",
}
APGD = Note(
    "Auto-PGD (Croce and Hein, 2020): projected gradient ascent with momentum, which halves its steps "
    "where the loss stops growing. Many attacks here are made of it.",
    "APGD",
)
OWN_BUDGET = "each attack's own"
HOW_TO_READ = (
    "Trust the worst case. An image counts if the model classifies it correctly without an attack and "
    "under every attack that was run. It is an upper bound, because other attacks exist. Where it has "
    "not converged, more budget of the same attacks may already lower it. The claimed accuracy is "
    "what one would report without the attacks made for adaptation; the gap is the part of the claim "
    "that does not stand. A static model does not adapt, so it has no gap. All attacks are judged on "
    "the same images in the same batches, so a defense is compared with its static model on the same "
    "images; p is the probability that chance alone makes such a difference. Where answers depend on "
    "the batch, intervals and p are over batches, because images of one batch are not independent; "
    f"fewer than {LEAST_BATCHES} batches give neither. Each accuracy comes with its 95 % interval, and "
    "with its number of images and batches where these differ from the rest of its row."
)


def list_findings(results: Results) -> list[str]:
    """Return each finding once, with the cells that it is about."""
    places: dict[str, list[str]] = {}
    for cell in results.cells:
        for one in cell.findings:
            figures = ", ".join(f"{name} {value:g}" for name, value in one.get("figures", {}).items())
            place = str(cell.cell) + (f" ({figures})" if figures else "")
            places.setdefault(f"{one['name']}: {one['message']}", []).append(place)
    return [f"{finding} [{'; '.join(cells)}]" for finding, cells in places.items()]


def list_missing(results: Results) -> list[MissingUnit]:
    """Return the units that failed, then those that were not done."""
    missing = [one for cell in results.cells for one in cell.missing]
    return sorted(missing, key=lambda one: one.error is None)


def list_not_run(results: Results) -> list[str]:
    """Return the attacks that a defense does not allow, with the reason."""
    lines = []
    for cell in results.cells:
        reasons: dict[str, list[str]] = {}
        for attack, reason in cell.not_run.items():
            reasons.setdefault(reason, []).append(attack)
        lines += [f"{cell.cell}: {', '.join(names)}, because {why}" for why, names in reasons.items()]
    return lines


def list_remarks(results: Results, most: int) -> Iterator[tuple[str, list[str]]]:
    """Yield what tables do not show, each with its title: findings, attacks not run, missing units."""
    if findings := list_findings(results):
        yield "Findings", findings
    if not_run := list_not_run(results):
        yield NOT_RUN, not_run
    if missing := list_missing(results):
        more = len(missing) - most
        rest = [f"and {format_count(more)} more; results.json has all"] if more > 0 else []
        count = format_count(len(missing))
        yield f"Missing: {count} units failed or were not done", [*map(str, missing[:most]), *rest]


def results_text(results: Results, width: int = WIDTH) -> str:
    """Return all tables as aligned text, then findings and what is missing."""
    parts = [table_text(table, width) for table in result_tables(results)] or [NOTHING_EVALUATED]
    for title, lines in list_remarks(results, most=10):
        parts.append("\n".join([title, *fold_lines(lines, width, "- ")]))
    return "\n\n".join(parts)


def results_markdown(results: Results) -> str:
    """Return report.md: what was asked, the tables with all intervals, and how to read them."""
    asked = [f"{name}: {format_setting(value)}" for name, value in _list_settings(results).items()]
    parts = ["# Evaluation", markdown_list(asked)]
    if not results.complete:
        parts.append("**The run is not complete.** The end of this report names what is missing.")
    for table in result_tables(results):
        parts += [f"## {table.title}", table_markdown(table), markdown_list(table.notes)]
    parts += ["## How to read it", HOW_TO_READ]
    for title, lines in list_remarks(results, most=100):
        parts += [f"## {escape_markdown(title)}", markdown_list(lines)]
    return "\n\n".join(filter(None, parts)) + "\n"


def _list_settings(results: Results) -> dict[str, object]:
    """Return what was asked, with what was used for settings that were not given."""
    asked: dict[str, object] = dict(results.about.get("asked", {}))
    if asked.get("attacks"):
        asked.pop("suite", None)  # the attacks were chosen instead of it
    used = _list_used(results)
    filled = {
        name: used[name] if value in (None, [], ()) and name in used else value
        for name, value in asked.items()
    }
    rest = {name: value for name, value in results.about.items() if name not in ("asked", "plan")}
    return filled | {name: value for name, value in rest.items() if value not in (None, {}, [])}


def _list_used(results: Results) -> dict[str, object]:
    """Return what a run used for the settings that have no value of their own unless given."""
    cells = [one.cell for one in results.cells]
    if not cells:
        return {}
    plan: Mapping[str, Any] = results.about.get("plan", {})
    names = [name for one in results.cells for name in (*one.kinds, *one.scenarios)]
    has_protocol = any(one.protocol is not None for one in results.cells)
    return {
        "defenses": list(dict.fromkeys(cell.defense for cell in cells)),
        "attacks": list(dict.fromkeys(names)) or "none",
        "n": plan.get("n") or "all",
        "eps": _format_radii(cells),
        "steps": OWN_BUDGET,
        "queries": OWN_BUDGET,
        "protocol": has_protocol,
    }


def _format_radii(cells: Iterable[Cell]) -> str:
    """Return the radius of each model, or the one that all have.

    >>> _format_radii([Cell("a", "static", 8 / 255, "linf"), Cell("b", "static", 0.5, "linf")])
    '8/255 (a), 0.5 (b)'
    """
    radii = {cell.model: format_eps(cell.eps) for cell in cells}
    if len(set(radii.values())) == 1:
        return next(iter(radii.values()))
    return ", ".join(f"{eps} ({model})" for model, eps in radii.items())


def explain_attacks(names: Iterable[str], budgets: Mapping[str, str] | None = None) -> Glossary:
    """Return a line on each attack; variants share a line. budgets: the options that were used."""
    bases = dict.fromkeys(name.partition(" (")[0] if name not in ATTACKS else name for name in names)
    entries = []
    for name in bases:
        if name not in ATTACKS:
            entries.append(Note("An attack of your own.", name))
            continue
        about, used = ATTACKS[name], (budgets or {}).get(name)
        end = f" In this run: {used}." if used else ""
        entries.append(Note(f"{capitalize(about.note)}. {KIND_NOTES[about.kind]}.{end}", name))
    return Glossary("The attacks", [*entries, APGD])


def _explain_run(results: Results) -> Glossary | None:
    """Return a line on each attack of a run; None if it has none."""
    names = dict.fromkeys(name for one in results.cells for name in (*one.attacks, *one.scenarios))
    planned = [row.get("attacks", {}) for row in results.about.get("plan", {}).get("cells", [])]
    budgets = {
        name: format_setting(options)
        for attacks in planned
        for name, options in attacks.items()
        if options
    }
    return explain_attacks(names, budgets) if names else None


def evaluation_page(results: Results) -> Page:
    """Return the page of an evaluation, with whatever the results hold."""
    settings = _list_settings(results)
    known = {title: settings[name] for name, title in FACTS.items() if settings.get(name) is not None}
    facts = [(title, format_setting(value)) for title, value in known.items()]
    models = dict.fromkeys(cell.cell.model for cell in results.cells)
    return Page(
        title="Evaluation" + (f" of {', '.join(models)}" if models else ""),
        lead=write_headlines(results),
        facts=facts,
        blocks=tuple(_list_blocks(results)),
        alerts=tuple(_list_alerts(results)),
    )


def write_headlines(results: Results) -> list[str]:
    """Return for each model in a ball what its best defense claims and what stands, the best first."""
    best = list_headlines(results)
    if not best:
        return ["No worst case is known yet." if results.cells else NOTHING_EVALUATED]
    return [_write_headline(cell) for cell in best]


def list_headlines(results: Results) -> list[CellResult]:
    """Return for each model in a ball its best defense, the best of all first."""
    scored = [
        [cell for cell in cells if cell.worst.n] for cells in group_cells(results).values()
    ]  # fmt: skip
    best = [
        max(cells, key=lambda cell: (not cell.cell.static, cell.worst.percent))
        for cells in scored
        if cells
    ]
    return sorted(best, key=lambda cell: -cell.worst.percent)


def _write_headline(cell: CellResult) -> str:
    defense = "The static model" if cell.cell.static else cell.cell.defense
    name = f"{defense} ({cell.cell.model}, {format_ball(cell.cell.norm, cell.cell.eps)})"
    if not cell.is_attacked:
        return f"{name}: {format_percent(cell.natural.percent)} % natural; no attack was made."
    stands = f"{'at most ' * is_upper_bound(cell)}{format_percent(cell.worst.percent)} % stands"
    stands += "" if cell.is_fully_attacked else " (not fully attacked)"
    if cell.majority is not None:
        stands += f" in one submission, {format_percent(cell.majority.worst.percent)} % by majority"
    text = f"{name}: {stands}"
    if cell.claimed is not None and cell.claimed.n and not cell.cell.static:
        text = f"{name} claims {format_percent(cell.claimed.percent)} %; {stands}"
    versus = cell.versus_static
    if cell.cell.static or versus is None or not versus.n:
        return f"{text}."
    by = format_points(abs(versus.difference))
    side = "above" if versus.difference > 0 else "below"
    than = "as the static model" if by == "0.0" else f"{by} percentage points {side} the static model"
    if versus.p_corrected is None:
        return f"{text}, {than} (no p; the table says why)."
    batches = "" if versus.independent else f" over {versus.batches} batches"
    chance = "" if versus.is_beyond_chance else ": may be chance"
    return f"{text}, {than} ({format_p(versus.p_corrected, named=True)}{batches}{chance})."


def _list_alerts(results: Results) -> Iterator[Text]:
    missing = list_missing(results)
    if not missing:
        return
    undone = sum(one.error is None for one in missing)
    failed = len(missing) - undone
    counts = [f"{format_count(failed)} failed"] if failed else []
    if undone:
        counts.append(f"{format_count(undone)} {'was' if undone == 1 else 'were'} not done")
    advice = (
        "Each number below uses the batches for which everything it needs is there. Run the same "
        "command again to do the rest."
    )
    title = f"The run is not complete: of its units, {' and '.join(counts)}."
    yield Text(title, (advice,), tuple(map(str, missing[:200])), is_closed=True)


def _list_blocks(results: Results) -> Iterator[Block]:
    tables = result_tables(results)
    if not tables:
        return
    first = 1 + any(cell.versus_static for cell in results.cells)  # and what supports the headline
    yield from tables[:first]
    yield Text("How to read it", (HOW_TO_READ,), level=3)
    yield from draw_evaluation(results)
    yield from show_records(_list_records(results))
    yield from tables[first:]
    if attacks := _explain_run(results):
        yield attacks
    if findings := list_findings(results):
        yield Text("Findings", items=findings)
    if not_run := list_not_run(results):
        yield Text(NOT_RUN, items=not_run)
    rows = [
        [Value(name.replace("_", " ")), Value(format_setting(value))]
        for name, value in _list_settings(results).items()
    ]
    yield Table("How it was run", ("setting", "value"), [Group(rows)])


def _list_records(results: Results) -> list[Record]:
    """Return the recorded attacks of all cells; those that the headlines are about come first."""
    cells = dict.fromkeys(one.cell for one in (*list_headlines(results), *results.cells))
    battles = {one.cell: one.battle for one in results.cells}
    made = (make_record(cell, battles[cell]) for cell in cells)
    return [one for one in made if one is not None]
