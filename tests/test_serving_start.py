"""What the server checks before it starts, and what it makes of Ray's errors; Ray is not started."""

from __future__ import annotations

import asyncio
import importlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dent.clusters import is_loopback
from dent.serving.answers import answer_batch
from dent.serving.batches import Reply
from dent.serving.inputs import Refusal
from dent.serving.settings import Serving

pytest.importorskip("ray.serve")

from ray.exceptions import ActorDiedError
from ray.serve._private.common import DeploymentID
from ray.serve.exceptions import DeploymentUnavailableError

from dent.serving.deployments import STUCK, Front, Model, make_scaling
from dent.serving.replica import Service, describe_service, load_defense
from dent.serving.start import Server, check_port, count_threads, serve_until_stopped, start_proxy

SERVING = Serving(queue=10, batch_size=4, replicas=2)
UNAVAILABLE = DeploymentUnavailableError(DeploymentID("model"))
SERVICE = Service("none", "static", "independent", shared=True, steps=6)
ANSWERED = [Reply()]


class Replies:
    """A handle of a deployment whose replicas answer in turn, or do not."""

    def __init__(self, *replies: Any) -> None:
        self.replies = list(replies)
        self.answer = self.respond = self

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
    return Front(Replies(*replies), SERVING, SERVICE, None)


def compute(made: Front) -> list[Reply]:
    return asyncio.run(made.compute(torch.zeros(1, 3, 32, 32).numpy(), [1], 6))


def test_a_replica_that_dies_is_followed_by_another() -> None:
    made = front(ActorDiedError(), ANSWERED)
    assert compute(made) is ANSWERED
    assert "dent_retried_total 1.0" in made.metrics.format()


@pytest.mark.parametrize(
    ("replies", "says"),
    [
        ([ActorDiedError(), ActorDiedError(), ANSWERED], "two replicas of the model died"),
        ([UNAVAILABLE, ANSWERED], "no replica of the model can be started"),
    ],
)
def test_what_is_not_tried_again(replies: list[Any], says: str) -> None:
    made = front(*replies)
    with pytest.raises(Refusal, match=says) as refused:
        compute(made)
    assert refused.value.status == 503
    assert made.model.replies == [ANSWERED]


def test_without_a_replica_it_is_not_healthy() -> None:
    with pytest.raises(Refusal, match="no replica"):
        asyncio.run(front(ActorDiedError()).check_replica())
    asyncio.run(front(None).check_replica())


def test_a_replica_that_hangs_is_not_healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(SERVING, torch.get_num_threads(), str(Path.cwd()), [])
    asyncio.run(model.check_health())
    long_ago = time.perf_counter() - STUCK * SERVING.deadline
    monkeypatch.setattr(model.replica, "_start", long_ago + 5)
    asyncio.run(model.check_health())
    monkeypatch.setattr(model.replica, "_start", long_ago - 5)
    with pytest.raises(RuntimeError, match="expected a batch to end"):
        asyncio.run(model.check_health())


def test_ray_chooses_the_replicas_only_if_asked_for() -> None:
    assert make_scaling(SERVING) == {"num_replicas": 2}
    several = Serving(replicas=2, max_replicas=5, batch_size=4, queue=10)
    scaled = make_scaling(several)["autoscaling_config"]
    assert (scaled["min_replicas"], scaled["max_replicas"]) == (2, 5)
    assert several.max_requests == 10 + 5 * 4


def test_how_many_are_taken_in() -> None:
    assert SERVING.max_requests == 10 + 2 * 4


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
    service = describe_service(Serving(**asked))
    assert service.isolation.startswith(isolation)
    assert service.shared is not isolation.startswith("own")


MODULE = """
from torch import nn

class Centered(nn.Module):
    def forward(self, inputs):
        return inputs - inputs.mean(0)

def model():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 10)).eval()

def centered():
    return nn.Sequential(Centered(), model())
"""


