"""The command line: verbs only. The rooms that they call do the work."""

from __future__ import annotations

import sys
from typing import Any

import typer

from dent.cli import evaluate, lists, reproduce, serve, train
from dent.cli.app import app

__all__ = ["app", "evaluate", "lists", "main", "reproduce", "serve", "train"]

INTERRUPTED = 130  # exit code after an interrupt, as in shells


def main() -> None:
    """Run the command line. A mistake of the user becomes one line on stderr and exit code 2."""
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
