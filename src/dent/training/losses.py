"""The losses that training minimizes, and the attack inside adversarial training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dent.attacks.norms import sample_in_ball
from dent.attacks.pgd import ascend
from dent.training.recipe import Recipe


def compute_loss(
    model: nn.Module, inputs: Tensor, points: Tensor, labels: Tensor, *, beta: float | None
) -> tuple[Tensor, Tensor]:
    """Return the loss of a batch, and the logits of `points`, the inputs as attacked (or not).

    Without beta this is the cross-entropy of the points: nominal training, or AT (Madry et al., 2018).
    With beta it is TRADES (Zhang et al., 2019): the cross-entropy of the inputs plus
    beta KL(p(inputs) || p(points)).
    """
    if beta is None:
        logits = model(points)
        return F.cross_entropy(logits, labels), logits
    natural, logits = model(inputs), model(points)
    divergence = beta * sum_divergence(logits, natural) / len(inputs)
    return F.cross_entropy(natural, labels) + divergence, logits


def sum_divergence(logits: Tensor, natural: Tensor) -> Tensor:
    """Return KL(softmax(natural) || softmax(logits)), summed over the batch."""
    return F.kl_div(logits.log_softmax(1), natural.log_softmax(1), reduction="sum", log_target=True)


def attack_batch(
    model: nn.Module, inputs: Tensor, labels: Tensor, start: Tensor, *, recipe: Recipe
) -> Tensor:
    """Return the batch as the recipe's attack changes it, beginning at `start`."""
    with freeze(model):
        if recipe.method == "trades":
            with torch.no_grad():
                natural = model(inputs)
        return ascend(
            lambda points: (
                sum_divergence(model(points), natural)
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


def draw_offsets(shape: torch.Size, *, recipe: Recipe, generator: torch.Generator) -> Tensor:
    """Return the offset from each input at which the attack starts.

    AT starts anywhere in the ball. TRADES starts very close to the input, but not at it: there the
    divergence is at its minimum and has no gradient.
    """
    if recipe.method == "trades":
        return 0.001 * torch.randn(shape, generator=generator)
    return recipe.eps * sample_in_ball(shape, recipe.norm, generator)


@contextmanager
def freeze(model: nn.Module) -> Iterator[nn.Module]:
    """Put the model in evaluation mode without gradients for its parameters while the block runs.

    Attacks need only the gradient of the input; that of the weights would be a third of the work.
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
