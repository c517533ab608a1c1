"""`dent serve`: a defended model behind HTTP."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dent.clusters import is_loopback
from dent.flags import add_flags
from dent.serving.settings import Serving

if TYPE_CHECKING:
    from dent.serving.start import Server

TOKEN = "DENT_TOKEN"


@add_flags(Serving)
def serve(
    ray_address: Annotated[
        str | None,
        typer.Option(help="Address of a running Ray cluster to serve on (default: start Ray here)."),
    ] = None,
    **settings: Any,
) -> None:
    """Serve a defended model over HTTP, on Ray Serve, until Ctrl-C or SIGTERM.

    Without flags, it serves a shipped model on http://127.0.0.1:8000, with a page to try it. If the
    environment variable DENT_TOKEN is set, clients must send that token.
    """
    serving = Serving(**settings)
    from dent.serving.start import serve_until_stopped  # not earlier, because it loads Ray

    typer.echo(f"dent: starting {serving.model} on Ray, which takes some seconds", err=True)
    token = os.environ.get(TOKEN)
    if token is None and not _is_local(serving.host):
        typer.echo(
            f"dent: anyone who can reach {serving.host} can use this server; set {TOKEN} to require it",
            err=True,
        )
    serve_until_stopped(serving, token=token, address=ray_address, ready=_print_server)
    typer.echo("stopped")


def _print_server(server: Server) -> None:
    service = server.service
    typer.echo(f"{service.model}, {service.defense}: {server.url}")
    typer.echo(service.isolation)


def _is_local(host: str) -> bool:
    try:
        return is_loopback(host)
    except ValueError:
        return host == "localhost"
