"""The quality of an image that was to become another one. B batch, S image size."""

from __future__ import annotations

from torch import Tensor

PEAK = 255


def psnr(found: Tensor, truth: Tensor) -> Tensor:
    """Returns the peak signal-to-noise ratio of each image in decibels, (B,) float32: infinite for
    one without an error.

    Args:
        found, truth: (B, 3, S, S) uint8.
    """
    error = (found.float() - truth.float()).square().flatten(1).mean(1)
    return 10 * (PEAK**2 / error).log10()
