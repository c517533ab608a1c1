"""Test-time ensemble of views (Cohen et al., 2022, "A simple test-time defense: TTE")."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from dent.defense.defended import Method, Network, Variables

Directions = Literal["straight", "diagonal"]
Padding = Literal["zero", "edge"]

_DIRECTIONS: dict[str, list[tuple[int, int]]] = {
    "straight": [(0, 1), (1, 0), (0, -1), (-1, 0)],
    "diagonal": [(1, 1), (1, -1), (-1, 1), (-1, -1)],
}


def make_views(
    images: Tensor, *, mirror: bool, shifts: int, directions: Directions, padding: Padding
) -> Iterator[Tensor]:
    """Yield the images, then the images shifted by `shifts` pixels in four directions, then mirrors.

    >>> import torch
    >>> image = torch.arange(3.0).view(1, 1, 1, 3)
    >>> views = make_views(image, mirror=True, shifts=0, directions="straight", padding="zero")
    >>> [view.flatten().tolist() for view in views]
    [[0.0, 1.0, 2.0], [2.0, 1.0, 0.0]]
    """
    if images.dim() != 4:
        raise ValueError(f"expected images (N, C, H, W) to make views of, got {tuple(images.shape)}")
    moved = [images]
    if shifts:
        height, width = images.shape[2:]
        mode = "constant" if padding == "zero" else "replicate"
        padded = F.pad(images, (shifts,) * 4, mode=mode)
        for dy, dx in _DIRECTIONS[directions]:
            top, left = shifts - dy * shifts, shifts - dx * shifts
            moved.append(padded[:, :, top : top + height, left : left + width])
    for view in moved:
        yield view
        if mirror:
            yield view.flip(3)


class Views(Method):
    """Average the logits over the image, its mirror and shifts.

    There is nothing to adapt: no variable, and no update. A gradient goes through all views.
    """

    name: ClassVar[str] = "views"
    independent: ClassVar[bool] = True
    per_input: ClassVar[bool] = False

    mirror: bool = Field(True, description="Add the mirror image of every view.")
    shifts: int = Field(0, description="Add views shifted by so many pixels; 0 adds none.", ge=0)
    directions: Directions = Field("straight", description="Directions of the four shifts.")
    padding: Padding = Field("zero", description="What a shift moves in: zeros, or the edge repeated.")

    @property
    def forwards(self) -> int:
        return (5 if self.shifts else 1) * (2 if self.mirror else 1)

    def predict(self, network: Network, inputs: Tensor, variables: Variables) -> Tensor:
        views = make_views(
            inputs,
            mirror=self.mirror,
            shifts=self.shifts,
            directions=self.directions,
            padding=self.padding,
        )
        # One view at a time: the model sees batches of the size that it is given.
        logits = [network(view) for view in views]
        total = logits[0]
        for one in logits[1:]:
            total = total + one
        return total / len(logits)
