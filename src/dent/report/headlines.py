"""The headline numbers of the paper: what attacks leave of dent, in sentences and in one table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from dent.paper.results import Measurement, Reproduction
from dent.paper.tables import find_number, tables
from dent.report.blocks import EMPTY, Group, Table, Value
from dent.report.format import NOT_MEASURED, capitalize, format_count, format_percent

AT, NOMINAL = "table-1/linf 8/255/ding2020", "table-4/nominal ResNet-26-4"
SIGMA = "Delta, dynamic Sigma, 10 updates"
# The numbers of the table: of one row of a table each, its columns.
HEADLINES: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    (
        "Ding et al., Linf 8/255: static / dent / dent+",
        AT,
        ("static", "dent", "dent+"),
    ),
    (
        "Ding et al., L2 0.5: static / dent / dent+",
        "table-1/l2 0.5/ding2020",
        ("static", "dent", "dent+"),
    ),
    (
        "Ding et al., Linf 8/255: dent+ after 0 / 1 / 3 / 6 updates",
        "table-7/dent+/ding2020",
        ("0", "1", "3", "6"),
    ),
    (
        "nominal ResNet-26-4, Linf 1.5/255: static",
        f"{NOMINAL}/static",
        ("linf 1.5/255",),
    ),
    (
        "nominal ResNet-26-4, Linf 1.5/255: a static Sigma, no updates",
        f"{NOMINAL}/static Sigma",
        ("linf 1.5/255",),
    ),
    (
        "nominal ResNet-26-4, Linf 1.5/255: dent with Sigma",
        f"{NOMINAL}/{SIGMA}",
        ("linf 1.5/255",),
    ),
)
# What is said in words: the kind of training, and the numbers by what they are of.
SENTENCES: tuple[tuple[str, dict[str, str]], ...] = (
    (
        "adversarial training",
        {
            "the static model keeps": f"{AT}/static",
            "dent": f"{AT}/dent",
            "dent+": f"{AT}/dent+",
        },
    ),
    (
        "nominal training",
        {
            "the static model keeps": f"{NOMINAL}/static/linf 1.5/255",
            "a static Sigma": f"{NOMINAL}/static Sigma/linf 1.5/255",
            "dent with Sigma": f"{NOMINAL}/{SIGMA}/linf 1.5/255",
        },
    ),
)


def list_sentences(reproduction: Reproduction, size: str = "") -> Iterator[str]:
    """Yield what attacks leave, a sentence for each kind of training that is measured.

    size: what the reproduction is called beside others.
    """
    for training, references in SENTENCES:
        found = [_measure(reproduction, reference) for reference in references.values()]
        if any(one.ours is None or one.worst is None for one in found):
            continue
        shown = [
            f"{name} {format_percent(one.ours)} %" for name, one in zip(references, found, strict=True)
        ]
        worst = [format_percent(one.worst.percent) for one in found if one.worst]
        model = found[0].work.model if found[0].work else ""
        place = capitalize(", ".join(filter(None, (size, f"{training} ({model})"))))
        yield (
            f"{place}: under attacks on the defense itself, {_join_words(shown)} of the images. "
            f"With attacks made for adaptation, they keep {_join_words(worst)} %."
        )


def headline_table(reproductions: Mapping[str, Reproduction]) -> Table:
    """Return the numbers: published, and for each reproduction here and in the worst case."""
    columns = ["accuracy in %", "published"]
    for size in reproductions:
        columns += [size, f"{size}, worst case", f"{size}: model, n (batches)"]
    rows = []
    for title, row, names in HEADLINES:
        references = [f"{row}/{name}" for name in names]
        published = [find_number(reference).published for reference in references]
        values = [Value(title), Value(" / ".join(map(format_percent, published)))]
        for one in reproductions.values():
            found = [_measure(one, reference) for reference in references]
            if not any(number.ours is not None for number in found):
                values += [Value(NOT_MEASURED), EMPTY, EMPTY]
                continue
            worst = [number.worst.percent if number.worst else None for number in found]
            models = dict.fromkeys(number.work.model for number in found if number.work)
            values.append(Value(" / ".join(format_percent(number.ours) for number in found)))
            values.append(Value(" / ".join(map(format_percent, worst))))
            values.append(Value(", ".join([*models, *dict.fromkeys(map(describe_n, found))])))
        rows.append(values)
    return Table("", columns, [Group(rows)])


def describe_n(one: Measurement) -> str:
    """Return the number of points, and of their batches."""
    if not one.n:
        return EMPTY.text
    return f"{format_count(one.n)} ({format_count(one.batches)})" if one.batches else format_count(one.n)


def _measure(reproduction: Reproduction, reference: str) -> Measurement:
    return reproduction.by_reference(tables()[reference.partition("/")[0]])[reference]


def _join_words(words: Sequence[str]) -> str:
    return f"{', '.join(words[:-1])} and {words[-1]}"
