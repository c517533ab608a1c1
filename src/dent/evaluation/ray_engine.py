"""Workers of Ray, on this machine or on a cluster. If a worker dies, another one repeats its unit."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from copy import deepcopy
from dataclasses import replace
from typing import Any
from uuid import uuid4

import torch
from torch import nn

from dent import clusters
from dent.attacks.checks import InvalidPointsError
from dent.evaluation.execute import Engine, Task, execute_task
from dent.evaluation.sources import Sources
from dent.evaluation.store import UnitResult

RETRIES = 3  # of a unit whose worker died: killed, out of memory, or with its machine

_sources: dict[str, Sources] = {}  # in a worker: models and images of the run that it works for


@contextmanager
def start_workers(
    sources: Sources, *, threads: int, workers: int | None, address: str | None
) -> Iterator[Engine]:
    """Run units by Ray workers with so many threads each.

    Without an address, Ray starts here, with as many workers as there are cores for, and ends with the
    run. With an address ("auto", "10.0.0.1:6379"), the workers are those of a running cluster. If the
    program has called `ray.init` before, that cluster is used. On "cuda", every worker has a GPU.

    All machines need the same packages. Each worker loads named models and images once, from the same
    files; models and images in memory are sent.
    """
    ray, device = _import_ray(), sources.evaluation.device
    luggage = _pack(ray, sources, threads)
    with connect_ray(
        threads=threads, workers=workers, address=address, device=device, extra=2 * len(luggage)
    ) as is_shared:
        gpus = _count_gpus(device)
        room = _count_room(ray, threads, gpus)
        # One task more than it works at for each worker: none waits, and chains go on side by side.
        # In a shared cluster, no more tasks than were asked for: they would run at once.
        slots = workers if is_shared and workers else 2 * (workers or room)
        remote = ray.remote(execute_there).options(
            num_cpus=threads,
            num_gpus=gpus,
            max_retries=RETRIES,
            runtime_env={"env_vars": clusters.list_variables(threads)} if is_shared else None,
        )
        engine = RayEngine(ray, remote, ray.put(luggage), slots)
        try:
            yield engine
        finally:
            if is_shared:
                engine.cancel()


def connect_ray(
    *, threads: int, workers: int | None, address: str | None, device: str, extra: int = 0
) -> AbstractContextManager[bool]:
    """Start or join Ray for so many workers, with so many bytes more in its object store."""
    _import_ray()
    cores = clusters.count_cores()
    room = torch.cuda.device_count() if _count_gpus(device) else max(1, cores // threads)
    return clusters.connect(
        address, cpus=(workers or room) * threads, store=clusters.OBJECT_STORE + extra,
        variables=clusters.list_variables(threads),
        system={"task_oom_retries": RETRIES},  # else it would try for ever
    )  # fmt: skip


class WorkerError(OSError):
    """Ray or all of its workers cannot go on: the run stops."""


class RayEngine:
    """Give each task to a free worker of Ray."""

    def __init__(self, ray: Any, remote: Any, luggage: Any, slots: int) -> None:
        self.slots = slots
        self._ray, self._remote, self._luggage = ray, remote, luggage
        self._run = uuid4().hex
        self._tasks: dict[Any, Task] = {}

    def submit(self, task: Task) -> None:
        # In a list, Ray does not fetch the luggage for every task: a worker fetches it once.
        self._tasks[self._remote.remote(self._run, [self._luggage], task)] = task

    def wait(self) -> UnitResult:
        errors = self._ray.exceptions
        (reference, *_), _ = self._ray.wait(list(self._tasks), num_returns=1)
        task = self._tasks.pop(reference)
        try:
            result: UnitResult = self._ray.get(reference)
        except errors.RayTaskError as error:  # raised in the worker, but not by the unit
            if isinstance(error.cause, InvalidPointsError):
                raise error.cause from None
            raise WorkerError(
                f"a worker could not begin ({_shorten(error.cause)}); all machines need the same "
                "packages, and the modules that models and images come from"
            ) from error
        except (errors.WorkerCrashedError, errors.OutOfMemoryError, errors.NodeDiedError) as error:
            return UnitResult(task.unit, error=_shorten(error))
        except errors.RayError as error:
            raise WorkerError(
                f"Ray failed ({_shorten(error)}); what was finished is kept. Run the same command again"
            ) from error
        return result

    def cancel(self) -> None:
        """Stop what is not finished, after an interruption or a broken rule."""
        for reference in self._tasks:
            self._ray.cancel(reference)  # by force, Ray may take this process with it
        self._tasks.clear()


def execute_there(run: str, luggage: list[Any], task: Task) -> UnitResult:
    """Execute a task in a worker. The first task of a run fetches what all of them need."""
    if run not in _sources:
        _sources.clear()  # of an earlier run
        _sources[run] = _unpack(_import_ray().get(luggage[0]))
    return execute_task(task, _sources[run])


def _pack(ray: Any, sources: Sources, threads: int) -> bytes:
    """Return what a worker needs, as bytes: arrays from Ray's store cannot be written to."""
    if sources.evaluation.device.startswith("cuda"):  # a worker's GPU may have another number
        given, own = (_move_to_cpu(held) for held in (sources.given, sources.own))
        sources = replace(sources, given=given, own=own)
    sources.check_states()
    try:
        packed = ray.cloudpickle.dumps(sources)
    except Exception as error:
        raise TypeError(
            f"expected models and images that can be sent to workers, got {_shorten(error)}; give them "
            "by name, as package.module:function"
        ) from error
    return pickle.dumps((threads, os.getcwd(), sys.path, packed))


def _move_to_cpu(held: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: deepcopy(one).cpu() if isinstance(one, nn.Module) else one for name, one in held.items()
    }


def _unpack(luggage: bytes) -> Sources:
    threads, folder, path, packed = pickle.loads(luggage)
    clusters.prepare_worker(threads, folder, path)
    sources: Sources = pickle.loads(packed)
    if sources.evaluation.device.startswith("cuda"):  # the only GPU that a worker sees
        sources.evaluation = sources.evaluation.replace(device="cuda")
    return sources


def _import_ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise ImportError("engine='ray' needs: pip install 'dent-defense[ray]'") from error
    return ray


def _count_gpus(device: str) -> int:
    return 1 if device.startswith("cuda") else 0


def _count_room(ray: Any, threads: int, gpus: int) -> int:
    """Return the number of tasks that the machines have room for at once."""
    room = 0
    for node in ray.nodes():
        if node["Alive"]:
            has = node["Resources"]
            fits = int(has.get("CPU", 0)) // threads
            room += min(fits, int(has.get("GPU", 0))) if gpus else fits
    if not room:
        raise ValueError(
            f"expected a machine with {threads} cores{' and a GPU' if gpus else ''} for a worker, got "
            f"a cluster of {ray.cluster_resources()}; ask for fewer threads, or add machines"
        )
    return room


def _shorten(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]  # Ray can say pages
