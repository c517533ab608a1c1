"""The report of a reproduction: the paper's tables beside our numbers, as Markdown and as a page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from dent.evaluation.attacks import find_attack
from dent.paper.claims import Judgment, judge_claims
from dent.paper.results import Measurement, Reproduction
from dent.paper.scales import Work
from dent.paper.tables import PaperTable, Part, tables
from dent.report.battle import make_record, show_records
from dent.report.blocks import (
    EMPTY,
    INTERVAL,
    Block,
    Group,
    Note,
    Page,
    Table,
    Text,
    Tone,
    Value,
    count_value,
)
from dent.report.claims import claim_table, summarize_claims, write_evidence
from dent.report.comparisons import points_value
from dent.report.evaluation import explain_attacks
from dent.report.figures import draw_curves
from dent.report.format import (
    NOT_MEASURED,
    NOTHING,
    capitalize,
    format_count,
    format_interval,
    format_number,
    format_percent,
)
from dent.report.headlines import list_sentences
from dent.report.text import markdown_list, table_markdown
from dent.texts import join_lines

HOW_TO_READ = (
    "published: as the paper prints it",
    "here: the same number under the attacks of this scale, with its 95 % interval",
    "difference: here minus published",
    "worst case: what stands when attacks made for adaptation are added; the paper did not run these",
)
STANDS_IN = (
    "Where another model stands in for the paper's, compare the direction of a row, not its numbers."
)
MISSING = (
    "Some numbers are missing, or are on fewer images. The same command tries again what failed."
)  # fmt: skip


def name_table(table: PaperTable) -> str:
    """Return the name of a table as one says it.

    >>> from dent.paper.tables import find_table
    >>> name_table(find_table("sota")), name_table(find_table("text-imagenet"))
    ('Table 1', 'In the text')
    """
    is_text = table.name.startswith("text-")
    return "In the text" if is_text else table.name.replace("-", " ").capitalize()


def title_table(table: PaperTable) -> str:
    """Return the name and the caption of a table."""
    return f"{name_table(table)}: {table.caption}"


def part_tables(
    reproduction: Reproduction, table: PaperTable, *, interval_rows: bool = False
) -> list[Table]:
    """Return the parts of a table; the notes on all parts stand under the last.

    interval_rows: give intervals rows of their own, and leave out those of the worst case.
    """
    alone = len(table.parts) == 1 and not interval_rows
    made = []
    for part, rows in zip(table.parts, reproduction.measure_table(table), strict=True):
        head = "model" if _has_models(part) else ""
        groups = [
            Group(list(_make_lines(numbers, interval_rows)), {head: label_row(title, numbers)})
            for title, numbers in zip(part.rows, rows, strict=True)
        ]
        notes = list_notes(reproduction, table) if part is table.parts[-1] else ()
        columns = (part.name if alone else "", *part.columns)
        title, level = (title_table(table), 2) if alone else (part.name, 3)
        made.append(Table(title, columns, groups, notes, level=level))
    return made


def _has_models(part: Part) -> bool:
    """Return True if the rows are models, which are named by their authors and the year."""
    return all(row[-4:].isdigit() for row in part.rows)


def label_row(title: str, numbers: Sequence[Measurement]) -> str:
    """Return the name of a row with the model that stands in for the paper's.

    If that is not the same for all numbers of the row, a line of its own names them (`name_models`).
    """
    if all(one.is_left_out for one in numbers):
        return f"{title} ({NOT_MEASURED})"
    names = {name for name in map(_find_stand_in, numbers) if name}
    return f"{title} ({names.pop()})" if len(names) == 1 else title


def name_models(numbers: Sequence[Measurement]) -> list[Value]:
    """Return the model that stands in, for each number, if it is not the same for the whole row."""
    names = [_find_stand_in(one) for one in numbers]
    return [Value(name or NOTHING) for name in names] if len(set(filter(None, names))) > 1 else []


def _find_stand_in(one: Measurement) -> str | None:
    return one.work.model.rpartition(":")[2] if one.work and one.work.stands_in else None


def _make_lines(numbers: Sequence[Measurement], interval_rows: bool) -> Iterator[list[Value]]:
    """Yield a line for each kind of number that there is; ours is there unless all are left out."""

    def emphasize(value: Value, tone: Tone = "") -> Value:
        interval = None if interval_rows else value.interval
        return value if value.is_empty else replace(value, interval=interval, strong=True, tone=tone)

    lines = {
        "model": name_models(numbers),
        "published": [_published_value(one) for one in numbers],
        "here": [emphasize(our_value(one)) for one in numbers],
        INTERVAL: [_interval_value(one) for one in numbers] if interval_rows else [],
        "difference": [points_value(one.difference, sign="+") for one in numbers],
        "worst case": [emphasize(worst_value(one), "bad") for one in numbers],
    }
    for name, values in lines.items():
        is_ours = name == "here" and not all(one.is_left_out for one in numbers)
        if is_ours or any(not value.is_empty for value in values):
            shown = name if interval_rows else name.replace(" ", "\N{NO-BREAK SPACE}")
            yield [Value(shown), *values]


def _published_value(one: Measurement) -> Value:
    published = one.number.published
    return Value(format_percent(published), published)


def our_value(one: Measurement) -> Value:
    """Return our number with its interval."""
    if one.ours is None:
        return EMPTY
    text = format_percent(one.ours) if one.score else format_number(one.ours)
    return Value(text, one.ours, one.interval)


def worst_value(one: Measurement) -> Value:
    """Return what stands in the worst case with its interval."""
    if one.worst is None:
        return EMPTY
    return Value(format_percent(one.worst.percent), one.worst.percent, one.worst.interval)


def _interval_value(one: Measurement) -> Value:
    return Value(format_interval(*one.interval), one.interval[0]) if one.interval else EMPTY


def list_notes(reproduction: Reproduction, table: PaperTable) -> list[Note]:
    """Return what the numbers are of (stand-ins, points, attacks), and what is missing and why."""
    numbers = list(reproduction.by_reference(table).values())
    works = [one.work for one in numbers if one.work]
    notes = [Note(table.note)] if table.note else []
    notes += [Note(text) for text in _list_stand_ins(numbers)]
    if any(one.work.defense not in (one.number.ask.defense, "static") for one in numbers if one.work):
        notes.append(Note(f"At this scale, updates are at most {reproduction.scale.most_updates}."))
    if counts := sorted({one.n for one in numbers if one.n}):
        batches = sorted({one.batches for one in numbers if one.batches})
        cut = f", in {_format_range(batches)} batch{'es' * (batches[-1] > 1)}" if batches else ""
        notes.append(Note(f"n = {_format_range(counts)}{cut}."))
    keys = dict.fromkeys(map(reproduction.key, works))
    cells = [reproduction.cells[key] for key in keys if key in reproduction.cells]
    notes += [Note(text) for text in _list_limits(numbers)]
    if halves := sum(cell.evaluation.mixed_precision for cell in cells):
        which = "Attacks" if halves == len(cells) else f"Attacks of {halves} of {len(cells)} evaluations"
        notes.append(Note(f"{which} searched in bfloat16; what they found was judged in float32."))
    scores = (score for one in numbers for score in (one.score, one.worst) if score)
    reasons = dict.fromkeys(score.why_no_interval for score in scores)
    notes += [Note(f"{why}.", "No interval") for why in reasons if why]
    notes += _list_attacks(works)
    missing = Counter(one.missing for one in numbers if one.missing)
    for why, count in missing.items():
        notes.append(Note(f"{join_lines(why)}.", f"Missing, {count} of {len(numbers)} numbers"))
    if incomplete := [cell.missing[0] for cell in cells if cell.missing]:
        term = f"Incomplete, {len(incomplete)} of {len(keys)} evaluations"
        notes.append(Note(f"{join_lines(incomplete[0])}.", term))
    return notes


def _list_limits(numbers: Iterable[Measurement]) -> Iterator[str]:
    """Yield in what batches and budgets are smaller than the paper's."""
    known = [(one.number.ask, one.work) for one in numbers if one.work]
    sizes = {(work.batch_size, ask.batch_size) for ask, work in known if ask.attack != "none"}
    for size, usual in sorted(sizes):
        if size != usual:
            yield f"Batches of {format_count(size)} images, where the paper has {format_count(usual)}."
    budgets = {(work.steps, work.queries) for _, work in known if work.steps or work.queries}
    for steps, queries in sorted(budgets, key=str):
        said = [f"{steps} steps"] * bool(steps) + [f"{queries} queries of Square"] * bool(queries)
        yield (
            f"The budget of every attack, the reference's too, is limited to {' and '.join(said)}; "
            "AutoAttack has 100 steps and 5,000 queries."
        )


