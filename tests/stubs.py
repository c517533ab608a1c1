"""A server from the standard library that answers what it is told to, for the page."""

from __future__ import annotations

import json
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np

from dent.serving.answers import Answer, Prediction
from dent.serving.app import make_page
from dent.serving.settings import Serving

SERVING = Serving()


def answer(static: int = 3, defended: int = 5, *, names: tuple[str, ...] = SERVING.classes) -> Answer:
    shares = [0.6, *[0.4 / (len(names) - 1)] * (len(names) - 1)]

    def rolled(label: int) -> tuple[float, ...]:
        return tuple(np.roll(shares, label).tolist())

    return Answer(
        label=defended, name=names[defended], probabilities=rolled(defended), entropy_before=1.5,
        entropy_after=0.125, steps=6, seconds=0.0424,
        static=Prediction(
            label=static, name=names[static], probabilities=rolled(static), entropy=1.25
        ),
    )  # fmt: skip


class Stub(ThreadingHTTPServer):
    """Answers as `reply` says: a status, headers and a body; keeps what it was asked."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[tuple[dict[str, str], bytes]] = []
        self.page = make_page(SERVING)
        self.reply: Callable[[int], tuple[int, dict[str, str], Any]] = lambda _: (200, {}, answer())

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/"


class Handler(BaseHTTPRequestHandler):
    server: Stub

    def do_GET(self) -> None:
        known = self.path == "/"
        self._send(200 if known else 404, {"Content-Type": "text/html"}, self.server.page.encode())

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.asked.append((dict(self.headers), body))
        status, headers, content = self.server.reply(len(self.server.asked))
        if isinstance(content, Answer):
            content = {"answers": [content.model_dump(by_alias=True)]}
        text = content if isinstance(content, str) else json.dumps(content)
        self._send(status if self.path == "/predict" else 404, headers, text.encode())

    def _send(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass
