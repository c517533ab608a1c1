"""The figures of each epoch reach TensorBoard and Weights & Biases."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from dent.training import Epoch
from dent.training.loggers import open_logger

EPOCHS = [Epoch(1, 0.1, 2.0, 0.2, 0.3, 0.1, 0.2, 5.0), Epoch(2, 0.05, 1.5, 0.4, 0.5, 0.25, 0.3, 5.0)]


def test_tensorboard_reads_back_what_was_logged(tmp_path: Path) -> None:
    with open_logger("tensorboard", tmp_path, {"lr": 0.1}) as write:
        for epoch in EPOCHS:
            write(epoch)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its own imports
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    natural = [(event.step, event.value) for event in events.Scalars("natural")]
    assert natural == [(1, pytest.approx(0.3)), (2, pytest.approx(0.5))]
    assert {"loss", "accuracy", "robust", "fgsm", "lr"} <= set(events.Tags()["scalars"])


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
            write(epoch)
    assert asked["config"] == {"lr": 0.1}
    assert (asked["id"], asked["resume"]) == ("mine", "allow")  # a resumed training goes on with its run
    assert [step for step, _ in run.logged] == [1, 2]
    assert run.logged[1][1]["robust"] == 0.25
    assert run.finished


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
