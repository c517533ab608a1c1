"""The server from its start to its end, at which no answer is lost."""

from __future__ import annotations

import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from dent.clusters import connected, cores
from dent.serving.settings import Serving

try:
    import ray
    from ray import serve
    from ray.serve.context import _get_global_client

    from dent.serving.app import About, Token
    from dent.serving.deployments import GRACE, Described, application, described
    from dent.serving.priority import lower_proxies
except ImportError as error:
    raise ImportError(f"serving needs: pip install 'dent-defense[serve]' ({error})") from error

APP = "dent"
LOGS = {"enable_access_log": False, "log_level": "WARNING"}
SIGNALS = (signal.SIGTERM, signal.SIGINT)
# Memory that is given back is zeroed again at the next step, which costs as much as a convolution; so is
# that of any thread but the first, unless all share an arena.
KEEP_MEMORY = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(32 * 2**20),
    "MALLOC_TRIM_THRESHOLD_": str(16 * 2**30),
}


# Nothing here blocks an event loop, so one is enough for a process; and metrics are the server's own.
LEAN = {
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_enable_metrics_collection": "0",
}


@dataclass(frozen=True)
class Server:
    """A server that is running: where, and what it serves."""

    url: str
    about: About


def serve_until_stopped(
    serving: Serving,
    *,
    token: str | None = None,
    address: str | None = None,
    ready: Callable[[Server], None] = lambda server: None,
) -> None:
    """Serve until SIGTERM or SIGINT comes; what was taken in by then is still answered.

    token: what clients must know; they need none if not given.
    address: of a cluster of Ray that is there already; else Ray is started here.
    ready: called when requests are answered.
    """
    if token is not None and not (token.isascii() and token.isprintable() and token.strip()):
        raise ValueError("expected a token of ASCII letters and signs, got another, or an empty one")
    if address is None:
        check_port(serving.host, serving.port)
    told = described(serving)
    stop = threading.Event()
    before = {one: signal.getsignal(one) for one in SIGNALS}
    try:
        with cluster(serving, address):
            for one in SIGNALS:  # only now: Ray sets one of its own
                signal.signal(one, lambda *_: stop.set())
            with running(serving, told, token) as server:
                ready(server)
                stop.wait()
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


def cluster(serving: Serving, address: str | None = None) -> AbstractContextManager[bool]:
    """Ray, started here for this server alone, or one that is there already."""
    threads = threads_of(serving)
    needed = {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE", **KEEP_MEMORY, **LEAN}
    return connected(
        address, cpus=serving.most_replicas * threads, variables=needed, system={"worker_niceness": 0}
    )


@contextmanager
def running(serving: Serving, told: Described, token: str | None = None) -> Iterator[Server]:
    """The server on Ray, until the end of the block; what it has taken in then, it finishes first.

    Ray's own shutdown ends its proxy at once, with all connections; so nobody may be there any more.
    """
    key = None if token is None else Token(Token.digest_of(token))
    logging.getLogger("ray.serve").setLevel(logging.WARNING)  # of this process
    started = start_proxy(serving)
    try:
        app = application(serving, told, key, threads_of(serving))
        front = serve.run(app, name=APP, logging_config=LOGS)
        if started:
            lower_proxies()
        host = f"[{serving.host}]" if ":" in serving.host else serving.host
        yield Server(f"http://{host}:{serving.port}", told.about)
        with suppress(ray.exceptions.RayActorError):  # where it died, nobody waits
            most = serving.deadline + GRACE
            front.drain.remote(most).result(timeout_s=most + GRACE)
    finally:
        serve.delete(APP)  # which waits until the last answers have left the front
        if started:
            serve.shutdown()  # type: ignore[no-untyped-call]


def start_proxy(serving: Serving) -> bool:
    """Have Ray Serve listen where it should; whether it was not there before.

    A cluster has one Ray Serve, with one address for all: where it is there already and listens
    elsewhere, Ray would go on, and say that it does as it was asked.
    """
    there = serve.status()
    if not there.proxies:
        serve.start(
            proxy_location="HeadOnly", logging_config=LOGS,
            http_options={"host": serving.host, "port": serving.port},
        )  # fmt: skip
        return True
    client: Any = _get_global_client()
    options = client.http_config
    if (options.host, options.port) != (serving.host, serving.port):
        raise ValueError(
            f"expected Ray Serve of this cluster at {serving.host}:{serving.port}, got one that is "
            f"there already, at {options.host}:{options.port}; give that as --host and --port"
        )
    if APP in there.applications:
        raise ValueError(
            "expected a cluster without a server of dent, got one that has it; end it first"
        )
    return False


def check_port(host: str, port: int) -> None:
    """Say so if the port is taken; Ray would share it, and every other request get another server."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # one that has ended is no other
        try:
            probe.bind((host, port))
        except OSError as error:
            raise OSError(
                f"expected a free port at {host}, got {port}: {error.strerror}; choose another --port"
            ) from error


def threads_of(serving: Serving) -> int:
    """Threads of a replica: as asked, or the cores shared out."""
    return serving.threads or max(1, cores() // serving.most_replicas)
