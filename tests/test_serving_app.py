"""What clients of the server are answered and refused; without Ray, and with a model that is none."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from io import BytesIO
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from torch import Tensor

from dent.serving.answers import Answer, Prediction
from dent.serving.app import Admission, Token, make_app
from dent.serving.batches import BatchRecord, Reply
from dent.serving.inputs import Refusal
from dent.serving.metrics import Metrics
from dent.serving.replica import Service
from dent.serving.settings import Serving

SERVICE = Service("none", "static", "independent", shared=True, steps=6)
IMAGE = {"inputs": torch.full((3, 2, 2), 0.5).tolist()}
Predict = Callable[[Tensor], Awaitable[Reply]]


def answered(images: Tensor) -> Reply:
    """The brightness of each image as the probability of the second class."""
    answers = []
    for share in images.mean((1, 2, 3)).tolist():
        said = {"label": int(share > 0.5), "name": "ab"[int(share > 0.5)]}
        said["probabilities"] = (1 - share, share)
        static = Prediction(**said, entropy=0.5)
        answers.append(
            Answer(**said, entropy_before=0.7, entropy_after=0.5, steps=6, static=static, seconds=0.01)
        )
    return Reply(tuple(answers), batches=(BatchRecord(len(images), 0.01),))


async def at_once(images: Tensor) -> Reply:
    return answered(images)


async def present() -> None:
    pass


def app(predict: Predict = at_once, *, limit: int = 4, token: str | None = None, **settings: Any) -> Any:
    defaults: dict[str, Any] = {"size": (2, 2), "classes": "a,b", "max_images": 3}
    return make_app(
        Serving(**defaults | settings), SERVICE, predict=predict, check_replica=present,
        metrics=Metrics(), admission=Admission(limit), token=Token(token) if token else None,
    )  # fmt: skip


def client(made: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        transport=httpx.ASGITransport(made, raise_app_exceptions=False), base_url="http://dent"
    )


def ask(made: Any, method: str = "POST", path: str = "/predict", **request: Any) -> httpx.Response:
    async def send() -> httpx.Response:
        async with client(made) as there:
            return await there.request(method, path, **request)

    return asyncio.run(send())


def metric(made: Any, name: str, **labels: str) -> float:
    text = ask(made, "GET", "/metrics").text
    (found,) = (
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name and sample.labels == labels
    )
    return float(found)


def npy(images: Any) -> bytes:
    file = BytesIO()
    np.save(file, np.asarray(images, np.float32))
    return file.getvalue()


def test_images_are_answered_in_order() -> None:
    body = npy([np.full((3, 2, 2), share) for share in (0.25, 0.75)])
    response = ask(app(), content=body, headers={"content-type": "application/x-npy"})
    assert response.status_code == 200
    first, second = response.json()["answers"]
    assert (first["class"], first["name"], first["probabilities"]) == (0, "a", [0.75, 0.25])
    assert (second["class"], second["static"]["class"]) == (1, 1)
    assert (first["entropy_before"], first["entropy_after"], first["steps"]) == (0.7, 0.5, 6)


def test_a_full_queue() -> None:
    async def crowd() -> list[httpx.Response]:
        go_on = asyncio.Event()

        async def when_told(images: Tensor) -> Reply:
            await go_on.wait()
            return answered(images)

        async with client(app(when_told, limit=2)) as there:
            inside = [asyncio.ensure_future(there.post("/predict", json=IMAGE)) for _ in range(2)]
            await asyncio.sleep(0.1)
            turned_away = await there.post("/predict", json=IMAGE)
            go_on.set()
            return [
                *await asyncio.gather(*inside),
                turned_away,
                await there.post("/predict", json=IMAGE),
            ]

    *taken, turned_away, later = asyncio.run(crowd())
    assert [one.status_code for one in taken] == [200, 200]
    assert turned_away.status_code == 429
    assert int(turned_away.headers["retry-after"]) >= 1
    assert "at most 2 requests" in turned_away.json()["detail"]
    assert later.status_code == 200


def test_a_deadline_ends_the_work_too() -> None:
    ended = []

    async def for_ever(images: Tensor) -> Reply:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ended.append("canceled")
            raise
        raise AssertionError

    made = app(for_ever, deadline="200ms")
    response = ask(made, json=IMAGE)
    assert response.status_code == 504
    assert response.json() == {"detail": "expected an answer within 0.2 s, got none"}
    assert ended == ["canceled"]
    assert metric(made, "dent_requests_open") == 1  # only the one that asks this
    assert metric(made, "dent_rejected_total", status="504") == 1


def test_a_body_that_does_not_come() -> None:
    async def slow() -> AsyncIterator[bytes]:
        yield b"["
        await asyncio.sleep(5)

    headers = {"content-type": "application/json"}
    response = ask(app(deadline="200ms"), content=slow(), headers=headers)
    assert response.status_code == 408
    assert response.headers["connection"] == "close"


@pytest.mark.parametrize("told", [True, False])
def test_a_body_that_is_too_long_is_not_read(told: bool) -> None:
    """Neither if its length is told, nor if it turns out on the way."""
    read = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal read
        while True:
            read += 1000
            yield bytes(1000)

    headers = {"content-type": "image/png"} | ({"content-length": "5001"} if told else {})
    response = ask(app(max_body="5kB"), content=endless(), headers=headers)
    assert response.status_code == 413
    assert response.json() == {"detail": "expected a body of at most 5000 bytes, got more"}
    assert read <= 6000 if not told else read <= 1000


def test_a_token() -> None:
    made = app(token="secret")
    for header in ({}, {"authorization": "Bearer other"}, {"authorization": "Basic secret"}):
        response = ask(made, json=IMAGE, headers=header)
        assert response.status_code == 401
        assert response.headers["www-authenticate"] == "Bearer"
        assert ask(made, "GET", "/metrics", headers=header).status_code == 401
    right = {"authorization": "Bearer secret"}
    assert ask(made, json=IMAGE, headers=right).status_code == 200
    assert ask(made, "GET", "/metrics", headers=right).status_code == 200
    for path in ("/", "/health"):
        assert ask(made, "GET", path).status_code == 200


def test_health() -> None:
    assert ask(app(), "GET", "/health").json() == {
        "status": "ok", "model": "none", "defense": "static", "isolation": "independent",
    }  # fmt: skip


def test_a_server_that_stops_finishes_what_it_has() -> None:
    async def stop() -> tuple[httpx.Response, httpx.Response, httpx.Response, int]:
        go_on, admission = asyncio.Event(), Admission(4)

        async def when_told(images: Tensor) -> Reply:
            await go_on.wait()
            return answered(images)

        made = make_app(
            Serving(size=(2, 2), classes=("a", "b")), SERVICE, predict=when_told, check_replica=present,
            admission=admission, metrics=Metrics(),
        )  # fmt: skip
        async with client(made) as there:
            inside = asyncio.ensure_future(there.post("/predict", json=IMAGE))
            await asyncio.sleep(0.1)
            emptied = asyncio.ensure_future(admission.drain(5))
            await asyncio.sleep(0)
            turned_away, health = await there.post("/predict", json=IMAGE), await there.get("/health")
            assert not emptied.done()
            go_on.set()
            return await inside, turned_away, health, await emptied

    inside, turned_away, health, left = asyncio.run(stop())
    assert (inside.status_code, left) == (200, 0)
    for refused in (turned_away, health):
        assert refused.status_code == 503
        assert "retry-after" in refused.headers


def test_waiting_for_the_last_has_an_end() -> None:
    async def wait() -> int:
        admission = Admission(2)
        with admission.admit():
            return await admission.drain(0.05)

    assert asyncio.run(wait()) == 1


@pytest.mark.parametrize(
    ("error", "status", "detail"),
    [
        (Refusal(503, "no replica"), 503, "no replica"),
        (KeyError("secret"), 500, "the server failed on this request; its log says why"),
    ],
)
def test_errors_of_the_model(error: Exception, status: int, detail: str) -> None:
    async def fail(images: Tensor) -> Reply:
        raise error

    made = app(fail)
    response = ask(made, json=IMAGE)
    assert (response.status_code, response.json()) == (status, {"detail": detail})
    assert metric(made, "dent_requests_total", path="/predict", status=str(status)) == 1


def test_an_image_that_the_model_fails_on() -> None:
    async def fail(images: Tensor) -> Reply:
        return Reply(failure="not finite")

    response = ask(app(fail), json=IMAGE)
    assert (response.status_code, response.json()) == (500, {"detail": "not finite"})


BAD: dict[str, tuple[bytes, str, int]] = {
    "nothing": (b"", "image/png", 400),
    "no image": (b"not an image", "image/png", 400),
    "no type": (b"{}", "", 415),
    "another type": (b"GIF89a", "image/gif", 415),
    "no JSON": (b"{", "application/json", 400),
    "NaN": (
        json.dumps({"inputs": np.full((3, 2, 2), np.nan).tolist()}).encode(),
        "application/json",
        422,
    ),
    "another size": (npy(np.zeros((3, 4, 4))), "application/x-npy", 422),
    "too many": (npy(np.zeros((4, 3, 2, 2))), "application/x-npy", 422),
    "a pickle": (b"\x93NUMPY\x01\x00v\x00{'descr': '|O'}", "application/x-npy", 400),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_bodies_are_refused_and_the_next_request_is_answered(name: str) -> None:
    body, kind, status = BAD[name]
    made = app()
    response = ask(made, content=body, headers={"content-type": kind})
    assert response.status_code == status
    assert response.json()["detail"]
    assert ask(made, json=IMAGE).status_code == 200
    assert metric(made, "dent_rejected_total", status=str(status)) == 1


def test_metrics_count() -> None:
    made = app()
    for count in (1, 3):
        ask(made, content=npy(np.zeros((count, 3, 2, 2))), headers={"content-type": "application/x-npy"})
    ask(made, content=b"", headers={"content-type": "image/png"})
    ask(made, "GET", "/favicon.ico")
    assert metric(made, "dent_requests_total", path="/predict", status="200") == 2
    assert metric(made, "dent_requests_total", path="other", status="404") == 1
    assert metric(made, "dent_rejected_total", status="400") == 1
    assert metric(made, "dent_images_total") == 4
    assert metric(made, "dent_images_changed_total") == 0
    assert metric(made, "dent_batch_size_sum") == 4
    assert metric(made, "dent_batch_size_bucket", le="2.0") == 1
    assert metric(made, "dent_entropy_nats_sum", when="before") == pytest.approx(4 * 0.7)
    assert metric(made, "dent_entropy_nats_sum", when="after") == pytest.approx(4 * 0.5)
    assert metric(made, "dent_steps_sum") == 24
    assert metric(made, "dent_request_seconds_count", path="/predict") == 3


def test_a_cut_connection() -> None:
    """Half a body and then nothing: no answer to anyone, and the place is free again."""

    async def cut() -> tuple[list[Any], int]:
        made, sent = app(limit=1), []
        messages = iter([{"type": "http.request", "body": b"{", "more_body": True}])

        async def receive() -> Any:
            return next(messages, {"type": "http.disconnect"})

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST",
            "path": "/predict", "raw_path": b"/predict", "query_string": b"", "scheme": "http",
            "root_path": "", "headers": [(b"content-type", b"application/json")],
        }  # fmt: skip
        await made(scope, receive, send)
        async with client(made) as there:
            return sent, (await there.post("/predict", json=IMAGE)).status_code

    sent, later = asyncio.run(cut())
    assert sent[0]["status"] == 400
    assert later == 200
