"""The rules of evaluation, the suites, the run with its store, the engines."""

from __future__ import annotations

from dent.evaluation.config import Evaluation, make_evaluation, read_evaluation
from dent.evaluation.results import CellResult, Results, Score
from dent.evaluation.run import evaluate, load_results
from dent.evaluation.suites import SUITE_NOTES

__all__ = [
    "SUITE_NOTES",
    "CellResult",
    "Evaluation",
    "Results",
    "Score",
    "evaluate",
    "load_results",
    "make_evaluation",
    "read_evaluation",
]
