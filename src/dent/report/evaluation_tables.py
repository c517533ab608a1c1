"""The numbers of an evaluation as tables: one row for each defense of a model in a ball."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from dent.evaluation.compare import find_extremes
from dent.evaluation.defenses import DYNAMIC
from dent.evaluation.paired import LEVEL
from dent.evaluation.plan import SUBMISSIONS
from dent.evaluation.results import CellResult, Cost, Results, Score
from dent.evaluation.spec import Cell
from dent.report.blocks import EMPTY, Group, Mark, Note, Table, Value, count_value
from dent.report.comparisons import (
    difference_value,
    list_reasons,
    list_tests,
    p_value,
    points_value,
    read_difference,
    versus_value,
)
from dent.report.format import (
    format_ball,
    format_cost,
    format_count,
    format_n,
    format_percent,
)

Row = Mapping[str, Value]
AT_MOST = "\N{LESS-THAN OR EQUAL TO}"  # marks a worst case that has not converged
UPPER_BOUND = "upper bound, not converged"
NOT_FULLY = "†"  # marks a defense on which some attacks cannot be run


def result_tables(results: Results) -> list[Table]:
    """Return all tables of the results; tables without rows are left out."""
    makers = (_main_table, _versus_table, _majority_table, _convergence_table, _attack_table)
    made = (make(results) for make in (*makers, _alone_table, _scenario_table))
    return [table for table in made if table.groups]


def mark_extremes(results: Results) -> dict[Cell, Mark]:
    """Return the marks of cells that differ from all others of a model in a ball beyond chance."""
    places = group_cells(results).values()
    return {cell: mark for cells in places for mark, cell in find_extremes(cells).items()}


def score_value(score: Score | None, usual: int | None = None) -> Value:
    """Return a cell with an accuracy in %, and with its n where that is not the usual one."""
    if score is None or not score.n:
        return EMPTY
    details = (format_n(score.n, score.batches),) if usual is not None and score.n != usual else ()
    return Value(format_percent(score.percent), score.percent, score.interval, details)


def _main_table(results: Results) -> Table:
    marks = mark_extremes(results)
    protocols = {cell.protocol is not None for cell in results.cells if cell.claimed}
    costs = any(cell.cost for cell in results.cells)

    def make_row(cell: CellResult, usual: int) -> Row:
        name = cell.cell.defense + NOT_FULLY * (not cell.is_fully_attacked)
        row = {"defense": Value(name), "natural": score_value(cell.natural, usual)}
        if protocols:
            claimed = score_value(cell.claimed, usual)
            if len(protocols) > 1 and cell.protocol is None and cell.claimed:
                claimed = replace(claimed, details=(*claimed.details, "direct"))
            row["claimed"] = claimed
        worst = score_value(cell.worst if cell.is_attacked else None, usual)
        if is_upper_bound(cell) and not worst.is_empty:
            worst = replace(worst, text=f"{AT_MOST} {worst.text}")
        row["worst case"] = replace(worst, mark=marks.get(cell.cell, ""), strong=not worst.is_empty)
        if protocols:
            row["gap"] = points_value(cell.gap)
        versus = cell.versus_static if cell.is_attacked else None
        row["vs static"] = Value("") if cell.cell.static else versus_value(versus)
        if costs:
            row["cost"] = cost_value(cell.cost)
        return row | {"submitted": score_value(cell.submitted if cell.is_attacked else None, usual)}

    notes = [Note(f"{_describe_claim(protocols)}.", "claimed")] if protocols else []
    notes.append(Note("correct without an attack and under every attack.", "worst case"))
    if not any(cell.is_attacked for cell in results.cells):
        notes.append(Note("No attack was made: only the natural accuracy is known."))
    if any(is_upper_bound(cell) for cell in results.cells):
        notes.append(Note(f"{UPPER_BOUND}: more budget may lower the worst case.", AT_MOST))
    scores = (score for cell in results.cells for _, score in cell.scores() if score.n)
    notes += list_reasons(score.why_no_interval for score in scores)
    if not all(cell.is_fully_attacked for cell in results.cells):
        lacks = "the defense lacks what some attacks need, and they were not run"
        notes.append(Note(f"not fully attacked: {lacks}; the worst case may be lower.", NOT_FULLY))
    if protocols:
        notes.append(Note("claimed minus worst case, in percentage points on the same images.", "gap"))
    versus = "worst case minus that of the static model, in percentage points on the same images"
    compared = max([one.versus_static.comparisons for one in results.cells if one.versus_static] or [0])
    holm = f"; p is corrected by Holm for {compared} comparisons" if compared > 1 else ""
    notes.append(Note(f"{versus}{holm}.", "vs static"))
    if marks:
        above = "above, or below, every other worst case of a model in a ball beyond chance"
        notes.append(Note(f"{above} (p < {LEVEL:g} by Holm for all pairs).", "best, worst"))
    if costs:
        notes.append(Note("operations (FLOPs) of an answer; the static model costs 1x.", "cost"))
    if any(cell.cell.is_dynamic for cell in results.cells):
        notes.append(Note("the model adapts inside of its call; its static model is unknown.", DYNAMIC))
    notes.append(Note("each batch under the one attack that hurts it most.", "submitted"))
    if version := results.about.get("suite_version"):
        notes.append(Note(f"{version}; numbers of other versions are not comparable.", "suite version"))
    return _make_table("Accuracy in %", results, make_row, notes, interval_of="worst case")


def _majority_table(results: Results) -> Table:
    def make_row(cell: CellResult, usual: int) -> Row:
        row = {"defense": Value(cell.cell.defense)}
        if cell.majority is None:
            return row
        for name, one, most in (
            ("natural", cell.natural, cell.majority.natural),
            ("claimed", cell.direct, cell.majority.direct),
            ("worst case", cell.worst, cell.majority.worst),
        ):
            row |= {name: score_value(one, usual), f"{name} by majority": score_value(most, usual)}
        return row

    about = f"correct in most of {SUBMISSIONS} submissions of the same batch, each with its own draws"
    notes = [
        Note("all other tables are about one submission, as these columns are."),
        Note(f"{about}.", "by majority"),
        Note("under the direct attacks, without those made for adaptation.", "claimed"),
    ]
    title = "Random defenses: accuracy in % in one submission, and by majority"
    return _make_table(title, results, make_row, notes, lambda cell: cell.majority is not None)


def cost_value(cost: Cost | None) -> Value:
    """Return a cell with the cost of an answer: a multiple of the static model's if that is known."""
    times = cost.times_flops if cost else None
    if times is None and cost is not None and cost.flops is not None:
        passes = f", {cost.backward_passes:.0f} backward" if cost.backward_passes else ""
        return Value(f"{cost.flops:.3g} FLOPs{passes}")
    return Value(format_cost(times), times)


