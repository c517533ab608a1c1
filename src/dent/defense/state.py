"""The value of an adaptation: what a defense has learned from a batch, and how."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from dent.defense.objectives import entropy
from dent.defense.optimizers import Moments

Statistics = dict[str, tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Trace:
    """The steps of an adaptation, for plots; all without gradient.

    logits: (steps, N, classes), seen before each update.
    delta: (steps + 1, 1 or N), the L2 norm of Delta before the first and after each update.
    sigma: (steps + 1, 1 or N, 2), standard deviations of the smoothing along y and x, in pixels.
    """

    logits: Tensor
    delta: Tensor
    sigma: Tensor

    @property
    def entropy(self) -> Tensor:
        """(steps, N), in nats, before each update."""
        return entropy(self.logits.flatten(0, 1)).view(self.logits.shape[:2])


@dataclass(frozen=True)
class State:
    """Delta and Sigma for a batch; a value, never changed, that `predict` can use at any time.

    delta: (1 or N, parameters), what is added to the scales and shifts of the model, or None.
    blur: (1 or N, 1 to 3), the smoothing's parameters (see `blur.py`), or None.
    statistics: mean and variance by layer if they were frozen, else None: those of the settings.
    moments: what the optimizer remembers of delta and of blur, to go on from here.
    steps: how many updates led here.
    """

    delta: Tensor | None
    blur: Tensor | None
    moments: dict[str, Moments]
    steps: int
    trace: Trace
    statistics: Statistics | None = None

    def detach(self) -> State:
        """The same adaptation as a constant."""
        return replace(
            self,
            delta=None if self.delta is None else self.delta.detach(),
            blur=None if self.blur is None else self.blur.detach(),
            moments={
                name: tuple(moment.detach() for moment in moments)
                for name, moments in self.moments.items()
            },
        )
