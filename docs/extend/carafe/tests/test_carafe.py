"""Tests of the layer alone; `hoconv test carafe` runs those of the operator, too."""

import pytest
import torch
import torch.nn.functional as F
from carafe import Carafe, carafe

import hoconv


def test_it_is_a_high_order_convolution_for_each_subpixel() -> None:
    x, weight = torch.randn(2, 3, 5, 4), torch.randn(2, 9, 4, 5, 4)
    kernels = weight.permute(1, 0, 2, 3, 4).flatten(1, 2)  # (k * k, B * s * s, H, W)
    images = x.repeat_interleave(4, dim=0)  # (B * s * s, C, H, W)
    applied = hoconv.high_order_conv2d(images, kernels.unsqueeze(2), impl="reference")
    shuffled = F.pixel_shuffle(applied.unflatten(0, (2, 4)).transpose(1, 2).flatten(1, 2), 2)
    torch.testing.assert_close(carafe(x, weight), shuffled)


def test_an_even_image_stays_even() -> None:
    inner = Carafe(3)(torch.ones(1, 3, 8, 8))[..., 4:-4, 4:-4]  # no taps outside the image
    torch.testing.assert_close(inner, torch.ones(1, 3, 8, 8))


def test_weights_of_another_shape_or_dtype_are_refused() -> None:
    with pytest.raises(TypeError, match=r"weight: expected the dtype of x, torch\.float64"):
        carafe(torch.randn(1, 3, 4, 4, dtype=torch.float64), torch.randn(1, 9, 4, 4, 4))
    with pytest.raises(ValueError, match="weight: expected shape"):
        carafe(torch.randn(1, 3, 4, 4), torch.randn(1, 8, 4, 4, 4))
