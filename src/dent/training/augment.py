"""Random crops and flips (He et al., 2016)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

BORDER = 4


def draw_crops(n: int, *, generator: torch.Generator) -> Tensor:
    """For each of n images: rows and columns cut off at the top and left, and whether it is mirrored."""
    shifts = torch.randint(2 * BORDER + 1, (n, 2), generator=generator)
    return torch.cat([shifts, torch.randint(2, (n, 1), generator=generator)], 1)


def crop_and_flip(images: Tensor, crops: Tensor) -> Tensor:
    """Each image (N, C, H, W) with a black border of 4 pixels, cut to its size again, mirrored or not.

    >>> image = torch.tensor([[[[1.0, 2.0], [3.0, 4.0]]]])
    >>> crop_and_flip(image, torch.tensor([[4, 4, 1]])).tolist()  # as it was, but mirrored
    [[[[2.0, 1.0], [4.0, 3.0]]]]
    """
    n, _, height, width = images.shape
    top, left, flip = crops.to(images.device).split(1, 1)
    across = torch.arange(width, device=images.device).expand(n, width)
    rows = top + torch.arange(height, device=images.device)
    columns = left + torch.where(flip.bool(), across.flip(1), across)
    padded = F.pad(images, (BORDER, BORDER, BORDER, BORDER))
    each = torch.arange(n, device=images.device)[:, None, None]
    # Indexing puts the channels last; as a view they are second again, and the layout stays.
    return padded[each, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def resize(images: Tensor, width: int) -> Tensor:
    """Return the images (N, C, H, W) at another width; each pixel is the mean of those it covers.

    >>> resize(torch.tensor([[[[1.0, 2.0], [3.0, 4.0]]]]), 1).tolist()
    [[[[2.5]]]]
    """
    if images.shape[-1] == width:
        return images
    height = round(images.shape[-2] * width / images.shape[-1])
    return F.interpolate(images, size=(height, width), mode="area")
