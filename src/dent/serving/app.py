"""The server as its clients see it: its paths, its schema, its page, and whom it lets in."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import math
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from importlib import resources
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Request, Security
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from pydantic import BaseModel
from starlette.requests import ClientDisconnect
from torch import Tensor

import dent
from dent.serving.answers import Answer
from dent.serving.batches import Reply
from dent.serving.inputs import BYTES, FORM, JSON, NPY, PICTURES, Refusal, read_images
from dent.serving.metrics import CONTENT_TYPE, CountRequests, Metrics
from dent.serving.replica import Service
from dent.serving.settings import Serving
from dent.theme import theme

SMALL = 2**15  # bytes, which are read in less time than it takes to hand them to another thread
STOPPING = "the server is shutting down; ask another one"
ERRORS = {
    400: "The body cannot be read",
    401: "The token is missing or wrong",
    408: "The body did not arrive in time",
    413: "The body or an image is too large",
    415: "The content type is not supported",
    422: "Images of the wrong shape, size or range, or too many",
    429: "Too many requests at once; the header Retry-After says when to try again",
    500: "The model failed on an image",
    503: "No model is available; the header Retry-After says when to try again",
    504: "The answer was not ready in time",
}
ABOUT = '<script type="application/json" id="about">{}</script>'  # a line of the page

Credentials = Annotated[
    HTTPAuthorizationCredentials | None, Security(HTTPBearer(scheme_name="token", auto_error=False))
]


class Answers(BaseModel):
    """One answer for each image, in order."""

    answers: list[Answer]


class Health(BaseModel):
    """Which model answers, and how its clients are kept apart."""

    status: str = "ok"
    model: str
    defense: str
    isolation: str


class Problem(BaseModel):
    """Why there is no answer."""

    detail: str


class Token:
    """A bearer token, of which only the digest is kept."""

    def __init__(self, text: str) -> None:
        self._digest = self._hash(text)

    async def __call__(self, credentials: Credentials) -> None:
        """Refuse a request without the token; a nearly right one takes as long as a wrong one."""
        text = credentials.credentials if credentials else ""
        if not hmac.compare_digest(self._hash(text), self._digest):
            raise Refusal(
                401, "expected the header Authorization: Bearer TOKEN, with the server's token"
            )

    @staticmethod
    def _hash(text: str) -> bytes:
        return hashlib.sha256(text.encode()).digest()


class Admission:
    """Count requests, from before their body is read until their answer is there.

    limit: number of requests at once; the next is refused with 429, before its body is read.

    >>> admission = Admission(limit=1)
    >>> with admission.admit(), admission.admit():
    ...     pass
    Traceback (most recent call last):
    ...
    dent.serving.inputs.Refusal: expected at most 1 requests at once, got one more; try again later
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.inside = 0
        self.closed = False
        self._seconds = 1.0  # moving average of how long a request takes

    @contextmanager
    def admit(self) -> Iterator[None]:
        """Count a request as inside until the end of the block, or refuse it."""
        if self.closed:
            raise Refusal(503, STOPPING)
        if self.inside >= self.limit:
            raise Refusal(
                429, f"expected at most {self.limit} requests at once, got one more; try again later"
            )
        self.inside += 1
        start = time.monotonic()
        try:
            yield
        finally:
            self.inside -= 1
            self._seconds += 0.1 * (time.monotonic() - start - self._seconds)

    @property
    def retry_after(self) -> int:
        """Return the seconds after which most of those inside will be done."""
        return max(1, math.ceil(self._seconds))

    async def drain(self, seconds: float) -> int:
        """Let nobody in any more, wait for those inside, and return how many are left in the end."""
        self.closed = True
        end = time.monotonic() + seconds
        while self.inside and time.monotonic() < end:
            await asyncio.sleep(0.02)
        return self.inside


