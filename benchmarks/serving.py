"""Measure what serving costs: a server under full load, compared with the model called in a loop.

    python benchmarks/serving.py [--rounds 3] [--seconds 20] [--threads 1] [--json FILE]

The limit is the defended model in one process, called with one full batch after the other and as many
threads as the server's replica has. It is measured before and after each load. The server has one
replica. The clients are threads of this process that send the next request as soon as one is answered,
with two batches of images on their way, so that a full batch waits while another is computed. Requests
and answers go over HTTP. The clients need CPU time too, so leave them a core. The server should reach at
least 85 % of the limit.
"""

from __future__ import annotations

import argparse
import json
import re
import socket
import threading
import time
from http.client import HTTPConnection
from io import BytesIO
from pathlib import Path
from statistics import median
from typing import Any

import environment  # noqa: F401
import numpy as np
import torch
from torch import Tensor

import dent
from dent.report.terminal import progress_bar, show_table
from dent.serving.replica import describe_service, load_defense
from dent.serving.settings import Serving
from dent.serving.start import run_server, start_ray

SHARE = 85.0  # % of the limit, at least
# Images per request, and how many batches of them are on their way; 0 means one request at a time.
LOADS = {"1 image, saturated": (1, 2), "8 images, saturated": (8, 2), "1 image, 1 client": (1, 0)}
Figures = dict[str, float]


def measure_limit(serving: Serving, images: Tensor, seconds: float) -> float:
    """Return the images per second of the model alone."""
    defense, _ = load_defense(serving)
    torch.set_num_threads(serving.threads or 1)
    batch = images[: serving.batch_size]
    times: list[float] = []
    for _ in range(2):
        defense(batch)
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or len(times) < 3:
        began = time.perf_counter()
        defense(batch)
        times.append(time.perf_counter() - began)
    return len(batch) * len(times) / sum(times)


class Clients:
    """Connections that each send one request after the other until they are stopped."""

    def __init__(self, serving: Serving, images: Tensor, count: int) -> None:
        self.latencies: list[tuple[float, float]] = []  # time of the answer, and how long it took
        self.errors: list[int] = []
        self._serving, self._images = serving, images
        self._stopped = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(at,)) for at in range(count)]

    def run(self, warm_up: float, seconds: float) -> Figures:
        for thread in self._threads:
            thread.start()
        time.sleep(warm_up)
        before, began = self._wait_for_batch_end()
        time.sleep(seconds)
        after, ended = self._wait_for_batch_end()
        self._stopped.set()
        for thread in self._threads:
            thread.join()
        if self.errors:
            raise RuntimeError(f"expected answers, got errors {sorted(set(self.errors))}")
        wall = ended - began
        found = sorted(took for at, took in self.latencies if began <= at <= ended)
        new = {name: after[name] - before[name] for name in after}
        return {
            "requests/s": len(found) / wall,
            "images/s": new["dent_batch_size_sum"] / wall,
            **{f"p{share} ms": 1000 * found[(len(found) - 1) * share // 100] for share in (50, 95, 99)},
            "images per batch": new["dent_batch_size_sum"] / new["dent_batch_size_count"],
            "model busy %": 100 * new["dent_batch_seconds_sum"] / wall,
        }

    def _ask(self, number: int) -> None:
        file = BytesIO()
        np.save(file, self._images.roll(number, 0).numpy())
        body, headers = file.getvalue(), {"Content-Type": "application/x-npy"}
        connection = HTTPConnection(self._serving.host, self._serving.port)
        while not self._stopped.is_set():
            began = time.perf_counter()
            connection.request("POST", "/predict", body, headers)
            response = connection.getresponse()
            response.read()
            if response.status != 200:
                self.errors.append(response.status)
                return
            now = time.perf_counter()
            self.latencies.append((now, now - began))
        connection.close()

    def _wait_for_batch_end(self) -> tuple[dict[str, float], float]:
        """Wait for the end of a batch; otherwise the counts could be off by up to one batch."""
        last = self._read_counts()
        while (now := self._read_counts()) == last:
            time.sleep(0.01)
        return now, time.perf_counter()

    def _read_counts(self) -> dict[str, float]:
        connection = HTTPConnection(self._serving.host, self._serving.port)
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
        return {
            name: float(value)
            for name, value in re.findall(r"^(dent_batch_\w+_(?:sum|count)) (\S+)$", text, re.MULTILINE)
        }


def measure(given: argparse.Namespace) -> tuple[Serving, dict[str, list[Figures]]]:
    """Measure the limit and each load in turns, as often as there are rounds."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    serving = Serving(
        model=given.model, threads=given.threads, batch_size=given.batch_size, port=port, queue=1000,
        deadline=600,
    )  # fmt: skip
    images = dent.load_data("cifar10", n=max(serving.batch_size, 8))[0]
    found: dict[str, list[Figures]] = {name: [] for name in LOADS}
    turns = [name for _ in range(given.rounds) for name in LOADS]
    service = describe_service(serving)
    with progress_bar("serving") as move, start_ray(serving), run_server(serving, service):
        most = measure_limit(serving, images, given.seconds)
        for number, name in enumerate(turns):
            move(number, len(turns), name)
            size, batches = LOADS[name]
            count = max(1, batches * serving.batch_size // size)
            figures = Clients(serving, images[:size], count).run(given.seconds / 4, given.seconds)
            before, most = most, measure_limit(serving, images, given.seconds)
            figures["limit"] = (before + most) / 2
            figures["share of the limit %"] = 100 * figures["images/s"] / figures["limit"]
            found[name].append(figures)
    return serving, found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=20, help="duration of each measurement")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--model", default="resnet20-at")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    serving, found = measure(given)
    rows: list[dict[str, Any]] = [
        {"load": name}
        | {key: round(median(one[key] for one in rounds), 1) for key in rounds[0]}
        | {"share in each round": " ".join(f"{one['share of the limit %']:.0f}" for one in rounds)}
        for name, rounds in found.items()
    ]
    columns = list(dict.fromkeys(key for row in rows for key in row))
    show_table(
        [{key: row.get(key, "") for key in columns} for row in rows], right=columns[1:],
        title=f"{serving.model}, {serving.defense}, batches of {serving.batch_size}, "
        f"{serving.threads} threads, {given.rounds} rounds",
    )  # fmt: skip
    least = min(row["share of the limit %"] for row in rows if row["load"].endswith("saturated"))
    print(f"\nat saturation, {least} % of the limit (at least {SHARE:g})")
    if given.json:
        content = {"asked": serving.model_dump(), "rounds": found, "loads": rows, "share": least}
        given.json.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
