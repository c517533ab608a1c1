"""Sigma: Gaussian smoothing of the input with a learned covariance (paper, section 3.2).

Sigma is parameterized by its Cholesky factor with a logarithmic diagonal, and the filter's half-size
follows the scale, two standard deviations (Shelhamer et al., 2019). Rows of parameters are one for
the batch or one per sample. `torchvision`'s blur has a fixed size and no gradient in sigma, hence
this one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from dent.defense.dent.settings import Covariance

SMALLEST = 0.05  # standard deviation, in pixels; the filter is the identity far above it


def make_blur(sigma: float, covariance: Covariance, rows: int) -> Tensor:
    """Parameters (rows, 1, 2 or 3) of a round Gaussian of standard deviation sigma.

    >>> make_blur(1.0, "full", 1)
    tensor([[0., 0., 0.]])
    """
    log_sigma = math.log(sigma)
    row = {
        "spherical": [log_sigma],
        "diagonal": [log_sigma, log_sigma],
        "full": [log_sigma, 0.0, log_sigma],
    }[covariance]
    return torch.tensor([row]).repeat(rows, 1)


def bound_blur(params: Tensor, image_size: Sequence[int]) -> Tensor:
    """Parameters brought back to scales that the image can hold: a quarter of its smaller side."""
    largest = max(min(image_size) / 4, 2 * SMALLEST)
    low, high = math.log(SMALLEST), math.log(largest)
    if params.shape[1] < 3:
        return params.clamp(low, high)
    log_y, shear, log_x = params.unbind(1)
    return torch.stack(
        [log_y.clamp(low, high), shear.clamp(-largest, largest), log_x.clamp(low, high)], 1
    )


def get_deviations(params: Tensor) -> Tensor:
    """Standard deviations along y and x, (rows, 2), in pixels."""
    factor = _cholesky(params)
    return factor.square().sum(2).sqrt()


def smooth(inputs: Tensor, params: Tensor | None) -> Tensor:
    """Images (N, C, H, W) filtered by their Gaussian; beyond the border the edge is repeated.

    >>> smooth(torch.ones(1, 1, 4, 4), make_blur(1.0, "spherical", 1)).allclose(torch.ones(1, 1, 4, 4))
    True
    """
    if params is None:
        return inputs
    count, channels = inputs.shape[:2]
    rows = len(params)
    kernel, (pad_y, pad_x) = _kernel(params)
    padded = F.pad(inputs, (pad_x, pad_x, pad_y, pad_y), mode="replicate")
    # All images under one filter, or each under its own, are channels of a depthwise convolution.
    stacked = padded.reshape(count // rows, rows * channels, *padded.shape[2:])
    weight = kernel.to(inputs.dtype).repeat_interleave(channels, 0).unsqueeze(1)
    return F.conv2d(stacked, weight, groups=rows * channels).reshape(inputs.shape)


def _cholesky(params: Tensor) -> Tensor:
    """The lower triangular factor, (rows, 2, 2)."""
    if params.shape[1] == 3:
        log_y, shear, log_x = params.unbind(1)
    else:
        log_y, log_x = params[:, 0], params[:, -1]
        shear = torch.zeros_like(log_y)
    zero = torch.zeros_like(log_y)
    return torch.stack([log_y.exp(), zero, shear, log_x.exp()], 1).view(-1, 2, 2)


def _kernel(params: Tensor) -> tuple[Tensor, tuple[int, int]]:
    """Normalized filters (rows, height, width) and their half-sizes, the largest among the rows.

    Each row is cut off at its own half-size, so that no row depends on the others.
    """
    half = (2 * get_deviations(params.detach())).ceil()
    pad_y, pad_x = (int(size) for size in half.amax(0).tolist())
    y = torch.arange(-pad_y, pad_y + 1, dtype=params.dtype, device=params.device)
    x = torch.arange(-pad_x, pad_x + 1, dtype=params.dtype, device=params.device)
    grid = torch.stack(torch.meshgrid(y, x, indexing="ij"))  # (2, height, width)
    inside = (grid.abs() <= half[:, :, None, None]).all(1)
    factor = _cholesky(params)
    # Mahalanobis distance by forward substitution in the factor.
    v = grid[0] / factor[:, 0, 0, None, None]
    u = (grid[1] - factor[:, 1, 0, None, None] * v) / factor[:, 1, 1, None, None]
    exponent = torch.where(inside, -0.5 * (v.square() + u.square()), -math.inf)
    return exponent.flatten(1).softmax(1).view(exponent.shape), (pad_y, pad_x)