def _format_range(counts: Sequence[int]) -> str:
    """Return the least and the largest of sorted counts, or the one that all are."""
    return " to ".join(dict.fromkeys(map(format_count, (counts[0], counts[-1]))))


def _list_stand_ins(numbers: Iterable[Measurement]) -> list[str]:
    stands: dict[str, dict[str, None]] = {}
    for one in numbers:
        if one.work and one.work.stands_in:
            what = f"{one.work.model}, {one.work.note}," if one.work.note else one.work.model
            stands.setdefault(what, {})[one.number.ask.model] = None
    return [f"{model} stands in for {', '.join(paper)}." for model, paper in stands.items()]


def _list_attacks(works: Sequence[Work]) -> Iterator[Note]:
    """Yield the paper's attacks as they are run here, and those that the worst case adds."""
    own: dict[str, dict[str, None]] = {}
    added: dict[str, dict[str, None]] = {}
    for text in (text for work in works for text in work.attacks):
        name = text.partition(":")[0]
        kinds = added if find_attack(name).kind == "adaptive" else own
        kinds.setdefault(name, {})[text] = None
    reference = ["the reference AutoAttack, re-batching included"] * any(one.protocol for one in works)
    if shown := reference + [_join_range(list(texts)) for texts in own.values()]:
        yield Note(f"{'; '.join(shown)}.", "Attacks")
    if added:
        texts = "; ".join(_join_range(list(texts)) for texts in added.values())
        yield Note(f"{texts}.", "For the worst case also")


