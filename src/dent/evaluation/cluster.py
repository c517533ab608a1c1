"""Workers of Ray, on this machine or on a cluster; a unit whose worker dies is done again by another."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from copy import deepcopy
from dataclasses import replace
from typing import Any
from uuid import uuid4

import torch

from dent import clusters
from dent.evaluation.engines import Engine
from dent.evaluation.perform import OutOfBallError, Task, perform
from dent.evaluation.sources import Sources
from dent.evaluation.units import Done

RETRIES = 3  # of a unit whose worker died: killed, out of memory, or with its machine

_sources: dict[str, Sources] = {}  # in a worker: models and images of the run that it works for


@contextmanager
def cluster(
    sources: Sources, *, threads: int, workers: int | None, address: str | None
) -> Iterator[Engine]:
    """Units are done by workers of Ray with so many threads each.

    Without an address, workers are started here, as many as there are cores for, and end with the
    run. With one ("auto", "10.0.0.1:6379"), they are those of a cluster that is there already, all of
    them unless told. Where the program called `ray.init` before, that is what is used. On "cuda",
    every worker has a GPU for itself.

    All machines need the same packages; named models and images are loaded there, once by each
    worker, and must be the same files. What is in memory is sent.
    """
    ray, device = _ray(), sources.evaluation.device
    luggage = _packed(ray, sources, threads)
    with connected(
        threads=threads, workers=workers, address=address, device=device, extra=2 * len(luggage)
    ) as shared:
        gpus = _gpus(device)
        room = _room(ray, threads, gpus)
        # One task more than it works at for each worker: none waits, and chains go on side by side.
        # Where others work too, no more are given than were asked for: they would be done at once.
        slots = workers if shared and workers else 2 * (workers or room)
        there = ray.remote(perform_there).options(
            num_cpus=threads,
            num_gpus=gpus,
            max_retries=RETRIES,
            runtime_env={"env_vars": _surroundings(threads)} if shared else None,
        )
        engine = Workers(ray, there, ray.put(luggage), slots)
        try:
            yield engine
        finally:
            if shared:
                engine.cancel()


def connected(
    *, threads: int, workers: int | None, address: str | None, device: str, extra: int = 0
) -> AbstractContextManager[bool]:
    """Within, Ray is there for so many workers, with the store for so many bytes more than else."""
    _ray()
    room = torch.cuda.device_count() if _gpus(device) else max(1, clusters.cores() // threads)
    return clusters.connected(
        address, cpus=(workers or room) * threads, store=clusters.OBJECT_STORE + extra,
        variables=_surroundings(threads),
        system={"task_oom_retries": RETRIES},  # else it would try for ever
    )  # fmt: skip


def _gpus(device: str) -> int:
    return 1 if device.startswith("cuda") else 0


class WorkerError(OSError):
    """Ray or all of its workers cannot go on: the run stops."""


class Workers:
    """Tasks of Ray: each unit goes to a worker that is free."""

    def __init__(self, ray: Any, there: Any, luggage: Any, slots: int) -> None:
        self.slots = slots
        self._ray, self._there, self._luggage = ray, there, luggage
        self._run = uuid4().hex
        self._tasks: dict[Any, Task] = {}

    def submit(self, task: Task) -> None:
        # In a list, it is fetched by a worker that has none yet, not for every task.
        self._tasks[self._there.remote(self._run, [self._luggage], task)] = task

    def finished(self) -> Done:
        errors = self._ray.exceptions
        (reference, *_), _ = self._ray.wait(list(self._tasks), num_returns=1)
        task = self._tasks.pop(reference)
        try:
            done: Done = self._ray.get(reference)
        except errors.RayTaskError as error:  # raised there, but not by the unit
            if isinstance(error.cause, OutOfBallError):
                raise error.cause from None
            raise WorkerError(
                f"a worker could not begin ({_said(error.cause)}); all machines need the same packages, "
                "and the modules that models and images come from"
            ) from error
        except (errors.WorkerCrashedError, errors.OutOfMemoryError, errors.NodeDiedError) as error:
            return Done(task.unit, error=_said(error))
        except errors.RayError as error:
            raise WorkerError(
                f"Ray failed ({_said(error)}); what was finished is kept. Run the same command again"
            ) from error
        return done

    def cancel(self) -> None:
        """Stop what is not finished: of a run that was interrupted, or broke its rules."""
        for reference in self._tasks:
            self._ray.cancel(reference)  # by force, Ray may take this process with it
        self._tasks.clear()


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]  # Ray can say pages


def perform_there(run: str, luggage: list[Any], task: Task) -> Done:
    """In a worker: what all units of a run need is fetched with its first one, and kept."""
    if run not in _sources:
        _sources.clear()  # of a run before
        _sources[run] = _unpacked(_ray().get(luggage[0]))
    return perform(task, _sources[run])


def _packed(ray: Any, sources: Sources, threads: int) -> bytes:
    """As bytes, for arrays that come out of Ray's store cannot be written to."""
    if sources.evaluation.device.startswith("cuda"):  # a worker's GPU may have another number
        given = {name: deepcopy(model).cpu() for name, model in sources.given.items()}
        sources = replace(sources, given=given)
    try:
        packed = ray.cloudpickle.dumps(sources)
    except Exception as error:
        raise TypeError(
            f"expected models and images that can be sent to workers, got {_said(error)}; give them by "
            "name, as package.module:function"
        ) from error
    return pickle.dumps((threads, os.getcwd(), sys.path, packed))


def _unpacked(luggage: bytes) -> Sources:
    threads, folder, path, packed = pickle.loads(luggage)
    torch.set_num_threads(threads)
    with suppress(OSError):  # on another machine it may not be there
        os.chdir(folder)
    sys.path += [place for place in path if place not in sys.path]
    sources: Sources = pickle.loads(packed)
    if sources.evaluation.device.startswith("cuda"):  # the only one that a worker sees
        sources.evaluation = replace(sources.evaluation, device="cuda")
    return sources


def _surroundings(threads: int) -> dict[str, str]:
    """What the environment of a worker must have before torch is loaded."""
    needed = {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}
    return needed | {name: os.environ[name] for name in ("DENT_HOME",) if name in os.environ}


def _ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise ImportError("engine='ray' needs: pip install 'dent-defense[ray]'") from error
    return ray


def _room(ray: Any, threads: int, gpus: int) -> int:
    """How many tasks the machines have room for at once."""
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
