"""Figures, those of each epoch and any others, reach TensorBoard and Weights & Biases."""

from __future__ import annotations

import json
import struct
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from dent.loggers import open_logger
from dent.training import Epoch
from dent.training.card import list_figures

EPOCHS = [Epoch(1, 0.1, 2.0, 0.2, 0.3, 0.1, 0.2, 5.0), Epoch(2, 0.05, 1.5, 0.4, 0.5, 0.25, 0.3, 5.0)]


CELL = "resnet20-at, dent+, linf 8/255"
LOGGED = [{f"{CELL}/natural": 0.8125, "n": 64}, {f"{CELL}/natural": 0.75, f"{CELL}/worst case": 0.5}]


def tensorboard_scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its own imports
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    events = EventAccumulator(str(folder))
    events.Reload()
    return {
        name: [(event.step, event.value) for event in events.Scalars(name)]
        for name in events.Tags()["scalars"]
    }


def test_tensorboard_reads_back_what_was_logged(tmp_path: Path) -> None:
    with open_logger("tensorboard", tmp_path, {"lr": 0.1}) as write:
        for epoch in EPOCHS:
            write(list_figures(epoch), epoch.epoch)
    scalars = tensorboard_scalars(tmp_path / "tensorboard")
    assert [step for step, _ in scalars["natural"]] == [1, 2]
    assert [value for _, value in scalars["natural"]] == pytest.approx([0.3, 0.5])
    assert set(scalars) == {"loss", "accuracy", "natural", "robust", "fgsm", "lr", "seconds"}


def test_tensorboard_takes_figures_of_any_name(tmp_path: Path) -> None:
    with open_logger("tensorboard", tmp_path / "runs" / "new", {"suite": "quick"}) as write:
        for step, logged in enumerate(LOGGED):
            write(logged, step)
        written = tensorboard_scalars(tmp_path / "runs" / "new" / "tensorboard")  # before it is closed
    assert written == {
        f"{CELL}/natural": [(0, 0.8125), (1, 0.75)],
        "n": [(0, 64)],
        f"{CELL}/worst case": [(1, 0.5)],
    }


def test_figures_of_an_epoch_leave_out_what_it_has_not() -> None:
    nominal = Epoch(3, 0.1, 2.0, 0.2, 0.3, None, None, 5.0)
    assert list_figures(nominal) == {
        "lr": 0.1,
        "loss": 2.0,
        "accuracy": 0.2,
        "natural": 0.3,
        "seconds": 5.0,
    }


class FakeRun:
    def __init__(self) -> None:
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.finished = False

    def log(self, figures: dict[str, float], *, step: int) -> None:
        self.logged.append((step, figures))

    def __enter__(self) -> FakeRun:
        return self

    def __exit__(self, *_: object) -> None:
        self.finished = True


def test_wandb_gets_the_recipe_and_the_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}
    run = FakeRun()

    def init(**options: Any) -> FakeRun:
        asked.update(options)
        return run

    fake = ModuleType("wandb")
    fake.init = init  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", fake)
    with open_logger("wandb", tmp_path / "mine", {"lr": 0.1}) as write:
        for epoch in EPOCHS:
            write(list_figures(epoch), epoch.epoch)
    assert asked["config"] == {"lr": 0.1}
    assert (asked["id"], asked["resume"]) == ("mine", "allow")  # a resumed training goes on with its run
    assert [step for step, _ in run.logged] == [1, 2]
    assert run.logged[1][1]["robust"] == 0.25
    assert run.finished


def wandb_records(file: Path) -> Iterator[Any]:
    """What is in a file of Weights & Biases: a header of 7 bytes, then the log format of LevelDB."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, at, whole = file.read_bytes(), 7, b""
    while at + 7 <= len(content):
        if (left := 2**15 - at % 2**15) < 7:  # the rest of a block that has no room for a header
            at += left
            continue
        _, size, kind = struct.unpack_from("<IHB", content, at)
        whole += content[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or its last part
            record = Record()
            record.ParseFromString(whole)
            yield record
            whole = b""


def test_wandb_offline_keeps_what_was_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")  # nothing is sent anywhere
    with open_logger("wandb", tmp_path / "quick: 8,255", {"suite": "quick", "eps": 0.5}) as write:
        for step, logged in enumerate(LOGGED):
            write(logged, step)
    (file,) = (tmp_path / "quick: 8,255" / "wandb").glob("offline-run-*/*.wandb")
    assert file.name == "run-quick--8-255.wandb"
    until = time.monotonic() + 60  # a process of its own writes it, also after the run has ended
    while not any(record.HasField("exit") for record in wandb_records(file)):
        assert time.monotonic() < until
        time.sleep(0.1)
    read: list[dict[str, Any]] = []
    config: dict[str, Any] = {}
    for record in wandb_records(file):
        config |= {one.key: json.loads(one.value_json) for one in record.run.config.update}
        if items := record.history.item:
            read.append(
                {"".join(one.nested_key) or one.key: json.loads(one.value_json) for one in items}
            )
    own = [{name: value for name, value in one.items() if name[0] != "_"} for one in read]
    assert own == LOGGED
    assert [one["_step"] for one in read] == [0, 1]
    assert (config["suite"], config["eps"]) == ("quick", 0.5)


def test_a_missing_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, module in {"wandb": "wandb", "tensorboard": "torch.utils.tensorboard"}.items():
        monkeypatch.setitem(sys.modules, module, None)
        with (
            pytest.raises(ImportError, match=rf"pip install 'dent-defense\[{name}\]'"),
            open_logger(name, tmp_path, {}),
        ):
            pass


def test_an_unknown_logger_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="did you mean 'tensorboard'"):
        open_logger("tensorbord", tmp_path, {})
