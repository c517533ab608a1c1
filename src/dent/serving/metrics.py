"""What a server has done so far, for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import generate_latest

from dent.serving.batches import Answered

CONTENT_TYPE = CONTENT_TYPE_LATEST
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
STEPS = (0, 1, 2, 3, 4, 6, 8, 10, 15, 20, 30)
NATS = (0.01, 0.03, 0.1, 0.3, 0.5, 1, 1.5, 2, 2.5, 3, 4, 5, 6, 7)


class Metrics:
    """Counts of requests and batches, and what the answers were like.

    >>> metrics = Metrics()
    >>> metrics.finished("/predict", 200, 0.5)
    >>> print([line for line in metrics.text().splitlines() if line.startswith("dent_requests_total")])
    ['dent_requests_total{path="/predict",status="200"} 1.0']
    """

    def __init__(self) -> None:
        self._requests = Counter(
            "dent_requests", "Requests that have ended", ["path", "status"], registry=None
        )
        self._rejected = Counter(
            "dent_rejected", "Requests to /predict that got an error", ["status"], registry=None
        )
        self._retried = Counter("dent_retried", "Requests given to a second replica", registry=None)
        self._open = Gauge("dent_requests_open", "Requests that have not ended", registry=None)
        self._latency = Histogram(
            "dent_request_seconds", "From a request's head to its end", ["path"], buckets=SECONDS,
            registry=None,
        )  # fmt: skip
        self._images = Counter("dent_images", "Images that were answered", registry=None)
        self._changed = Counter(
            "dent_images_changed", "Images whose class the defense changed", registry=None
        )
        self._batch_size = Histogram(
            "dent_batch_size", "Images computed at once", buckets=SIZES, registry=None
        )
        self._batch_seconds = Histogram(
            "dent_batch_seconds", "Computation of a batch", buckets=SECONDS, registry=None
        )
        self._entropy = Histogram(
            "dent_entropy_nats", "Of predictions, before and after adaptation", ["when"], buckets=NATS,
            registry=None,
        )  # fmt: skip
        self._steps = Histogram("dent_steps", "Updates for an image", buckets=STEPS, registry=None)
        # Of its own, so that two servers of a process do not add up.
        self._registry = CollectorRegistry()
        for one in vars(self).copy().values():
            if one is not self._registry:
                self._registry.register(one)

    @contextmanager
    def open(self) -> Iterator[None]:
        """While a request waits for its answer."""
        with self._open.track_inprogress():
            yield

    def finished(self, path: str, status: int, seconds: float) -> None:
        """A request has its answer; status 499 if the client left before that."""
        self._requests.labels(path, str(status)).inc()
        self._latency.labels(path).observe(seconds)
        if path == "/predict" and status >= 400:
            self._rejected.labels(str(status)).inc()

    def retried(self) -> None:
        self._retried.inc()

    def answered(self, found: Answered) -> None:
        """What a request was answered, and the batches that count with it."""
        for answer in found.answers:
            self._images.inc()
            self._changed.inc(answer.defended.label != answer.static.label)
            self._steps.observe(answer.steps)
            self._entropy.labels("before").observe(answer.entropy_before)
            self._entropy.labels("after").observe(answer.defended.entropy)
        for batch in found.batches:
            self._batch_size.observe(batch.size)
            self._batch_seconds.observe(batch.seconds)

    def text(self) -> str:
        """In Prometheus' text format."""
        return generate_latest(self._registry).decode()
