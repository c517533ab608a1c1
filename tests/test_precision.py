"""Attacks that search in half precision: what they find counts if the model in float32 says so."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from cells import labeled, tiny
from torch import Tensor, nn

import dent
from dent.cli import main
from dent.evaluation import Evaluation, evaluate, load_results
from dent.precision import search_in_bfloat16

SMALL: dict[str, Any] = {"n": 8, "batch_size": 8, "eps": 0.1, "battle": False, "steps": 2}


@pytest.fixture(autouse=True)
def _has_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    # oneDNN's bfloat16 kernels die of an illegal instruction on some CPUs without bfloat16.
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True}, raising=False)


class Recorder(nn.Module):
    """A linear model that notes in what precision it computes; its copies note in the same list."""

    seen: ClassVar[list[torch.dtype]] = []

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.stack([weight, torch.zeros_like(weight)]))

    def forward(self, inputs: Tensor) -> Tensor:
        logits = F.linear(inputs.flatten(1), self.weight)
        self.seen.append(logits.dtype)
        return logits


def test_the_search_is_in_half_and_the_verdict_is_not() -> None:
    """The worst point for a linear model is known: a corner of the ball, or of [0, 1]."""
    weight, eps = torch.linspace(-1, 1, 12), 0.1
    images = torch.rand(32, 3, 2, 2)
    labels = (images.flatten(1) @ weight < 0).long()
    away = (1 - 2 * labels).view(-1, 1) * weight.sign()
    worst = (images.flatten(1) - eps * away).clamp(0, 1)
    stands = (worst @ weight < 0).long() == labels
    Recorder.seen.clear()
    results = evaluate(
        Recorder(weight), ["static"], attacks=["apgd-ce"], data=(images, labels), eps=eps,
        batch_size=32, battle=False, mixed_precision=True,
    )  # fmt: skip
    assert set(Recorder.seen) == {torch.float32, torch.bfloat16}
    assert Recorder.seen[-1] == torch.float32
    assert 0 < stands.sum() < 32
    assert results.cells[0].worst.correct == int(stands.sum())


@pytest.mark.parametrize("defense", ["static", "dent:steps=2", "dent+:steps=2", "dent-nominal:steps=2"])
def test_every_kind_of_attack_can_search_in_half(defense: str) -> None:
    net = tiny()
    attacks = ["apgd-ce", "apgd-t:targets=2", "fab-t:targets=2", "square:queries=4"]
    if defense != "static":
        attacks += ["denying updates", "fpa:rounds=1", "unrolled", "mixed (50 %)"]
    both = [
        evaluate(net, [defense], attacks=attacks, data=labeled(net, 8), mixed_precision=half, **SMALL)
        for half in (False, True)
    ]
    for results in both:
        assert results.complete
        assert not [one.error for cell in results.cells for one in cell.missing]
    single, half = (results.cells[0] for results in both)
    assert half.natural == single.natural
    assert abs(half.worst.correct - single.worst.correct) <= 1


@pytest.mark.parametrize(
    "name", ["static", "dent:steps=1", "dent+solo:steps=1", "views", "hedge:steps=1"]
)
def test_defenses_answer_in_single_precision(name: str) -> None:
    net = tiny()
    defended = dent.defend(net, name)
    with search_in_bfloat16(net, torch.device("cpu")):
        assert defended(torch.rand(2, 3, 8, 8)).dtype == torch.float32


def test_losses_see_logits_in_single_precision() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(12, 3))
    inputs = torch.rand(2, 3, 2, 2)
    before = net(inputs)
    with search_in_bfloat16(net, torch.device("cpu")):
        logits = net(inputs)
    assert logits.dtype == torch.float32
    assert 0 < (logits - before).abs().max() < 0.05
    assert torch.equal(net(inputs), before)  # nothing is left behind
    with search_in_bfloat16(net, torch.device("cpu"), enabled=False):
        assert torch.equal(net(inputs), before)


def test_it_is_refused_where_it_would_be_slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": False}, raising=False)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False, raising=False)
    net = tiny()
    with pytest.raises(ValueError, match="expected a processor with bfloat16 instructions"):
        evaluate(net, ["static"], data=labeled(net, 8), out=tmp_path, mixed_precision=True, **SMALL)
    assert not list(tmp_path.iterdir())


def test_a_dry_run_shows_the_plan_and_says_why_it_would_be_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": False}, raising=False)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False, raising=False)
    asked = "evaluate --model resnet20-at --defense static --n 4 --mixed-precision --dry-run"
    monkeypatch.setattr(sys, "argv", ["dent", *asked.split()])
    with pytest.raises(SystemExit) as end:
        main()
    assert not end.value.code
    assert "- expected a processor with bfloat16 instructions" in capsys.readouterr().out


def test_a_run_says_how_it_searched(tmp_path: Path) -> None:
    net = tiny()
    options = SMALL | {"data": labeled(net, 8), "attacks": ["pgd"], "out": tmp_path}
    evaluate(net, ["static"], mixed_precision=True, **options)
    assert load_results(tmp_path).about["asked"]["mixed_precision"] is True
    with pytest.raises(ValueError, match="mixed_precision"):
        evaluate(net, ["static"], **options)
    assert "mixed_precision" not in Evaluation().to_json()  # runs before there was a choice
