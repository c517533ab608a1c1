"""Tables of the docs that people laid out: every number is one that a benchmark measured and stored."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from dent.evaluation.paired import Paired
from dent.paper.tables import tables

ROOT = Path(__file__).parent.parent
DOCS, BENCHMARKS = ROOT / "docs", ROOT / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
import winning  # noqa: E402

CALLED = {"views:frame=1": "framed views 1", "crops": "frame 1, square 3"}  # in the search
ADAPTS = {
    "test statistics (norm)": "dent:statistics=test",
    "test statistics and Delta": "dent:statistics=test",
    "test statistics and a fixed Sigma": "dent-nominal",
    "test statistics, Delta and Sigma (dent-nominal)": "dent-nominal",
}


def read_tables(page: str, column: str) -> list[list[dict[str, str]]]:
    """Return the tables of a page that begin with a column, as rows; empty first cells repeat."""
    tables: list[list[dict[str, str]]] = []
    header: list[str] = []
    for line in (DOCS / page).read_text().replace("`", "").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|"):
            header = []
        elif not header:
            header = cells
            tables += [[]] if cells[0] == column else []
        elif header[0] == column and not cells[0].startswith("---"):
            row = dict(zip(header, cells, strict=False))  # later columns of one name are not read
            row[column] = row[column] or tables[-1][-1][column]
            tables[-1].append(row)
    return tables


def read_json(name: str) -> Any:
    return json.loads((BENCHMARKS / name).read_text())


# Prose

FIGURE = re.compile(
    r"(?<![\w.\-/])\d+(?:\.\d+(?:e-\d+)?|e-\d+)(?![\w.\-/])"
)  # with a point or an exponent
CITED = {
    "paper.md": {"84.36", "88.02"},  # of RobustBench
    "statistics.md": {"0.05"},  # the level of a test
    "winning.md": {"0.19"},  # p of the natural accuracies, which has a test of its own
}


@pytest.mark.parametrize("page", ["paper.md", "presets.md", "statistics.md", "winning.md"])
def test_figures_in_sentences_are_those_of_the_tables(page: str) -> None:
    """Or a difference within a column, or a number that the paper printed."""
    columns: dict[tuple[int, int, int], list[str]] = {}
    sentences = []
    text = re.sub(r"```.*?```|`[^`]*`", "", (DOCS / page).read_text(), flags=re.DOTALL)
    for line in text.splitlines():
        if not line.startswith("|"):
            sentences.append(line)
            continue
        for column, cell in enumerate(line.strip("|").split("|")):
            for place, figure in enumerate(FIGURE.findall(cell)):
                # The number of lines of text before it tells which table this is.
                columns.setdefault((len(sentences), column, place), []).append(figure)
    shown = {figure for column in columns.values() for figure in column}
    differences = {
        f"{abs(float(one) - float(other)):.1f}"
        for column in columns.values()
        for one, other in combinations(column, 2)
    }
    numbers = (one.published for table in tables().values() for one in table.references().values())
    printed = {f"{number:.1f}" for number in numbers if number is not None}
    known = shown | differences | printed | CITED.get(page, set())
    figures = FIGURE.findall(" ".join(sentences))
    assert figures
    assert [figure for figure in figures if figure not in known] == []


# The search for a defense that wins


def read_search(model: str, candidate: str, stage: int | str) -> dict[str, list[bool]]:
    """Return which images stand after each attack and all before it."""
    found = read_json(f"winning/{model}, {candidate}, stage {stage}.json")["after"]
    return {attack: list(map(bool, standing)) for attack, standing in found.items()}


def percent(standing: list[bool]) -> str:
    return f"{100 * sum(standing) / len(standing):.1f}"


def count_alone(one: list[bool], other: list[bool]) -> str:
    """Return how many images stand in one alone, and in the other alone."""
    pairs = list(zip(one, other, strict=False))  # on the images of both
    return f"{sum(a > b for a, b in pairs)} / {sum(a < b for a, b in pairs)}"


@pytest.mark.parametrize(("place", "model"), [(0, "resnet20-at"), (1, "2b2")])
def test_the_search_has_these_numbers(place: int, model: str) -> None:
    table = read_tables("winning.md", "candidate")[place]
    controls = {name: list(read_search(model, name, 1).values())[-1] for name in ("static", "views")}
    for row in table:
        after = read_search(model, row["candidate"], 1)
        worst = list(after.values())[-1]
        shown = [row[name] for name in ("n", "natural", "worst case")]
        assert shown == [str(len(worst)), percent(after["natural"]), percent(worst)], row
        for name, control in controls.items():
            if alone := row[f"only it / only {name}"]:
                assert alone == count_alone(worst, control), row
    assert len(table) > 7


def test_the_final_table_has_these_numbers() -> None:
    (table,) = [one for one in read_tables("winning.md", "model") if "defense" in one[0]]
    for row in table:
        model = row["model"].partition(",")[0]
        after = read_search(model, CALLED.get(row["defense"], row["defense"]), 2)
        shown = [row["natural"], row["after transfer"], row["after APGD-CE"]]
        assert [*shown, row["after APGD-T: worst case"]] == [percent(one) for one in after.values()], row
        assert row["n"] == str(len(after["natural"]))
        for name in ("static", "views"):
            if said := row[f"over {name} (only it / only {name})"]:
                alone = count_alone(after["apgd-t"], read_search(model, name, 2)["apgd-t"])
                assert f"({alone})" in said, row
    assert len(table) >= 12


def test_the_whole_suite_has_these_numbers() -> None:
    (table,) = [one for one in read_tables("winning.md", "defense") if "fab-t" in one[0]]
    stored = {
        row["defense"]: read_json(
            f"winning/resnet20-at, {CALLED.get(row['defense'], row['defense'])}, stage suite.json"
        )
        for row in table
    }

    def compare(defense: str, attack: str) -> Paired:
        """Return the comparison with static of what stands after an attack and all before it."""
        entries = [stored[name]["after"] for name in ("static", defense)]
        until = [{"after": {attack: one[attack]}} for one in entries]
        (pair,) = winning.correct_for_all({defense: winning.compare(until[1], until[0])}).values()
        return pair

    for row in table:
        own = stored[row["defense"]]
        *shown, worst, gain = list(row.values())[2:]
        last = list(own["after"])[-1]
        assert shown == [percent(own["after"][name]) for name in list(row)[2:-2]], row
        assert worst == (percent(own["after"][last]) if own["converged"] else "not run"), row
        if own["converged"]:
            assert own["broken by the last doubling"] == 1  # as a sentence says
        if row["defense"] != "static":
            pair = compare(row["defense"], last)
            counts = f"({pair.only_second} / {pair.only_first})"
            said = f"{pair.difference:+.1f} {counts}, p = {pair.p_corrected:.2g}"
            assert gain.removesuffix(", before doubling") == said, row
    interval = compare("crops", "fab-t (x2)").interval
    assert interval is not None
    assert "({:.1f} to {:.1f}, 95 % interval)".format(*interval) in (DOCS / "winning.md").read_text()


def test_natural_accuracies_of_all_test_images_have_these_numbers() -> None:
    (table,) = read_tables("winning.md", "natural accuracy of")
    for row in table:
        model, static, *others = row.values()
        control = read_search(model, "static", "natural")["natural"]
        assert len(control) == 10_000
        assert static == percent(control)
        for name, shown in zip([*row][2:], others, strict=True):
            standing = read_search(model, CALLED.get(name, name), "natural")["natural"]
            assert shown == f"{percent(standing)} ({count_alone(standing, control)})", row
    assert len(table) >= 3


def test_no_natural_accuracy_differs_beyond_chance() -> None:
    """The smallest p by McNemar, and by Holm over all candidates, as the page says."""
    smallest = 1.0
    for row in read_tables("winning.md", "natural accuracy of")[0]:
        control = read_search(row["natural accuracy of"], "static", "natural")["natural"]
        pairs = {}
        for name in list(row)[2:]:
            only, lost = map(int, re.findall(r"(\d+) / (\d+)", row[name])[0])
            pairs[name] = Paired(len(control), lost, only, sum(control) - lost)
        corrected = winning.correct_for_all(pairs).values()
        smallest = min(
            smallest, *(1.0 if one.p_corrected is None else one.p_corrected for one in corrected)
        )
    assert f"the smallest p is {smallest:.2g}" in (DOCS / "winning.md").read_text()


def test_what_a_border_does_has_these_numbers() -> None:
    """The rows name views in words, in the order of the file."""
    views = ["shift0,0", "frame1", "frame2", "gray1", "white1", "edge1", "pad2", "pad4", "shift3,3"]
    stored = {one["view"]: one for one in read_json("winning-views.json")}
    (table,) = read_tables("winning.md", "view, alone")
    for view, (_, *shown) in zip(views, map(dict.values, table), strict=True):
        assert shown == [f"{stored[view][name]:.1f}" for name in ("natural", "left", "length")], view


def test_the_table_of_the_claim_has_these_numbers() -> None:
    stored = {(one["adapts"], one["lr"]): one for one in read_json("claim.json")["rows"]}
    (table,) = read_tables("winning.md", "adapts")
    assert len(table) == len(stored)
    for row in table:
        one = stored[row["adapts"], float(row["lr"])]
        _, _, *accuracies, gain, cosine = row.values()
        names = ("natural", "stale", "exact", "transfer")
        assert accuracies == [f"{one[name]:.1f}" for name in names], row
        low, high = one["gain_interval"]
        assert gain == f"{one['gain']:+.1f} ({low:+.1f} to {high:+.1f})", row
        assert cosine == f"{one['cosine']:.2f}"
        assert one["n"] == 256


# What updates do


def read_updates(name: str) -> dict[tuple[str, str, str, int], dict[str, float]]:
    return {
        (one["model"], one["defense"], one["images"], one["updates"]): one for one in read_json(name)
    }


def find_updates(name: str, column: str) -> list[tuple[dict[str, str], dict[str, dict[str, float]]]]:
    """Return the rows of a table with what was measured for each, by the kind of images."""
    stored = read_updates(name)
    (table,) = [one for one in read_tables("paper.md", "model") if column in one[0]]
    rows = []
    for row in table:
        of = row["model"], ADAPTS.get(row["adapts"], row["adapts"]), int(row["updates"])
        rows.append((row, {key[2]: one for key, one in stored.items() if (*key[:2], key[3]) == of}))
    return rows


def test_updates_of_robust_models_have_these_numbers() -> None:
    rows = find_updates("updates-robust.json", "confidence")
    assert len(rows) == 14
    for row, measured in rows:
        kinds = [measured[kind] for kind in ("natural", "highest loss", "direct")]
        # 59 of 256 are 23.05 in the file, and 23.0 on the page.
        accuracies = [pytest.approx(one["accuracy"], abs=0.051) for one in kinds]
        assert [float(row[kind]) for kind in ("natural", "transferred", "direct attack")] == accuracies
        assert row["confidence"] == " / ".join(f"{one['confidence']:.0f}" for one in kinds)
        assert row["entropy"] == " / ".join(f"{one['entropy']:.2f}" for one in kinds)


def test_causes_have_these_numbers() -> None:
    stored = {
        (one["defense"], one["batch_size"], one["images"]): one
        for one in read_json("updates-causes.json")
    }
    (table,) = read_tables("paper.md", "learning rate")
    assert len(table) == 8
    for row in table:
        rate, size = row["learning rate"], int(row["batch size"])
        of = ("dent" if size != 128 else f"dent:lr={rate}", size)
        kinds = [stored[*of, kind] for kind in ("natural", "highest loss", "direct")]
        shown = [float(row[kind]) for kind in ("natural", "transferred", "direct attack")]
        assert shown == [pytest.approx(one["accuracy"], abs=0.051) for one in kinds]
        assert row["entropy"] == " / ".join(f"{one['entropy']:.2f}" for one in kinds)


def test_updates_of_nominal_models_have_these_numbers() -> None:
    rows = find_updates("updates-nominal.json", "first success")
    assert len(rows) == 8
    for row, measured in rows:
        for kind in ("natural", "highest loss", "first success", "direct"):
            shown = float(row["direct attack" if kind == "direct" else kind])
            assert shown == pytest.approx(measured[kind]["accuracy"], abs=0.051), row


# Intervals and tests


@pytest.mark.parametrize("place", range(3))
def test_simulated_statistics_have_these_numbers(place: int) -> None:
    stored = list(read_json("intervals.json").values())[place]
    cases = [name for name in ("batches", "correlation", "accuracy", "difference") if name in stored[0]]
    by_case = {tuple(one.pop(name) for name in cases): list(one.values()) for one in stored}
    table = read_tables("statistics.md", "batches")[place]
    assert len(table) >= 5
    for row in table:
        texts = [text.removesuffix(" %").removesuffix(" points") for text in row.values()]
        case, shown = tuple(map(float, texts[: len(cases)])), texts[len(cases) :]
        assert shown == [f"{one:.1f}" for one in by_case[case]], row


# What lazy attacks save


def test_lazy_attacks_have_these_numbers() -> None:
    (table,) = [one for one in read_tables("adaptive.md", "model") if "times faster" in one[0]]
    for row, one in zip(table, read_json("lazy.json"), strict=True):
        shown = list(row.values())
        assert shown[:6] == [str(value) for value in one.values()][:6], row
        assert shown[6:] == [f"{one[f'r={r}, s per batch']} s" for r in (1, 5)] + [
            str(one["times faster"])
        ]


# Speed and memory


def test_times_of_defenses_have_these_numbers() -> None:
    stored = read_json("defense.json")
    (table,) = [one for one in read_tables("performance.md", "model") if "static" in one[0]]
    for row, one in zip(table, stored["time"], strict=True):
        assert list(row.values()) == [
            one["model"],
            one["affine"],
            "yes" if one["compiled"] else "no",
            str(one["steps"]),
            *(f"{one[key]:.0f} ms" for key in ("static_ms", "defended_ms")),
            f"{one['ratio']:.2f}",
            str(one["bound"]),
            f"{one['over_bound']:.2f}",
        ]
    (table,) = [one for one in read_tables("performance.md", "model") if "MiB" in one[0]]
    for row, one in zip(table, stored["memory"], strict=True):
        assert list(row.values()) == [
            one["model"],
            one["what"],
            f"{one['mib']:.0f}",
            f"{one['ratio']:.2f}",
        ]


def test_times_of_attacks_have_these_numbers() -> None:
    stored = read_json("attacks.json")
    spinning = [one for one in stored["static"] if one["waiting"] == "active"]
    (table,) = [one for one in read_tables("performance.md", "model") if "reference" in one[0]]
    for row, one in zip(table, spinning, strict=True):
        assert list(row.values()) == [
            one["model"],
            *(f"{one[key]:.1f} s" for key in ("reference s", "dent s")),
            f"{one['times faster']:.2f}",
            *(f"{one[f'standing, {who} %']:.1f} %" for who in ("reference", "dent")),
            f"{one['same verdict %']:.0f} %",
        ]
    waits = {"passive": "sleep", "active": "spin"}
    (table,) = read_tables("performance.md", "call")
    for row, one in zip(table, stored["calls"], strict=True):
        assert list(row.values()) == [
            one["call"],
            waits[one["waiting"]],
            *(f"{one[key]:.1f} ms" for key in ("model ms", "copy ms")),
            f"{one['times faster']:.2f}",
            f"{one['copy in convolutions %']} %",
            f"{one['by convolutions alone']:.2f}",
        ]
    (table,) = read_tables("performance.md", "defense on resnet20-at, batch 128")
    for row, one in zip(table, stored["defended"], strict=True):
        name, *shown = row.values()
        assert name.partition(",")[0] == one["defense"]
        times = [f"{one[key]} ms" for key in ("forward and backward ms", "attack iteration ms")]
        assert shown == [*times, f"{one['ratio']:.2f}"]


def test_engines_have_these_numbers() -> None:
    (table,) = read_tables("performance.md", "engine")
    for row, one in zip(table, read_json("scaling.json")["engines"], strict=True):
        engine, *shown = row.values()
        assert engine.removeprefix("Ray, ") == one["engine"]
        waiting = f"{one['waiting, %']:.1f}".removesuffix(".0")
        assert shown == [
            *(f"{one[key]:.1f} s" for key in ("start, s", "run, s")),
            f"{one['units/s']:.2f}",
            f"{waiting} %",
            f"{one['lost, %']:.1f} %, {one['lost, ms per unit']:.1f} ms a unit",
        ]


def test_loads_of_the_server_have_these_numbers() -> None:
    (table,) = read_tables("serving.md", "load")
    for row, one in zip(table, read_json("serving.json")["loads"], strict=True):
        _, images, share, rounds, *latencies, batch = row.values()
        assert float(images) == one["images/s"]
        assert float(share) == one["share of the limit %"]
        assert rounds == one["share in each round"]
        measured = [one[f"p{part} ms"] for part in (50, 95, 99)]
        assert [float(text.removesuffix(" ms")) for text in latencies] == pytest.approx(
            measured, abs=0.51
        )
        assert float(batch) == one["images of a batch"]


# What each attack adds


def test_yields_are_what_the_benchmark_prints() -> None:
    command = [sys.executable, str(BENCHMARKS / "yield.py"), "--show"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    table, _, _ = printed.partition("\n\n")
    assert len(table.splitlines()) > 15
    assert table in (DOCS / "adaptive.md").read_text()


# The demo of the README


def test_the_demo_has_these_numbers() -> None:
    stored = {one["defense"]: one for one in read_json("demo.json")["cells"]}
    readme = (ROOT / "README.md").read_text()
    numbers = r"(\S+) +(\S+) +≤ (\S+) +(\d+) to (\d+) +(\S+) +(?:(\S+ \(p = \S+\)) +)?(\d+)x +(\S+)"
    shown = {name: row for name, *row in re.findall(rf"^  (\S+) +{numbers}$", readme, re.MULTILINE)}
    assert list(shown) == list(stored)
    for name, (natural, claimed, worst, low, high, gap, versus, cost, submitted) in shown.items():
        one = stored[name]
        # For the static model every attack counts as claimed.
        direct = one["direct"] if one["gap"] else one["worst"]
        scores = (one["natural"], direct, one["worst"], one["submitted"])
        assert [natural, claimed, worst, submitted] == [f"{score['percent']:.1f}" for score in scores]
        assert [low, high] == [f"{one['worst'][end]:.0f}" for end in ("low", "high")]
        assert gap == (f"{one['gap']:.1f}" if one["gap"] else "-")
        assert int(cost) == round(one["cost"]["times_flops"])
        if paired := one["versus_static"]:
            assert versus == f"{paired['difference']:.1f} (p = {paired['p']:.2f})"
    static, dent = (stored[name]["attacks"]["apgd-ce"]["percent"] for name in stored)
    gain = f"keeps {static:.1f} % and dent+ {dent:.1f} %: {dent - static:.1f} points more"
    assert gain in " ".join(readme.split())
