"""What the server checks before it starts, and what it makes of Ray's errors; Ray is not started."""

from __future__ import annotations

import asyncio
import importlib
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dent.serving.answers import answer_batch
from dent.serving.batches import Answered
from dent.serving.limits import Refused
from dent.serving.settings import make_serving

pytest.importorskip("ray.serve")

from ray.exceptions import ActorDiedError
from ray.serve._private.common import DeploymentID
from ray.serve.exceptions import DeploymentUnavailableError

from dent.serving.deployments import (
    STUCK,
    Described,
    Front,
    Model,
    copies,
    defended,
    described,
    most_inside,
)
from dent.serving.run import check_port, serve_until_stopped, start_proxy, threads_of

SERVING = make_serving(queue=10, batch_size=4, replicas=2)
ABOUT: Any = {"model": "none", "defense": "static", "isolation": "independent"}
UNAVAILABLE = DeploymentUnavailableError(DeploymentID("model"))
TOLD = Described(ABOUT, shared=True, steps=6)
ANSWERED = [Answered()]


class Replies:
    """A handle of a deployment whose replicas answer in turn, or do not."""

    def __init__(self, *replies: Any) -> None:
        self.replies = list(replies)
        self.answer = self.alive = self

    def remote(self, *_: Any) -> Replies:
        return self

    def __await__(self) -> Any:
        return self._reply().__await__()

    async def _reply(self) -> Any:
        reply = self.replies.pop(0)
        if isinstance(reply, float):
            await asyncio.sleep(reply)
        if isinstance(reply, Exception):
            raise reply
        return reply


def front(*replies: Any) -> Front:
    return Front(Replies(*replies), SERVING, TOLD, None)


def compute(made: Front) -> list[Answered]:
    return asyncio.run(made.compute(torch.zeros(1, 3, 32, 32).numpy(), [1], 6))


def test_a_replica_that_dies_is_followed_by_another() -> None:
    made = front(ActorDiedError(), ANSWERED)
    assert compute(made) is ANSWERED
    assert "dent_retried_total 1.0" in made.metrics.text()


@pytest.mark.parametrize(
    ("replies", "says"),
    [
        ([ActorDiedError(), ActorDiedError(), ANSWERED], "two replicas of the model died"),
        ([UNAVAILABLE, ANSWERED], "no replica of the model can be started"),
    ],
)
def test_what_is_not_tried_again(replies: list[Any], says: str) -> None:
    made = front(*replies)
    with pytest.raises(Refused, match=says) as refused:
        compute(made)
    assert refused.value.status == 503
    assert made.model.replies == [ANSWERED]


def test_without_a_replica_it_is_not_healthy() -> None:
    with pytest.raises(Refused, match="no replica"):
        asyncio.run(front(ActorDiedError()).alive())
    asyncio.run(front(None).alive())


def test_a_replica_that_hangs_is_not_healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(SERVING, torch.get_num_threads(), str(Path.cwd()), [])
    asyncio.run(model.check_health())
    long_ago = time.perf_counter() - STUCK * SERVING.deadline
    monkeypatch.setattr(model.replica, "_began", long_ago + 5)
    asyncio.run(model.check_health())
    monkeypatch.setattr(model.replica, "_began", long_ago - 5)
    with pytest.raises(RuntimeError, match="expected a batch to end"):
        asyncio.run(model.check_health())


def test_ray_chooses_the_replicas_only_if_asked_for() -> None:
    assert copies(SERVING) == {"num_replicas": 2}
    several = make_serving(replicas=2, max_replicas=5, batch_size=4, queue=10)
    scaled = copies(several)["autoscaling_config"]
    assert (scaled["min_replicas"], scaled["max_replicas"]) == (2, 5)
    assert most_inside(several) == 10 + 5 * 4


def test_how_many_are_taken_in() -> None:
    assert most_inside(SERVING) == 10 + 2 * 4


@pytest.mark.parametrize(
    ("asked", "isolation"),
    [
        ({}, "independent: "),
        ({"shared_batches": True}, "independent: "),
        ({"defense": "dent:steps=1"}, "own batches: "),
        ({"defense": "dent:steps=1", "shared_batches": True}, "shared batches: "),
    ],
)
def test_it_says_how_clients_are_kept_apart(asked: dict[str, Any], isolation: str) -> None:
    assert described(make_serving(**asked)).about["isolation"].startswith(isolation)


