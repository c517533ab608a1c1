"""What an attack returns."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True)
class AttackResult:
    """The inputs of an attack, and how the model answered them when it was last asked."""

    inputs: Tensor  # (N, C, H, W), in the ball and in [0, 1]
    success: Tensor  # (N,) bool: misclassified (or, driven towards a class, classified as that)
    logits: Tensor  # (N, classes) of `inputs`
    queries: int  # forwards, in inputs
    gradients: int  # backwards, in inputs


@dataclass(frozen=True)
class Finding:
    """A sign that a result may not be what it seems: its name, what it means, and the figures for it."""

    name: str
    message: str
    figures: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class SuiteResult(AttackResult):
    """What the attacks of a suite did together.

    Where the model depends on the batch, `inputs` are one submission of it, `success` is of that, and
    `broken` is the worst case over all attacks for each input. Elsewhere the two are the same.
    """

    broken: Tensor  # (N,) bool: by any attack, or without one
    attacks: dict[str, Tensor]  # (N,) bool: what each attack broke, of what it was given
    findings: tuple[Finding, ...]
