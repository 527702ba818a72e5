"""What registers operators of one's own: casts, gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hoconv.dispatch.registration import autocast, define, register_gradient
from hoconv.jit import Library


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


def test_a_gradient_for_each_tensor_is_asked_for() -> None:
    library = torch.library.Library("hoconv_test_registration", "FRAGMENT")

    def save(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    def differentiate(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.saved_tensors[1]

    op = define(library, "times", "cpp", "(Tensor a, Tensor b) -> Tensor", lambda a, b: a * b)
    register_gradient(library, op, differentiate, save)
    library.impl("times.cpp", lambda a, b: a * b, "CPU")
    a, b = (torch.randn(3, requires_grad=True) for _ in "ab")
    said = r"hoconv_test_registration::times.cpp: expected 2 gradients, of a, b; got 1"
    with pytest.raises(ValueError, match=said):
        op(a, b).sum().backward()


def test_an_op_whose_code_registers_no_kernel_says_what_to_write() -> None:
    class Code(Library):
        def load(self) -> str | None:
            return None

    library = torch.library.Library("hoconv_test_registration", "FRAGMENT")
    code = Code("nothing", ["nothing.cpp"])
    op = define(library, "empty", "fast", "(Tensor a) -> Tensor", torch.empty_like, code)
    said = (
        r'empty.fast has no kernel for CPU tensors; .* m.impl\("empty.fast", .*registration, CPU, m'
    )
    with pytest.raises(RuntimeError, match=said):
        op(torch.ones(3))
