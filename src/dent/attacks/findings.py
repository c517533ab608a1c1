"""Signs that an evaluation may not be what it seems: AutoAttack's five warnings, as values.

What they mean and when they are raised follows Croce and Hein (2020); see docs/attacks.md.
"""

from __future__ import annotations

import sys
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from dent.attacks.calls import Calls, Model
from dent.attacks.checks import looks_like_probabilities
from dent.attacks.losses import loss_of
from dent.attacks.result import Finding

CALLS = 5  # of a model that may be random
LARGEST_DIFFERENCE = 1e-4  # between answers of unit length, for a model that is not
LARGEST_GAIN = 0.002  # of Square over the attacks that see gradients, as a share of all inputs


def randomized(model: Model, inputs: Tensor) -> Finding | None:
    """Whether the same inputs get different answers."""
    with torch.no_grad():
        answers = torch.stack([model(inputs) for _ in range(CALLS)])
    answers = answers / answers.norm(dim=-1, keepdim=True).clamp(min=1e-10)
    difference = float((answers[1:] - answers[0]).norm(dim=-1).max())
    if difference <= LARGEST_DIFFERENCE:
        return None
    return Finding(
        "randomized",
        "the same inputs get different answers; use version='rand', whose attacks average over draws",
        {"largest difference": difference},
    )


def probabilities(answers: Tensor) -> Finding | None:
    """Whether the model returns the softmax instead of what goes into it."""
    if not looks_like_probabilities(answers):
        return None
    return Finding(
        "probabilities",
        "the model returns probabilities, through which gradients vanish; their logarithm was attacked",
    )


def zero_gradient(model: Model, inputs: Tensor, labels: Tensor) -> Finding | None:
    """Whether the losses have no gradient at some of the inputs."""
    calls, figures, everyone = Calls(model), {}, torch.arange(len(labels), device=labels.device)
    for name in ("ce", "dlr"):
        loss = loss_of(name, labels)
        gradient = calls.ascent(inputs, partial(loss, everyone)).gradient
        figures[name] = float((gradient.flatten(1).abs().sum(1) == 0).sum())
    if not any(figures.values()):
        return None
    return Finding(
        "zero gradient",
        "a loss has no gradient at some inputs (ce: saturated; dlr too: masked); attacks that follow it "
        "are blind there",
        figures | {"inputs": float(len(inputs))},
    )


def square_is_stronger(broken: dict[str, Tensor]) -> Finding | None:
    """Whether Square, which sees no gradient, breaks what none of the others does."""
    others = [one for name, one in broken.items() if name != "square"]
    if "square" not in broken or not others:
        return None
    alone = int((broken["square"] & ~torch.stack(others).any(0)).sum())
    if alone <= LARGEST_GAIN * len(broken["square"]):
        return None
    return Finding(
        "square is stronger",
        "Square, which sees no gradient, breaks what the attacks with gradients do not: these are "
        "misled; use more queries, and an attack made for this model",
        {"inputs": float(alone)},
    )


def optimization_inside(model: Model, inputs: Tensor) -> Finding | None:
    """Whether the model computes gradients when it is asked: a dynamic defense.

    Every way to them leads through two Python functions of torch, whatever name they are called by.
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
    if not count:
        return None
    return Finding(
        "optimization inside",
        "the model computes gradients when it is asked: attacks for static models are not enough, use "
        "those of dent.attacks.adaptive as well",
        {"backward passes": float(count)},
    )
