"""The reference AutoAttack behind our call: `pyautoattack`, the authors' code, as the paper used it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dent.attacks.calls import Model, succeeds
from dent.attacks.result import Finding, SuiteResult

THEIRS = {"linf": "Linf", "l2": "L2", "l1": "L1"}


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
    findings: tuple[Finding, ...],
) -> SuiteResult:
    """What its own evaluation says and returns.

    `broken` is its verdict, on batches of its making. `success` is that of submitting what it returns in
    batches of `batch_size`, in which every input that it did not break is the natural one. It does not
    tell which attack broke what.
    """
    counted, labels = _Counted(model), labels.long()
    reference = find_reference()(
        counted, norm=THEIRS[norm], eps=eps, version=version, seed=seed, device=inputs.device
    )
    if attacks is not None:
        reference.attacks_to_run = list(attacks)
    _set_budget(reference, steps=steps, queries=queries)
    with torch.no_grad():
        others = counted(inputs[:batch_size]).shape[1] - 1
    for attack in (reference.apgd_targeted, reference.fab):
        attack.n_target_classes = min(attack.n_target_classes, others)
    # It views gradients as rows, which inputs in channels last do not allow.
    points, answers = reference.run_standard_evaluation(
        inputs.detach().contiguous(), labels, batch_size=batch_size
    )
    with torch.no_grad():
        logits = torch.cat([counted(part) for part in points.split(batch_size)])
    return SuiteResult(
        points, succeeds(logits, labels), logits, counted.queries, counted.gradients,
        broken=answers != labels, attacks={}, findings=findings,
    )  # fmt: skip


def find_reference() -> Any:
    """The class of `pyautoattack`; its absence is an error that says what to install."""
    try:
        from pyautoattack import AutoAttack
    except ImportError as error:
        raise ImportError("engine='reference' needs: pip install 'dent-defense[reference]'") from error
    return AutoAttack


class _Counted:
    """A model that counts what it is asked."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.queries = 0
        self.gradients = 0

    def __call__(self, points: Tensor) -> Tensor:
        self.queries += len(points)
        self.gradients += len(points) * (points.requires_grad and torch.is_grad_enabled())
        return self.model(points)


def _set_budget(reference: Any, *, steps: int, queries: int) -> None:
    """What its constructor derives from 100 steps and 5,000 queries, for other numbers."""
    reference.square.n_queries, reference.fab.n_iter = queries, steps
    for attack in (reference.apgd, reference.apgd_targeted):
        attack.n_iter = attack.n_iter_orig = steps
        attack.n_iter_2, attack.n_iter_min, attack.size_decr = (
            max(int(share * steps), 1) for share in (0.22, 0.06, 0.03)
        )
