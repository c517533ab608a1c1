"""DIA (Wu et al., 2023): malicious members of a batch change the predictions of natural ones."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from dent.attacks.adaptive.submission import PartResult, pick_strongest, submit
from dent.attacks.adaptive.views import MakeView, Unrolled
from dent.attacks.checks import Eps, Labels, check_attack, read_arguments
from dent.attacks.losses import make_loss
from dent.attacks.norms import project, sample_in_ball, unsqueeze_like
from dent.attacks.pgd import take_step
from dent.attacks.search import AttackedModel, Model, is_broken
from dent.seeds import make_generator


def poisoning(
    defense: Model,
    inputs: Tensor,
    labels: Labels,
    *,
    malicious: Tensor,
    eps: Eps = 1.0,
    norm: str = "linf",
    loss: str = "ce",
    steps: int = 100,
    step_size: float | None = None,
    restarts: int = 1,
    through: MakeView = Unrolled,
    seed: int = 0,
) -> PartResult:
    """Increase the loss of the benign members by steps of the malicious ones.

    Members affect one another through shared statistics and parameters; if nothing is shared, nothing
    happens. The first run starts from gray images, the others from random points. The result is the
    batch that breaks most benign members or, of equally many, has the highest loss. Its `part` is the
    benign members.

    malicious: (N,) bool; `draw_mask` draws one.
    eps: the radius of the malicious members (default: all of [0, 1]).
    step_size: 2.5 eps / steps if it is None.
    through: the kind of view whose gradient is followed. `Unrolled` sees updates and statistics;
    `Direct` is the defense's own gradient.
    """
    labels, eps = read_arguments(inputs, labels, eps)
    check_attack(
        inputs, labels, eps=eps, norm=norm, mask=malicious,
        steps=steps, step_size=step_size, restarts=restarts,
    )  # fmt: skip
    if malicious.all() or not malicious.any():
        raise ValueError(
            "expected malicious and benign members, "
            f"got {int(malicious.sum())} malicious of {len(inputs)}"
        )
    inputs, labels, benign = inputs.detach(), labels.long(), ~malicious
    step_size = 2.5 * eps / max(steps, 1) if step_size is None else step_size
    loss_of_all = partial(make_loss(loss, labels), torch.arange(len(labels), device=labels.device))
    attacked = AttackedModel(defense, through=through(defense), joint=True, mask=benign)
    best, most = inputs, (-1, -torch.inf)
    for restart in range(restarts):
        points = _draw_start(inputs, restart, eps=eps, norm=norm, seed=seed)
        for _ in range(steps + 1):
            points = torch.where(unsqueeze_like(malicious, points), points, inputs)
            answer = attacked.differentiate(points, loss_of_all)
            broken = is_broken(answer.logits, labels) & benign
            reached = int(broken.sum()), float(answer.values[benign].sum())
            if reached > most:
                best, most = points, reached
            points = take_step(points, answer.gradient, inputs, eps=eps, norm=norm, step_size=step_size)
    natural = submit(defense, inputs, labels)
    result = pick_strongest(defense, [attacked.submit(best, labels), natural], benign)
    return PartResult(**vars(result), part=benign)


def _draw_start(inputs: Tensor, restart: int, *, eps: float, norm: str, seed: int) -> Tensor:
    """Return gray images, the middle of [0, 1], for the first run, and random points for the others."""
    if restart == 0:
        points = torch.full_like(inputs, 0.5)
    else:
        drawn = sample_in_ball(inputs.shape, norm, make_generator(seed, restart))
        points = inputs + eps * drawn.to(inputs)
    return project(points, inputs, eps=eps, norm=norm)
