"""Measure the time of attacks on static and on defended models.

    python benchmarks/attacks.py [calls] [static] [defended] [--n 256] [--batch 256] [--json FILE]

`static` runs standard AutoAttack by dent and by `pyautoattack` on an adversarially trained and on a
nominal model, on the same images in turns. It also prints how many verdicts agree, and the share of
dent's time that is spent outside the model. `calls` measures one call of the model and one of its fused
copy, and the speedup if everything but convolutions took no time. `defended` divides the time of an APGD
iteration on a defended model by that of one defended forward pass and one backward pass.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import environment  # noqa: F401
import torch
import torch.nn.functional as F
from torch import Tensor

import dent
from dent.attacks.fab import Linearization
from dent.attacks.fused import fuse_batch_norm
from dent.attacks.search import AttackedModel
from dent.report.terminal import progress_bar, show_table

suite = sys.modules["dent.attacks.autoattack"]  # the module; the package's attribute is the function
BATCH = 128  # of the defended model
STATIC = {"resnet20-at": (8 / 255, 2.0), "resnet20-nominal": (8 / 255, 5.0)}
DEFENDED: dict[str, dict[str, Any]] = {"dent": {"steps": 10}, "dent+": {}}
OUTSIDE, OVERHEAD = 5.0, 1.1  # the largest share outside the model in %, and the largest ratio
WAITING = os.environ["OMP_WAIT_POLICY"].lower()  # waiting threads sleep (passive) or spin (active)
STANDING = 92  # of 256 inputs, those that resnet20-at withstands: the batch of most calls
# The functions that call a model: in attacks, and in the checks before them.
CALLS: list[tuple[Any, str]] = [
    (AttackedModel, "predict"),
    (AttackedModel, "differentiate"),
    (Linearization, "at"),
    (Linearization, "compute_gradient"),
    (suite, "inspect_model"),
    (suite, "fuse_batch_norm"),
]


@contextmanager
def time_calls() -> Iterator[dict[str, float]]:
    """Measure the seconds in each function of `CALLS`; nested calls count for the outermost."""
    seconds = dict.fromkeys((name for _, name in CALLS), 0.0)
    before = [vars(owner)[name] for owner, name in CALLS]
    depth = 0

    def wrap(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **settings: Any) -> Any:
            nonlocal depth
            depth += 1
            started = time.perf_counter()
            try:
                return method(*arguments, **settings)
            finally:
                depth -= 1
                seconds[name] += (time.perf_counter() - started) * (depth == 0)

        return call

    for (owner, name), plain in zip(CALLS, before, strict=True):
        bound = isinstance(plain, classmethod)
        wrapped = wrap(name, plain.__func__ if bound else plain)
        setattr(owner, name, classmethod(wrapped) if bound else wrapped)
    try:
        yield seconds
    finally:
        for (owner, name), plain in zip(CALLS, before, strict=True):
            setattr(owner, name, plain)


def run_autoattack(engine: str, name: str, inputs: Tensor, labels: Tensor, eps: float) -> dict[str, Any]:
    model = dent.load_model(name)
    with time_calls() as calls:
        started = time.perf_counter()
        run = dent.attacks.autoattack(model, inputs, labels, eps=eps, engine=engine, seed=0)
        total = time.perf_counter() - started
    return {"seconds": total, "model": sum(calls.values()), "broken": run.broken}


def measure_static(n: int, batch: int) -> list[dict[str, Any]]:
    inputs, labels = dent.load_data("cifar10", n=n)
    batches = list(zip(inputs.split(batch), labels.split(batch), strict=True))
    rows = []
    with progress_bar("standard AutoAttack") as move:
        for number, (name, (eps, target)) in enumerate(STATIC.items()):
            runs: dict[str, list[dict[str, Any]]] = {"dent": [], "reference": []}
            for index, (images, truth) in enumerate(batches):
                for engine in list(runs)[:: 1 if index % 2 else -1]:
                    done = (number * len(batches) + index) * 2 + (engine == "reference")
                    move(done, 2 * len(batches) * len(STATIC), f"{name}, {engine}")
                    runs[engine].append(run_autoattack(engine, name, images, truth, eps))
            seconds = {engine: sum(run["seconds"] for run in some) for engine, some in runs.items()}
            ours, theirs = (torch.cat([run["broken"] for run in some]) for some in runs.values())
            inside = sum(run["model"] for run in runs["dent"])
            rows.append(
                {
                    "model": name,
                    "eps": f"{eps * 255:g}/255",
                    "n": n,
                    "batch": batch,
                    "waiting": WAITING,
                    "reference s": round(seconds["reference"], 1),
                    "dent s": round(seconds["dent"], 1),
                    "times faster": round(seconds["reference"] / seconds["dent"], 2),
                    "target": f">= {target:g}",
                    "standing, reference %": round(100 * float((~theirs).float().mean()), 1),
                    "standing, dent %": round(100 * float((~ours).float().mean()), 1),
                    "same verdict %": round(100 * float((ours == theirs).float().mean()), 1),
                    "outside the model %": round(100 * (1 - inside / seconds["dent"]), 1),
                }
            )
    return rows


def measure_calls(rounds: int = 40) -> list[dict[str, Any]]:
    model = dent.load_model("resnet20-at")
    inputs, labels = dent.load_data("cifar10", n=STANDING)
    copy = fuse_batch_norm(model, inputs)

    def forward(net: Callable[[Tensor], Tensor]) -> None:
        with torch.no_grad():
            net(inputs)

    def gradient(net: Callable[[Tensor], Tensor]) -> None:
        points = inputs.clone().requires_grad_()
        torch.autograd.grad(F.cross_entropy(net(points), labels), points)

    rows = []
    for name, ask in (("forward", forward), ("gradient", gradient)):
        seconds: dict[str, list[float]] = {"model": [], "copy": []}
        with progress_bar(name) as move:
            for number in range(rounds):
                move(number, rounds, "model and copy")
                for which, net in (("model", model), ("copy", copy)):
                    started = time.perf_counter()
                    ask(net)
                    seconds[which].append(time.perf_counter() - started)
        ratio = median(slow / quick for slow, quick in zip(*seconds.values(), strict=True))
        share = measure_convolutions(partial(ask, copy))
        rows.append(
            {
                "call": name,
                "n": STANDING,
                "waiting": WAITING,
                "model ms": round(1e3 * median(seconds["model"]), 1),
                "copy ms": round(1e3 * median(seconds["copy"]), 1),
                "times faster": round(ratio, 2),
                "copy in convolutions %": round(100 * share),
                "by convolutions alone": round(ratio / share, 2),
            }
        )
    return rows


def measure_convolutions(call: Callable[[], None]) -> float:
    """Return the share of a call's time that is spent in convolutions, on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        call()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            for _ in range(10):
                call()
    finally:
        torch.set_num_threads(threads)
    times: dict[str, float] = {one.key: one.self_cpu_time_total for one in profile.key_averages()}
    return sum(spent for name, spent in times.items() if "conv" in name) / sum(times.values())