def _join_range(texts: Sequence[str]) -> str:
    """Return an attack with its settings, from the first to the last if these vary.

    >>> _join_range(["pgd:steps=1"]), _join_range(["pgd:steps=1", "pgd:steps=2", "pgd:steps=9"])
    ('pgd:steps=1', 'pgd:steps=1 to pgd:steps=9')
    """
    word = " or " if len(texts) == 2 else " to "
    return word.join(dict.fromkeys((texts[0], texts[-1])))


def list_not_begun(reproduction: Reproduction) -> list[str]:
    """Return the tables of which no number was measured, each with the reasons."""
    begun = {table.name for table in reproduction.list_begun()}
    lines = []
    for table in tables().values():
        if table.name not in begun:
            numbers = reproduction.by_reference(table).values()
            asked = [one for one in numbers if not one.is_left_out] or numbers
            why = dict.fromkeys(one.missing for one in asked)
            lines.append(join_lines(f"{title_table(table)}: {'; '.join(filter(None, why))}."))
    return lines


def table_rows(reproduction: Reproduction) -> list[dict[str, object]]:
    """Return a row for every table and figure, with how many of its numbers were measured."""
    rows = []
    for table in tables().values():
        numbers = reproduction.by_reference(table).values()
        rows.append(
            {
                "name": table.name,
                "label": table.label,
                "what it is": table.caption,
                "numbers": len(numbers),
                "published": sum(one.number.published is not None for one in numbers),
                "here": sum(one.ours is not None for one in numbers),
            }
        )
    return rows


