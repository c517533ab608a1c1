"""Ray: started for this program alone, or a cluster that is there already."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from socket import create_connection
from typing import Any

OBJECT_STORE = 200 * 2**20  # bytes
# Of its own accord, Ray does this on macOS and Windows only: without it, all of its ports are open to
# the network. What is started inherits it.
LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
SILENT = {"RAY_USAGE_STATS_ENABLED": "0"}  # nothing is told to anyone


@contextmanager
def connected(
    address: str | None = None,
    *,
    cpus: int = 1,
    store: int = OBJECT_STORE,
    variables: Mapping[str, str] | None = None,
    system: Mapping[str, Any] | None = None,
) -> Iterator[bool]:
    """Within, Ray is there: started or joined, or what the program has started before.

    Gives whether others may work there too. Several runs in one such block start Ray once. What is
    started here is reached from this machine only, and asks for Ray's own token.

    address: of a cluster that is there already, "auto" or "10.0.0.1:6379".
    cpus, store, system: of what is started: tasks at once, bytes for what is shared, Ray's settings.
    variables: of the environment of its workers. Ray's own way would be to start each worker twice.
    """
    import ray

    if ray.is_initialized():
        yield True
        return
    constants = ray._private.ray_constants
    spread = constants.ENABLE_RAY_CLUSTER
    # Else Ray prints about dead workers among our tables; their errors say it.
    ray._private.worker._worker_logs_enabled = False
    try:
        if address is None:
            constants.ENABLE_RAY_CLUSTER = False  # what LOOPBACK says, in this process
            with environment({**(variables or {}), **LOOPBACK, **SILENT}):
                ray.init(
                    "local", num_cpus=cpus, object_store_memory=store, include_dashboard=False,
                    log_to_driver=False, logging_level=logging.ERROR, _system_config=dict(system or {}),
                )  # fmt: skip
        else:
            _join(ray, address)
        yield address is not None
    finally:
        ray.shutdown()  # of a cluster that others started: leave it
        ray._private.worker._worker_logs_enabled = True
        constants.ENABLE_RAY_CLUSTER = spread


def cores() -> int:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """These variables in the environment, for a while."""
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
        said = " ".join(str(error).split())
        raise ConnectionError(
            f"expected a cluster of Ray at {address}, got {said}; start one with: ray start --head. If "
            "it is there and asks for a token, set RAY_AUTH_MODE=token"
        ) from error
