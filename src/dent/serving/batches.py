"""Which images are computed together, and when: batches on one copy of the model."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from itertools import count, islice

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dent.defense import Dent
from dent.serving.answers import Answer, Failed, answer_batch
from dent.serving.settings import Serving


@dataclass(frozen=True)
class Item:
    """What is put into a batch as a whole: images of one request."""

    request: int
    inputs: Tensor


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


Compute = Callable[[list[Item]], Awaitable[list[Answered]]]
# Of a function of lists one of single items; with the size of a list, and the time to wait for it.
Batching = Callable[[Compute, int, float], Callable[[Item], Awaitable[Answered]]]


class Batches:
    """Answers requests with one copy of a defended model, in batches.

    Where the defence is independent, or batches are shared by will, images of several requests are
    computed together, at most `batch_size` of them; a larger request is spread over several. Else every
    request is a batch of its own, whatever its size.

    batching: what collects items; Ray Serve's in a server.
    """

    def __init__(self, serving: Serving, defence: Dent, batching: Batching) -> None:
        self.shared = defence.independent or serving.shared_batches
        self._serving, self._defence = serving, defence
        size = serving.batch_size if self.shared else 1
        self._gate = Gate(size)
        self._batched = batching(self._compute, size, serving.max_wait if size > 1 else 0.0)
        self._numbers = count()
        self._requests = 0
        self._everywhere = 1.0  # requests of all replicas, for each of this one
        self._began: float | None = None  # the batch that is being computed
        self._thread = ThreadPoolExecutor(1)  # only one, for each has torch start threads of its own

    @property
    def busy_for(self) -> float:
        """Seconds that the batch in work has taken so far."""
        began = self._began
        return 0.0 if began is None else time.perf_counter() - began

    async def predict(self, images: NDArray[np.float32], requests: int = 1) -> Answered:
        """Answer the images of a request, (N, 3, H, W).

        requests: how many there are now, on all replicas; how long the queue is follows from it.
        """
        inputs = torch.tensor(images)  # a copy: what comes out of Ray's store cannot be written to
        number = next(self._numbers)
        parts = inputs.split(1) if self.shared else (inputs,)
        self._requests += 1
        self._everywhere = max(1.0, requests / self._requests)
        try:
            found = await asyncio.gather(*(self._placed(Item(number, part)) for part in parts))
        finally:
            self._requests -= 1
        return Answered(
            tuple(answer for one in found for answer in one.answers),
            next((one.failed for one in found if one.failed), ""),
            tuple(batch for one in found for batch in one.batches),
        )

    async def _placed(self, item: Item) -> Answered:
        async with self._gate.place():
            return await self._batched(item)

    async def _compute(self, items: list[Item]) -> list[Answered]:
        waiting = self._everywhere * (self._requests - len({item.request for item in items}))
        steps = self._serving.steps_for(self._defence.settings.steps, round(waiting))
        groups = [item.inputs for item in items]
        with self._gate.working():
            loop, self._began = asyncio.get_running_loop(), time.perf_counter()
            try:
                found = await loop.run_in_executor(self._thread, self._answer, groups, steps)
                batch = Batch(sum(map(len, groups)), self.busy_for)
            finally:
                self._began = None
        return [replace(found[0], batches=(batch,)), *found[1:]]

    def _answer(self, groups: list[Tensor], steps: int) -> list[Answered]:
        def answer(inputs: Tensor) -> list[Answer]:
            inputs = inputs.to(self._serving.device)
            return answer_batch(self._defence, inputs, steps, classes=self._serving.classes)

        return answer_groups(answer, groups)


def answer_groups(answer: Callable[[Tensor], list[Answer]], groups: list[Tensor]) -> list[Answered]:
    """Answer groups of images together, and each group for itself.

    If that fails, each half is tried without the other, and so on: who sends what the model fails on
    fails alone, and the others wait about three times as long, however many they are.
    """
    try:
        answers = iter(answer(torch.cat(groups)))
        return [Answered(tuple(islice(answers, len(group)))) for group in groups]
    except Failed as error:
        if len(groups) == 1:
            return [Answered(failed=error.reason)]
    half = len(groups) // 2
    return answer_groups(answer, groups[:half]) + answer_groups(answer, groups[half:])


class Gate:
    """Lets in what fits into the next batch, in order, while none is being computed.

    Ray's batching closes a batch when its time is up, also while the model is busy: under load that
    makes many small batches, which then wait in line. Behind a gate, all that came meanwhile is there
    when the model is free, and the next batch is full.

    size: places, as many as a batch has.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._inside = 0
        self._busy = False
        self._line: deque[asyncio.Future[None]] = deque()

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """Wait for a place in the next batch, and keep it until there is an answer."""
        turn = asyncio.get_running_loop().create_future()
        self._line.append(turn)
        self._admit()
        try:
            await turn
            yield
        finally:
            if turn.done() and not turn.cancelled():  # it was let in, if only to leave at once
                self._inside -= 1
                self._admit()

    @contextmanager
    def working(self) -> Iterator[None]:
        """While a batch is computed, nobody is let in."""
        self._busy = True
        try:
            yield
        finally:
            self._busy = False
            self._admit()

    def _admit(self) -> None:
        while self._line and self._inside < self._size and not self._busy:
            turn = self._line.popleft()
            if not turn.done():  # else it was cancelled
                self._inside += 1
                turn.set_result(None)
