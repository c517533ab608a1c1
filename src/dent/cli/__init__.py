"""The command line: verbs only; the work is done in the rooms that they call."""

from __future__ import annotations

import sys
from typing import Any

import typer

from dent.cli import evaluate, lists, reproduce, serve, train
from dent.cli.app import app

__all__ = ["app", "evaluate", "lists", "main", "reproduce", "serve", "train"]

INTERRUPTED = 130  # what typer returns after an interrupt, as shells do


def main() -> None:
    """Run the command line; what the user got wrong is one line on stderr and exit code 2."""
    try:
        code = app(standalone_mode=False)
        if code == INTERRUPTED:
            typer.echo("dent: stopped", err=True)
        sys.exit(code)
    except typer.TyperException as error:
        usage: Any = error
        message = " ".join(usage.format_message().split())
        if message:
            typer.echo(f"dent: {message} Try 'dent --help'.", err=True)
    except (ValueError, TypeError, OSError, ImportError) as error:
        typer.echo(f"dent: {error}", err=True)
    sys.exit(2)