def is_upper_bound(cell: CellResult) -> bool:
    """Return True if more budget of the attacks may lower the worst case."""
    return cell.convergence is not None and not cell.convergence.converged


def _convergence_table(results: Results) -> Table:
    def make_row(cell: CellResult, usual: int) -> Row:
        found = cell.convergence
        assert found is not None
        change, alone = (format_percent(share) for share in (found.change_percent, found.alone_percent))
        by = (found.alone_by,) if found.alone_by else ()
        skipped = Value(", ".join(found.skipped)) if found.skipped else EMPTY
        return {
            "defense": Value(cell.cell.defense),
            "worst case": score_value(cell.worst, usual),
            "verdict": Value(UPPER_BOUND if is_upper_bound(cell) else "converged"),
            "doublings": count_value(found.doublings),
            "last one broke": EMPTY
            if found.change is None
            else replace(count_value(found.change), details=(f"{change} %",)),
            "one attack alone": Value(alone, found.alone_percent, details=by),
        } | ({"too costly": skipped} if has_skipped else {})

    known = [cell.convergence for cell in results.cells if cell.convergence]
    has_skipped = any(one.skipped for one in known)
    notes = [
        Note("the last doubling of the budgets changed the worst case by less than half a percentage "
             "point, or nothing stands. Else more budget may lower it.", "converged"),
        Note("images that the last doubling broke, and their share of n.", "last one broke"),
        Note("the largest share of images, in %, that one attack (with its doublings) alone breaks: "
             "what the worst case would gain without this attack. It is not known where broken images "
             "leave.", "one attack alone"),
    ]  # fmt: skip
    if has_skipped:
        notes.append(
            Note("attacks that still gained, but whose doubled budgets cost more than the run allows; "
                 "--doubling-cost allows more.", "too costly")
        )  # fmt: skip
    if not any(one.doublings for one in known):
        notes.append(Note("No budget was doubled; --converge does it."))
    title = "Convergence of the worst case"
    return _make_table(title, results, make_row, notes, lambda cell: cell.convergence is not None)


