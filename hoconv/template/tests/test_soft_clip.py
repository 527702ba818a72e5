"""What is special about the layer; `hoconv test soft_clip` tests the operator, and this."""

import pytest
import torch
from soft_clip import SoftClip, soft_clip


def test_outputs_stay_within_the_limits() -> None:
    layer = SoftClip(3)
    assert layer(100 * torch.randn(2, 3, 4, 4)).abs().max() <= 1
    assert layer(torch.zeros(2, 3)).eq(0).all()


def test_a_limit_of_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=r"limit: expected shape \(C\)"):
        soft_clip(torch.randn(2, 3, 4), torch.ones(4))
