"""The linear layer of few outputs is PyTorch's."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from models.networks.narrow import NarrowLinear


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [0, 1, 7])
def test_narrow_linear_is_pytorchs_linear(rows: int, bias: bool) -> None:
    narrow = NarrowLinear(5, 3, bias=bias, dtype=torch.float64)
    linear = nn.Linear(5, 3, bias=bias, dtype=torch.float64)
    linear.load_state_dict(narrow.state_dict())
    x = torch.randn(rows, 5, dtype=torch.float64, requires_grad=True)
    found, expected = narrow(x), linear(x)
    torch.testing.assert_close(found, expected)
    cotangent = torch.randn_like(expected)
    of_narrow = torch.autograd.grad(found, [x, *narrow.parameters()], cotangent)
    of_linear = torch.autograd.grad(expected, [x, *linear.parameters()], cotangent)
    torch.testing.assert_close(of_narrow, of_linear)
