"""A training survives: kills, restarts, full disks, a second one at the same time, its own failure."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import dent
from dent.data import open_data
from dent.storage import lock_folder
from dent.training import Epoch, Recipe, TrainingError, train
from dent.training.loop import Training
from dent.training.watch import find_fault

RECIPE = Recipe(
    method="at", eps=0.05, attack_steps=2, step_size=0.03, epochs=4, batch_size=64, hold_out=128
)


AVERAGED = RECIPE.replace(average=0.9, resize_from=4, resize_until=0.6)


def trained(
    out: Path, recipe: Recipe = RECIPE, *, architecture: str = "toys:pooled", **options: Any
) -> Any:
    return train(architecture, open_data("toys:features", split="train"), recipe, out=out, **options)


def contents(out: Path) -> dict[str, Any]:
    checkpoint: dict[str, Any] = torch.load(out / "checkpoint.pt", weights_only=True)
    for epoch in checkpoint["history"]:
        del epoch["seconds"]  # all that may differ
    return checkpoint


def assert_identical(ours: Any, theirs: Any) -> None:
    """Bit for bit, all the way down."""
    assert type(ours) is type(theirs)
    if isinstance(ours, torch.Tensor):
        assert torch.equal(ours, theirs)
    elif isinstance(ours, dict):
        assert ours.keys() == theirs.keys()
        for key in ours:
            assert_identical(ours[key], theirs[key])
    elif isinstance(ours, list):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            assert_identical(one, other)
    else:
        assert ours == theirs


class StoppedError(Exception):
    pass


@pytest.mark.parametrize("recipe", [RECIPE, AVERAGED], ids=["plain", "averaged-and-resized"])
@pytest.mark.parametrize("epoch", [1, 3])
def test_resumed_is_unbroken_bit_for_bit(tmp_path: Path, epoch: int, recipe: Recipe) -> None:
    def stop(reached: Epoch) -> None:
        if reached.epoch == epoch:
            raise StoppedError

    trained(tmp_path / "start", RECIPE.replace(epochs=1))
    start = tmp_path / "start" / "checkpoint.pt"
    trained(tmp_path / "unbroken", recipe, start=start)
    with pytest.raises(StoppedError):
        trained(tmp_path / "broken", recipe, start=start, on_epoch=stop)
    assert len(contents(tmp_path / "broken")["history"]) == epoch
    torch.rand(17)  # the global generator has no part in it
    trained(tmp_path / "broken", recipe, start=start)
    assert_identical(contents(tmp_path / "broken"), contents(tmp_path / "unbroken"))


SCRIPT = """
import time
from pathlib import Path
from test_resume import trained

def slow(step):
    Path("started").touch()
    time.sleep(0.02)

