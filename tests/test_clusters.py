"""Ray's processes can be reached from this machine only, or nothing is run."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from dent.clusters import check_open_ports, connect, list_open_ports

ray = pytest.importorskip("ray")

LISTEN = """
import socket, sys
family = socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET
with socket.create_server((sys.argv[1], 0), family=family) as server:
    print(server.getsockname()[1], flush=True)
    sys.stdin.read()
"""
Listen = Callable[[str], int]


@pytest.fixture
def listen() -> Iterator[Listen]:
    """Start children of this process that listen at an address; they end with the test."""
    children: list[subprocess.Popen[str]] = []

    def start(host: str) -> int:
        command = [sys.executable, "-c", LISTEN, host]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        children.append(child)
        assert child.stdout is not None
        return int(child.stdout.readline())

    yield start
    for child in children:
        child.communicate("")


def test_a_port_that_others_can_reach_is_an_error_unless_it_is_allowed(listen: Listen) -> None:
    before = list_open_ports()
    listen("127.0.0.1")
    check_open_ports(before)
    port = listen("0.0.0.0")
    assert list_open_ports() - before == {("0.0.0.0", port)}
    with pytest.raises(
        ConnectionError, match=f"on this machine only, got port {port} at 0.0.0.0, which"
    ):
        check_open_ports(before)
    check_open_ports({*before, ("0.0.0.0", port)})


def test_a_ray_that_others_can_reach_is_stopped(listen: Listen, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it would be if Ray gave its private settings another name."""
    stopped: list[bool] = []
    monkeypatch.setattr(ray, "init", lambda *_, **__: listen("0.0.0.0"))
    monkeypatch.setattr(ray, "shutdown", lambda: stopped.append(True))
    with (
        pytest.raises(ConnectionError, match="expected Ray to listen on this machine only"),
        connect(),
    ):
        pytest.fail("went on")
    assert stopped == [True]
