"""Run the command `dent` in this process, which takes seconds less than starting another."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch

from dent.cli import main


@dataclass(frozen=True)
class Finished:
    """What a command printed, and its exit code."""

    returncode: int
    stdout: str
    stderr: str


def run(*arguments: object, cwd: Path | None = None) -> Finished:
    """Run `dent` with arguments in the folder `cwd`; warnings are printed, as in another process."""
    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch.object(sys, "argv", ["dent", *map(str, arguments)]),
        chdir(cwd or Path.cwd()),
        redirect_stdout(out),
        redirect_stderr(err),
        warnings.catch_warnings(),
        keep_threads(),
    ):
        warnings.simplefilter("default")
        try:
            main()
        except SystemExit as end:
            return Finished(int(end.code or 0), out.getvalue(), err.getvalue())
    raise AssertionError("the command did not exit")


def run_script(script: str, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a Python script in another process, which may be killed; it can import what tests can."""
    here = str(Path(__file__).parent)
    path = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)], capture_output=True, text=True, cwd=here,
        env=os.environ | {"PYTHONPATH": path} | environment,
    )  # fmt: skip


@contextmanager
def keep_threads() -> Iterator[None]:
    """Undo `--threads` when the block ends."""
    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)
