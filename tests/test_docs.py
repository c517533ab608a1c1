"""Every example script runs, and every Python block and command of the docs does what it says."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

import dent
from dent.evaluation import Evaluation, read_evaluation
from dent.evaluation.spec import format_eps
from dent.intervals import LEAST_BATCHES
from dent.paper.results import load_reproduction
from dent.paper.tables import find_table

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAPER = (ROOT / "docs" / "paper.md").read_text()
BLOCKS = [
    pytest.param(block, id=f"{page.name}-{number}")
    for page in PAGES
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
]


@pytest.mark.parametrize("block", BLOCKS)
def test_python_blocks_run(block: str) -> None:
    exec(compile(block, "docs", "exec"), {})


def test_relative_links_lead_somewhere() -> None:
    for page in PAGES:
        for link in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name}: {link}"


def test_make_targets_in_the_docs_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        assert set(re.findall(r"`make ([a-z-]+)`", page.read_text())) <= targets


def test_the_readme_lists_every_extra() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    table = re.findall(
        r"^\| (`.*?`) \|", PAGES[0].read_text().partition("## Ten lines")[0], re.MULTILINE
    )
    assert set(re.findall(r"`(\w+)`", " ".join(table))) == extras.keys() - {"test", "lint"}


def test_the_version_is_the_same_everywhere() -> None:
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == dent.__version__
    versions = re.findall(r"^## (\S+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert versions[0] == dent.__version__


def test_the_demo_is_set_up_without_what_tests_need() -> None:
    planned = subprocess.run(
        ["make", "--dry-run", "--always-make", "demo"],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    ).stdout
    (install,) = [line for line in planned.splitlines() if "pip install" in line]
    assert install.endswith("--editable .")


def run_example(name: str, *arguments: str, cwd: Path) -> str:
    command = [sys.executable, str(ROOT / "examples" / name), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=cwd).stdout


def test_the_demo_is_what_the_readme_shows() -> None:
    """`test_measured.py` checks its numbers; here, that the README tells the command that made them."""
    makefile, readme = (ROOT / "Makefile").read_text(), PAGES[0].read_text()
    (flags,) = re.findall(r"dent evaluate (.*) --out runs/demo", makefile)
    given = re.findall(r"--(\w+) (\S+)", flags)
    assert " ".join(f"--{name} {value}" for name, value in given) == flags
    asked = Evaluation(
        models=[value for name, value in given if name == "model"],
        defenses=[value for name, value in given if name == "defense"],
    )
    assert asked.n is not None
    assert asked.n / asked.batch_size >= LEAST_BATCHES  # else the table has no p and no intervals
    for cell in asked.cells():
        assert re.search(rf"^  {re.escape(cell.defense)} ", readme, re.MULTILINE), cell
        assert f"{cell.model}, {cell.norm} {format_eps(cell.eps)}, n = {asked.n}" in readme


SEARCHED = {"static": "static", "frame 1, square 3": "crops"}  # names in the search, and of presets


def read_search(name: str) -> dict[str, str]:
    """What stands after each attack of the search for a defense that wins, in %."""
    content = json.loads((ROOT / "benchmarks" / "winning" / f"{name}.json").read_text())
    return {attack: f"{100 * sum(one) / len(one):.1f}" for attack, one in content["after"].items()}


def test_the_numbers_of_the_presets_are_those_of_the_demo_and_the_results() -> None:
    readme, results = PAGES[0].read_text(), (ROOT / "docs" / "results.md").read_text()
    demo = {
        name: numbers
        for name, *numbers in re.findall(r"^  (\S+) +(\S+) +(\S+) +≤ (\S+) ", readme, re.MULTILINE)
    }
    page = (ROOT / "docs" / "presets.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")]
    shown = [row for row in rows if len(row) == 6 and row[0].startswith("`")]
    for _, defense, claimed, worst, images, source in shown:
        if source == "`make demo`":
            assert [claimed, worst] == demo[defense.strip("`")][1:]
        elif source == "[the search](winning.md)":
            after = [read_search(f"resnet20-at, {name}, stage 2") for name in SEARCHED]
            assert defense == " / ".join(f"`{name}`" for name in SEARCHED.values())
            assert claimed == " / ".join(one["apgd-ce"] for one in after)
            assert worst == " / ".join(one["apgd-t"] for one in after)
        else:
            cells = rf"\| {re.escape(claimed)} \| {re.escape(worst)} \| \S+, {re.escape(images)} \|"
            assert re.search(cells, results), f"presets.md: {defense}"
    assert len(shown) == 7

    lost = {row[2].strip("`"): re.findall(r"[\d.]+", row[4]) for row in rows if len(row) == 5}
    table = [(row[1], row[3].split(" / ")) for row in shown]
    static, dent = table[2][1][:2]
    stored = load_reproduction(ROOT / "docs" / "results" / "cpu.json").by_reference(
        find_table("table-4")
    )
    rows_of = {"static": "static", "blur": "static Sigma"}
    rows_of["dent-nominal"] = "Delta, dynamic Sigma, 10 updates"
    kept = {
        preset: stored[f"table-4/nominal ResNet-26-4/{row}/natural"].ours
        for preset, row in rows_of.items()
    }
    (natural,) = re.findall(r"^\| `resnet20-at` \| `dent` \| 0 \| ([\d.]+) ", PAPER, re.MULTILINE)
    (after,) = re.findall(r"`resnet20-at` \| `dent` \| 0 .*?`dent` \| 30 \| ([\d.]+) ", PAPER, re.DOTALL)
    assert lost["dent+"] == [demo["static"][0], demo["dent+"][0], demo["static"][2], demo["dent+"][2]]
    assert lost["dent"][:4] == [natural, after, static, dent]
    ends = {defense.strip("`"): shown_worst[0] for defense, shown_worst in table[3:6]}
    for preset in ("blur", "dent-nominal"):
        natural_ends = [f"{kept[name]:.1f}" for name in ("static", preset)]
        assert lost[preset] == [*natural_ends, ends["static"], ends[preset]]


def test_the_page_on_citing_is_the_citation_file() -> None:
    page = (ROOT / "docs" / "cite.md").read_text()
    paper = yaml.safe_load((ROOT / "CITATION.cff").read_text())["preferred-citation"]
    assert f"{{{paper['title']}}}" in page
    names = [f"{author['family-names']}, {author['given-names']}" for author in paper["authors"]]
    assert f"{{{' and '.join(names)}}}" in page
    assert f"{{{paper['year']}}}" in page
    assert f"{{{paper['journal']}}}" in page


def test_the_file_of_settings_is_one() -> None:
    evaluation = read_evaluation(ROOT / "examples" / "evaluate.yaml")
    assert [cell.defense for cell in evaluation.cells()] == ["static", "dent:steps=10", "dent+:steps=3"]


def test_the_example_of_an_own_defense_is_checked_and_evaluated(tmp_path: Path) -> None:
    shown = run_example("own_defense.py", cwd=tmp_path)
    assert re.search(r"^  soften +\d", shown, re.MULTILINE)  # fully attacked: the name has no mark
    assert "fpa" in shown


def test_the_example_of_an_own_attack_is_evaluated(tmp_path: Path) -> None:
    shown = run_example("own_attack.py", cwd=tmp_path)
    assert "walk" in shown
    assert re.search(r"^  dent\+ +\d", shown, re.MULTILINE)


def test_the_trace_example_draws(tmp_path: Path) -> None:
    run_example("trace.py", "trace.png", cwd=tmp_path)
    assert (tmp_path / "trace.png").read_bytes()[:4] == b"\x89PNG"
