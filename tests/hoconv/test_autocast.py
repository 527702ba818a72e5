"""Casting as autocast does, for operators of one's own."""

from __future__ import annotations

import pytest
import torch

from hoconv.dispatch.registration import autocast


@pytest.mark.parametrize("enabled", [False, True])
def test_one_tensor_comes_back_as_a_tensor_and_several_as_a_tuple(enabled: bool) -> None:
    x, mask = torch.randn(3, 2), torch.ones(3, dtype=torch.bool)
    wanted = torch.bfloat16 if enabled else torch.float32
    with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
        alone = autocast("cpu", x)
        several = autocast("cpu", x, None, mask, x.double())
        assert autocast("cpu", None) is None
    assert isinstance(alone, torch.Tensor)
    assert (alone.dtype, alone.shape) == (wanted, x.shape)
    assert isinstance(several, tuple)
    assert [t if t is None else t.dtype for t in several] == [
        wanted, None, torch.bool, torch.float64
    ]  # fmt: skip
