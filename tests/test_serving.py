"""The whole server, `dent serve` on Ray: what it promises under load, under attack and at its end."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from browsing import NEEDS_CHROMIUM, chromium
from torch import Tensor

from dent.data import load_data
from dent.defense import defend
from dent.models import load_model

pytest.importorskip("ray.serve")

REPLICAS, BATCH, QUEUE = 2, 8, 16
ASKED = [
    "--replicas", str(REPLICAS), "--threads", "1", "--batch-size", str(BATCH), "--queue", str(QUEUE),
    "--deadline", "2min", "--max-body", "1MB",
]  # fmt: skip
TOLERANCE = 1e-5  # of probabilities, between one batch and another; what is documented
IN_PROC = pytest.mark.skipif(not Path("/proc/self").exists(), reason="finds processes in /proc")
TOKEN = {"authorization": "Bearer secret"}


@dataclass
class Started:
    """`dent serve` in a process of its own."""

    process: subprocess.Popen[str]
    url: str
    said: str

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, headers=TOKEN, timeout=150, trust_env=False)

    def replicas(self) -> set[int]:
        """Those that hold the model."""
        return {one for one, title in self.processes().items() if ":dent:model" in title}

    def processes(self) -> dict[int, str]:
        """All processes of the server, with their titles."""
        parents, titles = {}, {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                titles[int(folder.name)] = (folder / "cmdline").read_text().strip("\0 ")
                parents[int(folder.name)] = int(
                    (folder / "stat").read_text().rpartition(")")[2].split()[1]
                )
            except OSError:  # it has ended
                continue

        def ours(process: int) -> bool:
            return process == self.process.pid or (process in parents and ours(parents[process]))

        return {one: title for one, title in titles.items() if ours(one)}

    def listening(self) -> set[str]:
        """Addresses at which these processes take connections, as the kernel writes them."""
        sockets = {
            os.readlink(link) for one in self.processes() for link in Path(f"/proc/{one}/fd").glob("*")
        }
        tables = [Path(f"/proc/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
        rows = [line.split() for table in tables for line in table]
        return {row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in sockets}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("server") / "stderr"
    with (
        log.open("w") as errors,
        subprocess.Popen(
            [sys.executable, "-m", "dent", "serve", "--port", str(port), *ASKED],
            stdout=subprocess.PIPE, stderr=errors, text=True, env=os.environ | {"DENT_TOKEN": "secret"},
        ) as process,
    ):  # fmt: skip
        assert process.stdout is not None
        said = process.stdout.readline() + process.stdout.readline()
        if "http" not in said:
            pytest.fail(f"the server did not start: {said}{log.read_text()}")
        yield Started(process, f"http://127.0.0.1:{port}", said)
        process.terminate()


@pytest.mark.browser
@NEEDS_CHROMIUM
def test_a_person_tries_it_in_a_browser(server: Started) -> None:
    """An attacked horse, on the page and by the server itself."""
    with chromium() as browser:
        page = browser.new_page()
        page.goto(server.url)
        page.locator("#thumbs button").nth(1).click()
        page.locator("#key").fill("secret")
        page.locator("#token button").click()
        page.locator("#answer[aria-busy=false]").wait_for()
        says = {
            side: page.locator(f".side.{side} .says").inner_text() for side in ("static", "defended")
        }
        updates = page.locator("#answer .facts").inner_text().split("\n")[1]
    assert "deer" in says["static"]  # what it was changed to
    assert "wrong" in says["static"]
    assert any(verdict in says["defended"] for verdict in ("right", "wrong"))
    assert updates == "6"


@pytest.fixture(scope="module")
def images() -> Tensor:
    return load_data("cifar10", n=12)[0]


def npy(images: Tensor) -> dict[str, Any]:
    file = BytesIO()
    np.save(file, images.numpy())
    return {"content": file.getvalue(), "headers": {"content-type": "application/x-npy"}}


def predicted(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    answers: list[dict[str, Any]] = response.json()["answers"]
    return answers


def metric(client: httpx.Client, name: str) -> float:
    found = re.findall(rf"^{re.escape(name)} (\S+)$", client.get("/metrics").text, re.MULTILINE)
    return float(found[0]) if found else 0.0


def wait_until(true: Callable[[], bool], seconds: float = 120) -> None:
    until = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < until, "waited long enough"
        time.sleep(0.1)


def worked(process: int) -> float:
    """How long a process has computed so far, in ticks."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return float(fields[11])


