from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from scipy import ndimage
from scipy.stats import multivariate_normal

from dent.defense.dent import blur

IMAGES = torch.rand(2, 3, 14, 17, dtype=torch.double, generator=torch.Generator().manual_seed(0))


def gaussian_filter(images: torch.Tensor, sigma_y: float, sigma_x: float) -> torch.Tensor:
    radius = (0, 0, *(math.ceil((2 - blur.SLACK) * sigma) for sigma in (sigma_y, sigma_x)))
    filtered = ndimage.gaussian_filter(
        images.numpy(), (0, 0, sigma_y, sigma_x), mode="nearest", radius=radius
    )
    return torch.from_numpy(filtered)


@example(1.0, 3.0)  # exp(log(3)) is above 3
@given(st.floats(0.3, 3.4), st.floats(0.3, 3.4))
def test_smoothing_is_scipys(sigma_y: float, sigma_x: float) -> None:
    round_ = torch.tensor([[math.log(sigma_y)]], dtype=torch.double)
    torch.testing.assert_close(blur.smooth(IMAGES, round_), gaussian_filter(IMAGES, sigma_y, sigma_y))
    oval = torch.tensor([[math.log(sigma_y), math.log(sigma_x)]], dtype=torch.double)
    torch.testing.assert_close(blur.smooth(IMAGES, oval), gaussian_filter(IMAGES, sigma_y, sigma_x))


@given(st.floats(0.4, 2.0), st.floats(-1.5, 1.5), st.floats(0.4, 2.0))
def test_full_covariance_is_the_normal_density(y: float, shear: float, x: float) -> None:
    factor = np.array([[y, 0], [shear, x]])
    covariance = factor @ factor.T
    half = np.ceil((2 - blur.SLACK) * np.sqrt(np.diag(covariance))).astype(int)
    grid = np.mgrid[-half[0] : half[0] + 1, -half[1] : half[1] + 1]
    kernel = multivariate_normal(cov=covariance).pdf(np.moveaxis(grid, 0, -1))
    weights = (kernel / kernel.sum())[None, None]
    expected = torch.from_numpy(ndimage.correlate(IMAGES.numpy(), weights, mode="nearest"))
    params = torch.tensor([[math.log(y), shear, math.log(x)]], dtype=torch.double)
    torch.testing.assert_close(blur.smooth(IMAGES, params), expected)
    torch.testing.assert_close(
        blur.get_deviations(params)[0], torch.from_numpy(np.sqrt(np.diag(covariance)))
    )


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("columns", [1, 2, 3])
def test_gradient_by_finite_differences(rows: int, columns: int) -> None:
    params = torch.tensor([[-0.3, 0.2, 0.1], [0.35, -0.4, -0.2]], dtype=torch.double)[:rows, :columns]
    images = IMAGES[:, :1, :5, :5].clone().requires_grad_()
    assert torch.autograd.gradcheck(blur.smooth, (images, params.clone().requires_grad_()))
    assert torch.autograd.gradgradcheck(blur.smooth, (images, params.clone().requires_grad_()))


def test_the_limit_is_the_identity() -> None:
    errors = [
        (blur.smooth(IMAGES, blur.make_blur(sigma, "full", 1).double()) - IMAGES).abs().max().item()
        for sigma in (0.4, 0.3, 0.2, 0.1, blur.SMALLEST)
    ]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] == 0
    smallest = blur.make_blur(blur.SMALLEST, "spherical", 1).requires_grad_()
    (grad,) = torch.autograd.grad(blur.smooth(IMAGES.float(), smallest).sum(), smallest)
    assert grad.isfinite().all()


def test_each_sample_under_its_own_filter_is_as_if_alone() -> None:
    params = torch.tensor([[math.log(0.4)], [math.log(2.7)]], dtype=torch.double)  # sizes 3 and 13
    alone = [blur.smooth(IMAGES[i : i + 1], params[i : i + 1]) for i in range(2)]
    torch.testing.assert_close(blur.smooth(IMAGES, params), torch.cat(alone))


def test_scales_stay_where_the_image_can_hold_them() -> None:
    wild = torch.tensor([[-50.0, 90.0, 50.0], [0.0, 0.5, 0.0]], dtype=torch.double)
    tame = blur.bound_blur(wild, (14, 17))
    assert torch.equal(tame[1], wild[1])
    assert blur.smooth(IMAGES, tame).isfinite().all()
    assert blur.smooth(torch.rand(1, 1, 1, 1), blur.bound_blur(torch.zeros(1, 1), (1, 1))).shape == (
        1,
        1,
        1,
        1,
    )
