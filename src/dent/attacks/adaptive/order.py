"""Batches sorted by label (REORDER of Chen et al., 2022): no diversity left to maximize."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dent.attacks.adaptive.protocol import GradientAttack
from dent.attacks.adaptive.submission import joined, rows_of, submitted
from dent.attacks.calls import Model
from dent.attacks.checks import check_attack, check_numbers
from dent.attacks.result import AttackResult
from dent.seeds import generator


def sort_by_label(labels: Tensor, *, batch_size: int, window: int | None = None) -> Tensor:
    """The permutation (N,) after which labels rise within each window of so many batches, or in all.

    >>> labels = torch.tensor([2, 0, 1, 0, 2, 1])
    >>> labels[sort_by_label(labels, batch_size=2)]
    tensor([0, 0, 1, 1, 2, 2])
    >>> labels[sort_by_label(labels, batch_size=2, window=2)]
    tensor([0, 0, 1, 2, 1, 2])
    """
    check_numbers(batch_size=batch_size, window=window)
    size = max(len(labels), 1) if window is None else window * batch_size
    return torch.cat(
        [part.argsort(stable=True) + size * number for number, part in enumerate(labels.split(size))]
    )


def sorted_batches(
    model: Model,
    inputs: Tensor,
    labels: Tensor,
    *,
    batch_size: int = 128,
    window: int | None = 2,
    attack: GradientAttack | None = None,
    mask: Tensor | None = None,
    seed: int = 0,
    **settings: Any,
) -> AttackResult:
    """The inputs as natural ones or attacked, in batches sorted by label; in the order they came in.

    attack: of each batch, with its settings; any of `(model, inputs, labels, *, mask, seed, ...)`.
    window: the labels are sorted within so many batches, in all if not given.
    """
    check_attack(
        inputs, labels, eps=settings.get("eps", 0), norm=settings.get("norm", "linf"), mask=mask
    )
    order = sort_by_label(labels, batch_size=batch_size, window=window)
    results = []
    for number, at in enumerate(order.split(batch_size)):
        if attack is None:
            results.append(submitted(model, inputs[at], labels[at]))
        else:
            own = generator(seed, number).initial_seed()
            part = None if mask is None else mask[at]
            results.append(attack(model, inputs[at], labels[at], mask=part, seed=own, **settings))
    return rows_of(joined(results), order.argsort())