trained(Path("killed"), on_step=slow)
"""


def test_a_kill_at_any_moment_changes_nothing(tmp_path: Path) -> None:
    trained(tmp_path / "unbroken")
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    for wait in (0.0, 0.07, 0.13):
        (tmp_path / "started").unlink(missing_ok=True)
        process = subprocess.Popen([sys.executable, "-c", SCRIPT], cwd=tmp_path, env=environment)
        while not (tmp_path / "started").exists() and process.poll() is None:
            time.sleep(0.005)
        time.sleep(wait)
        process.send_signal(signal.SIGKILL)
        process.wait()
    trained(tmp_path / "killed")
    assert_identical(contents(tmp_path / "killed"), contents(tmp_path / "unbroken"))
    log = [json.loads(line) for line in (tmp_path / "killed" / "log.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in log] == [1, 2, 3, 4]


def test_a_finished_training_is_not_repeated(tmp_path: Path) -> None:
    trained(tmp_path)
    before = (tmp_path / "checkpoint.pt").read_bytes()
    epochs: list[Epoch] = []
    again = trained(tmp_path, on_epoch=epochs.append)
    assert epochs == []
    assert len(again.history) == 4
    assert (tmp_path / "checkpoint.pt").read_bytes() == before


def test_another_training_in_the_folder_is_refused(tmp_path: Path) -> None:
    trained(tmp_path)
    other = Recipe(epochs=2, batch_size=64, hold_out=128)
    with pytest.raises(ValueError, match="holds another training: method is 'at' there, 'nominal' was"):
        trained(tmp_path, other)
    assert len(contents(tmp_path)["history"]) == 4


@pytest.mark.parametrize("content", [b"", b"rubbish", b"PK\x03\x04 truncated"])
def test_a_foreign_checkpoint_is_named_and_kept(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "checkpoint.pt").write_bytes(content)
    with pytest.raises(ValueError, match="checkpoint.pt is no checkpoint of a training"):
        trained(tmp_path)
    assert (tmp_path / "checkpoint.pt").read_bytes() == content


def test_two_at_once_in_a_folder(tmp_path: Path) -> None:
    with (
        lock_folder(tmp_path, doing="trains"),
        pytest.raises(ValueError, match="another process trains in"),
    ):
        trained(tmp_path)
    trained(tmp_path)  # the lock is gone with its holder


def test_a_full_disk_leaves_the_last_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def stop(reached: Epoch) -> None:
        monkeypatch.setattr(os, "fsync", full)

    with pytest.raises(OSError, match="No space left"):
        trained(tmp_path / "full", on_epoch=stop)
    monkeypatch.undo()
    assert len(contents(tmp_path / "full")["history"]) == 1
    assert sorted(path.name for path in (tmp_path / "full").iterdir()) == [
        "checkpoint.pt", "lock", "log.jsonl",
    ]  # fmt: skip
    trained(tmp_path / "full")
    trained(tmp_path / "unbroken")
    assert_identical(contents(tmp_path / "full"), contents(tmp_path / "unbroken"))


def test_a_loss_that_is_not_finite_stops_at_once(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="the loss is (nan|inf) after epoch 1.*Nothing was saved"):
        trained(tmp_path, Recipe(epochs=3, batch_size=64, hold_out=128, lr=1e20))
    assert not (tmp_path / "checkpoint.pt").exists()


def test_a_collapse_leaves_the_last_good_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = [(0.6, 0.4, 0.45), (0.7, 0.55, 0.6), (0.75, 0.02, 0.7)]

    def measure(run: Training, model: torch.nn.Module) -> tuple[float, float, float]:
        return watched[len(run.history)]

    monkeypatch.setattr(Training, "measure", measure)
    fast = Recipe(
        method="at", eps=0.05, attack_steps=1, step_size=0.06, epochs=4, batch_size=64, hold_out=128
    )
    with pytest.raises(
        TrainingError, match=r"catastrophic overfitting.*from 55.0% to 2.0%.*of epoch 2, the last good"
    ):
        trained(tmp_path, fast)
    assert len(contents(tmp_path)["history"]) == 2
    dent.load_model("toys:pooled", weights=tmp_path / "checkpoint.pt")


def epoch(
    number: int, natural: float, robust: float | None = None, fgsm: float | None = None, lr: float = 0.1
) -> Epoch:
    return Epoch(number, lr, 1.0, natural, natural, robust, fgsm, 1.0)


@pytest.mark.parametrize(
    ("history", "fast", "says"),
    [
        ([epoch(1, 0.10), epoch(2, 0.11)], False, None),  # the first epochs may be at chance
        ([epoch(1, 0.10), epoch(2, 0.11), epoch(3, 0.11)], False, "no better than chance"),
        ([epoch(1, 0.10), epoch(2, 0.11), epoch(3, 0.20)], False, None),
        ([epoch(n, 0.10, lr=0.001) for n in (1, 2, 3)], False, None),  # lr still rises from zero
        ([epoch(1, 0.5, 0.3, 0.35), epoch(2, 0.6, 0.01, 0.60)], True, "catastrophic overfitting"),
        ([epoch(1, 0.5, 0.3, 0.35), epoch(2, 0.6, 0.01, 0.60)], False, None),  # not fast AT
        ([epoch(1, 0.5, 0.3, 0.35), epoch(2, 0.6, 0.28, 0.60)], True, None),  # PGD holds
        ([epoch(1, 0.5, 0.3, 0.35), epoch(2, 0.2, 0.1, 0.11)], True, None),  # FGSM falls with it
        ([epoch(1, 0.5, 0.08, 0.3), epoch(2, 0.5, 0.02, 0.3)], True, None),  # there was nothing to lose
    ],
)
def test_what_counts_as_gone_wrong(history: list[Epoch], fast: bool, says: str | None) -> None:
    found = find_fault(history, classes=10, watched=1000, lr=0.1, fast=fast)
    assert (found is None) if says is None else (found is not None and says in found)


def test_other_weights_to_start_from_are_another_training(tmp_path: Path) -> None:
    for seed in (0, 1):
        trained(tmp_path / f"start{seed}", RECIPE.replace(epochs=1, seed=seed))
    trained(tmp_path / "tuned", start=tmp_path / "start0" / "checkpoint.pt")
    with pytest.raises(ValueError, match="holds another training: start is"):
        trained(tmp_path / "tuned", start=tmp_path / "start1" / "checkpoint.pt")


def test_a_training_goes_on_where_bfloat16_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # oneDNN's bfloat16 kernels die of an illegal instruction on some CPUs without bfloat16.
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)

    def stop(reached: Epoch) -> None:
        raise StoppedError

    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True}, raising=False)
    with pytest.raises(StoppedError):
        trained(tmp_path / "begun", mixed_precision=True, on_epoch=stop)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": False}, raising=False)
    with pytest.raises(ValueError, match="expected a processor with bfloat16 instructions"):
        trained(tmp_path / "new", mixed_precision=True)
    assert not (tmp_path / "new" / "checkpoint.pt").exists()
    with pytest.warns(UserWarning, match="began in bfloat16 on cpu.*goes on in float32.*bit for bit"):
        trained(tmp_path / "begun", mixed_precision=True)
    assert len(contents(tmp_path / "begun")["history"]) == 4