def paper_markdown(reproduction: Reproduction) -> str:
    """Return all tables that were begun, the others with the reason, and the claims."""
    scale = reproduction.scale
    parts = [f"# The paper, reproduced: scale {scale.name}", f"{capitalize(scale.describe())}."]
    for table in reproduction.list_begun():
        parts.append(f"## {title_table(table)}")
        for one in part_tables(reproduction, table, interval_rows=True):
            parts += [f"**{one.title}**", table_markdown(one), markdown_list(one.notes)]
    if absent := list_not_begun(reproduction):
        parts += ["## Not measured", markdown_list(absent)]
    claims = claim_table(judge_claims(reproduction))
    parts += ["## Claims of the paper's text", table_markdown(claims), markdown_list(claims.notes)]
    return "\n\n".join(filter(None, parts)) + "\n"


def paper_page(reproduction: Reproduction) -> Page:
    """Return the page of a reproduction, with whatever was measured."""
    begun, judgments = reproduction.list_begun(), judge_claims(reproduction)
    scale = reproduction.scale
    facts = [("scale", scale.name), ("tables", str(len(begun))), ("seed", str(reproduction.seed))]
    blocks = tuple(_list_blocks(reproduction, begun, judgments))
    facts += [("evaluations", str(len(reproduction.cells))), ("device", reproduction.device)]
    return Page(
        title="The paper, reproduced",
        lead=(
            *list_sentences(reproduction),
            *summarize_claims(judgments),
            f"Scale {scale.name}: {scale.describe()}.",
        ),
        facts=facts,
        blocks=(*_list_overview(reproduction, begun, blocks), *blocks),
        alerts=tuple(_list_alerts(reproduction)),
        is_folded=True,
    )


def _list_overview(
    reproduction: Reproduction, begun: Sequence[PaperTable], blocks: Sequence[Block]
) -> Iterator[Block]:
    """Yield the index of the page: a row for each chapter, which links to it."""
    counts = {row["name"]: row for row in table_rows(reproduction)}
    rows = {title_table(table): counts[table.name] for table in begun}
    lines = []
    for title in (block.title for block in blocks if block.level == 2):
        numbers = [rows[title][name] if title in rows else None for name in ("published", "here")]
        lines.append(
            [Value(title), *(EMPTY if one is None else count_value(int(str(one))) for one in numbers)]
        )
    notes = (
        Note("Click a chapter to open it."),
        Note("Some numbers that are measured here were not published."),
    )
    yield Table("Overview", ("chapter", "published numbers", "measured here"), [Group(lines)], notes)
    if begun:
        yield Text("How to read the tables", (STANDS_IN,), HOW_TO_READ, level=3)


def _list_blocks(
    reproduction: Reproduction, begun: Sequence[PaperTable], judgments: Sequence[Judgment]
) -> Iterator[Block]:
    yield claim_table(judgments)
    behind = [write_evidence(one) for one in judgments]
    yield Text("The numbers behind each claim", items=behind, is_closed=True, level=3)
    for table in begun:
        if len(table.parts) > 1:
            yield Text(title_table(table))
        yield from part_tables(reproduction, table)
        for part, rows in zip(table.parts, reproduction.measure_table(table), strict=True):
            yield from draw_curves(table, part, rows, name_table(table))
    records = (
        make_record(cell, one.battle)
        for one in reproduction.cells.values()
        for cell in one.evaluation.cells()
    )
    yield from show_records([one for one in records if one is not None])
    works = [
        one.work for table in begun for one in reproduction.by_reference(table).values() if one.work
    ]
    if names := [text.partition(":")[0] for work in works for text in work.attacks]:
        yield explain_attacks(names)
    if absent := list_not_begun(reproduction):
        yield Text("Not measured", items=absent, is_closed=len(absent) > 5)


def _list_alerts(reproduction: Reproduction) -> Iterator[Text]:
    troubles = list(dict.fromkeys(reproduction.troubles.values()))
    failed = [
        f"{cell}: {one.missing[0]}" + (f", and {len(one.missing) - 1} more" * (len(one.missing) > 1))
        for one in reproduction.cells.values()
        for cell in one.evaluation.cells()
        if one.missing
    ]
    if items := troubles + failed:
        yield Text("Not all of it is there", (MISSING,), items, is_closed=len(items) > 3)