def find_busy(processes: set[int]) -> int:
    """The first of these processes that is seen to compute."""
    while True:
        before = {one: worked(one) for one in processes}
        time.sleep(0.02)
        for one in processes:
            if worked(one) > before[one]:
                return one


def test_it_says_what_it_serves(server: Started) -> None:
    assert server.said.startswith(f"resnet20-at, dent+solo: {server.url}\nindependent: ")
    with server.client() as client:
        assert client.get("/health").json()["isolation"].startswith("independent: ")
        assert "<html" in client.get("/").text
    assert httpx.post(server.url + "/predict", json={}).status_code == 401


@IN_PROC
def test_no_other_machine_can_reach_any_of_its_processes(server: Started) -> None:
    """Nor Ray's own, which would run what they are sent."""
    port = server.url.rpartition(":")[2]
    local = ("0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000")
    addresses = server.listening()
    assert f"{local[0]}:{int(port):04X}" in addresses
    assert len(addresses) > 5
    assert {one.partition(":")[0] for one in addresses} <= set(local)


@IN_PROC
def test_models_get_a_core_before_those_who_talk(server: Started) -> None:
    nice: dict[str, set[int]] = {"dent:model": set(), "dent:front": set(), "ProxyActor": set()}
    for process, title in server.processes().items():
        for name in nice:
            if name in title:
                nice[name] |= {
                    os.getpriority(os.PRIO_PROCESS, int(task.name))
                    for task in Path(f"/proc/{process}/task").iterdir()
                }
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert nice == {"dent:model": {own}, "dent:front": {19}, "ProxyActor": {19}}


def test_the_example_of_a_client(server: Started) -> None:
    script = Path(__file__).parents[1] / "examples" / "serve_client.py"
    said = subprocess.run(
        [sys.executable, script, "--url", server.url], capture_output=True, text=True, check=True,
        env=os.environ | {"DENT_TOKEN": "secret"},
    ).stdout  # fmt: skip
    assert [line.partition(":")[0] for line in said.splitlines()] == ["sky", "grass"]
    assert said.count("in 6 steps") == 2


def test_a_poisoned_stream_beside_a_benign_one_changes_nothing(server: Started, images: Tensor) -> None:
    """The answers are those of a process that has the model, and each image, to itself."""
    defense = defend(load_model("resnet20-at"), "dent+solo")
    alone = torch.cat([defense(image[None]).softmax(1) for image in images]).detach()
    poison = (torch.rand(32, 3, 32, 32, generator=torch.Generator().manual_seed(0)) > 0.5).float()
    with server.client() as client, ThreadPoolExecutor(BATCH) as crowd:
        before = {name: metric(client, f"dent_batch_size_{name}") for name in ("sum", "count")}
        poisoned = [crowd.submit(client.post, "/predict", **npy(one)) for one in poison.split(4)]
        answers = [crowd.submit(client.post, "/predict", **npy(image[None])) for image in images]
        found = [predicted(one.result())[0] for one in answers]
        assert all(len(predicted(one.result())) == 4 for one in poisoned)
        images_, batches = (
            metric(client, f"dent_batch_size_{name}") - before[name] for name in ("sum", "count")
        )
    assert images_ == 32 + 12
    assert images_ / batches > 2  # they did share batches
    assert [one["class"] for one in found] == alone.argmax(1).tolist()
    probabilities = torch.tensor([one["probabilities"] for one in found])
    assert torch.allclose(probabilities, alone, rtol=0, atol=TOLERANCE)
    assert {one["steps"] for one in found} == {6}


