"""`dent serve`: a defended model behind HTTP."""

from __future__ import annotations

import os
from ipaddress import ip_address
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dent.cli.app import app
from dent.flags import flags
from dent.serving.settings import Serving, make_serving

if TYPE_CHECKING:
    from dent.serving.run import Server

TOKEN = "DENT_TOKEN"


@app.command()
@flags(Serving)
def serve(
    ray_address: Annotated[str | None, typer.Option(help="Of a cluster of Ray, to serve there.")] = None,
    **settings: Any,
) -> None:
    """Serve a defended model over HTTP, on Ray Serve, until Ctrl-C or SIGTERM.

    Alone, it serves a shipped model on http://127.0.0.1:8000, with a page to try it; clients need the
    token of the environment variable DENT_TOKEN, if it is set.
    """
    serving = make_serving(**settings)
    from dent.serving.run import serve_until_stopped  # only here, for it loads Ray

    typer.echo(f"dent: starting {serving.model} on Ray, which takes some seconds", err=True)
    token = os.environ.get(TOKEN)
    if token is None and not _is_loopback(serving.host):
        typer.echo(
            f"dent: anyone who reaches {serving.host} can use this server; set {TOKEN} to ask for it",
            err=True,
        )
    serve_until_stopped(serving, token=token, address=ray_address, ready=_say_where)
    typer.echo("stopped")


def _say_where(server: Server) -> None:
    about = server.about
    typer.echo(f"{about['model']}, {about['defense']}: {server.url}")
    typer.echo(about["isolation"])


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
