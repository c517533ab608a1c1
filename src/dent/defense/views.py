"""Test-time ensembles of views (Pérez et al., 2021), and framed ones.

A frame blackens the outermost pixels of an image. Networks that were trained on shifted images, with
zeros moved in, know black borders, and are less sensitive where they see one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, Self

import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor

from dent.defense.defended import Method, Network, Variables

Directions = Literal["straight", "diagonal"]
Padding = Literal["zero", "edge"]

_DIRECTIONS: dict[str, list[tuple[int, int]]] = {
    "straight": [(0, 1), (1, 0), (0, -1), (-1, 0)],
    "diagonal": [(1, 1), (1, -1), (-1, 1), (-1, -1)],
}


def make_views(
    images: Tensor,
    *,
    mirror: bool,
    shifts: int,
    directions: Directions,
    padding: Padding,
    frame: int = 0,
    halve: bool = False,
) -> Iterator[Tensor]:
    """Yield the images and their mirrors, then shifts by `shifts` pixels in four directions.

    frame: number of outermost pixels of the unshifted images that are black. Shifts have borders.
    halve: mirror two of the four shifts. Otherwise the mirror of each is a view of its own.

    >>> import torch
    >>> image = torch.arange(3.0).view(1, 1, 1, 3)
    >>> views = make_views(image, mirror=True, shifts=0, directions="straight", padding="zero")
    >>> [view.flatten().tolist() for view in views]
    [[0.0, 1.0, 2.0], [2.0, 1.0, 0.0]]
    """
    if images.dim() != 4:
        raise ValueError(f"expected images (N, C, H, W) to make views of, got {tuple(images.shape)}")
    height, width = images.shape[2:]
    if 2 * frame >= min(height, width):
        raise ValueError(f"expected a frame that leaves some of {height} x {width} pixels, got {frame}")
    plain = F.pad(images[:, :, frame : height - frame, frame : width - frame], (frame,) * 4)
    yield plain
    if mirror:
        yield plain.flip(3)
    if not shifts:
        return
    padded = F.pad(images, (shifts,) * 4, mode="constant" if padding == "zero" else "replicate")
    for number, (dy, dx) in enumerate(_DIRECTIONS[directions]):
        top, left = shifts - dy * shifts, shifts - dx * shifts
        view = padded[:, :, top : top + height, left : left + width]
        if not (mirror and halve) or number < 2:
            yield view
        if mirror and (not halve or number >= 2):
            yield view.flip(3)


class Views(Method):
    """Average the logits over the image, its mirror and shifts.

    There is nothing to adapt: no variable, and no update. A gradient goes through all views.
    """

    name = "views"
    independent = True
    per_input = False

    mirror: bool = Field(True, description="Add the mirror image of every view.")
    shifts: int = Field(0, description="Add views shifted by so many pixels; 0 adds none.", ge=0)
    directions: Directions = Field("straight", description="Directions of the four shifts.")
    padding: Padding = Field("zero", description="What a shift moves in: zeros, or the edge repeated.")
    frame: int = Field(0, description="Blacken so many outermost pixels of the unshifted image.", ge=0)
    halve: bool = Field(False, description="Mirror two of the four shifts, and add no other mirrors.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.halve and not (self.mirror and self.shifts):
            raise ValueError("halve: expected with mirror=True and shifts, got one without them")
        return self

    @property
    def forwards(self) -> int:
        shifts = 4 if self.shifts else 0
        if not self.mirror:
            return 1 + shifts
        return 2 + (shifts if self.halve else 2 * shifts)

    def predict(self, network: Network, inputs: Tensor, variables: Variables) -> Tensor:
        views = make_views(
            inputs,
            mirror=self.mirror,
            shifts=self.shifts,
            directions=self.directions,
            padding=self.padding,
            frame=self.frame,
            halve=self.halve,
        )
        # One view at a time: the model sees batches of the size that it is given.
        logits = [network(view) for view in views]
        total = logits[0]
        for one in logits[1:]:
            total = total + one
        return total / len(logits)


class Crops(Views):
    """Average the logits over the framed image, its mirror, and shifts to the four corners.

    The defaults are for images of 32 x 32 pixels; `docs/winning.md` says where it was tried.
    """

    name = "crops"

    shifts: int = Field(3, description="Add views shifted by so many pixels; 0 adds none.", ge=0)
    directions: Directions = Field("diagonal", description="Directions of the four shifts.")
    frame: int = Field(1, description="Blacken so many outermost pixels of the unshifted image.", ge=0)
    halve: bool = Field(True, description="Mirror two of the four shifts, and add no other mirrors.")