def test_clients_do_not_share_batches_of_a_model_that_depends_on_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The defense alone would be independent; the model is not, and does not say so."""
    (tmp_path / "of_a_user.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    for name, shared in (("model", True), ("centered", False)):
        service = describe_service(Serving(model=f"of_a_user:{name}", size=(8, 8), defense="dent+solo"))
        assert service.shared is shared


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"model": "resnet2"}, "resnet20"),
        ({"classes": "cat,dog"}, "names for the 10 classes"),
        ({"device": "quantum"}, "expected a device that this machine has, got 'quantum'"),
        ({"device": "cuda:99"}, "expected a device that this machine has, got 'cuda:99'"),
        ({"model": "of_mine:model"}, "expected a model of images of 32 x 32 pixels, got: "),
    ],
)
def test_what_cannot_be_served_is_told_before_anything_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: Any, says: str
) -> None:
    (tmp_path / "of_mine.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    assert describe_service(Serving(model="of_mine:model", size=(8, 8))).model == "of_mine:model"
    with pytest.raises(ValueError, match=says):
        describe_service(Serving(**asked))


def test_the_model_that_is_served_is_the_one_that_was_asked_for() -> None:
    defense, _ = load_defense(Serving(defense="dent+solo:steps=2"))
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
            serve_until_stopped(Serving(port=port))
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
            "dent.serving.start._get_global_client", lambda: SimpleNamespace(http_config=options)
        )
    if says:
        with pytest.raises(ValueError, match=says):
            start_proxy(Serving())
        assert not started
    else:
        assert start_proxy(Serving()) is not bool(proxies)
        assert started == ([] if proxies else [{"host": "127.0.0.1", "port": 8000}])


@pytest.mark.parametrize("address", [None, "10.0.0.1:6379"])
@pytest.mark.parametrize(
    ("host", "listens", "is_right"),
    [
        ("127.0.0.1", ("127.0.0.1", 8000), True),
        ("127.0.0.1", ("0.0.0.0", 8000), False),
        ("127.0.0.1", ("::", 40000), False),  # a port of a replica
        ("0.0.0.0", ("0.0.0.0", 8000), True),
        ("0.0.0.0", ("0.0.0.0", 40000), False),
        ("localhost", ("0.0.0.0", 8000), False),
    ],
)
def test_a_server_that_others_can_reach_is_stopped_unless_it_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, host: str, listens: Any, is_right: bool, address: str | None
) -> None:
    """On a cluster that is there already, Ray listens as the cluster was started."""
    opened: set[Any] = set()
    ended: list[str] = []

    @contextmanager
    def start_ray(*_: Any) -> Iterator[bool]:
        yield address is not None

    @contextmanager
    def run_server(*_: Any) -> Iterator[Server]:
        if not is_loopback(listens[0]):
            opened.add(listens)
        try:
            yield Server("", SERVICE)
        finally:
            ended.append("server")

    def ready(server: Server) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("dent.serving.start.start_ray", start_ray)
    monkeypatch.setattr("dent.serving.start.run_server", run_server)
    monkeypatch.setattr("dent.serving.start.check_port", lambda *_: None)
    monkeypatch.setattr("dent.serving.start.describe_service", lambda _: SERVICE)
    for place in ("dent.clusters", "dent.serving.start"):
        monkeypatch.setattr(f"{place}.list_open_ports", lambda: {("0.0.0.0", 22), *opened})
    with pytest.raises(KeyboardInterrupt if is_right or address else ConnectionError) as error:
        serve_until_stopped(Serving(host=host), address=address, ready=ready)
    if error.type is ConnectionError:
        assert f"got port {listens[1]} at {listens[0]}, which other machines can reach" in str(
            error.value
        )
    assert ended == ["server"]


@pytest.mark.parametrize("token", ["", " ", "geheimnis\n", "schlüssel"])
def test_a_token_that_no_client_can_send(token: str) -> None:
    with pytest.raises(ValueError, match="expected a token"):
        serve_until_stopped(Serving(), token=token)


def test_threads_are_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)), raising=False)
    assert count_threads(Serving(replicas=3)) == 2
    assert count_threads(Serving(replicas=9)) == 1
    assert count_threads(Serving(replicas=1, max_replicas=3)) == 2
    assert count_threads(Serving(replicas=3, threads=5)) == 5


def test_without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "dent.serving.start")
    with pytest.raises(ImportError, match=r"serving needs: pip install 'dent-defense\[serve\]'"):
        importlib.import_module("dent.serving.start")


def test_the_command_line_loads_no_ray_and_tells_faults_in_a_line() -> None:
    script = (
        "import sys, dent.cli.serve; sys.exit(any(x in sys.modules for x in ('ray', 'fastapi', 'PIL')))"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
    command = [sys.executable, "-m", "dent", "serve", "--max-wait", "soon", "--batch-size", "0"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 2
    assert run.stderr.startswith("dent: 2 wrong settings of the server:")