def _versus_table(results: Results) -> Table:
    pairs = [cell.versus_static for cell in results.cells if cell.versus_static]

    def make_row(cell: CellResult, usual: int) -> Row:
        worst, natural = cell.versus_static, cell.natural_versus_static
        assert worst is not None
        n = (format_n(worst.n, worst.batches),) if worst.n != usual else ()
        row = {"defense": Value(cell.cell.defense), "natural": versus_value(natural)}
        row |= {"worst case": replace(difference_value(worst), details=n), "p": p_value(worst.p)}
        if any(pair.comparisons > 1 for pair in pairs):
            row["corrected p"] = p_value(worst.p_corrected)
        return row | {"read as": Value(read_difference(worst))}

    notes = [
        Note("accuracy without an attack minus the static model's, in percentage points.", "natural"),
        Note("the same in the worst case, with the 95 % interval of the difference.", "worst case"),
        *list_tests(pairs),
        *list_reasons(pair.why_no_p for pair in pairs),
    ]
    title = "Beside the static model, in percentage points"
    return _make_table(
        title, results, make_row, notes, lambda cell: cell.versus_static is not None,
        interval_of="worst case",
    )  # fmt: skip


def _describe_claim(protocols: set[bool]) -> str:
    """Return what is claimed, in words: by the protocol, by direct attacks, or by both."""
    by_protocol = "under the paper's own protocol (the reference AutoAttack)"
    by_direct = "under the attacks on the defended model itself, without those made for adaptation"
    if len(protocols) > 1:
        return f"{by_protocol}; (direct): {by_direct}"
    return by_protocol if True in protocols else by_direct


def _attack_table(results: Results) -> Table:
    names = _order_names(results, lambda cell: list(cell.attacks))
    kinds = {name: kind for cell in results.cells for name, kind in cell.kinds.items()}
    made_for = [name for name in names if kinds.get(name) != "direct"]
    static = [cell for cell in results.cells if cell.cell.static]
    hidden = [name for name in made_for if any(name in cell.attacks for cell in static)]
    if len(static) == len(results.cells):
        names = [name for name in names if name not in hidden]
    rounds = [cell.convergence.doubled for cell in results.cells if cell.convergence]
    doubled = [name for name in dict.fromkeys(name for each in rounds for name in each) if name in names]
    direct = [name for name in names if name not in (*made_for, *doubled)]
    adaptive = [name for name in names if name in made_for and name not in doubled]

    def make_row(cell: CellResult, usual: int) -> Row:
        row = {"defense": Value(cell.cell.defense + "*" * cell.cumulative)}
        row |= {name: score_value(cell.attacks.get(name), usual) for name in direct}
        if hidden or (len(direct) > 1 and adaptive):  # what is claimed without the paper's protocol
            row["all direct"] = score_value(cell.worst if cell.cell.static else cell.direct, usual)
        left_out = hidden if cell.cell.static else ()
        own = {name: score for name, score in cell.attacks.items() if name not in left_out}
        return row | {name: score_value(own.get(name), usual) for name in (*adaptive, *doubled)}

    notes = []
    if adaptive:
        notes.append(Note(f"{', '.join(adaptive)}; the others are direct.", "made for adaptation"))
    if hidden:
        direct_too = "a static model does not adapt, so every attack on it is direct"
        notes.append(Note(f"{direct_too}; all direct includes {', '.join(hidden)}.", "static"))
    if doubled:
        notes.append(Note("the attack again, with so many times its budget.", "(x2)"))
    if any(cell.cumulative for cell in results.cells):
        left = "each attack got only the images that the attacks before it had left standing"
        notes.append(Note(f"{left}; its number is what stands after all of them.", "*"))
    title = "Accuracy in % under each attack"
    return _make_table(title, results, make_row, notes, lambda cell: bool(names))


