"""Which images are computed together, and when."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from itertools import count

import numpy as np
from numpy.typing import NDArray

from dent.serving.answers import Answer
from dent.serving.settings import Serving

Place = asyncio.Future[None]  # in a batch; done when it is given


@dataclass(frozen=True)
class Item:
    """What is put into a batch as a whole: images of one request, (N, 3, H, W)."""

    request: int
    images: NDArray[np.float32]
    place: Place


@dataclass(frozen=True)
class Batch:
    """What was computed at once: how many images, and how long it took."""

    size: int
    seconds: float


@dataclass(frozen=True)
class Answered:
    """Answers to images of a request.

    failed: why there are none, if the model failed on them.
    batches: those that they were first in, so that each is counted once.
    """

    answers: tuple[Answer, ...] = ()
    failed: str = ""
    batches: tuple[Batch, ...] = ()


# A batch: its images, how many of them go together each time, and the updates that they get.
Compute = Callable[[NDArray[np.float32], list[int], int], Awaitable[list[Answered]]]
Together = Callable[[list[Item]], Awaitable[list[Answered]]]
# Of a function of lists one of single items; with the size of a list, the time to wait for it, and how
# many of them may be computed at once.
Batching = Callable[[Together, int, float, int], Callable[[Item], Awaitable[Answered]]]


class Batches:
    """Collects the images of requests into batches, and has these computed.

    Where clients may share batches, images of several requests are computed together, at most
    `batch_size` of them; a larger request is spread over several. Else every request is a batch of its
    own, whatever its size.

    compute: answers a batch; as many are given to it at once as there are replicas, and one more full
    one for each, so that they need not wait for it.
    shared: whether clients share batches.
    steps: updates of the defense.
    batching: what collects items; Ray Serve's in a server.
    """

    def __init__(
        self, serving: Serving, compute: Compute, *, shared: bool, steps: int, batching: Batching
    ) -> None:
        self._serving, self._compute, self._shared, self._steps = serving, compute, shared, steps
        size, replicas = serving.batch_size if shared else 1, serving.most_replicas
        self._gate = Gate(size, replicas)
        wait = serving.max_wait if size > 1 else 0.0
        self._batched = batching(self._together, size, wait, 2 * replicas)
        self._numbers = count()
        self._waiting: set[int] = set()  # requests of which no image has been given away yet

    async def predict(self, images: NDArray[np.float32]) -> Answered:
        """Answer the images of a request, (N, 3, H, W)."""
        number = next(self._numbers)
        parts = np.split(images, len(images)) if self._shared else [images]
        self._waiting.add(number)
        try:
            found = await asyncio.gather(*(self._placed(number, part) for part in parts))
        finally:
            self._waiting.discard(number)
        return Answered(
            tuple(answer for one in found for answer in one.answers),
            next((one.failed for one in found if one.failed), ""),
            tuple(batch for one in found for batch in one.batches),
        )

    async def _placed(self, request: int, images: NDArray[np.float32]) -> Answered:
        async with self._gate.place() as place:
            return await self._batched(Item(request, images, place))

    async def _together(self, items: list[Item]) -> list[Answered]:
        self._waiting.difference_update(item.request for item in items)
        steps = self._serving.steps_for(self._steps, len(self._waiting))
        images = [item.images for item in items]
        with self._gate.working([item.place for item in items]):
            return await self._compute(np.concatenate(images), [len(one) for one in images], steps)


class Gate:
    """Lets in what fits into the next batch, in order, while there is a replica for it.

    Ray's batching closes a batch when its time is up, also while all replicas are busy: under load that
    makes many small batches, which then wait in line. Behind a gate, all that came meanwhile is there
    when one is free, and the next batch is full. One that is full already need not wait for that: it
    goes ahead, and waits at the replica.

    size: places in a batch.
    replicas: batches that are computed at once.
    """

    def __init__(self, size: int, replicas: int = 1) -> None:
        self._size, self._replicas = size, replicas
        self._working = 0
        self._inside: set[Place] = set()
        self._line: deque[Place] = deque()

    @asynccontextmanager
    async def place(self) -> AsyncIterator[Place]:
        """Wait for a place in the next batch."""
        place: Place = asyncio.get_running_loop().create_future()
        self._line.append(place)
        self._admit()
        try:
            await place
            yield place
        finally:
            if place.cancelled():
                with suppress(ValueError):  # it is in line no more
                    self._line.remove(place)
            self._leave([place])

    @contextmanager
    def working(self, places: list[Place]) -> Iterator[None]:
        """While a batch is computed; those in it have left the places of the next one."""
        self._working += 1
        self._leave(places)
        try:
            yield
        finally:
            self._working -= 1
            self._admit()

    def _leave(self, places: list[Place]) -> None:
        self._inside.difference_update(places)
        self._admit()

    def _admit(self) -> None:
        while self._line and len(self._inside) < self._size and self._has_replica():
            place = self._line.popleft()
            if not place.done():  # else it was canceled
                self._inside.add(place)
                place.set_result(None)

    def _has_replica(self) -> bool:
        if self._working < self._replicas:
            return True
        full = len(self._line) + len(self._inside) >= self._size
        return full and self._working < 2 * self._replicas
