"""About what attacks cost at most, in forwards of the static model for each input: for estimates.

A backward through the activations counts as a forward. Models with ten classes or more are meant.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

OTHERS = 9  # classes that an attack goes for in turn
ASKED = 3  # times that every attack asks besides: at the natural inputs, at the end, to submit that


@dataclass(frozen=True)
class Forwards:
    """What a model's answers cost.

    size: how many inputs the batch has.

    >>> Forwards(updates=10).answer
    21.0
    """

    updates: int
    size: int = 128

    @property
    def answer(self) -> float:
        """A step is a forward and a backward through activations; then comes the prediction."""
        return 2.0 * self.updates + 1

    @property
    def gradient(self) -> float:
        return self.answer + 1

    @property
    def asked(self) -> float:
        return ASKED * self.answer


def climb(f: Forwards, s: dict[str, Any]) -> float:
    return _steps(s) * f.gradient + f.asked


def targeted(f: Forwards, s: dict[str, Any]) -> float:
    return float(s.get("targets", OTHERS) * _steps(s) * f.gradient + f.asked)


def fab(f: Forwards, s: dict[str, Any]) -> float:
    """One answer leads to the gradients of all classes, another tells where a step has led."""
    return _steps(s) * (2 * f.answer + OTHERS) + f.asked


def fab_targeted(f: Forwards, s: dict[str, Any]) -> float:
    return float(s.get("targets", OTHERS) * _steps(s) * (f.gradient + f.answer) + f.asked)


def queries(f: Forwards, s: dict[str, Any]) -> float:
    return float(s.get("queries", 5000) + 1) * f.answer + f.asked


def denying(f: Forwards, s: dict[str, Any]) -> float:
    names = s.get("attacks", ("apgd-ce", "apgd-t"))
    runs = sum(OTHERS if name == "apgd-t" else 1 for name in names)
    return 2 * runs * _steps(s) + (len(names) + 1) * f.answer


def confident(f: Forwards, s: dict[str, Any]) -> float:
    targets = s.get("targets", 3)
    return float(2 * targets * _steps(s) + (targets + 2) * f.answer)


def rounds(f: Forwards, s: dict[str, Any], *, models: float) -> float:
    """In each round so many models are climbed, on average a share of the rounds' number."""
    count = s.get("rounds", 10)
    return float(count * (_steps(s) * 2 * max(models * count, 1) + 2 * f.answer) + 2 * f.answer)


def unrolled(f: Forwards, s: dict[str, Any]) -> float:
    return _steps(s) * 3 * f.answer + f.asked


def averaged(f: Forwards, s: dict[str, Any]) -> float:
    return _steps(s) * (f.answer + 2 * (f.updates + 1)) + f.asked


def halved(f: Forwards, s: dict[str, Any]) -> float:
    return _steps(s) * Forwards(s.get("updates", f.updates // 2)).gradient + f.asked


def lazy(f: Forwards, s: dict[str, Any]) -> float:
    return _steps(s) * (f.answer / float(s.get("every", 5)) + 2) + f.asked


def among(f: Forwards, s: dict[str, Any]) -> float:
    points, together = min(s["points"], f.size), min(s.get("companions", 15) + 1, f.size)
    return float(points * together) / f.size * climb(f, s)


def _steps(s: dict[str, Any]) -> float:
    """Of all runs, with the point that a run starts from."""
    return float((s.get("steps", 100) + 1) * s.get("restarts", 1) * s.get("draws", 1))
