"""Splatting: every pixel spreads its value; it is the adjoint of the high-order convolution."""

from __future__ import annotations

import pytest
import torch

from hoconv import high_order_conv2d, splat


@pytest.mark.parametrize("impl", ["reference", "cpp"])
def test_a_pixel_spreads_over_its_neighbours(impl: str) -> None:
    x, weight = torch.zeros(1, 1, 4, 5), torch.zeros(9, 1, 1, 4, 5)
    x[0, 0, 1, 2] = 2
    weight[:, 0, 0, 1, 2] = torch.arange(1.0, 10)
    expected = torch.zeros(4, 5)
    expected[0:3, 1:4] = 2 * torch.arange(1.0, 10).view(3, 3)
    assert torch.equal(splat(x, weight, impl=impl)[0, 0], expected)
    x, weight = x.roll((-1, 2), (2, 3)), weight.roll((-1, 2), (3, 4))  # into the upper right corner
    expected = torch.zeros(4, 5)
    expected[0:2, 3:5] = 2 * torch.arange(1.0, 10).view(3, 3)[1:, :2]
    assert torch.equal(splat(x, weight, impl=impl)[0, 0], expected)


@pytest.mark.parametrize("impl", ["reference", "cpp"])
@pytest.mark.parametrize(("k", "dilation", "G"), [(3, 1, 1), (4, 3, 2), (5, 2, 4), (3, 9, 1)])
def test_is_the_adjoint(impl: str, k: int, dilation: int, G: int) -> None:
    x, y = torch.randn(2, 2, 4, 7, 9, dtype=torch.float64)
    weight = torch.randn(k * k, 2, G, 7, 9, dtype=torch.float64)
    gathered = high_order_conv2d(x, weight, dilation=dilation, impl="reference")
    spread = splat(y, weight, dilation=dilation, impl=impl)
    torch.testing.assert_close((gathered * y).sum(), (x * spread).sum(), rtol=1e-12, atol=1e-12)
