"""Tests of the layer alone; `hoconv test soft_clip` runs those of the operator, too."""

import pytest
import torch
from soft_clip import SoftClip, soft_clip


def test_outputs_stay_within_the_limits() -> None:
    layer = SoftClip(3)
    assert layer(100 * torch.randn(2, 3, 4, 4)).abs().max() <= 1
    assert layer(torch.zeros(2, 3)).eq(0).all()


def test_a_limit_of_another_shape_or_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match=r"limit: expected shape \(C\)"):
        soft_clip(torch.randn(2, 3, 4), torch.ones(4))
    with pytest.raises(TypeError, match=r"limit: expected the dtype of x, torch\.float64"):
        soft_clip(torch.randn(2, 3, 4, dtype=torch.float64), torch.ones(3))
