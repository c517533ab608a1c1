"""The names of the package `dent`: what users import."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec

from dent import __version__, attacks, evaluation, testing
from dent.data import load_data
from dent.defense import (
    DEFENSES,
    PRESETS,
    Defended,
    Defense,
    Dent,
    Online,
    Settings,
    State,
    Trace,
    defend,
)
from dent.evaluation import Results, load_results
from dent.models import load_model

P = ParamSpec("P")


def _write_report(evaluate: Callable[P, Results]) -> Callable[P, Results]:
    """Have `evaluate` also write report.md: evaluation returns numbers, and report formats them."""

    @wraps(evaluate)
    def evaluate_and_write(*args: P.args, **settings: P.kwargs) -> Results:
        from dent.report.write import write_markdown  # loads what only reports need

        results = evaluate(*args, **settings)
        if results.folder is not None:
            write_markdown(results, results.folder)
        return results

    return evaluate_and_write


evaluate = _write_report(evaluation.evaluate)

__all__ = [
    "DEFENSES",
    "PRESETS",
    "Defended",
    "Defense",
    "Dent",
    "Online",
    "Settings",
    "State",
    "Trace",
    "__version__",
    "attacks",
    "defend",
    "evaluate",
    "load_data",
    "load_model",
    "load_results",
    "testing",
]
