"""Two processes train what one trains."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dent.training.processes import Processes

SETTINGS = [
    "--epochs=2", "--batch-size=64", "--hold-out=128",
    "--attack-steps=3", "--step-size=0.02", "--eps=0.05",
]  # fmt: skip


@pytest.mark.parametrize("name", ["at", "trades-l2"])
def test_two_gloo_processes_train_what_one_trains(tmp_path: Path, name: str) -> None:
    torchrun = ["torch.distributed.run", "--nproc-per-node", "2", "--standalone", "-m"]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1"}
    found, printed = [], []
    for launcher, out in ((torchrun, "two"), ([], "one")):
        command = [
            sys.executable,
            "-m",
            *launcher,
            "dent",
            "train",
            "toys:convolutional",
            "--recipe",
            name,
        ]
        command += ["--data", "toys:features", "--out", str(tmp_path / out), *SETTINGS]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
        assert done.returncode == 0, done.stderr
        found.append(torch.load(tmp_path / out / "checkpoint.pt", weights_only=True))
        printed.append([line.split()[0] for line in done.stdout.splitlines()])
    two, one = found
    # The order of sums differs, so does the last digit, and the sign of a gradient near zero.
    for key, value in one["model"].items():
        torch.testing.assert_close(two["model"][key], value, rtol=1e-3, atol=2e-4)
    for one_epoch, two_epoch in zip(one["history"], two["history"], strict=True):
        assert two_epoch["loss"] == pytest.approx(one_epoch["loss"], rel=1e-3)
    assert printed[0] == printed[1] == ["epoch", "epoch", "what", "natural,", "model,"]


def test_the_parts_of_a_batch_are_the_batch() -> None:
    batch = torch.randperm(12)
    parts = [Processes(rank, 3).part(batch) for rank in range(3)]
    assert torch.equal(torch.cat(parts), batch)
    assert {len(part) for part in parts} == {4}
