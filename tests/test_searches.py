"""Commands that measure what attacks leave: `updates.py`, `winning.py` and `winning_views.py`."""

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
import winning_views  # noqa: E402

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


def test_a_run_of_a_suite_is_a_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small: dict[str, Any] = {"n": 8, "steps": 2, "batch_size": 4, "attacks": ["apgd-ce", "apgd-dlr"]}
    results = dent.evaluate("resnet20-at", ["static", "crops"], out=tmp_path / "run", **small)
    command = ["winning.py", "--out", str(tmp_path), "--run", str(tmp_path / "run")]
    monkeypatch.setattr(sys, "argv", command)
    winning.main()
    for cell, name in zip(results.cells, ("static", "frame 1, square 3"), strict=True):
        entry = winning.read_entry(winning.find_file(tmp_path, "resnet20-at", name, "suite"))
        natural, first, second = entry["after"].values()
        assert len(natural) == 8
        assert cell.natural is not None
        assert cell.worst is not None
        assert (sum(natural), sum(second)) == (cell.natural.correct, cell.worst.correct)
        assert all(a >= b >= c for a, b, c in zip(natural, first, second, strict=True))
        assert entry["converged"] is False


def test_first_order_is_exact_for_a_linear_network() -> None:
    """The margin that eps leaves is that at the image moved against the margin's gradient."""
    images, labels = torch.rand(5, 3, 4, 4, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1])
    rivals = torch.stack([(labels + 1) % 3, (labels + 2) % 3], 1)
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(48, 3)).double()
    linear = winning_views.linearize(network, images, labels, rivals, "shift0,0")
    for place in range(2):
        slope = linear.gradients[:, place]
        logits = network(images - 0.1 * slope.sign().reshape(images.shape))
        moved = (logits.gather(1, labels[:, None]) - logits.gather(1, rivals))[:, place]
        torch.testing.assert_close(moved, linear.margins[:, place] - 0.1 * slope.abs().sum(1))


def test_views_are_ranked_and_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(winning_views, "load_search_images", lambda data, n: dent.load_data(data, n=n))
    out = tmp_path / "views.json"
    command = ["winning_views.py", "--n", "8", "--views", "shift0,0", "frame1", "--json", str(out)]
    monkeypatch.setattr(sys, "argv", command)
    winning_views.main()
    plain, framed = json.loads(out.read_text())
    images, labels = dent.load_data("cifar10", n=8)
    right = (dent.load_model("resnet20-at")(images).argmax(1) == labels).float().mean()
    assert plain["natural"] == pytest.approx(100 * float(right))
    assert plain["cosine"] == pytest.approx(1, abs=1e-5)
    assert framed["length"] < plain["length"]  # the frame has no gradient
