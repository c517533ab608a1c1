"""What an adaptation returns: Delta and Sigma as a value, and the steps that led there."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from dent.defense.dent.descent import Moments, entropy
from dent.defense.dent.layers import Tensors


@dataclass(frozen=True)
class Trace:
    """The steps of an adaptation, for plots. No field has a gradient.

    logits: (steps, N, classes), seen before each update.
    delta: (steps + 1, 1 or N), the L2 norm of Delta before the first and after each update.
    sigma: (steps + 1, 1 or N, 2), standard deviations of the smoothing along y and x, in pixels.
    """

    logits: Tensor
    delta: Tensor
    sigma: Tensor

    @property
    def entropy(self) -> Tensor:
        """Entropy (steps, N) before each update, in nats."""
        return entropy(self.logits.flatten(0, 1)).view(self.logits.shape[:2])

    def __repr__(self) -> str:
        steps, n, _ = self.logits.shape
        return f"Trace(updates={steps}, n={n})"


@dataclass(frozen=True)
class State:
    """What a defense has learned from a batch: a value, never changed, that `predict` takes.

    delta: (1 or N, parameters), added to the scales and shifts of the model, or None.
    blur: (1 or N, 1 to 3), the parameters of the smoothing (see `blur.py`), or None.
    moments: what the optimizer remembers of delta and of blur, to continue from here.
    steps: number of updates that led here.
    statistics: mean and variance of each BatchNorm layer, by name, if they were frozen, else None.
    layers: number of layers that delta belongs to.
    """

    delta: Tensor | None
    blur: Tensor | None
    moments: dict[str, Moments]
    steps: int
    trace: Trace
    statistics: Tensors | None = None
    layers: int = 0

    def __repr__(self) -> str:
        """Return layers, updates, and the mean entropy in nats that the first and last update saw."""
        parts = [f"layers={self.layers if self.delta is not None else 0}", f"updates={self.steps}"]
        if len(self.trace.logits):
            first, last = self.trace.entropy[[0, -1]].mean(1).tolist()
            parts.append(f"entropy={first:.3f} before the first update, {last:.3f} before the last")
        return f"State({', '.join(parts)})"
