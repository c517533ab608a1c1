"""How long attacks take: beside the reference on static models, and over the least on a defended one.

    python benchmarks/attacks.py [calls] [static] [defended] [--n 256] [--batch 256] [--json FILE]

`static`: standard AutoAttack by dent and by `pyautoattack`, on the same images in turns, batch by batch,
on an adversarially trained and on a nominal model; with how many verdicts agree, and how much of dent's
time is spent around the model. `calls`: what a call of the model and of the copy that is searched on
take there, and what would be left of it if all but its convolutions cost nothing. `defended`: the time
of an APGD iteration against a defended model, over that of a defended forward and one backward through
its prediction.
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

suite = sys.modules["dent.attacks.autoattack"]  # the module; the package has the function of that name
BATCH = 128  # of the defended model
STATIC = {"resnet20-at": (8 / 255, 2.0), "resnet20-nominal": (8 / 255, 5.0)}
DEFENDED: dict[str, dict[str, Any]] = {"dent": {"steps": 10}, "dent+": {}}
AROUND, OVERHEAD = 5.0, 1.1
WAITING = os.environ["OMP_WAIT_POLICY"].lower()  # what threads do that wait: sleep, or spin (active)
STANDING = 92  # inputs of resnet20-at that most calls of its AutoAttack are made with, of 256


# Where a model is asked: by attacks, for logits or a gradient, and by the checks before them.
CALLS: list[tuple[Any, str]] = [
    (AttackedModel, "predict"),
    (AttackedModel, "differentiate"),
    (Linearization, "at"),
    (Linearization, "compute_gradient"),
    (suite, "inspect_model"),
    (suite, "fuse_batch_norm"),
]


@contextmanager
def timed_calls() -> Iterator[dict[str, float]]:
    """The seconds of all calls of a model, by what is called; of nested ones, the outermost."""
    seconds = dict.fromkeys((name for _, name in CALLS), 0.0)
    before = [vars(owner)[name] for owner, name in CALLS]
    depth = 0

    def timed(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
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
        wrapped = timed(name, plain.__func__ if bound else plain)
        setattr(owner, name, classmethod(wrapped) if bound else wrapped)
    try:
        yield seconds
    finally:
        for (owner, name), plain in zip(CALLS, before, strict=True):
            setattr(owner, name, plain)


def attacked(engine: str, name: str, inputs: Tensor, labels: Tensor, eps: float) -> dict[str, Any]:
    model = dent.load_model(name)
    with timed_calls() as calls:
        started = time.perf_counter()
        run = dent.attacks.autoattack(model, inputs, labels, eps=eps, engine=engine, seed=0)
        total = time.perf_counter() - started
    return {"seconds": total, "model": sum(calls.values()), "broken": run.broken}


def static(n: int, batch: int) -> list[dict[str, Any]]:
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
                    runs[engine].append(attacked(engine, name, images, truth, eps))
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
                    "around the model %": round(100 * (1 - inside / seconds["dent"]), 1),
                }
            )
    return rows


def calls(rounds: int = 40) -> list[dict[str, Any]]:
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
        share = in_convolutions(partial(ask, copy))
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


def in_convolutions(call: Callable[[], None]) -> float:
    """The share of a call's time, on one thread."""
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


def defended(rounds: int = 5, steps: int = 5) -> list[dict[str, Any]]:
    inputs, labels = dent.load_data("cifar10", n=BATCH)
    rows = []
    with progress_bar("APGD on defended models") as move:
        for number, (preset, settings) in enumerate(DEFENDED.items()):
            model = dent.defend(dent.load_model("resnet20-at"), preset, **settings)
            least, attack, around = [], [], []
            for round_ in range(rounds + 1):
                move(number * (rounds + 1) + round_, len(DEFENDED) * (rounds + 1), preset)
                started = time.perf_counter()
                points = inputs.clone().requires_grad_()
                torch.autograd.grad(F.cross_entropy(model(points), labels, reduction="sum"), points)
                between = time.perf_counter()
                with timed_calls() as calls:
                    dent.attacks.apgd(model, inputs, labels, eps=8 / 255, steps=steps, joint=True)
                ended = time.perf_counter()
                if round_:  # the first warms up
                    least.append(between - started)
                    # The start and the steps; scoring the natural and the final batch apart.
                    attack.append((ended - between - calls["predict"]) / (steps + 1))
                    around.append(1 - sum(calls.values()) / (ended - between))
            ratio = median(attack) / median(least)
            rows.append(
                {
                    "defense": preset,
                    "forward and backward ms": round(1e3 * median(least)),
                    "attack iteration ms": round(1e3 * median(attack)),
                    "ratio": round(ratio, 3),
                    "target": f"<= {OVERHEAD}",
                    "around the model %": round(100 * median(around), 1),
                }
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", nargs="*", choices=("calls", "static", "defended", []))
    parser.add_argument("--n", type=int, default=256)
    parser.add_argument("--batch", type=int, default=256, help="of the static models")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    what = given.what or ["calls", "static", "defended"]
    results: dict[str, Any] = {"torch": torch.__version__, "threads": torch.get_num_threads()}
    measures: dict[str, tuple[Callable[[], list[dict[str, Any]]], str]] = {
        "defended": (defended, f"APGD on resnet20-at with a defense, batch {BATCH}"),
        "calls": (calls, "Calls of resnet20-at and of its fused copy"),
        "static": (lambda: static(given.n, given.batch), "Standard AutoAttack, Linf"),
    }
    for name, (measure, title) in measures.items():
        if name in what:
            results[name] = measure()
            numbers = [key for key, value in results[name][0].items() if not isinstance(value, str)]
            show_table(results[name], right=numbers, title=title)
    if {"static", "defended"} & results.keys():
        print(f"Around the model must stay under {AROUND:g} %.")
    if given.json:
        given.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
