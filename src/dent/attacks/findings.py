"""Signs that an evaluation may be misleading: AutoAttack's five warnings, as values.

Their meaning and thresholds follow Croce and Hein (2020); see docs/attacks.md.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from dent.attacks.checks import check_labels, check_logits, returns_probabilities
from dent.attacks.losses import make_loss
from dent.attacks.search import AttackedModel, Model

CALLS = 5  # to a model that may be random
LARGEST_DIFFERENCE = 1e-4  # between normalized answers of a deterministic model
LARGEST_GAIN = 0.002  # of Square over the gradient attacks, as a share of all inputs


@dataclass(frozen=True)
class Finding:
    """A sign that a result may be misleading: its name, its meaning and the figures behind it."""

    name: str
    message: str
    figures: dict[str, float] = field(default_factory=dict)


def inspect_model(
    model: Model, inputs: Tensor, labels: Tensor, *, random: bool = False
) -> tuple[Finding, ...]:
    """Return all findings that need no attack. `random=True` skips the test for randomness."""
    with torch.no_grad():
        logits = model(inputs)
    check_logits(logits, inputs)
    check_labels(labels, logits.shape[1])
    if not len(inputs):
        return ()
    probabilities = detect_probabilities(model, inputs, logits)
    findings = [
        None if random else detect_randomness(model, inputs),
        probabilities,
        detect_zero_gradient(take_logarithm(model) if probabilities else model, inputs, labels.long()),
        detect_optimization(model, inputs),
    ]
    return tuple(finding for finding in findings if finding)


def detect_randomness(model: Model, inputs: Tensor) -> Finding | None:
    """Return a finding if the same inputs get different answers."""
    with torch.no_grad():
        first, *others = [model(inputs) for _ in range(CALLS)]
    difference = max(measure_difference(first, other) for other in others)
    if difference <= LARGEST_DIFFERENCE:
        return None
    return Finding(
        "randomized",
        "the same inputs get different answers; use version='rand', whose attacks average over draws",
        {"largest difference": difference},
    )


def measure_difference(one: Tensor, other: Tensor) -> float:
    """Return the largest distance between two answers to an input, each scaled to length one.

    >>> measure_difference(torch.tensor([[3.0, 0.0]]), torch.tensor([[-2.0, 0.0]]))
    2.0
    """
    one, other = (logits / logits.norm(dim=-1, keepdim=True).clamp(min=1e-10) for logits in (one, other))
    return float((one - other).norm(dim=-1).max())


def detect_probabilities(model: Model, inputs: Tensor, logits: Tensor) -> Finding | None:
    """Return a finding if the model returns the output of a softmax."""
    if not returns_probabilities(model, inputs, logits):
        return None
    return Finding(
        "probabilities",
        "the model returns probabilities, through which gradients vanish; their logarithm was attacked",
    )


def take_logarithm(model: Model) -> Model:
    """Return a model of logits, up to a constant, for a model that returns probabilities."""

    def logits(points: Tensor) -> Tensor:
        probabilities = model(points)
        return probabilities.clamp(min=torch.finfo(probabilities.dtype).tiny).log()

    return logits


def detect_zero_gradient(model: Model, inputs: Tensor, labels: Tensor) -> Finding | None:
    """Return a finding if a loss has no gradient at some inputs."""
    attacked, figures = AttackedModel(model), {}
    everyone = torch.arange(len(labels), device=labels.device)
    for name in ("ce", "dlr"):
        loss = make_loss(name, labels)
        gradient = attacked.differentiate(inputs, partial(loss, everyone)).gradient
        figures[name] = float((gradient.flatten(1).abs().sum(1) == 0).sum())
    if not any(figures.values()):
        return None
    return Finding(
        "zero gradient",
        "a loss has no gradient at some inputs (ce alone: saturated; dlr too: masked); attacks that "
        "follow gradients are blind there",
        figures | {"inputs": float(len(inputs))},
    )


def count_backward_passes(model: Model, inputs: Tensor) -> int:
    """Return how often the model computes gradients in a forward pass.

    All of torch's ways to compute gradients call one of two Python functions, so a profiler sees them.

    >>> count_backward_passes(torch.nn.Linear(2, 2), torch.rand(1, 2))
    0
    """
    watched = {torch.autograd.backward.__code__, torch.autograd.grad.__code__}
    count = 0

    def watch(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call" and frame.f_code in watched

    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        with torch.no_grad():
            model(inputs)
    finally:
        sys.setprofile(before)
    return count


def detect_optimization(model: Model, inputs: Tensor) -> Finding | None:
    """Return a finding if the model computes gradients in its forward pass, as dynamic defenses do."""
    count = count_backward_passes(model, inputs)
    if not count:
        return None
    return Finding(
        "optimization inside",
        "the model computes gradients in its forward pass: attacks for static models are not enough, "
        "use those of dent.attacks.adaptive as well",
        {"backward passes": float(count)},
    )


def detect_stronger_square(broken: dict[str, Tensor]) -> Finding | None:
    """Return a finding if Square, which uses no gradient, breaks inputs that no other attack breaks."""
    others = [one for name, one in broken.items() if name != "square"]
    if "square" not in broken or not others:
        return None
    alone = int((broken["square"] & ~torch.stack(others).any(0)).sum())
    if alone <= LARGEST_GAIN * len(broken["square"]):
        return None
    return Finding(
        "square is stronger",
        "Square, which uses no gradient, breaks inputs that the gradient attacks do not break: the "
        "gradients mislead; use more queries, and an attack made for this model",
        {"inputs": float(alone)},
    )
