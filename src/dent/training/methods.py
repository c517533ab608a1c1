"""The losses that training minimizes: natural, under attack (AT), and TRADES."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dent.attacks.norms import sample_in_ball
from dent.attacks.pgd import ascend
from dent.training.recipe import Recipe


def nominal_loss(model: nn.Module, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy; with the logits that it was computed from."""
    logits = model(inputs)
    return F.cross_entropy(logits, labels), logits


def trades_loss(
    model: nn.Module, inputs: Tensor, points: Tensor, labels: Tensor, *, beta: float
) -> tuple[Tensor, Tensor]:
    """Cross-entropy of the inputs + beta KL(p(inputs) || p(points)); with the logits of the points."""
    natural, attacked = model(inputs), model(points)
    return F.cross_entropy(natural, labels) + beta * divergence(attacked, natural) / len(
        inputs
    ), attacked


def divergence(attacked: Tensor, natural: Tensor) -> Tensor:
    """KL(softmax(natural) || softmax(attacked)), summed over the batch."""
    return F.kl_div(attacked.log_softmax(1), natural.log_softmax(1), reduction="sum", log_target=True)


@contextmanager
def frozen(model: nn.Module) -> Iterator[nn.Module]:
    """The model as it is deployed: evaluation mode, and no gradient for its parameters.

    Attacks need the gradient of the input alone; that of the weights is a third of the work.
    """
    training = model.training
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model.eval()
    for parameter in parameters:
        parameter.requires_grad_(False)
    try:
        yield model
    finally:
        for parameter in parameters:
            parameter.requires_grad_(True)
        model.train(training)


def attacked(
    model: nn.Module, inputs: Tensor, labels: Tensor, start: Tensor, *, recipe: Recipe
) -> Tensor:
    """The batch as the recipe's attack makes it, from `start`, against the model as it is deployed."""
    with frozen(model):
        if recipe.method == "trades":
            with torch.no_grad():
                natural = model(inputs)
        return ascend(
            lambda points: (
                divergence(model(points), natural)
                if recipe.method == "trades"
                else F.cross_entropy(model(points), labels, reduction="sum")
            ),
            inputs,
            start,
            eps=recipe.eps,
            norm=recipe.norm,
            steps=recipe.attack_steps,
            step_size=recipe.step_size,
        )


def start_offsets(shape: torch.Size, *, recipe: Recipe, generator: torch.Generator) -> Tensor:
    """How far from each input the attack starts: anywhere in the ball, or (TRADES) hardly beside it.

    At the input itself the divergence of TRADES is at its minimum, so it starts a little beside.
    """
    if recipe.method == "trades":
        return 0.001 * torch.randn(shape, generator=generator)
    return recipe.eps * sample_in_ball(shape, recipe.norm, generator)
