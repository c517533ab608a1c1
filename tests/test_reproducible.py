"""The same numbers whatever the order, the hashes and the threads; the same memory whatever the n."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import SHORT, answer, evaluated, kept, python
from torch import Tensor, nn

from dent.data import Dataset
from dent.evaluation import evaluate
from dent.evaluation.plan import Plan, Unit
from dent.evaluation.store import UnitResult

Chains = list[list[Unit]]
ORDERS: dict[str, Callable[[Chains], Chains]] = {
    "reversed": lambda chains: chains[::-1],
    "shuffled": lambda chains: random.Random(0).sample(chains, len(chains)),
    "by batch": lambda chains: sorted(chains, key=lambda chain: -chain[0].batch),
}


@pytest.fixture(scope="module")
def in_order(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("in-order")
    evaluated(folder)
    return kept(folder)


@pytest.mark.parametrize("order", ORDERS)
def test_the_order_of_the_chains_does_not_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_order: dict[str, Any], order: str
) -> None:
    chains, done = Plan.chains, list[UnitResult]()
    monkeypatch.setattr(Plan, "chains", lambda plan: iter(ORDERS[order]([*chains(plan)])))
    evaluated(tmp_path, on_unit=done.append)
    files = [f"units/{one.unit.file}" for one in done]
    assert sorted(files) == sorted(name for name in in_order if name.startswith("units/"))
    assert files[0] != next(name for name in in_order if name.startswith("units/"))
    assert kept(tmp_path) == in_order


def test_what_was_drawn_before_does_not_matter(tmp_path: Path, in_order: dict[str, Any]) -> None:
    torch.manual_seed(12345)
    random.seed(12345)
    evaluated(tmp_path, on_unit=lambda _: [torch.rand(3), random.random()])
    assert kept(tmp_path) == in_order


HASHED = """
import sys
from pathlib import Path
from runs import evaluated
evaluated(Path(sys.argv[1]))
print(hash("dent"))
"""


def test_hashes_do_not_matter(tmp_path: Path, in_order: dict[str, Any]) -> None:
    folders = [tmp_path / seed for seed in ("1", "2")]
    with (
        python(HASHED, folders[0], PYTHONHASHSEED="1") as first,
        python(HASHED, folders[1], PYTHONHASHSEED="2") as second,
    ):
        assert answer(first) != answer(second)
    assert kept(folders[0]) == kept(folders[1]) == in_order
    for name in ("run.json", "report.md", "results.csv"):  # to the byte
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes()


def verdicts(folder: Path) -> Iterator[tuple[str, str]]:
    for name, content in kept(folder).items():
        if name.startswith("units/"):
            yield name, content["outcome"]["correct"]


def test_threads_do_not_matter_beyond_rounding(tmp_path: Path) -> None:
    """Batches of 32 are attacked in two parts by two threads."""
    for threads in (1, 2):
        assert evaluated(
            tmp_path / str(threads), "runs:model", n=64, batch_size=32, threads=threads
        ).complete
    one, two = (dict(verdicts(tmp_path / str(threads))) for threads in (1, 2))
    assert one.keys() == two.keys()
    flips = [a != b for name in one for a, b in zip(one[name], two[name], strict=True)]
    assert len(flips) == 64 * (4 + 5)
    assert sum(flips) <= 2


def made(indices: Tensor) -> Tensor:
    """Images out of nothing but their numbers."""
    pixels = torch.arange(3 * 12 * 12)
    return (indices[:, None] * 7919 + pixels * 104729).remainder(10007).view(-1, 3, 12, 12) / 10007


def tiniest() -> nn.Module:
    torch.manual_seed(1)
    layers = nn.Conv2d(3, 4, 4, stride=4), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 4)
    return nn.Sequential(*layers).eval()


def peak_of(n: int, folder: Path) -> float:
    """The most memory that this process ever had, in MB, once it has evaluated n points."""
    net = tiniest()
    with torch.no_grad():
        labels = torch.cat([net(made(some)).argmax(1) for some in torch.arange(n).split(200)])
    dataset = Dataset("made", labels, made, tuple("abcd"))
    asked = SHORT | {"defenses": ["static", "dent+:steps=1"], "batch_size": 200, "steps": 1}
    results = evaluate({"net": net}, data=dataset, out=folder, **asked)
    assert [cell.worst.n for cell in results.cells] == [n, n]
    lines = Path("/proc/self/status").read_text().splitlines()
    (kilobytes,) = (int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
    return kilobytes / 1024


PEAKS = """
import sys
from pathlib import Path
from test_reproducible import peak_of
print([peak_of(n, Path(sys.argv[1]) / str(n)) for n in (1_000, 10_000)])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the most memory of a process is read from /proc")
def test_memory_does_not_grow_with_n(tmp_path: Path) -> None:
    with python(PEAKS, tmp_path) as process:
        few, many = answer(process)
    assert many - few < 10  # MB; the images alone would be 15
    assert len(list((tmp_path / "10000" / "units").rglob("*.json"))) == 50 * (4 + 5) + 2 + 1
