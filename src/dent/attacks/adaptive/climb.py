"""A gradient attack through a view, on a batch that stays together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from dent.attacks.adaptive.protocol import GradientAttack
from dent.attacks.adaptive.submission import strongest, submitted
from dent.attacks.calls import Model, View
from dent.attacks.result import AttackResult


class Itself:
    """The view that is the model's own gradient."""

    exact: bool = True

    def __init__(self, model: Model) -> None:
        self.model = model

    def __call__(self, points: Tensor) -> Iterator[Tensor]:
        yield self.model(points)


class Watched:
    """A view that remembers the points that it was asked for last."""

    def __init__(self, view: View) -> None:
        self.view = view
        self.exact = view.exact
        self.points: Tensor | None = None

    def __call__(self, points: Tensor) -> Iterator[Tensor]:
        self.points = points.detach().clone()
        yield from self.view(points)
        self.exact = self.view.exact


def climb(
    attack: GradientAttack,
    model: Model,
    view: View,
    inputs: Tensor,
    labels: Tensor,
    *,
    joint: bool = True,
    mask: Tensor | None = None,
    **settings: Any,
) -> AttackResult:
    """The attack on the model through the view.

    Where the view's last answer was not the model's own, nobody knows what the last points do to the
    model: as a batch they are submitted too, and the stronger of the two results is kept.
    """
    watched = Watched(view)
    result = attack(model, inputs, labels, through=watched, joint=joint, mask=mask, **settings)
    if watched.exact or watched.points is None or not joint:
        return result
    return strongest([result, submitted(model, watched.points, labels)], mask)
