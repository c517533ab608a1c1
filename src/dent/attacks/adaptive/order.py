"""Batches sorted by label (REORDER of Chen et al., 2022): they leave no diversity to maximize."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dent.attacks.adaptive.submission import select_rows, submit
from dent.attacks.adaptive.views import GradientAttack
from dent.attacks.checks import Labels, check_attack, check_numbers, read_arguments, read_labels
from dent.attacks.search import AttackResult, Model, join_results
from dent.seeds import make_generator


def sort_by_label(labels: Labels, *, batch_size: int, window: int | None = None) -> Tensor:
    """Return the permutation (N,) that sorts the labels within each window of batches.

    window: the number of batches that are sorted together (default: all).

    >>> labels = torch.tensor([2, 0, 1, 0, 2, 1])
    >>> labels[sort_by_label(labels, batch_size=2)]
    tensor([0, 0, 1, 1, 2, 2])
    >>> labels[sort_by_label(labels, batch_size=2, window=2)]
    tensor([0, 0, 1, 2, 1, 2])
    """
    check_numbers(batch_size=batch_size, window=window)
    labels = read_labels(labels)
    size = max(len(labels), 1) if window is None else window * batch_size
    return torch.cat(
        [part.argsort(stable=True) + size * number for number, part in enumerate(labels.split(size))]
    )


def sorted_batches(
    model: Model,
    inputs: Tensor,
    labels: Labels,
    *,
    batch_size: int = 128,
    window: int | None = 2,
    attack: GradientAttack | None = None,
    mask: Tensor | None = None,
    seed: int = 0,
    **settings: Any,
) -> AttackResult:
    """Submit the inputs, natural or attacked, in batches sorted by label.

    The rows of the result are in the order of the inputs.

    attack: the attack on each batch, a function of `(model, inputs, labels, *, mask, seed, ...)`; none
    if it is None. settings: its other settings.
    window: the number of batches that are sorted together; all if it is None.
    """
    labels, eps = read_arguments(inputs, labels, settings.get("eps", 0))
    check_attack(inputs, labels, eps=eps, norm=settings.get("norm", "linf"), mask=mask)
    order = sort_by_label(labels, batch_size=batch_size, window=window)
    results = []
    for number, at in enumerate(order.split(batch_size)):
        if attack is None:
            results.append(submit(model, inputs[at], labels[at]))
        else:
            own = make_generator(seed, number).initial_seed()
            part = None if mask is None else mask[at]
            results.append(attack(model, inputs[at], labels[at], mask=part, seed=own, **settings))
    return select_rows(join_results(results), order.argsort())