MODULE = """
from torch import nn

def model():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 10)).eval()
"""


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"model": "resnet2"}, "resnet20"),
        ({"classes": "cat,dog"}, "names for the 10 classes"),
        ({"model": "of_mine:model"}, "expected a model of images of 32 x 32 pixels, got: "),
    ],
)
def test_what_cannot_be_served_is_told_before_anything_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: Any, says: str
) -> None:
    (tmp_path / "of_mine.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    assert described(make_serving(model="of_mine:model", size="8x8")).about["model"] == "of_mine:model"
    with pytest.raises(ValueError, match=says):
        described(make_serving(**asked))


def test_the_model_that_is_served_is_the_one_that_was_asked_for() -> None:
    defense = defended(make_serving(defense="dent+:objective=entropy,reduction=sum,steps=2"))
    (answer,) = answer_batch(defense, torch.rand(1, 3, 32, 32))
    assert answer.steps == 2


def test_a_port_that_is_taken() -> None:
    """Also by a server that would share it, as Ray's proxy does."""
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"expected a free port at 127.0.0.1, got {port}: "):
            serve_until_stopped(make_serving(port=port))
    check_port("127.0.0.1", port)


@pytest.mark.parametrize(
    ("proxies", "address", "applications", "says"),
    [
        ({}, None, {}, None),
        ({"node": "HEALTHY"}, ("127.0.0.1", 8000), {"other": None}, None),
        ({"node": "HEALTHY"}, ("127.0.0.1", 8000), {"dent": None}, "without a server of dent"),
        ({"node": "HEALTHY"}, ("127.0.0.1", 8001), {}, "there already, at 127.0.0.1:8001; give that"),
        ({"node": "HEALTHY"}, ("0.0.0.0", 8000), {}, "there already, at 0.0.0.0:8000; give that"),
    ],
)
def test_a_cluster_with_ray_serve_on_it_is_not_taken_for_another(
    monkeypatch: pytest.MonkeyPatch, proxies: Any, address: Any, applications: Any, says: str | None
) -> None:
    """Ray itself would ignore the address, and replace an application of the same name."""
    started: list[Any] = []
    there = SimpleNamespace(proxies=proxies, applications=applications)
    monkeypatch.setattr("ray.serve.status", lambda: there)
    monkeypatch.setattr("ray.serve.start", lambda **options: started.append(options["http_options"]))
    if address:
        options = SimpleNamespace(host=address[0], port=address[1])
        monkeypatch.setattr(
            "dent.serving.run._get_global_client", lambda: SimpleNamespace(http_config=options)
        )
    if says:
        with pytest.raises(ValueError, match=says):
            start_proxy(make_serving())
        assert not started
    else:
        assert start_proxy(make_serving()) is not bool(proxies)
        assert started == ([] if proxies else [{"host": "127.0.0.1", "port": 8000}])


@pytest.mark.parametrize("token", ["", " ", "geheimnis\n", "schlüssel"])
def test_a_token_that_no_client_can_send(token: str) -> None:
    with pytest.raises(ValueError, match="expected a token"):
        serve_until_stopped(make_serving(), token=token)


def test_threads_are_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)), raising=False)
    assert threads_of(make_serving(replicas=3)) == 2
    assert threads_of(make_serving(replicas=9)) == 1
    assert threads_of(make_serving(replicas=1, max_replicas=3)) == 2
    assert threads_of(make_serving(replicas=3, threads=5)) == 5


def test_without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "dent.serving.run")
    with pytest.raises(ImportError, match=r"serving needs: pip install 'dent-defense\[serve\]'"):
        importlib.import_module("dent.serving.run")


def test_the_command_line_loads_no_ray_and_tells_faults_in_a_line() -> None:
    script = "import sys, dent.cli; sys.exit(any(x in sys.modules for x in ('ray', 'fastapi', 'PIL')))"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
    command = [sys.executable, "-m", "dent", "serve", "--max-wait", "soon", "--batch-size", "0"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 2
    assert run.stderr.startswith("dent: 2 wrong settings of the server:")
