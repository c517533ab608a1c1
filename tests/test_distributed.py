"""Two processes train what one trains, and stop together."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dent.training import make_recipe
from dent.training.card import train_and_measure
from dent.training.machine import Processes

ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1"}
PYTHON = [sys.executable, "-m"]
TORCHRUN = ["torch.distributed.run", "--nproc-per-node", "2", "--standalone", "-m"]
SETTINGS = {
    "epochs": 2, "batch_size": 64, "hold_out": 128, "attack_steps": 3, "step_size": 0.02, "eps": 0.05,
}  # fmt: skip
NAME = "trades-l2"  # calls the model twice for each update, and draws crops and normal numbers


def test_two_gloo_processes_train_what_one_trains(tmp_path: Path) -> None:
    command = [*PYTHON, *TORCHRUN, "dent", "train", "toys:convolutional", "--recipe", NAME]
    command += ["--data", "toys:features", "--out", str(tmp_path / "two")]
    command += [f"--{name.replace('_', '-')}={value}" for name, value in SETTINGS.items()]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=300)
    assert done.returncode == 0, done.stderr
    printed = [line.split()[0] for line in done.stdout.splitlines()]
    assert printed == ["epoch", "epoch", "what", "natural,", "model,"]  # once, by the first process
    recipe = make_recipe(NAME, **SETTINGS)
    card = train_and_measure("toys:convolutional", recipe, data="toys:features", out=tmp_path / "one")
    assert card is not None
    two, one = (
        torch.load(tmp_path / name / "checkpoint.pt", weights_only=True) for name in ("two", "one")
    )
    # The order of sums differs, so does the last digit, and the sign of a gradient near zero.
    for key, value in one["model"].items():
        torch.testing.assert_close(two["model"][key], value, rtol=1e-3, atol=2e-4)
    for one_epoch, two_epoch in zip(one["history"], two["history"], strict=True):
        assert two_epoch["loss"] == pytest.approx(one_epoch["loss"], rel=1e-3)


def test_a_loss_that_is_not_finite_on_one_process_ends_all(tmp_path: Path) -> None:
    """The loss of process 0 is finite, and it would wait forever for the gradients of process 1."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [*PYTHON, "dent", "train", "toys:convolutional", "--data", "toys:broken_on_rank_1"]
    command += ["--out", str(tmp_path), "--epochs", "2", "--batch-size", "64", "--hold-out", "128"]
    shared = ENVIRONMENT | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [
        subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=shared | {"RANK": rank})
        for rank in ("0", "1")
    ]
    try:
        errors = [process.communicate(timeout=60)[1] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    for process, error in zip(ranks, errors, strict=True):
        assert process.returncode == 2, error
        assert "dent: the loss is nan after epoch 1; lower lr or give it a warmup" in error
    assert not (tmp_path / "checkpoint.pt").exists()


def test_the_parts_of_a_batch_are_the_batch() -> None:
    batch = torch.randperm(12)
    parts = [Processes(rank, 3).take_part(batch) for rank in range(3)]
    assert torch.equal(torch.cat(parts), batch)
    assert {len(part) for part in parts} == {4}
