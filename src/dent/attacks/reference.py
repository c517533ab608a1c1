"""The reference AutoAttack behind our call: `pyautoattack`, the authors' code that the paper used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dent.attacks.search import AttackResult, Model, is_broken

NORM_NAMES = {"linf": "Linf", "l2": "L2", "l1": "L1"}


def run_reference(
    model: Model,
    inputs: Tensor,
    labels: Tensor,
    *,
    eps: float,
    norm: str,
    version: str,
    attacks: Sequence[str] | None,
    steps: int,
    queries: int,
    batch_size: int,
    seed: int,
) -> tuple[AttackResult, Tensor]:
    """Return the points that the reference returns, scored by the model, and its own verdict (N,).

    The verdict (True: broken) is that of batches which the reference makes itself. The score is that of
    its points in batches of `batch_size`, in which the inputs that it did not break are natural. The
    reference does not tell which attack broke which input.
    """
    counting, labels = _CountingModel(model), labels.long()
    reference = import_reference()(
        counting, norm=NORM_NAMES[norm], eps=eps, version=version, seed=seed, device=inputs.device
    )
    if attacks is not None:
        reference.attacks_to_run = list(attacks)
    _set_budget(reference, steps=steps, queries=queries)
    with torch.no_grad():
        others = counting(inputs[:batch_size]).shape[1] - 1
    for attack in (reference.apgd_targeted, reference.fab):
        attack.n_target_classes = min(attack.n_target_classes, others)
    # The reference views gradients as rows, which is impossible for inputs in channels last.
    points, answers = reference.run_standard_evaluation(
        inputs.detach().contiguous(), labels, batch_size=batch_size
    )
    with torch.no_grad():
        logits = torch.cat([counting(part) for part in points.split(batch_size)])
    result = AttackResult(
        points, is_broken(logits, labels), logits, counting.queries, counting.gradients
    )
    return result, answers != labels


def import_reference() -> Any:
    """Return the class of `pyautoattack`, or raise ImportError with the extra to install."""
    try:
        from pyautoattack import AutoAttack
    except ImportError as error:
        raise ImportError("engine='reference' needs: pip install 'dent-defense[reference]'") from error
    return AutoAttack


class _CountingModel:
    """A model that counts its forward and backward passes, in inputs."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.queries = 0
        self.gradients = 0

    def __call__(self, points: Tensor) -> Tensor:
        self.queries += len(points)
        self.gradients += len(points) * (points.requires_grad and torch.is_grad_enabled())
        return self.model(points)


def _set_budget(reference: Any, *, steps: int, queries: int) -> None:
    """Set the values that its constructor derives from 100 steps and 5,000 queries."""
    reference.square.n_queries, reference.fab.n_iter = queries, steps
    for attack in (reference.apgd, reference.apgd_targeted):
        attack.n_iter = attack.n_iter_orig = steps
        attack.n_iter_2, attack.n_iter_min, attack.size_decr = (
            max(int(share * steps), 1) for share in (0.22, 0.06, 0.03)
        )
