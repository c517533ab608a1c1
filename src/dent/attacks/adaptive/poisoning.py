"""DIA (Wu et al., 2023): members of a batch flip the predictions of others that are natural."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from dent.attacks.adaptive.protocol import MakeView
from dent.attacks.adaptive.submission import PartResult, strongest, submitted
from dent.attacks.adaptive.unrolled import Unrolled
from dent.attacks.calls import Calls, Model, succeeds
from dent.attacks.checks import check_attack
from dent.attacks.losses import loss_of
from dent.attacks.norms import like, project, random_in_ball
from dent.attacks.pgd import stepped
from dent.seeds import generator


def poisoning(
    defense: Model,
    inputs: Tensor,
    labels: Tensor,
    *,
    malicious: Tensor,
    eps: float = 1.0,
    norm: str = "linf",
    loss: str = "ce",
    steps: int = 100,
    step_size: float | None = None,
    restarts: int = 1,
    through: MakeView = Unrolled,
    seed: int = 0,
) -> PartResult:
    """Ascend the loss of the benign members by steps of the malicious ones (2.5 eps / steps).

    What they share are statistics and parameters; where they share nothing, nothing happens. From the
    gray image, and from random points in further restarts; the batch that breaks most benign members
    is kept, of equals the one of highest loss. The part of the result are the benign members.

    malicious: (N,) bool; `draw_mask` draws one.
    eps: of the malicious members, all of [0, 1] if not given.
    through: what is climbed; `Unrolled` reaches through updates and statistics, `Itself` is the gradient
    that the defense gives by itself.
    """
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
    value = partial(loss_of(loss, labels), torch.arange(len(labels), device=labels.device))
    calls = Calls(defense, through=through(defense), joint=True, mask=benign)
    best, most = inputs, (-1, -torch.inf)
    for restart in range(restarts):
        points = _start(inputs, restart, eps=eps, norm=norm, seed=seed)
        for _ in range(steps + 1):
            points = torch.where(like(malicious, points), points, inputs)
            answer = calls.ascent(points, value)
            broken = succeeds(answer.logits, labels) & benign
            reached = int(broken.sum()), float(answer.values[benign].sum())
            if reached > most:
                best, most = points, reached
            points = stepped(points, answer.gradient, inputs, eps=eps, norm=norm, step_size=step_size)
    natural = submitted(defense, inputs, labels)
    result = strongest([calls.score(best, labels), natural], benign)
    return PartResult(**vars(result), part=benign)


def _start(inputs: Tensor, restart: int, *, eps: float, norm: str, seed: int) -> Tensor:
    """Gray, the middle of [0, 1], at first; later a random point."""
    if restart == 0:
        points = torch.full_like(inputs, 0.5)
    else:
        points = inputs + eps * random_in_ball(inputs.shape, norm, generator(seed, restart)).to(inputs)
    return project(points, inputs, eps=eps, norm=norm)
