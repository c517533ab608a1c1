"""Who does the units: this process, or Ray's workers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch

from dent.evaluation.perform import Task, perform
from dent.evaluation.sources import Sources
from dent.evaluation.units import Done


class Engine(Protocol):
    """Takes tasks, and gives each back when it is done, in any order."""

    slots: int  # how many tasks it wants at once

    def submit(self, task: Task) -> None: ...

    def finished(self) -> Done:
        """Wait for one of the tasks."""
        ...


class Here:
    """One task after the other, in this process."""

    slots = 1

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._tasks: deque[Task] = deque()

    def submit(self, task: Task) -> None:
        self._tasks.append(task)

    def finished(self) -> Done:
        return perform(self._tasks.popleft(), self._sources)


@contextmanager
def here(sources: Sources, *, threads: int | None = None, **_: object) -> Iterator[Engine]:
    """Units are done here, with so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        yield Here(sources)
    finally:
        torch.set_num_threads(before)


@contextmanager
def ray(
    sources: Sources,
    *,
    threads: int | None = None,
    workers: int | None = None,
    address: str | None = None,
) -> Iterator[Engine]:
    """Workers of Ray, on this machine or on a cluster."""
    from dent.evaluation.cluster import cluster

    with cluster(sources, threads=threads or 1, workers=workers, address=address) as engine:
        yield engine


@contextmanager
def kept(
    engine: str, *, threads: int | None, workers: int | None, address: str | None, device: str
) -> Iterator[None]:
    """Several runs within share what their engine has to start: Ray."""
    if engine != "ray":
        yield
        return
    from dent.evaluation.cluster import connected

    with connected(threads=threads or 1, workers=workers, address=address, device=device):
        yield


ENGINES: dict[str, Callable[..., AbstractContextManager[Engine]]] = {"here": here, "ray": ray}