def make_app(
    serving: Serving,
    service: Service,
    *,
    predict: Callable[[Tensor], Awaitable[Reply]],
    check_replica: Callable[[], Awaitable[None]],
    admission: Admission,
    metrics: Metrics,
    token: Token | None = None,
) -> FastAPI:
    """Return the application; it knows nothing of Ray.

    predict: answers images, (N, 3, H, W).
    check_replica: raises `Refusal` if no replica answers. Both may raise `Refusal`.
    """
    app = FastAPI(
        title="dent", version=dent.__version__, docs_url=None, redoc_url=None,
        description=f"{service.model} defended by {service.defense}.",
    )  # fmt: skip
    app.add_middleware(CountRequests, metrics=metrics)
    page = make_page(serving)
    guard = [Depends(token)] if token else []

    @app.exception_handler(Refusal)
    async def refuse(request: Request, error: Refusal) -> JSONResponse:
        # A slow client is not waited for. The rest of a body that is too long is read and thrown away,
        # because most clients look for the answer only when they have sent everything.
        headers = {"Connection": "close"} if error.status == 408 else {}
        if error.status in (429, 503):
            headers["Retry-After"] = str(admission.retry_after)
        if error.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return JSONResponse({"detail": error.reason}, error.status, headers)

    @app.exception_handler(Exception)
    async def hide_error(request: Request, error: Exception) -> JSONResponse:
        return JSONResponse({"detail": "the server failed on this request; its log says why"}, 500)

    @app.get("/", response_class=HTMLResponse, summary="A page to try it")
    async def show_page() -> str:
        return page

    @app.get("/health", responses={503: {"model": Problem}})
    async def check_health() -> Health:
        """Say whether a model answers, and which."""
        if admission.closed:
            raise Refusal(503, STOPPING)
        await check_replica()
        return Health(model=service.model, defense=service.defense, isolation=service.isolation)

    @app.get(
        "/metrics", response_class=PlainTextResponse, dependencies=guard,
        responses={401: UNAUTHORIZED} if token else {},
    )  # fmt: skip
    async def show_metrics() -> PlainTextResponse:
        """Say what the server has done so far, for Prometheus."""
        return PlainTextResponse(metrics.format(), media_type=CONTENT_TYPE)

    @app.post(
        "/predict", dependencies=guard, openapi_extra={"requestBody": describe_body(serving)},
        responses={
            status: {"model": Problem, "description": text}
            for status, text in ERRORS.items() if token or status != 401
        },
    )  # fmt: skip
    async def answer_images(request: Request) -> Answers:
        """Predict one image or several, with the defense and without it."""
        with admission.admit():
            reply = await predict_in_time(request)
        metrics.count_reply(reply)
        if reply.failure:
            raise Refusal(500, reply.failure)
        return Answers(answers=list(reply.answers))

    async def predict_in_time(request: Request) -> Reply:
        late = Refusal(408, f"expected the body within {serving.deadline:g} s, got only a part of it")
        try:
            async with asyncio.timeout(serving.deadline):
                body = await read_body(request, serving.max_body)
                late = Refusal(504, f"expected an answer within {serving.deadline:g} s, got none")
                kind = request.headers.get("content-type", "")
                if (
                    len(body) <= SMALL and not serving.resize
                ):  # otherwise small bodies can be large images
                    images = read_images(body, kind, serving)
                else:
                    images = await asyncio.to_thread(read_images, body, kind, serving)
                return await predict(images)
        except TimeoutError:
            raise late from None

    return app


async def read_body(request: Request, most: int) -> bytes:
    """Return the body of a request; stop reading and refuse it as soon as it is too long."""
    too_long = Refusal(413, f"expected a body of at most {most} bytes, got more")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length[:20]) > most:
        raise too_long
    body = bytearray()
    try:
        async for chunk in request.stream():
            if len(body) + len(chunk) > most:
                raise too_long
            body += chunk
    except ClientDisconnect:
        raise Refusal(
            400, "expected the whole body, got a part of it before the connection ended"
        ) from None
    return bytes(body)


# FastAPI would describe this error as text, because the answer itself is text.
UNAUTHORIZED: dict[str, Any] = {
    "description": ERRORS[401],
    "content": {JSON: {"schema": {"$ref": f"#/components/schemas/{Problem.__name__}"}}},
}


def describe_body(serving: Serving) -> dict[str, Any]:
    """Return the OpenAPI schema of the bodies that `/predict` accepts: files, arrays, or a form."""

    def exactly(count: int) -> dict[str, int]:
        return {"minItems": count, "maxItems": count}

    def closed(name: str, schema: dict[str, Any]) -> dict[str, Any]:
        fields = {"properties": {name: schema}, "required": [name]}
        return {"type": "object", **fields, "additionalProperties": False}

    file = {"type": "string", "format": "binary"}
    sides = [{"minItems": 1}] * 2 if serving.resize else [exactly(side) for side in serving.size]
    image: dict[str, Any] = {"type": "number", "minimum": 0, "maximum": 1}
    for bounds in (sides[1], sides[0], exactly(3)):
        image = {"type": "array", "items": image, **bounds}
    images = {"type": "array", "items": image, "minItems": 1, "maxItems": serving.max_images}
    return {
        "required": True,
        "content": {kind: {"schema": file} for kind in (*PICTURES, NPY, BYTES)}
        | {JSON: {"schema": closed("inputs", {"anyOf": [image, images]})}}
        | {
            FORM: {
                "schema": closed("image", file),
                "encoding": {"image": {"contentType": ", ".join(PICTURES)}},
            }
        },
    }


def make_page(serving: Serving) -> str:
    """Return the page to try the server: it loads nothing, and only asks `predict` beside it.

    >>> '"model": "resnet20-at"' in make_page(Serving())
    True
    """
    page = resources.files("dent.serving").joinpath("assets", "page.html").read_text(encoding="utf-8")
    about = serving.model_dump(include={"model", "defense", "size", "classes"})
    text = json.dumps(about).replace("<", "\\u003c")  # so that no name can end the script element
    for name in ("theme.css", "theme.js"):
        page = page.replace(f"/* {name} */\n", theme(name))
    return page.replace(ABOUT, ABOUT.replace("{}", text))
