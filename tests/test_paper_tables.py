"""The paper's tables as data: every published number against the paper's source, and what is refused."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from dent.defense.dent.settings import PRESETS, Settings
from dent.defense.text import format_defense
from dent.paper.tables import (
    FOLDER,
    Ask,
    PaperTable,
    PublishedNumber,
    find_number,
    find_table,
    read_table,
    tables,
)
from dent.texts import parse_text

SOURCE = Path(__file__).parents[1].parent / "shared" / "paper" / "dent.tex"
TABLES = tables()
PRINTED = [name for name in TABLES if name.startswith("table-")]


def paper() -> str:
    """The source without its comments."""
    if not SOURCE.is_file():
        pytest.skip(f"the paper's source is not at {SOURCE}")
    return re.sub(r"(?<!\\)%.*", "", SOURCE.read_text(encoding="utf-8"))


def body(label: str) -> str:
    """What stands between the rules of a table."""
    (found,) = re.findall(
        rf"\\label{{tab:{label}}}.*?\\begin{{tabular}}{{\w+}}(.*?)\\end{{tabular}}", paper(), re.DOTALL
    )
    return str(found)


def lines(label: str) -> list[list[str]]:
    """The lines of a table, cell by cell, without rules and braces for type."""
    text = re.sub(r"\\(toprule|midrule|bottomrule)", "", body(label))
    text = re.sub(r"{\\bf ([^}]*)}", r"\1", text)
    return [[cell.strip() for cell in line.split("&")] for line in text.split(r"\\") if line.strip()]


def value(cell: str) -> float | None:
    """A number with a point, or the dash for none; all else is a ValueError."""
    if cell == "-":
        return None
    if not (match := re.fullmatch(r"\$?(\d+\.\d+)(\\times\$)?", cell)):
        raise ValueError(cell)
    return float(match[1])


def rows(table: PaperTable) -> list[tuple[list[str], list[float | None]]]:
    """The titles and numbers of every line that ends in as many numbers as the table has columns."""
    count, found = len(table.parts[0].columns), []
    for cells in lines(table.label):
        try:
            numbers = [value(cell) for cell in cells[-count:]]
        except ValueError:
            continue
        if len(numbers) == count and any(number is not None for number in numbers):
            found.append((cells[:-count], numbers))
    return found


def ours(table: PaperTable) -> list[tuple[PublishedNumber, ...]]:
    """The rows of which something was published."""
    return [
        row
        for part in table.parts
        for row in part.numbers
        if any(number.published is not None for number in row)
    ]


def settings(ask: Ask) -> Settings:
    preset, overrides = parse_text(ask.defense, "dent")
    return PRESETS[preset].replace(**overrides)


# Beside the paper's source


def test_the_tables_are_those_of_the_paper_in_its_order() -> None:
    labels = re.findall(r"\\label{tab:([^}]*)}", paper())
    assert [TABLES[name].label for name in PRINTED] == labels
    assert [f"table-{number + 1}" for number in range(len(labels))] == PRINTED
    figures = {label for name in TABLES if "figure" in name for label in TABLES[name].label.split()}
    assert figures <= set(re.findall(r"\\label{fig:([^}]*)}", paper()))


@pytest.mark.parametrize("name", PRINTED)
def test_every_published_number(name: str) -> None:
    printed = [numbers for _, numbers in rows(TABLES[name])]
    assert printed == [[number.published for number in row] for row in ours(TABLES[name])]
    cells = [cell for line in lines(TABLES[name].label) for cell in line if "epsilon" not in cell]
    decimals = sum(bool(re.search(r"\d\.\d", cell)) for cell in cells)  # no line was passed over
    assert decimals == sum(number is not None for numbers in printed for number in numbers)


def test_the_gains_on_imagenet() -> None:
    sentence = re.search(
        r"adversarial and natural accuracy of by \$(\d+)\+\$ and \$(\d+){\+}\$ points", paper()
    )
    assert sentence is not None
    gains = [f"text-imagenet/linf 4/255/{row}/gain" for row in ("adversarial", "natural")]
    assert [find_number(gain).published for gain in gains] == [float(one) for one in sentence.groups()]
    assert all(find_number(gain).ask.minus == "static" for gain in gains)


@pytest.mark.parametrize("name", ["table-7", "table-9", "table-10", "table-13", "table-14"])
def test_columns_that_are_numbers(name: str) -> None:
    """The heads of the columns, which are whole numbers, and what the settings make of them."""
    table, heads = TABLES[name], []
    for cells in lines(table.label):
        numbers = cells[-len(table.parts[0].columns) :]
        if all(re.fullmatch(r"\d+", cell) for cell in numbers):
            heads.append([float(cell) for cell in numbers])
    at = [list(part.at) for part in table.parts]
    assert (heads * len(at) if len(heads) == 1 else heads) == at
    for part in table.parts:
        for row in part.numbers:
            for where, number in zip(part.at, row, strict=True):
                across = {
                    "updates": settings(number.ask).steps,
                    "batch size": number.ask.batch_size,
                    "attack steps": number.ask.attack_steps,
                }
                assert across[str(table.across)] == where


@pytest.mark.parametrize("name", PRINTED)
def test_the_rows_of_cited_works_are_of_their_models(name: str) -> None:
    table, method = TABLES[name], {"madry2018": "madry", "zhang2019": "trades"}
    for (titles, _), row in zip(rows(table), ours(table), strict=True):
        for key in re.findall(r"\\citet{(\w+)}", " ".join(titles)):
            assert key.startswith(row[0].row)
            model = method.get(row[0].row, row[0].row)
            # The rows of the table of objectives are named the wrong way round.
            expected = "nominal" if name == "table-12" else model
            assert all(number.ask.model.startswith(expected) for number in row)


@pytest.mark.parametrize("name", ["table-6", "table-8", "table-9"])
def test_ticks_of_statistics(name: str) -> None:
    for (titles, _), row in zip(rows(TABLES[name]), ours(TABLES[name]), strict=True):
        assert {settings(number.ask).test_share for number in row} == {float(titles[0] == r"$\surd$")}
        if name == "table-8":
            assert {settings(one.ask).steps for one in row} == {10 if titles[1] == r"$\surd$" else 0}
        if name == "table-6":
            assert {settings(one.ask).steps for one in row} == {int(titles[1])}
        if name == "table-9":
            natural = titles[1].startswith("Nat")
            assert {one.ask.measure for one in row} == {"natural" if natural else "adversarial"}


def test_delta_sigma_and_steps_of_the_nominal_model() -> None:
    blurs = {"None": "off", "Stat.": "static", "Dyna.": "dynamic"}
    for (titles, _), row in zip(rows(TABLES["table-4"]), ours(TABLES["table-4"]), strict=True):
        for number in row:
            found = settings(number.ask)
            assert (found.blur, found.steps) == (blurs[titles[1]], int(titles[2]))
            assert found.adapts_affine == (titles[0] == r"$\surd$") == (found.test_share == 1)


@pytest.mark.parametrize("name", ["table-1", "table-4", "table-5", "table-8", "table-11", "table-13"])
def test_balls(name: str) -> None:
    pattern = r"\\epsilon_{?(\\infty|2)}?=(?:\\frac{([\d.]+)}{(255)}|([\d.]+)(?:/(255))?)"
    printed = set()
    for norm, above, below, plain, over in re.findall(pattern, body(TABLES[name].label)):
        eps = float(above or plain) / float(below or over or 1)
        printed.add(("l2" if norm == "2" else "linf", eps))
    asked = {(one.ask.norm, one.ask.eps) for one in TABLES[name].references().values()}
    assert asked == printed


# In themselves


def test_same_cells_have_the_same_published_number() -> None:
    """But for where the paper contradicts itself, which the notes say."""
    published: defaultdict[Ask, dict[str, float]] = defaultdict(dict)
    for table in TABLES.values():
        for reference, number in table.references().items():
            if number.published is not None:
                published[number.ask][reference] = number.published
    differ = {
        (ask.model, ask.defense, ask.measure): set(found.values())
        for ask, found in published.items()
        if len(set(found.values())) > 1
    }
    both = "dent:statistics=test,steps=10"
    assert differ == {
        ("ding2020", "static", "natural"): {88.0, 87.5},
        ("madry-26-4", "dent:steps=10", "adversarial"): {49.9, 52.0},
        ("madry-26-4", both, "natural"): {86.5, 86.1},
        ("madry-26-4", both, "adversarial"): {50.4, 51.4},
    }
    for value in (88.0, 87.5):
        assert all(str(value) in TABLES[name].note for name in ("table-1", "table-11"))
    for value in (52.0, 49.9, 86.1, 86.5, 51.4, 50.4):
        assert str(value) in TABLES["table-9"].note


def test_the_number_that_six_tables_have_is_of_one_cell() -> None:
    same = [
        "table-3/CIFAR-10 ResNet-26-4/madry2018/adversarial dent",
        "table-5/denying updates/dent-dent/adversarial linf 8/255",
        "table-8/ResNet-26-4/both/adversarial linf 8/255",
        "table-11/madry2018 linf 8/255/dent/AutoAttack",
        "table-12/ResNet-26-4/nominal/adversarial minent",
        "table-13/madry2018 ResNet-26-4/linf 8/255/10",
    ]
    found = [find_number(reference) for reference in same]
    assert {number.published for number in found} == {50.4}
    assert {number.ask for number in found} == {
        Ask("madry-26-4", "dent:statistics=test,steps=10", "linf", 8 / 255, "autoattack")
    }


def test_the_nominal_models_dent_is_of_one_cell() -> None:
    same = [
        "table-4/nominal ResNet-26-4/Delta, dynamic Sigma, 10 updates/linf 1.5/255",
        "table-11/nominal linf 1.5/255/dent/AutoAttack",
        "table-12/ResNet-26-4/madry2018/adversarial minent",
        "table-13/nominal ResNet-26-4/linf 1.5/255/10",
    ]
    assert {find_number(one).published for one in same} == {45.4}
    assert len({find_number(one).ask for one in same}) == 1
    without_sigma = find_number("table-5/denying updates/dent-dent/nominal linf 1.5/255")
    assert without_sigma == replace(
        find_number("table-8/ResNet-26-4/both/nominal linf 1.5/255"), row=without_sigma.row
    )


@pytest.mark.parametrize("name", TABLES)
def test_references_are_of_one_number_each(name: str) -> None:
    table = TABLES[name]
    shape = [(len(part.rows), len(part.columns)) for part in table.parts]
    assert len(table.references()) == sum(rows * columns for rows, columns in shape)
    assert all(find_number(reference) is number for reference, number in table.references().items())
    for part in table.parts:
        assert len(part.at) == (len(part.columns) if table.across else 0)
        assert tuple(sorted(part.at)) == part.at
        assert [[(one.row, one.column) for one in row] for row in part.numbers] == [
            [(row, column) for column in part.columns] for row in part.rows
        ]


@pytest.mark.parametrize("name", TABLES)
def test_defenses_are_written_in_one_way(name: str) -> None:
    for number in TABLES[name].references().values():
        assert format_defense(number.ask.defense) == number.ask.defense


def test_tables_are_found_by_name_and_label() -> None:
    for table in TABLES.values():
        assert find_table(table.name) is table
        assert all(find_table(label) is table for label in table.label.split())
    assert find_table("fig:static_dynamic") is find_table("fig:battle") is TABLES["figure-3"]
    with pytest.raises(ValueError, match="unknown table 'tabel-1'; did you mean 'table-1'"):
        find_table("tabel-1")
    with pytest.raises(ValueError, match="unknown number 'table-7/dent/ding2020/31'; did you mean"):
        find_number("table-7/dent/ding2020/31")


# Refused


def example() -> dict[str, Any]:
    return {
        "name": "table-99",
        "label": "made-up",
        "caption": "made up",
        "cell": {"attack": "autoattack", "ball": "linf 8/255"},
        "parts": [
            {
                "name": "dent",
                "cell": {"defense": "dent", "settings": {"statistics": "test"}},
                "columns": [
                    {"name": "0", "defense": "static"},
                    {"name": "5", "settings": {"steps": 5}},
                ],
                "rows": [{"name": "one", "model": "net", "published": [1.5, None]}],
            }
        ],
    }


def read(folder: Path, content: Any) -> PaperTable:
    path = folder / "table-99.yaml"
    path.write_text(yaml.safe_dump(content))
    return read_table(path)


def test_levels_are_merged(tmp_path: Path) -> None:
    content = example()
    (((static, dent),),) = (part.numbers for part in read(tmp_path, content).parts)
    assert static.ask == Ask("net", "static", "linf", 8 / 255, "autoattack")
    assert dent.ask == replace(static.ask, defense="dent:statistics=test,steps=5")
    assert (static.published, dent.published) == (1.5, None)
    content["parts"][0]["columns"][1] |= {"ball": "l2 0.5", "batch_size": 4, "minus": "dent:steps=30"}
    content["parts"][0]["rows"][0] |= {"settings": {"statistics": "train", "steps": 7}}
    (((_, dent),),) = (part.numbers for part in read(tmp_path, content).parts)
    assert dent.ask == Ask(
        "net", "dent:steps=5", "l2", 0.5, "autoattack", batch_size=4, minus="dent"
    )  # fmt: skip


ROW, COLUMN = ("parts", 0, "rows", 0), ("parts", 0, "columns", 1)
WRONG: list[tuple[tuple[Any, ...], Any, str]] = [
    (("captoin",), "x", "table-99.yaml: unknown settings of the table: captoin; did you mean 'caption'"),
    (("name",), "table-98", "name: expected table-99, the name of the file, got 'table-98'"),
    (("across",), "time", "across: expected one of attack steps, updates, .*, got 'time'"),
    (
        ("parts",),
        [],
        "table-99.yaml: 1 wrong setting of the table:\n  parts: expected 1 or more entries",
    ),
    (("parts", 0, "cell", "modell"), "x", "parts.dent: cell: unknown settings of the cell: modell"),
    ((*ROW, "published"), [1.5], r"parts.dent.rows.one: expected 2 published numbers, got \[1.5\]"),
    ((*ROW, "published"), [1.5, "2"], "rows.one: published.1: expected number, got '2'"),
    ((*ROW, "published"), [1.5, True], "rows.one: published.1: expected number, got True"),
    ((*ROW, "modle"), "x", "parts.dent: rows.one: unknown settings of the row: modle; .* 'model'"),
    ((*ROW, "name"), 1, "parts.dent: rows.1: name: expected text, got 1"),
    ((*ROW, "ball"), "l3 0.5", "rows.one: ball: expected a ball such as linf 8/255 or l2 0.5"),
    ((*ROW, "ball"), "l2 half", "rows.one: ball: expected a number such as 0.5 or 8/255"),
    ((*ROW, "attack"), "auto", "rows.one: attack: expected one of autoattack, .*, got 'auto'"),
    ((*ROW, "measure"), "apgd-cee", "rows.one: measure: unknown attack 'apgd-cee'; did you mean"),
    ((*ROW, "batch_size"), 0, "rows.one: batch_size: expected an integer >= 1, got 0"),
    ((*COLUMN, "settings"), {"step": 1}, "rows.one, column 5: unknown settings of the defense: step"),
    ((*COLUMN, "defense"), "dentt", "rows.one, column 5: unknown defense 'dentt'"),
    ((*COLUMN, "name"), "0", "parts.dent.columns: expected names of their own, got '0' 2 times"),
]


def test_all_faults_of_a_file_are_told_at_once(tmp_path: Path) -> None:
    content = example()
    content["parts"][0]["rows"][0] |= {"batch_size": 0, "modle": "x"}
    content["parts"][0]["columns"][1]["ball"] = "l3 1"
    with pytest.raises(ValueError, match="(?s)2 wrong settings.*ball: expected a ball.*modle"):
        read(tmp_path, content)
    content = example()
    content["parts"][0]["columns"][1]["defense"] = "dentt"
    content["parts"].append({**content["parts"][0], "name": "more"})
    with pytest.raises(ValueError, match="(?s)2 wrong settings.*parts.dent.rows.*parts.more.rows"):
        read(tmp_path, content)


@pytest.mark.parametrize(("where", "value", "message"), WRONG)
def test_wrong_files_are_refused_with_the_place(
    where: tuple[Any, ...], value: Any, message: str, tmp_path: Path
) -> None:
    content = example()
    inner: Any = content
    for key in where[:-1]:
        inner = inner[key]
    inner[where[-1]] = value
    with pytest.raises(ValueError, match=message):
        read(tmp_path, content)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    content = example()
    del content["parts"][0]["rows"][0]["model"]
    del content["cell"]["ball"]
    with pytest.raises(ValueError, match="rows.one, column 0: expected model and ball, which no level"):
        read(tmp_path, content)
    del content["parts"][0]["rows"][0]["published"]
    with pytest.raises(ValueError, match="rows.one: published: expected a list"):
        read(tmp_path, content)
    content = example() | {"across": "updates"}
    content["parts"][0]["columns"][0]["name"] = "none"
    with pytest.raises(ValueError, match="columns.none: expected a number such as .*; say its place"):
        read(tmp_path, content)
    with pytest.raises(ValueError, match="expected keys and values in .*table-99.yaml, got list"):
        read(tmp_path, [1])
    (tmp_path / "table-99.yaml").write_text("a: [")
    with pytest.raises(ValueError, match="table-99.yaml is no YAML file"):
        read_table(tmp_path / "table-99.yaml")


def test_every_file_of_the_folder_is_a_table() -> None:
    assert {path.stem for path in FOLDER.glob("*.yaml")} == set(TABLES)
