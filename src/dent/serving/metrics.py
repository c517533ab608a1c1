"""Count what a server does, for Prometheus."""

from __future__ import annotations

import time

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import generate_latest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dent.serving.batches import Reply

CONTENT_TYPE = CONTENT_TYPE_LATEST
ABANDONED = 499  # the status that logs give a request whose client left; nobody receives it
PATHS = ("/", "/predict", "/health", "/metrics", "/openapi.json")
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
STEPS = (0, 1, 2, 3, 4, 6, 8, 10, 15, 20, 30)
NATS = (0.01, 0.03, 0.1, 0.3, 0.5, 1, 1.5, 2, 2.5, 3, 4, 5, 6, 7)


class Metrics:
    """Counts of requests and batches, and distributions of what was answered.

    >>> metrics = Metrics()
    >>> metrics.count_request("/predict", 200, 0.5)
    >>> print([line for line in metrics.format().splitlines() if line.startswith("dent_requests_total")])
    ['dent_requests_total{path="/predict",status="200"} 1.0']
    """

    def __init__(self) -> None:
        # Not the global registry, so that two servers of a process do not add up.
        self._registry = own = CollectorRegistry()
        self._requests = Counter("dent_requests", "Ended requests", ["path", "status"], registry=own)
        self._rejected = Counter(
            "dent_rejected", "Requests to /predict that got an error", ["status"], registry=own
        )
        self._retried = Counter("dent_retried", "Batches given to a second replica", registry=own)
        self.open = Gauge("dent_requests_open", "Requests that have not ended", registry=own)
        self._latency = Histogram(
            "dent_request_seconds", "Time from the head of a request to its end", ["path"],
            buckets=SECONDS, registry=own,
        )  # fmt: skip
        self._images = Counter("dent_images", "Answered images", registry=own)
        self._changed = Counter(
            "dent_images_changed", "Images whose class the defense changed", registry=own
        )
        self._batch_size = Histogram(
            "dent_batch_size", "Images computed at once", buckets=SIZES, registry=own
        )
        self._batch_seconds = Histogram(
            "dent_batch_seconds", "Time to compute a batch", buckets=SECONDS, registry=own
        )
        self._entropy = Histogram(
            "dent_entropy_nats", "Entropy of predictions before and after adaptation", ["when"],
            buckets=NATS, registry=own,
        )  # fmt: skip
        self._steps = Histogram("dent_steps", "Updates for an image", buckets=STEPS, registry=own)

    def count_request(self, path: str, status: int, seconds: float) -> None:
        """Count a request that has ended, with status 499 if its client left before the answer."""
        self._requests.labels(path, str(status)).inc()
        self._latency.labels(path).observe(seconds)
        if path == "/predict" and status >= 400:
            self._rejected.labels(str(status)).inc()

    def count_retry(self) -> None:
        self._retried.inc()

    def count_reply(self, reply: Reply) -> None:
        """Count the answers to a request, and the batches that are counted with them."""
        for answer in reply.answers:
            self._images.inc()
            self._changed.inc(answer.label != answer.static.label)
            if answer.steps is not None:
                self._steps.observe(answer.steps)
            self._entropy.labels("before").observe(answer.entropy_before)
            self._entropy.labels("after").observe(answer.entropy_after)
        for batch in reply.batches:
            self._batch_size.observe(batch.size)
            self._batch_seconds.observe(batch.seconds)

    def format(self) -> str:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry).decode()


class CountRequests:
    """Middleware that counts every request to an application, and how long it takes."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app, self.metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        status, start = ABANDONED, time.perf_counter()

        async def note_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        path = scope["path"] if scope["path"] in PATHS else "other"
        with self.metrics.open.track_inprogress():
            try:
                await self.app(scope, receive, note_status)
            except Exception:
                status = 500  # Starlette sends the response outside of this middleware
                raise
            finally:
                self.metrics.count_request(path, status, time.perf_counter() - start)
