import math

import pytest
import torch

from models.metrics.psnr import psnr


def test_it_is_the_ratio_of_the_peak_to_the_error_of_each_image():
    truth = torch.full((3, 3, 4, 4), 100, dtype=torch.uint8)
    found = truth.clone()
    found[1] += 10
    found[2, 0, 0, 0] -= 96  # of 48 values
    expected = [math.inf, 20 * math.log10(255 / 10), 10 * math.log10(255**2 * 48 / 96**2)]
    assert psnr(found, truth).tolist() == pytest.approx(expected)
