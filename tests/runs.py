"""Little runs that take a second or two, and what of them must not vary."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from nets import small
from torch import Tensor, nn

from dent import evaluate
from dent.evaluation import Results

SHORT: dict[str, Any] = {
    "defenses": ["static", "dent+:steps=2"],
    "batch_size": 4,
    "steps": 2,
    "queries": 5,
    "eps": 0.02,
    "threads": 1,
}


def model() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        net = small(nn.BatchNorm2d(8))
    return net.eval()


class Noisy(nn.Module):
    """Answers that vary with each number drawn: where the seeds differ, so do verdicts."""

    independent = True  # of its batch: each answer has noise of its own

    def __init__(self) -> None:
        super().__init__()
        self.net = model()

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.net(inputs)
        return logits + 0.03 * torch.randn_like(logits)


def noisy() -> nn.Module:
    return Noisy().eval()


def images(n: int = 64) -> tuple[Tensor, Tensor]:
    """Noise. Most labels are what the network says, so that attacks have something to break."""
    pixels = torch.rand(n, 3, 8, 8, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        labels = model()(pixels).argmax(1)
    labels[::5] = (labels[::5] + 1) % 4
    return pixels, labels


def evaluated(out: Path, name: str = "runs:noisy", **settings: Any) -> Results:
    """By names, so that other processes can be asked for the same."""
    return evaluate(name, data="runs:images", out=out, **{"n": 16, **SHORT, **settings})


def kept(folder: Path) -> dict[str, Any]:
    """All that must not vary from run to run: everything but seconds, and what was half-written."""
    found: dict[str, Any] = {"run.json": json.loads((folder / "run.json").read_text())}
    for path in (folder / "units").rglob("*"):
        if path.is_dir() or path.name.startswith("."):
            continue
        content = json.loads(path.read_text())
        assert set(content.pop("took")) >= {"seconds"}
        found[str(path.relative_to(folder))] = content
    results = json.loads((folder / "results.json").read_text())
    for cell in results["cells"]:
        for name in ("seconds", "static_seconds", "times_seconds"):
            cell["cost"].pop(name)
    texts = {name: (folder / name).read_text() for name in ("report.md", "results.csv")}
    return found | {"results.json": results} | texts


def snapshot(folder: Path) -> dict[str, tuple[bytes | None, int]]:
    """Every file, to the byte, and when it was written."""
    return {
        str(path.relative_to(folder)): (
            None if path.is_dir() else path.read_bytes(),
            0 if path.is_dir() else path.stat().st_mtime_ns,
        )
        for path in folder.rglob("*")
    }


@contextmanager
def python(script: str, *arguments: object, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """Another process that has the modules of these tests; it is gone afterwards."""
    own = {"PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", script, *map(str, arguments)],
        env=os.environ | own | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def answer(process: subprocess.Popen[str]) -> Any:
    """What it printed, as JSON."""
    said, error = process.communicate(timeout=600)
    assert process.returncode == 0, error
    return json.loads(said)
