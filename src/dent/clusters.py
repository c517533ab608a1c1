"""Start Ray for this program alone, or join a cluster that is running."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from ipaddress import IPv6Address, ip_address
from socket import create_connection
from typing import Any

from dent.texts import join_lines

OBJECT_STORE = 200 * 2**20  # bytes
# Ray listens on this machine only, as it does by default on macOS and Windows. Without this, all of its
# ports are open to the network on Linux.
LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
SILENT = {"RAY_USAGE_STATS_ENABLED": "0"}  # Ray reports nothing to its makers

Address = tuple[str, int]  # IP address and port


@contextmanager
def connect(
    address: str | None = None,
    *,
    cpus: int = 1,
    store: int = OBJECT_STORE,
    variables: Mapping[str, str] | None = None,
    system: Mapping[str, Any] | None = None,
) -> Iterator[bool]:
    """Start or join Ray, or use what the program has started before; yield True if others may use it.

    Several runs in one such block start Ray once. Only this machine can reach the Ray that starts here,
    and only with Ray's own token.

    address: address of a running cluster, such as "auto" or "10.0.0.1:6379".
    cpus: number of tasks that run at once, if Ray starts here.
    store: size of the object store in bytes, if Ray starts here.
    variables: environment variables of the workers. (Ray's own option would start each worker twice.)
    system: system settings of Ray, if it starts here.
    """
    import ray

    if ray.is_initialized():
        yield True
        return
    constants = ray._private.ray_constants
    spread = constants.ENABLE_RAY_CLUSTER
    # Ray would print about dead workers among our tables; the errors of their units say it.
    ray._private.worker._worker_logs_enabled = False
    try:
        if address is None:
            constants.ENABLE_RAY_CLUSTER = False  # LOOPBACK, in this process
            before = list_open_ports()
            with set_environment({**(variables or {}), **LOOPBACK, **SILENT}):
                ray.init(
                    "local", num_cpus=cpus, object_store_memory=store, include_dashboard=False,
                    log_to_driver=False, logging_level=logging.ERROR, _system_config=dict(system or {}),
                )  # fmt: skip
            check_open_ports(allowed=before)
        else:
            _join(ray, address)
        yield address is not None
    finally:
        ray.shutdown()  # leaves a cluster that others started running
        ray._private.worker._worker_logs_enabled = True
        constants.ENABLE_RAY_CLUSTER = spread


def list_open_ports() -> set[Address]:
    """Return the addresses at which other machines can reach this process or its children."""
    try:
        import psutil
    except ImportError as error:
        raise ImportError(
            f"Ray's ports are checked with psutil: pip install 'dent-defense[ray]' ({error})"
        ) from error
    addresses: set[Address] = set()
    this = psutil.Process()
    for process in (this, *this.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):  # it has ended
            addresses |= {
                (one.laddr.ip, one.laddr.port)
                for one in process.net_connections("inet")
                if one.status == psutil.CONN_LISTEN and not is_loopback(one.laddr.ip)
            }
    return addresses


def check_open_ports(allowed: Collection[Address] = ()) -> None:
    """Raise ConnectionError if other machines can reach this process or its children.

    Ray's processes run any code that they are sent, and what keeps them to this machine are private
    settings of Ray. So we look at the sockets instead of trusting the settings.

    allowed: addresses that may be open.
    """
    if wrong := list_open_ports() - set(allowed):
        places = ", ".join(f"port {port} at {host}" for host, port in sorted(wrong))
        raise ConnectionError(
            f"expected Ray to listen on this machine only, got {places}, which other machines can "
            "reach; install a version of Ray that dent supports: pip install 'dent-defense[ray]'"
        )


def is_loopback(ip: str) -> bool:
    """Return True if only this machine can reach an IP address.

    >>> [is_loopback(ip) for ip in ("127.0.0.1", "::1", "::ffff:127.0.0.1", "0.0.0.0", "::")]
    [True, True, True, False, False]
    """
    address = ip_address(ip)
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return (mapped or address).is_loopback


def count_cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def list_variables(threads: int) -> dict[str, str]:
    """Return the environment variables that a worker needs before it loads torch."""
    needed = {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}
    return needed | {name: os.environ[name] for name in ("DENT_HOME",) if name in os.environ}


def prepare_worker(threads: int, folder: str, path: Sequence[str]) -> None:
    """Have this worker compute with so many threads, and find files and modules as the program does.

    folder, path: the current folder of the program that started Ray, and where it finds modules.
    """
    import torch

    torch.set_num_threads(threads)
    with suppress(OSError):  # on another machine it may not be there
        os.chdir(folder)
    sys.path += [place for place in path if place not in sys.path]


@contextmanager
def set_environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables within, and restore them at the end.

    Ray gives its processes the environment of this process and takes no other, so these variables are
    set for the moment in which Ray starts.
    """
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _join(ray: Any, address: str) -> None:
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        if host and port.isdigit():  # Ray itself would try for minutes
            create_connection((host.strip("[]"), int(port)), timeout=10).close()
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
    except OSError as error:
        said = join_lines(error)
        raise ConnectionError(
            f"expected a cluster of Ray at {address}, got {said}; start one with: ray start --head. If "
            "it is there and asks for a token, set RAY_AUTH_MODE=token"
        ) from error
