"""Every example script runs, and every Python block and command of the docs does what it says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
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


def run_example(name: str, *arguments: str, cwd: Path) -> str:
    command = [sys.executable, str(ROOT / "examples" / name), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=cwd).stdout


def test_the_demo_prints_an_aligned_table(tmp_path: Path) -> None:
    output = run_example("demo.py", "64", cwd=tmp_path)
    lines = [line for line in output.splitlines() if line.startswith("resnet20-")]
    rows = [re.split(r"\s{2,}", line.strip()) for line in lines]
    assert [row[:3] for row in rows] == [
        ["resnet20-at", "8/255", "static"],
        ["resnet20-at", "8/255", "dent"],
        ["resnet20-at", "8/255", "dent+"],
        ["resnet20-nominal", "1.5/255", "static"],
        ["resnet20-nominal", "1.5/255", "dent-nominal"],
    ]
    figures = [[float(cell) for cell in row[3:8]] for row in rows]
    for natural, *attacked, worst in figures:
        assert natural > 55
        assert worst <= min(attacked) <= natural
    # The nominal model falls; the adversarially trained one stands, though its radius is larger.
    assert figures[3][4] < 25 < figures[0][4]
    low, high = map(float, rows[0][8].split(" to "))
    assert low < figures[0][4] < high
    assert len({len(line.rstrip()) for line in lines}) == 1
    assert "n = 64" in output


def test_the_trace_example_draws(tmp_path: Path) -> None:
    run_example("trace.py", "trace.png", cwd=tmp_path)
    assert (tmp_path / "trace.png").read_bytes()[:4] == b"\x89PNG"
