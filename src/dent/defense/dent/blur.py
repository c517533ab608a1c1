"""Sigma: Gaussian smoothing of the input with a learned covariance (section 3.2).

The parameters of Sigma are its Cholesky factor with a logarithmic diagonal: one row for the batch or one
for each sample. The filter reaches two standard deviations, so that its size follows the scale
(Shelhamer et al., 2019). The blur of `torchvision` has a fixed size and no gradient in sigma.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from dent.defense.dent.settings import Covariance

SLACK = 1e-5
SMALLEST = 0.05  # standard deviation, in pixels; the filter is the identity far above it


def make_blur(sigma: float, covariance: Covariance, rows: int) -> Tensor:
    """Return the parameters (rows, 1 to 3) of a round Gaussian of standard deviation sigma.

    >>> make_blur(1.0, "full", 1)
    tensor([[0., 0., 0.]])
    """
    log_sigma = math.log(sigma)
    shapes = {"spherical": [log_sigma], "diagonal": [log_sigma] * 2, "full": [log_sigma, 0.0, log_sigma]}
    return torch.tensor([shapes[covariance]]).repeat(rows, 1)


def bound_blur(params: Tensor, image_size: Sequence[int]) -> Tensor:
    """Return the parameters within the scales that the image can hold: a quarter of its smaller side."""
    largest = max(min(image_size) / 4, 2 * SMALLEST)
    low, high = math.log(SMALLEST), math.log(largest)
    if params.shape[1] < 3:
        return params.clamp(low, high)
    log_y, shear, log_x = params.unbind(1)
    return torch.stack(
        [log_y.clamp(low, high), shear.clamp(-largest, largest), log_x.clamp(low, high)], 1
    )


def get_deviations(params: Tensor) -> Tensor:
    """Return the standard deviations along y and x, (rows, 2), in pixels."""
    return _get_factor(params).square().sum(2).sqrt()


def smooth(inputs: Tensor, params: Tensor | None) -> Tensor:
    """Return images (N, C, H, W) filtered by their Gaussian, or as they are if `params` is None.

    Beyond the border the edge is repeated.

    >>> smooth(torch.ones(1, 1, 4, 4), make_blur(1.0, "spherical", 1)).allclose(torch.ones(1, 1, 4, 4))
    True
    """
    if params is None:
        return inputs
    count, channels = inputs.shape[:2]
    rows = len(params)
    kernel, (pad_y, pad_x) = _make_filters(params)
    padded = F.pad(inputs, (pad_x, pad_x, pad_y, pad_y), mode="replicate")
    # Images become channels of a depthwise convolution: all under one filter, or each under its own.
    stacked = padded.reshape(count // rows, rows * channels, *padded.shape[2:])
    weight = kernel.to(inputs.dtype).repeat_interleave(channels, 0).unsqueeze(1)
    return F.conv2d(stacked, weight, groups=rows * channels).reshape(inputs.shape)


def _get_factor(params: Tensor) -> Tensor:
    """Return the lower triangular factor, (rows, 2, 2)."""
    if params.shape[1] == 3:
        log_y, shear, log_x = params.unbind(1)
    else:
        log_y, log_x = params[:, 0], params[:, -1]
        shear = torch.zeros_like(log_y)
    zero = torch.zeros_like(log_y)
    return torch.stack([log_y.exp(), zero, shear, log_x.exp()], 1).view(-1, 2, 2)


def _make_filters(params: Tensor) -> tuple[Tensor, tuple[int, int]]:
    """Return normalized filters (rows, height, width) and the largest of their half-sizes.

    Each row is cut off at its own half-size, so that no row depends on the others.
    """
    # A little less than two deviations: exp(log(3)) may be just above 3, and its filter is not larger.
    half = ((2 - SLACK) * get_deviations(params.detach())).ceil()
    pad_y, pad_x = (int(size) for size in half.amax(0).tolist())
    y = torch.arange(-pad_y, pad_y + 1, dtype=params.dtype, device=params.device)
    x = torch.arange(-pad_x, pad_x + 1, dtype=params.dtype, device=params.device)
    grid = torch.stack(torch.meshgrid(y, x, indexing="ij"))  # (2, height, width)
    inside = (grid.abs() <= half[:, :, None, None]).all(1)
    factor = _get_factor(params)
    # Mahalanobis distance by forward substitution in the factor.
    v = grid[0] / factor[:, 0, 0, None, None]
    u = (grid[1] - factor[:, 1, 0, None, None] * v) / factor[:, 1, 1, None, None]
    exponent = torch.where(inside, -0.5 * (v.square() + u.square()), -math.inf)
    return exponent.flatten(1).softmax(1).view(exponent.shape), (pad_y, pad_x)
