"""Two processes train what one trains."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dent.data import open_data
from dent.training import Recipe, train
from dent.training.processes import Processes

SCRIPT = """
import sys
from pathlib import Path
from test_distributed import RECIPES
from dent.data import open_data
from dent.training import train

data = open_data("toys:features", split="train")
train("toys:convolutional", data, RECIPES[sys.argv[1]], out=Path(sys.argv[2]))
"""
SMALL = {"epochs": 2, "batch_size": 64, "hold_out": 128}
ATTACK = {"eps": 0.05, "attack_steps": 3, "step_size": 0.02}
RECIPES = {
    "at": Recipe(method="at", **SMALL, **ATTACK),  # type: ignore[arg-type]
    "trades-l2": Recipe(method="trades", norm="l2", beta=6.0, **SMALL, **ATTACK),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", RECIPES)
def test_two_gloo_processes_train_what_one_trains(tmp_path: Path, name: str) -> None:
    here = Path(__file__).parent
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    command += [str(tmp_path / "script.py"), name, str(tmp_path / "two")]
    environment = os.environ | {"PYTHONPATH": str(here), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    data = open_data("toys:features", split="train")
    one = train("toys:convolutional", data, RECIPES[name], out=tmp_path / "one")
    two = torch.load(tmp_path / "two" / "checkpoint.pt", weights_only=True)
    # The order of sums differs, so does the last digit, and the sign of a gradient near zero.
    for key, value in one.model.state_dict().items():
        torch.testing.assert_close(two["model"][key], value, rtol=1e-3, atol=2e-4)
    assert [epoch["loss"] for epoch in two["history"]] == pytest.approx(
        [epoch.loss for epoch in one.history], rel=1e-3
    )


def test_the_parts_of_a_batch_are_the_batch() -> None:
    batch = torch.randperm(12)
    parts = [Processes(rank, 3).part(batch) for rank in range(3)]
    assert torch.equal(torch.cat(parts), batch)
    assert {len(part) for part in parts} == {4}