def measure_defended(rounds: int = 5, steps: int = 5) -> list[dict[str, Any]]:
    inputs, labels = dent.load_data("cifar10", n=BATCH)
    rows = []
    with progress_bar("APGD on defended models") as move:
        for number, (preset, settings) in enumerate(DEFENDED.items()):
            model = dent.defend(dent.load_model("resnet20-at"), preset, **settings)
            least, attack, outside = [], [], []
            for round_ in range(rounds + 1):
                move(number * (rounds + 1) + round_, len(DEFENDED) * (rounds + 1), preset)
                started = time.perf_counter()
                points = inputs.clone().requires_grad_()
                torch.autograd.grad(F.cross_entropy(model(points), labels, reduction="sum"), points)
                between = time.perf_counter()
                with time_calls() as calls:
                    dent.attacks.apgd(model, inputs, labels, eps=8 / 255, steps=steps, joint=True)
                ended = time.perf_counter()
                if round_:  # the first round warms up
                    least.append(between - started)
                    # The start and the steps, without the scoring of the natural and the final batch.
                    attack.append((ended - between - calls["predict"]) / (steps + 1))
                    outside.append(1 - sum(calls.values()) / (ended - between))
            ratio = median(attack) / median(least)
            rows.append(
                {
                    "defense": preset,
                    "forward and backward ms": round(1e3 * median(least)),
                    "attack iteration ms": round(1e3 * median(attack)),
                    "ratio": round(ratio, 3),
                    "target": f"<= {OVERHEAD}",
                    "outside the model %": round(100 * median(outside), 1),
                }
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", nargs="*", choices=("calls", "static", "defended", []))
    parser.add_argument("--n", type=int, default=256)
    parser.add_argument(
        "--batch", type=int, default=256, help="Batch size on the static models (default: 256)."
    )
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    what = given.what or ["calls", "static", "defended"]
    results: dict[str, Any] = {"torch": torch.__version__, "threads": torch.get_num_threads()}
    measures: dict[str, tuple[Callable[[], list[dict[str, Any]]], str]] = {
        "defended": (measure_defended, f"APGD on resnet20-at with a defense, batch {BATCH}"),
        "calls": (measure_calls, "Calls of resnet20-at and of its fused copy"),
        "static": (lambda: measure_static(given.n, given.batch), "Standard AutoAttack, Linf"),
    }
    for name, (measure, title) in measures.items():
        if name in what:
            results[name] = measure()
            numbers = [key for key, value in results[name][0].items() if not isinstance(value, str)]
            show_table(results[name], right=numbers, title=title)
    if {"static", "defended"} & results.keys():
        print(f"The share outside the model must stay under {OUTSIDE:g} %.")
    if given.json:
        given.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
