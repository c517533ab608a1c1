"""The notebooks of `examples` run, print and draw."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

from notebooks import NOTEBOOKS, clear_notebook, run_notebook  # noqa: E402

pytest.importorskip("matplotlib", reason="needs the extra demo")


def list_outputs(notebook: dict[str, Any]) -> list[list[str]]:
    """Return the kinds of outputs of each cell."""
    return [[one["output_type"] for one in cell.get("outputs", ())] for cell in notebook["cells"]]


def read_counts(notebook: dict[str, Any]) -> dict[str, int]:
    """Return the counts of images that a notebook printed, by what they are of."""
    outputs = [output for cell in notebook["cells"] for output in cell.get("outputs", ())]
    printed = "".join(line for output in outputs for line in output.get("text", ()))
    lines = re.findall(r"^(.*?) +(\d+) of 32$", printed, re.MULTILINE)
    return {name: int(count) for name, count in lines}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path) -> None:
    stored = json.loads(path.read_text("utf-8"))
    assert (stored["nbformat"], stored["nbformat_minor"]) == (4, 5)
    ran = run_notebook(clear_notebook(stored))
    assert list_outputs(ran) == list_outputs(stored)
    assert sum("display_data" in kinds for kinds in list_outputs(ran)) >= 2
    assert path.stat().st_size < 250_000
    if path.stem == "break_a_defense":
        for counts in (read_counts(ran), read_counts(stored)):  # what its text says of them
            assert counts["defended, APGD"] > counts["static, APGD"]
            assert counts["defended, worst case"] < counts["defended, APGD"]
            assert counts["defended, worst case"] <= counts["static, APGD"]
