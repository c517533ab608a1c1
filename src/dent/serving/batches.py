"""Decide which images are computed together, and when."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from itertools import count

import numpy as np
from numpy.typing import NDArray

from dent.serving.answers import Answer
from dent.serving.settings import Serving


@dataclass(frozen=True)
class BatchRecord:
    """How many images were computed at once, and how long it took."""

    size: int
    seconds: float


@dataclass(frozen=True)
class Reply:
    """The answers to images of one request.

    failure: why there are no answers, if the model failed on the images.
    batches: the batches in which these images came first, so that each batch is counted once.
    """

    answers: tuple[Answer, ...] = ()
    failure: str = ""
    batches: tuple[BatchRecord, ...] = ()


# Computes a batch: given its images, how many of them belong to each item, and the number of updates.
Compute = Callable[[NDArray[np.float32], list[int], int | None], Awaitable[list[Reply]]]


@dataclass(frozen=True, eq=False)
class Item:
    """Images of one request, (N, 3, H, W), that stay together in a batch, and the reply to them."""

    request: int
    images: NDArray[np.float32]
    reply: asyncio.Future[Reply]


class Batches:
    """Collect the images of requests into batches, in order, and have each batch computed.

    If clients share batches, images of several requests are computed together, at most `batch_size` at
    a time; a larger request is spread over several batches. Otherwise every request is its own batch,
    whatever its size.

    While a replica is free, a batch starts when it is full, or `max_wait` after its first image. What
    arrives while all replicas are busy waits here, so that the next batch is as full as can be. (Ray
    Serve's own batching would close many small batches meanwhile.) One full batch per replica goes ahead
    and waits at the replica, which then never waits for the next.

    compute: answers a batch.
    shared: True if clients share batches.
    steps: number of updates of the defense; None if it does not say.
    """

    def __init__(self, serving: Serving, compute: Compute, *, shared: bool, steps: int | None) -> None:
        self._serving, self._compute, self._shared, self._steps = serving, compute, shared, steps
        self._size = serving.batch_size if shared else 1
        self._numbers = count()
        self._line: deque[Item] = deque()
        self._waiting: set[int] = set()  # requests of which no image is in a batch yet
        self._running: set[asyncio.Task[None]] = set()  # batches
        self._timer: asyncio.TimerHandle | None = None  # runs while a batch waits to be full

    async def predict(self, images: NDArray[np.float32]) -> Reply:
        """Answer the images of a request, (N, 3, H, W)."""
        request, loop = next(self._numbers), asyncio.get_running_loop()
        parts = np.split(images, len(images)) if self._shared else [images]
        items = [Item(request, part, loop.create_future()) for part in parts]
        self._waiting.add(request)
        self._line.extend(items)
        self._start_full_batches()
        try:
            replies = await asyncio.gather(*(item.reply for item in items))
        except BaseException:  # its client has left, or one of its batches failed
            self._line = deque(item for item in self._line if item.request != request)
            raise
        finally:
            self._waiting.discard(request)
        return Reply(
            tuple(answer for reply in replies for answer in reply.answers),
            next((reply.failure for reply in replies if reply.failure), ""),
            tuple(batch for reply in replies for batch in reply.batches),
        )

    def _start_full_batches(self) -> None:
        """Start batches that are full; give another one some time to become full."""
        replicas = self._serving.most_replicas
        while len(self._line) >= self._size and len(self._running) < 2 * replicas:
            self._start_batch()
        if self._line and self._timer is None and len(self._running) < replicas:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._serving.max_wait, self._start_batch)

    def _start_batch(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if items := [self._line.popleft() for _ in range(min(self._size, len(self._line)))]:
            task = asyncio.ensure_future(self._run_batch(items))
            self._running.add(task)
            task.add_done_callback(self._end_batch)

    def _end_batch(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        self._start_full_batches()

    async def _run_batch(self, items: list[Item]) -> None:
        self._waiting.difference_update(item.request for item in items)
        own = self._steps
        steps = None if own is None else self._serving.choose_steps(own, len(self._waiting))
        images = [item.images for item in items]
        try:
            replies = await self._compute(np.concatenate(images), [len(one) for one in images], steps)
        except Exception as error:
            for item in items:
                if not item.reply.done():
                    item.reply.set_exception(error)
            return
        for item, reply in zip(items, replies, strict=True):
            if not item.reply.done():  # done here means that its client has left
                item.reply.set_result(reply)