def _alone_table(results: Results) -> Table:
    broken = {name for cell in results.cells for name, count in (cell.alone or {}).items() if count}
    names = [name for name in _order_names(results, lambda cell: list(cell.attacks)) if name in broken]

    def make_row(cell: CellResult, usual: int) -> Row:
        counts = cell.alone or {}
        shares = {name: 100 * counts[name] / usual for name in names if name in counts and usual}
        values = {name: Value(format_percent(shares.get(name)), shares.get(name)) for name in names}
        return {"defense": Value(cell.cell.defense)} | values

    title = "Images that one attack alone breaks, in %"
    return _make_table(title, results, make_row, (), lambda cell: bool(names and cell.alone))


def _scenario_table(results: Results) -> Table:
    names = _order_names(results, lambda cell: list(cell.scenarios))

    def make_row(cell: CellResult, usual: int) -> Row:
        values = {name: score_value(cell.scenarios.get(name), 0) for name in names}
        return {"defense": Value(cell.cell.defense)} | values

    notes = [Note("Each accuracy is on images of its own, and is no part of the worst case.")]
    title = "Accuracy in % in other batches"
    return _make_table(
        title, results, make_row, notes, lambda cell: bool(cell.scenarios), with_n=False
    )  # fmt: skip


def _make_table(
    title: str,
    results: Results,
    make_row: Callable[[CellResult, int], Row],
    notes: Sequence[Note],
    is_shown: Callable[[CellResult], bool] = lambda cell: True,
    *,
    with_n: bool = True,
    interval_of: str | None = None,
) -> Table:
    """Return a table with a group for each model in a ball.

    with_n: n and the number of batches stand in the heading, or in every row if the rows of a group
    differ in them.
    """
    places = group_cells(results)
    differ = any(
        len({(cell.worst.n, cell.batches) for cell in cells}) > 1 for cells in places.values()
    )  # fmt: skip
    columns: list[str] = []
    groups = []
    for (model, eps, norm), cells in places.items():
        rows = [dict(make_row(cell, cell.worst.n)) for cell in cells if is_shown(cell)]
        if not rows:
            continue
        labels = {"model": model, "ball": format_ball(norm, eps)}
        if with_n and differ:
            shown = [cell for cell in cells if is_shown(cell)]
            for row, cell in zip(rows, shown, strict=True):
                row |= {"n": count_value(cell.worst.n), "batches": count_value(cell.batches)}
        elif with_n:
            labels["n"] = format_count(cells[0].worst.n)
            labels["batches"] = format_count(cells[0].batches)
        columns = list(rows[0])
        groups.append(Group([list(row.values()) for row in rows], labels))
    return Table(title, columns, groups, notes, interval_of)


def group_cells(results: Results) -> dict[tuple[str, float, str], list[CellResult]]:
    """Return the cells by model, eps and norm."""
    places: dict[tuple[str, float, str], list[CellResult]] = {}
    for cell in results.cells:
        places.setdefault((cell.cell.model, cell.cell.eps, cell.cell.norm), []).append(cell)
    return places


def _order_names(results: Results, list_names: Callable[[CellResult], list[str]]) -> list[str]:
    """Return all names in the order of the cell that has most; other cells leave some out."""
    each = sorted(map(list_names, results.cells), key=len, reverse=True)
    return list(dict.fromkeys(name for names in each for name in names))
