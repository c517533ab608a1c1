"""Start the server, and stop it without losing an answer."""

from __future__ import annotations

import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from dent.clusters import (
    Address,
    check_open_ports,
    connect,
    count_cores,
    list_open_ports,
    list_variables,
)
from dent.serving.settings import Serving

try:
    import ray
    from ray import serve
    from ray.serve.context import _get_global_client

    from dent.serving.app import Token
    from dent.serving.deployments import GRACE, lower_proxies, make_application
    from dent.serving.replica import Service, describe_service
except ImportError as error:
    raise ImportError(f"serving needs: pip install 'dent-defense[serve]' ({error})") from error

APP = "dent"
LOGS = {"enable_access_log": False, "log_level": "WARNING"}
SIGNALS = (signal.SIGTERM, signal.SIGINT)
# Keep freed memory: the system zeroes what it gives out again, which costs as much as a convolution at
# every step. Threads beyond the first keep it only if all share one arena.
KEEP_MEMORY = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(32 * 2**20),
    "MALLOC_TRIM_THRESHOLD_": str(16 * 2**30),
}
# One event loop per process is enough, because nothing here blocks it. Metrics are the server's own.
LEAN = {
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_enable_metrics_collection": "0",
}


@dataclass(frozen=True)
class Server:
    """A server that is running: where, and what it serves."""

    url: str
    service: Service


def serve_until_stopped(
    serving: Serving,
    *,
    token: str | None = None,
    address: str | None = None,
    ready: Callable[[Server], None] = lambda server: None,
) -> None:
    """Serve until SIGTERM or SIGINT; requests that were accepted by then are still answered.

    token: what clients must send (default: no token).
    address: of a running Ray cluster (default: start Ray here, reachable from this machine only).
    ready: called when requests are answered.
    """
    if token is not None and not (token.isascii() and token.isprintable() and token.strip()):
        raise ValueError("expected a token of printable ASCII characters, got another or an empty one")
    if address is None:
        check_port(serving.host, serving.port)
    service = describe_service(serving)
    stop = threading.Event()
    handlers = {one: signal.getsignal(one) for one in SIGNALS}
    may_be_open = list_open_ports() | find_addresses(serving)
    try:
        with start_ray(serving, address) as is_shared:
            for one in SIGNALS:  # not earlier, because Ray sets its own
                signal.signal(one, lambda *_: stop.set())
            with run_server(serving, service, token) as server:
                if not is_shared:
                    check_open_ports(may_be_open)
                ready(server)
                stop.wait()
    finally:
        for one, handler in handlers.items():
            signal.signal(one, handler)


def start_ray(serving: Serving, address: str | None = None) -> AbstractContextManager[bool]:
    """Start Ray for this server alone, or join a running cluster, until the end of the block."""
    threads = count_threads(serving)
    needed = list_variables(threads) | KEEP_MEMORY | LEAN
    return connect(
        address, cpus=serving.most_replicas * threads, variables=needed, system={"worker_niceness": 0}
    )


@contextmanager
def run_server(serving: Serving, service: Service, token: str | None = None) -> Iterator[Server]:
    """Run the server on Ray until the end of the block, then answer what it has accepted.

    Ray's own shutdown ends its proxy at once, with all connections, so nobody may be connected then.
    """
    logging.getLogger("ray.serve").setLevel(logging.WARNING)  # of this process
    started = start_proxy(serving)
    try:
        key = None if token is None else Token(token)
        app = make_application(serving, service, key, count_threads(serving))
        front = serve.run(app, name=APP, logging_config=LOGS)
        if started:
            lower_proxies()
        host = f"[{serving.host}]" if ":" in serving.host else serving.host
        yield Server(f"http://{host}:{serving.port}", service)
        with suppress(ray.exceptions.RayActorError):  # if the front died, nobody waits
            most = serving.deadline + GRACE
            front.drain.remote(most).result(timeout_s=most + GRACE)
    finally:
        serve.delete(APP)  # which waits until the last answers have left the front
        if started:
            serve.shutdown()  # type: ignore[no-untyped-call]


def start_proxy(serving: Serving) -> bool:
    """Have Ray Serve listen at the right address; return False if it was running already.

    A cluster has one Ray Serve, with one address for all. If it runs already at another address, Ray
    would ignore ours and not say so.
    """
    status = serve.status()
    if not status.proxies:
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
    if APP in status.applications:
        raise ValueError(
            "expected a cluster without a server of dent, got one that has it; end it first"
        )
    return False


def check_port(host: str, port: int) -> None:
    """Raise OSError if the port is taken; Ray would share it, and requests would go to either server."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a server that has ended is none
        try:
            probe.bind((host, port))
        except OSError as error:
            raise OSError(
                f"expected a free port at {host}, got {port}: {error.strerror}; choose another --port"
            ) from error


def find_addresses(serving: Serving) -> set[Address]:
    """Return the IP addresses, with the port, that the user has chosen to listen on."""
    found = socket.getaddrinfo(serving.host, serving.port, type=socket.SOCK_STREAM)
    return {(str(ip), serving.port) for *_, (ip, *_) in found}


def count_threads(serving: Serving) -> int:
    """Return the threads of a replica: as set, or the cores divided among replicas."""
    return serving.threads or max(1, count_cores() // serving.most_replicas)
