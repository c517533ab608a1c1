"""Evaluation: spec, plan, execute, store, score. It returns numbers; `dent.report` formats them."""

from __future__ import annotations

from dent.evaluation.compare import ComparedCells, compare_runs
from dent.evaluation.paired import Paired
from dent.evaluation.pipeline import evaluate, load_results, run_evaluation
from dent.evaluation.results import CellResult, Cost, Results, Score
from dent.evaluation.spec import Cell, Evaluation, read_evaluation
from dent.evaluation.suites import SUITE_NOTES

__all__ = [
    "SUITE_NOTES",
    "Cell",
    "CellResult",
    "ComparedCells",
    "Cost",
    "Evaluation",
    "Paired",
    "Results",
    "Score",
    "compare_runs",
    "evaluate",
    "load_results",
    "read_evaluation",
    "run_evaluation",
]
