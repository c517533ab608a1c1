"""Who may come in: so many requests at once, each for so long, and nobody when the server stops."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

from dent.serving.limits import Refused


class Admission:
    """Counts requests, from before their body is read until their answer is there.

    limit: how many may be inside at once; the next is refused with 429, before its body is read.

    >>> admission = Admission(limit=1)
    >>> with admission.place(), admission.place():
    ...     pass
    Traceback (most recent call last):
    ...
    dent.serving.limits.Refused: expected at most 1 requests at once, got one more; try again later
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.inside = 0
        self.closed = False
        self._seconds = 1.0  # that a request takes, lately

    @contextmanager
    def place(self) -> Iterator[None]:
        """A place for a request, or `Refused`."""
        if self.closed:
            raise Refused(503, "the server is shutting down; ask another one")
        if self.inside >= self.limit:
            raise Refused(
                429, f"expected at most {self.limit} requests at once, got one more; try again later"
            )
        self.inside += 1
        began = time.monotonic()
        try:
            yield
        finally:
            self.inside -= 1
            self._seconds += 0.1 * (time.monotonic() - began - self._seconds)

    @property
    def retry_after(self) -> int:
        """Seconds after which most of those inside will be done, as far as the last ones tell."""
        return max(1, math.ceil(self._seconds))

    async def empty(self, seconds: float) -> int:
        """Let nobody in any more, and wait so long for those inside; how many are left then."""
        self.closed = True
        until = time.monotonic() + seconds
        while self.inside and time.monotonic() < until:
            await asyncio.sleep(0.02)
        return self.inside
