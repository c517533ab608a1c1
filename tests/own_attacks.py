"""Attacks as a user may write them: complete, with less than they could take, and broken."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dent.attacks import AttackResult

Model = Callable[[Tensor], Tensor]
calls = 0


def fgsm(model: Model, inputs: Tensor, labels: Tensor, *, eps: float, norm: str) -> Tensor:
    """One step, with nothing but what every attack is given; it leaves gradients behind."""
    assert norm == "linf"
    points = inputs.requires_grad_()
    F.cross_entropy(model(points), labels).backward()
    assert points.grad is not None
    return (points + eps * points.grad.sign()).clamp(0, 1)


def random_signs(
    model: Model, inputs: Tensor, labels: Tensor, *, eps: float, norm: str, steps: int = 1,
    seed: int = 0, mask: Tensor | None = None, joint: bool = False,
) -> AttackResult:  # fmt: skip
    """The best of `steps` random corners of the ball, by the seed; it tells its cost."""
    random = torch.Generator().manual_seed(seed)
    best, most = inputs, torch.full(labels.shape, -torch.inf)
    for _ in range(steps):
        points = inputs + eps * (torch.randint(2, inputs.shape, generator=random) * 2 - 1)
        points = points.clamp(0, 1)
        with torch.no_grad():
            logits = model(points)
            values = F.cross_entropy(logits, labels, reduction="none")
        better = (values > most)[:, None, None, None]
        best, most = torch.where(better, points, best), values.maximum(most)
    return AttackResult(best, logits.argmax(1) != labels, logits, steps * len(inputs), 0)


def frozen(defense: Any, inputs: Tensor, labels: Tensor, *, eps: float, norm: str) -> Tensor:
    """One step on the defense as adapted to the natural inputs."""
    state = defense.adapt(inputs)
    points = inputs.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(F.cross_entropy(defense.predict(points, state), labels), points)
    return (inputs + eps * gradient.sign()).clamp(0, 1)


frozen.kind = "adaptive"  # type: ignore[attr-defined]


def mortal(model: Model, inputs: Tensor, labels: Tensor, *, eps: float, norm: str) -> Tensor:
    """`fgsm`, which kills its process at its n-th call, if the environment says n."""
    global calls
    calls += 1
    if calls == int(os.environ.get("DIE_AT", "-1")):
        os.kill(os.getpid(), signal.SIGKILL)
    return fgsm(model, inputs, labels, eps=eps, norm=norm)


def nothing(model: Model, inputs: Tensor, labels: Tensor, *, eps: float, norm: str) -> None:
    return None


def far(model: Model, inputs: Tensor, labels: Tensor, *, eps: float, norm: str) -> Tensor:
    return inputs.add_(2 * eps).clamp_(0, 1)  # in place, so that it seems not to have moved


def bright(model: Model, inputs: Tensor, labels: Tensor, *, eps: float, norm: str) -> Tensor:
    return inputs + eps


def undefined(model: Model, inputs: Tensor, labels: Tensor, *, eps: float, norm: str) -> Tensor:
    return inputs / 0 * 0


def flat(model: Model, inputs: Tensor, labels: Tensor, *, eps: float, norm: str) -> Tensor:
    return inputs.flatten(1)


def double(model: Model, inputs: Tensor, labels: Tensor, *, eps: float, norm: str) -> Tensor:
    return inputs.double()


def failing(model: Model, inputs: Tensor, labels: Tensor, *, eps: float, norm: str) -> Tensor:
    raise RuntimeError("no idea")