def test_more_requests_than_may_wait(server: Started, images: Tensor) -> None:
    """A flood, bounded: some are answered, all others hear when to come again, and nobody is lost."""
    most = QUEUE + REPLICAS * BATCH
    with server.client() as client, ThreadPoolExecutor(3 * most) as crowd:
        body = npy(images[:4])
        answers = list(crowd.map(lambda _: client.post("/predict", **body), range(3 * most)))
        statuses = [one.status_code for one in answers]
        assert set(statuses) == {200, 429}
        assert statuses.count(200) >= most
        for one in answers:
            if one.status_code == 429:
                assert int(one.headers["retry-after"]) >= 1
        assert len(predicted(client.post("/predict", **body))) == 4
        assert metric(client, 'dent_rejected_total{status="429"}') == statuses.count(429)


def test_what_cannot_be_answered_harms_nobody(server: Started, images: Tensor) -> None:
    """Bodies that are wrong, far too long, or never end; then everything is as before."""
    with server.client() as client:
        for request, status in [
            ({"content": b"no image", "headers": {"content-type": "image/png"}}, 400),
            ({"content": b"GIF89a", "headers": {"content-type": "image/gif"}}, 415),
            (npy(torch.full((1, 3, 32, 32), torch.nan)), 422),
            (npy(torch.zeros(1, 3, 64, 64)), 422),
            (npy(torch.zeros(1, 3, 400, 400)), 413),
            ({"content": iter([bytes(10**5)] * 100), "headers": {"content-type": "image/png"}}, 413),
        ]:
            response = client.post("/predict", **request)
            assert response.status_code == status
            assert response.json()["detail"]
        host, port = server.url.removeprefix("http://").split(":")
        head = b"POST /predict HTTP/1.1\r\nHost: dent\r\nAuthorization: Bearer secret\r\n"
        head += b"Content-Type: image/png\r\nContent-Length: 1000\r\n\r\nhalf"
        for _ in range(2 * QUEUE):
            with socket.create_connection((host, int(port))) as cut:
                cut.sendall(head)
        assert len(predicted(client.post("/predict", **npy(images[:3])))) == 3
        wait_until(lambda: metric(client, "dent_requests_open") == 1)  # the one that asks


@IN_PROC
def test_a_replica_that_is_killed_at_its_work(server: Started, images: Tensor) -> None:
    """What it had is done by another; no answer is lost, nor changed."""
    with server.client() as client, ThreadPoolExecutor(BATCH) as crowd:
        expected = [one["class"] for one in predicted(client.post("/predict", **npy(images)))]
        for _ in range(5):  # it may be killed between two batches, which shows nothing
            replicas = server.replicas()
            assert len(replicas) == REPLICAS
            retried = metric(client, "dent_retried_total")
            answers = [crowd.submit(client.post, "/predict", **npy(images)) for _ in range(2 * BATCH)]
            answers[0].result()
            killed = find_busy(replicas)
            os.kill(killed, signal.SIGSTOP)
            time.sleep(1)  # what it is given now, it keeps, however slow the front is
            os.kill(killed, signal.SIGKILL)
            for one in answers:
                assert [each["class"] for each in predicted(one.result())] == expected
            wait_until(lambda: len(server.replicas() - {killed}) == REPLICAS)  # noqa: B023 - at once
            if metric(client, "dent_retried_total") > retried:
                return
    pytest.fail("no replica was killed at its work")


def test_sigterm_finishes_what_was_taken_in(server: Started, images: Tensor) -> None:
    """Requests whose bodies end only after it are answered. The last test of this file."""
    request, goes_on = npy(images), threading.Event()
    whole = request["content"]

    def in_halves() -> Iterator[bytes]:
        yield whole[:1000]
        goes_on.wait(120)
        yield whole[1000:]

    with server.client() as client, ThreadPoolExecutor(BATCH) as crowd:
        begun = metric(client, "dent_requests_open")
        answers = [
            crowd.submit(client.post, "/predict", content=in_halves(), headers=request["headers"])
            for _ in range(BATCH)
        ]
        try:
            wait_until(lambda: metric(client, "dent_requests_open") == begun + BATCH)
            server.process.send_signal(signal.SIGTERM)
            wait_until(lambda: client.get("/health").status_code == 503)
        finally:
            goes_on.set()
        for one in answers:
            assert len(predicted(one.result())) == len(images)
    assert server.process.wait(120) == 0
    with pytest.raises(httpx.ConnectError):
        httpx.get(server.url + "/health", trust_env=False)
    assert not server.replicas()
