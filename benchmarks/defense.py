"""Measure what a defended forward costs: its wall time over that of a static forward, and its memory.

    python benchmarks/defense.py [--quick] [--json FILE]

Both sides run in one process, in turns, and the ratio is one of medians. k updates and a prediction cost
at least 2k + 1 forwards: each update is a forward and a backward through the activations, and no weight
of a convolution needs a gradient. The static forward is the model as its user has it: float32,
contiguous, no gradient. Compiled runs are compared with the same eager static forward.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import environment
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import dent
from dent.models import MODELS as ARCHITECTURES

MODELS: dict[str, Callable[[], nn.Module]] = {
    "ResNet-20": ARCHITECTURES["resnet20"].make,
    "ResNet-26-4": ARCHITECTURES["resnet26-4"].make,
}
BATCH = 128
CHUNK = 64
# Targets at ten steps, as a share of 2k + 1.
TARGETS = {
    ("batch", False): 1.10,
    ("sample", False): 1.20,
    ("batch", True): 0.95,
    ("sample", True): 0.95,
}


def time_call(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def defend(net: nn.Module, affine: str, steps: int, **options: Any) -> dent.Dent:
    preset = {"batch": "dent", "sample": "dent+"}[affine]
    defended: dent.Dent = dent.defend(net, preset, steps=steps, **options)
    return defended


def measure_time(name: str, affine: str, steps: int, rounds: int, *, compile: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    net, inputs = MODELS[name]().eval(), torch.rand(BATCH, 3, 32, 32)
    defended = defend(net, affine, steps, compile=compile)
    static_times, defended_times = [], []
    with torch.no_grad():
        defend(net, affine, 1)(inputs)  # warm up
        if compile:
            defended(inputs)
        for _ in range(rounds):
            # Static forwards before and after: a few, cheap beside the defended one.
            static_times += [time_call(lambda: net(inputs)) for _ in range(3)]
            defended_times.append(time_call(lambda: defended(inputs)))
            static_times += [time_call(lambda: net(inputs)) for _ in range(2)]
    static, total = median(static_times), median(defended_times)
    return {
        "model": name,
        "affine": affine,
        "compiled": compile,
        "steps": steps,
        "static_ms": 1e3 * static,
        "defended_ms": 1e3 * total,
        "ratio": total / static,
        "bound": 2 * steps + 1,
        "over_bound": total / static / (2 * steps + 1),
        "target": TARGETS[affine, compile] if steps == 10 else None,
    }


def get_peak_memory(name: str, what: str) -> float:
    """Return the peak resident MiB above the model and its inputs, of a process of its own."""
    script = f"import defense; defense.measure_memory({name!r}, {what!r})"
    run = subprocess.run(
        [sys.executable, "-c", script],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | environment.ENVIRONMENT,
    )
    return float(run.stdout)


def measure_memory(name: str, what: str) -> None:
    net, inputs = MODELS[name]().eval(), torch.rand(BATCH, 3, 32, 32)
    net(inputs[:2]).sum().backward()  # so that libraries load what they need
    net.zero_grad()
    before = _read_status("VmRSS")
    if what == "forward and backward":
        entropy = torch.distributions.Categorical(logits=net(inputs)).entropy().mean()
        torch.autograd.grad(entropy, [p for n, p in net.named_parameters() if "bn" in n])
    else:
        affine, steps, gradient, *chunk = what.split()
        defended = defend(net, affine, int(steps), chunk=int(chunk[-1]) if chunk else None)
        leaf: Tensor = inputs.requires_grad_(gradient == "unrolled")
        logits = defended(leaf, gradient=gradient)
        if gradient == "unrolled":
            torch.autograd.grad(logits.sum(), leaf)
    print((_read_status("VmHWM") - before) / 1024)


def _read_status(field: str) -> int:
    """Return the resident KiB of this process, now (VmRSS) or at its peak (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def print_time(rows: list[dict[str, Any]], console: Console) -> None:
    table = Table(title=f"wall time, batch {BATCH} of 3 x 32 x 32, medians", box=None, pad_edge=False)
    for column in ("model", "Delta per", "compiled"):
        table.add_column(column)
    for column in ("steps", "static ms", "defended ms", "ratio", "2k+1", "over 2k+1", "target"):
        table.add_column(column, justify="right")
    for row in rows:
        met = row["target"] is None or row["over_bound"] <= row["target"]
        table.add_row(
            row["model"],
            row["affine"],
            "yes" if row["compiled"] else "no",
            str(row["steps"]),
            f"{row['static_ms']:.1f}",
            f"{row['defended_ms']:.0f}",
            f"{row['ratio']:.2f}x",
            str(row["bound"]),
            f"{row['over_bound']:.3f}",
            "" if row["target"] is None else f"<= {row['target']:.2f} {'met' if met else 'MISSED'}",
        )
    console.print(table)


def print_memory(rows: list[dict[str, Any]], console: Console) -> None:
    table = Table(title=f"peak memory above model and inputs, batch {BATCH}", box=None, pad_edge=False)
    table.add_column("model")
    table.add_column("what")
    table.add_column("MiB", justify="right")
    table.add_column("of one forward and backward", justify="right")
    for row in rows:
        table.add_row(row["model"], row["what"], f"{row['mib']:.0f}", f"{row['ratio']:.2f}x")
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--steps", nargs="+", type=int, default=[1, 5, 10, 30])
    parser.add_argument(
        "--rounds", type=int, default=9, help="number of defended forwards per row (default: 9)"
    )
    parser.add_argument(
        "--quick", action="store_true", help="ResNet-20 only, 1 and 10 steps, 5 rounds, eager"
    )
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    options = parser.parse_args()
    if options.quick:
        options.models, options.steps, options.rounds = ["ResNet-20"], [1, 10], 5
    console = Console(width=110)
    console.print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    times: list[dict[str, Any]] = []
    memory: list[dict[str, Any]] = []
    plans = [
        (name, compiled, affine, steps)
        for name in options.models
        for compiled in (False, True)
        for affine in ("batch", "sample")
        for steps in options.steps
        if not compiled
        or (steps == 10 and not options.quick)  # compiled: only the steps that have a target
    ]
    for number, (name, compiled, affine, steps) in enumerate(plans, 1):
        about = f"{name}, per {affine}, {steps} steps" + ", compiled" * compiled
        with console.status(f"{number} of {len(plans)}: {about}"):
            rounds = options.rounds if name == "ResNet-20" else max(3, options.rounds // 3)
            times.append(measure_time(name, affine, steps, rounds, compile=compiled))
            torch.compiler.reset()
    print_time(times, console)
    for name in options.models:
        whats = ["forward and backward", "batch 1 stale", "batch 10 stale", "sample 10 stale"]
        whats += [f"batch 10 stale in chunks of {CHUNK}"]
        if name == "ResNet-20":  # minutes for the larger model
            whats += ["batch 1 unrolled", "batch 10 unrolled"]
        for what in whats:
            with console.status(f"memory of {name}, {what}"):
                mib = get_peak_memory(name, what)
            one = next((row["mib"] for row in memory if row["model"] == name), mib)
            memory.append({"model": name, "what": what, "mib": mib, "ratio": mib / one})
    print_memory(memory, console)
    if options.json:
        options.json.write_text(json.dumps({"time": times, "memory": memory}, indent=2) + "\n")
        console.print(f"the same as JSON: {options.json}")


if __name__ == "__main__":
    main()
