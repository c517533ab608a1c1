"""Commands that measure what attacks leave: `benchmarks/updates.py` and `benchmarks/winning.py`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import dent
from dent.attacks import apgd
from dent.precision import has_bfloat16

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
import updates  # noqa: E402
import winning  # noqa: E402

half = pytest.mark.skipif(
    not has_bfloat16(torch.device("cpu")), reason="this processor has no bfloat16 instructions"
)


def run_updates(monkeypatch: pytest.MonkeyPatch, out: Path, *flags: str) -> list[dict[str, Any]]:
    command = "updates.py --model resnet20-at --defense dent --n 12 --batch-size 6 --steps 3"
    monkeypatch.setattr(sys, "argv", [*command.split(), "--json", str(out), *flags])
    updates.main()
    rows: list[dict[str, Any]] = json.loads(out.read_text())
    return rows


@pytest.mark.parametrize(
    "precision", [[], pytest.param(["--bfloat16"], marks=half)], ids=["single", "half"]
)
def test_direct_attacks_find_what_the_defense_leaves(
    precision: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ["--direct", "--updates", "0", "2", *precision]
    rows = run_updates(monkeypatch, tmp_path / "rows.json", *flags)
    inputs, labels = dent.load_data("cifar10", n=12)
    for row, steps in zip(rows, (0, 2), strict=True):
        defended = dent.defend(dent.load_model("resnet20-at"), "dent", steps=steps)
        right = 0
        for batch, truth in zip(inputs.split(6), labels.split(6), strict=True):
            found = apgd(defended, batch, truth, eps=8 / 255, steps=3, joint=True).inputs
            right += int((defended(found).argmax(1) == truth).sum())
        assert (row["updates"], row["images"]) == (steps, "direct")
        # In half precision the points are others, and one of them may end elsewhere.
        assert row["accuracy"] == pytest.approx(100 * right / 12, abs=9 if precision else 0.01)


def test_no_updates_change_nothing_on_natural_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    natural, attacked = run_updates(monkeypatch, tmp_path / "rows.json", "--updates", "0")
    inputs, labels = dent.load_data("cifar10", n=12)
    right = (dent.load_model("resnet20-at")(inputs).argmax(1) == labels).float().mean()
    assert natural["accuracy"] == pytest.approx(100 * float(right), abs=0.01)
    assert attacked["accuracy"] <= natural["accuracy"]


def test_a_file_keeps_the_rows_of_other_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "rows.json"
    first = run_updates(monkeypatch, out, "--updates", "0")
    both = run_updates(monkeypatch, out, "--updates", "0", "--direct")
    assert both[:-1] == first
    assert both[-1]["images"] == "direct"
    assert run_updates(monkeypatch, out, "--updates", "0", "--direct") == both  # replaced, not repeated
    more = run_updates(monkeypatch, out, "--updates", "0", "--direct", "--batch-size", "12")
    assert more[:-1] == both
    assert [row["batch_size"] for row in more] == [6, 6, 6, 12]


def search(monkeypatch: pytest.MonkeyPatch, out: Path, *flags: str) -> dict[str, list[bool]]:
    command = "winning.py --candidates static --stage brief --out"
    monkeypatch.setattr(sys, "argv", [*command.split(), str(out), *flags])
    winning.main()
    (stored,) = out.glob("*.json")
    after: dict[str, list[bool]] = json.loads(stored.read_text())["after"]
    return after


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> winning.Stage:
    """Give the search a stage of eight images in two batches."""
    images, labels = dent.load_data("cifar10", n=8)
    stage = winning.Stage(lambda data: (images, labels), steps=3, targets=1, batch_size=4)
    monkeypatch.setitem(winning.STAGES, "brief", stage)
    return stage


@pytest.mark.parametrize(
    "precision", [[], pytest.param(["--bfloat16"], marks=half)], ids=["single", "half"]
)
def test_an_image_that_is_broken_stays_broken(
    precision: list[str], brief: winning.Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    natural, *attacks = search(monkeypatch, tmp_path, *precision).values()
    images, labels = brief.load("cifar10")
    assert natural == (dent.load_model("resnet20-at")(images).argmax(1) == labels).tolist()
    for before, after in zip([natural, *attacks], attacks, strict=False):
        assert all(stood or not stands for stood, stands in zip(before, after, strict=True))
    assert sum(attacks[-1]) < sum(natural)


def test_a_search_that_was_stopped_ends_as_if_it_was_not(
    brief: winning.Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = search(monkeypatch, tmp_path / "whole")
    attack, calls = winning.attack_defense, []

    def stop(*arguments: Any, **options: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return attack(*arguments, **options)

    monkeypatch.setattr(winning, "attack_defense", stop)
    with pytest.raises(KeyboardInterrupt):
        search(monkeypatch, tmp_path / "stopped")
    assert search(monkeypatch, tmp_path / "stopped") == whole
    assert len(calls) == 3


@half
def test_a_search_stays_in_its_precision(
    brief: winning.Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    search(monkeypatch, tmp_path)
    with pytest.raises(ValueError, match="expected a search in float32, as static was begun"):
        search(monkeypatch, tmp_path, "--bfloat16")
