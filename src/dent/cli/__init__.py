"""The command line: verbs only. The rooms that they call do the work."""

from __future__ import annotations

import os
import sys
from types import ModuleType

__all__ = ["main"]

INTERRUPTED = 130  # exit code after an interrupt, as in shells
DEBUG = "--debug"
RESUMED = ("evaluate", "reproduce", "train")  # verbs that go on where they were stopped


def main() -> None:
    """Run the command line. A mistake of the user becomes one line on stderr and exit code 2.

    `--debug` may stand anywhere. Modules are imported within, so that an interrupt is one line from the
    first moment on.
    """
    try:
        arguments = [one for one in sys.argv[1:] if one != DEBUG]
        sys.exit(import_module("dent.cli.app").run_app(arguments, debug=DEBUG in sys.argv[1:]))
    except KeyboardInterrupt:
        print(_describe_stop(), file=sys.stderr)
        sys.exit(INTERRUPTED)


def import_module(name: str) -> ModuleType:
    """Return a module. An interrupt while it is imported ends this process at once.

    As an exception it could be lost: packages such as torch swallow errors in parts of their import.
    """
    import importlib
    import signal

    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # ignored, or someone else's
        return importlib.import_module(name)
    signal.signal(signal.SIGINT, _end_process)
    try:
        return importlib.import_module(name)
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end_process(*_: object) -> None:
    os.write(2, f"{_describe_stop()}\n".encode())
    os._exit(INTERRUPTED)


def _describe_stop() -> str:
    return f"dent: stopped{'; the same command goes on' * bool({*sys.argv[1:3]} & {*RESUMED})}"
