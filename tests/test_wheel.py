"""The wheel in an environment of its own: the library and the command line work far from the clone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LARGEST = 45_000_000  # bytes
SCRIPT = """
import dent
inputs, labels = dent.load_data("cifar10", n=8)
logits = dent.defend(dent.load_model("resnet20-at"), "dent+")(inputs)
print(dent.__file__, tuple(logits.shape))
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not list((ROOT / "dist").glob("*.whl")), reason="`make wheel` makes it"),
]


@pytest.fixture(scope="module")
def bin_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of a new environment that has the wheel and what it depends on."""
    (wheel,) = (ROOT / "dist").glob("*.whl")
    assert wheel.stat().st_size < LARGEST
    folder = tmp_path_factory.mktemp("clean") / "venv"
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    install: list[str | Path] = [
        folder / "bin" / "pip",
        "install",
        "--quiet",
        "--constraint",
        ROOT / "constraints.txt",
    ]
    subprocess.run([*install, wheel], check=True)
    return folder / "bin"


def run(*command: str | Path, cwd: Path) -> str:
    own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=own, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_library_defends_a_model(bin_folder: Path, tmp_path: Path) -> None:
    shown = run(bin_folder / "python", "-c", SCRIPT, cwd=tmp_path)
    assert str(bin_folder.parent) in shown
    assert "(8, 10)" in shown


def test_the_command_line_evaluates(bin_folder: Path, tmp_path: Path) -> None:
    assert "evaluate" in run(bin_folder / "dent", "--help", cwd=tmp_path)
    assert "resnet20-at" in run(bin_folder / "dent", "list", "models", cwd=tmp_path)
    flags = ["--model", "resnet20-at", "--defense", "dent+:steps=1", "--n", "4", "--batch-size", "4"]
    shown = run(bin_folder / "dent", "evaluate", *flags, "--steps", "1", "--out", "run", cwd=tmp_path)
    assert "dent+:steps=1" in shown
    assert (tmp_path / "run" / "results.json").exists()
    assert (tmp_path / "run" / "report.html").exists()
