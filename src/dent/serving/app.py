"""The server as its clients see it: what is asked for, what is answered, and what is refused."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import time
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, TypedDict

from fastapi import Depends, FastAPI, Request, Security
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from torch import Tensor

import dent
from dent.serving.admission import Admission
from dent.serving.batches import Answered
from dent.serving.inputs import read_images
from dent.serving.limits import Refused
from dent.serving.metrics import CONTENT_TYPE, Metrics
from dent.serving.page import page_html
from dent.serving.schema import ERRORS, UNAUTHORIZED, Answers, Health, Problem, request_body
from dent.serving.settings import Serving

ABANDONED = 499  # what logs call a request whose client left; nobody reads it
SMALL = 2**15  # bytes, which are read in less time than another thread takes to begin
PATHS = ("/", "/predict", "/health", "/metrics", "/openapi.json")

Given = Annotated[
    HTTPAuthorizationCredentials | None, Security(HTTPBearer(scheme_name="token", auto_error=False))
]


class About(TypedDict):
    """What `/health` says of the model."""

    model: str
    defense: str
    isolation: str


class Token:
    """A bearer token, of which only the digest is kept."""

    def __init__(self, digest: bytes) -> None:
        self._digest = digest

    async def __call__(self, given: Given) -> None:
        """Refuse a request without it; to be nearly right takes as long as to be wrong."""
        text = given.credentials if given else ""
        if not hmac.compare_digest(self.digest_of(text), self._digest):
            raise Refused(
                401, "expected the header Authorization: Bearer TOKEN, with the server's token"
            )

    @staticmethod
    def digest_of(token: str) -> bytes:
        return hashlib.sha256(token.encode()).digest()


def make_app(
    serving: Serving,
    predict: Callable[[Tensor], Awaitable[Answered]],
    *,
    about: About,
    alive: Callable[[], Awaitable[None]],
    admission: Admission,
    metrics: Metrics,
    token: Token | None = None,
) -> FastAPI:
    """The application; it knows nothing of Ray.

    predict: images (N, 3, H, W) to their answers. It and `alive` may raise `Refused`, with 5xx too.
    """
    app = FastAPI(
        title="dent", version=dent.__version__, docs_url=None, redoc_url=None,
        description=f"{about['model']} defended by {about['defense']}.",
    )  # fmt: skip
    app.add_middleware(Counting, metrics=metrics)
    page = page_html(serving)
    guard = [Depends(token)] if token else []
    errors = {status: one for status, one in ERRORS.items() if token or status != 401}

    @app.exception_handler(Refused)
    async def refused(request: Request, error: Refused) -> JSONResponse:
        # Who is too slow is not waited for; the rest of what is too long is read, and thrown away, for
        # most clients look for the answer only when they have sent all.
        headers = {"Connection": "close"} if error.status == 408 else {}
        if error.status in (429, 503):
            headers["Retry-After"] = str(admission.retry_after)
        if error.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return JSONResponse(error.to_json(), error.status, headers)

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> JSONResponse:
        return JSONResponse({"detail": "the server failed on this request; its log says why"}, 500)

    @app.get("/", response_class=HTMLResponse, summary="A page to try it")
    async def try_it() -> str:
        return page

    @app.get("/health", response_model=Health, responses={503: {"model": Problem}})
    async def health() -> Any:
        """Whether a model is there to answer."""
        if admission.closed:
            raise Refused(503, "the server is shutting down; ask another one")
        await alive()
        return {"status": "ok", **about}

    @app.get(
        "/metrics", response_class=PlainTextResponse, dependencies=guard,
        responses={401: UNAUTHORIZED} if token else {},
    )  # fmt: skip
    async def measured() -> PlainTextResponse:
        """What the server has done so far, for Prometheus."""
        return PlainTextResponse(metrics.text(), media_type=CONTENT_TYPE)

    @app.post(
        "/predict", response_model=Answers, responses=errors, dependencies=guard,
        openapi_extra={"requestBody": request_body(serving)},
    )  # fmt: skip
    async def predicted(request: Request) -> Any:
        """Predict one image or several, with the defense and without it."""
        with admission.place():
            found = await in_time(request)
        metrics.answered(found)
        if found.failed:
            raise Refused(500, found.failed)
        # As it is: to check our own answers against the schema is what tests are for.
        return JSONResponse({"answers": [answer.to_json() for answer in found.answers]})

    async def in_time(request: Request) -> Answered:
        late = Refused(408, f"expected the body within {serving.deadline:g} s, got only a part of it")
        try:
            async with asyncio.timeout(serving.deadline):
                body = await read_body(request, serving.max_body)
                late = Refused(504, f"expected an answer within {serving.deadline:g} s, got none")
                kind = request.headers.get("content-type", "")
                if len(body) <= SMALL and not serving.resize:  # where a small body is a small image
                    images = read_images(body, kind, serving)
                else:
                    images = await asyncio.to_thread(read_images, body, kind, serving)
                return await predict(images)
        except TimeoutError:
            raise late from None

    return app


async def read_body(request: Request, most: int) -> bytes:
    """The body of a request; as soon as it is too long, no more of it is read."""
    too_long = Refused(413, f"expected a body of at most {most} bytes, got more")
    told = request.headers.get("content-length", "")
    if told.isdecimal() and int(told[:20]) > most:
        raise too_long
    body = bytearray()
    try:
        async for chunk in request.stream():
            if len(body) + len(chunk) > most:
                raise too_long
            body += chunk
    except ClientDisconnect:
        raise Refused(
            400, "expected the whole body, got a part of it before the connection ended"
        ) from None
    return bytes(body)


class Counting:
    """Counts what goes through an application, and how long it takes."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app, self.metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        status, began = ABANDONED, time.perf_counter()

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        path = scope["path"] if scope["path"] in PATHS else "other"
        with self.metrics.open():
            try:
                await self.app(scope, receive, noting)
            except Exception:
                status = 500  # the response to it is made outside of this
                raise
            finally:
                self.metrics.finished(path, status, time.perf_counter() - began)
