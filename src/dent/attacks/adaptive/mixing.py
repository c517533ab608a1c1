"""Mixed batches (the paper's section 4.5): adversarial inputs among natural ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dent.attacks.adaptive.submission import PartResult, select_rows
from dent.attacks.adaptive.views import Direct, GradientAttack, MakeView, attack_through_view
from dent.attacks.apgd import apgd
from dent.attacks.checks import Eps, Labels, check_attack, read_arguments
from dent.attacks.search import AttackResult, Model, join_results
from dent.seeds import make_generator


def draw_mask(count: int, share: float, *, seed: int = 0) -> Tensor:
    """Draw which of `count` inputs are the adversary's, (count,) bool: a share of them, at least one.

    >>> draw_mask(16, 0.25).sum().item(), draw_mask(16, 0.01).sum().item()
    (4, 1)
    """
    if not 0 < share <= 1:
        raise ValueError(f"expected a share in (0, 1], got {share}")
    chosen = torch.randperm(count, generator=make_generator(seed))[: max(round(share * count), 1)]
    return torch.zeros(count, dtype=torch.bool).index_fill(0, chosen, True)


def mixing(
    model: Model,
    inputs: Tensor,
    labels: Labels,
    *,
    share: float,
    eps: Eps,
    norm: str = "linf",
    attack: GradientAttack = apgd,
    through: MakeView = Direct,
    seed: int = 0,
    **settings: Any,
) -> PartResult:
    """Attack a share of the batch, drawn by the seed. The rest stays natural and does not count.

    through: the kind of view whose gradient is followed, such as `Unrolled`.
    attack: the gradient attack. settings: its other settings.
    """
    mask = draw_mask(len(inputs), share, seed=seed).to(inputs.device)
    result = attack_through_view(
        attack, model, through(model), inputs, labels,
        eps=eps, norm=norm, mask=mask, seed=seed, **settings,
    )  # fmt: skip
    return PartResult(**vars(result), part=mask)


def one_among(
    model: Model,
    inputs: Tensor,
    labels: Labels,
    pool: Tensor,
    *,
    eps: Eps,
    norm: str = "linf",
    companions: int = 15,
    attack: GradientAttack = apgd,
    through: MakeView = Direct,
    seed: int = 0,
    **settings: Any,
) -> AttackResult:
    """Attack every input in a batch of its own, as the first among natural `companions`.

    The result has one row per input, with the answer in its batch. `draw_companions` returns the other
    inputs of that batch.

    pool: natural inputs to draw the companions from; in the paper, the test set.
    The other settings are those of `mixing`.
    """
    labels, eps = read_arguments(inputs, labels, eps)
    check_attack(inputs, labels, eps=eps, norm=norm)
    results = []
    for index, (image, label) in enumerate(zip(inputs, labels, strict=True)):
        others = draw_companions(image, pool, companions, seed=seed, index=index)
        batch = torch.cat([image[None], others])
        first = torch.arange(len(batch), device=batch.device) == 0
        # The companions' labels are unknown and do not matter: their losses are not increased.
        result = attack_through_view(
            attack, model, through(model), batch, label.expand(len(batch)),
            eps=eps, norm=norm, mask=first, seed=make_generator(seed, index).initial_seed(), **settings,
        )  # fmt: skip
        results.append(select_rows(result, first))
    return join_results(results)


def draw_companions(image: Tensor, pool: Tensor, count: int, *, seed: int, index: int) -> Tensor:
    """Draw the natural companions of input number `index`, (count, ...), never the input itself."""
    if pool.shape[1:] != image.shape:
        raise ValueError(f"expected a pool of inputs {tuple(image.shape)}, got {tuple(pool.shape[1:])}")
    others = (pool != image).flatten(1).any(1).nonzero().squeeze(1)
    if not 0 <= count <= len(others):
        raise ValueError(
            f"expected 0 to {len(others)} companions (the pool has no more other inputs), got {count}"
        )
    chosen = torch.randperm(len(others), generator=make_generator(seed, index))[:count]
    return pool[others[chosen.to(others.device)]]
