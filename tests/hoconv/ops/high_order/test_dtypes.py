"""The high-order convolution in half precision, with values not finite, and in autocast."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hoconv.ops.high_order.conv2d.operator import OPERATOR
from hoconv.ops.high_order.conv2d.window import Window
from hoconv.tools.testing.comparison import differentiable, output_and_gradients
from hoconv.tools.testing.variants import Variant
from tests.hoconv.ops.high_order.support import (
    HALVES,
    draw,
    everywhere,
    image_and_weight,
    ops,
    with_ops,
)


@everywhere
@pytest.mark.parametrize("dtype", HALVES)
def test_half_precision_is_accumulated_in_float32(variant: Variant, dtype: torch.dtype) -> None:
    # Ones added to `large` in half precision are lost. There are twelve on either side of it, so
    # that the order in which they are added does not matter.
    large = 2048 if dtype == torch.float16 else 256
    C, H, W, k = 25, 5, 5, 5
    x = torch.ones(1, C, H, W, dtype=dtype, device=variant.device)
    weight = torch.ones(k * k, 1, 1, H, W, dtype=dtype, device=variant.device)
    weight[12] = large
    results = output_and_gradients(variant.call, (x, weight), {}, x)
    assert results["output"][0, 0, 2, 2] == large + 24
    assert results["gradient of argument 0"][0, 0, 2, 2] == large + 24
    grad = x.clone()
    grad[:, 12] = large
    results = output_and_gradients(variant.call, (x, weight), {}, grad)
    assert results["gradient of argument 1"][12, 0, 0, 2, 2] == large + 24


def classes(t: Tensor) -> Tensor:
    """0 finite, 1 NaN, 2 inf, 3 -inf"""
    return t.isnan() + 2 * t.isposinf() + 3 * t.isneginf()


@everywhere
@pytest.mark.parametrize("dtype", OPERATOR.tolerances)
@pytest.mark.parametrize("where", ["x", "weight", "grad"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_nan_and_infinity_are_where_the_definition_has_them(
    variant: Variant, dtype: torch.dtype, where: str, value: float
) -> None:
    for k, dilation, W in ((3, 1, 5), (5, 1, 37), (4, 2, 18)):
        x, weight = image_and_weight(variant, H=7, W=W, k=k, dtype=dtype)
        tensors = {"x": x, "weight": weight, "grad": draw(variant, *x.shape, dtype=dtype)}
        chosen = tensors[where]
        for corner in (0, -1):
            chosen[..., corner, corner] = value
        chosen[..., 3, W // 2] = -value
        x, weight, grad = tensors.values()
        results = output_and_gradients(variant.call, (x, weight), {"dilation": dilation}, grad)
        reference = Variant(OPERATOR, "reference", variant.device)
        expected = output_and_gradients(reference.call, (x, weight), {"dilation": dilation}, grad)
        for name, result in results.items():
            assert torch.equal(classes(result), classes(expected[name])), (name, k)


@everywhere
@pytest.mark.parametrize("dtype", HALVES)
def test_sums_too_large_for_the_dtype_are_infinite(variant: Variant, dtype: torch.dtype) -> None:
    x, weight = image_and_weight(variant, dtype=dtype)
    x, weight = x.abs() + 1, torch.full_like(weight, torch.finfo(dtype).max)
    assert variant.call(x, weight).isposinf().all()
    assert variant.call(-x, weight).isneginf().all()


# Autocast


@everywhere
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    "given", [(torch.float32, torch.float32), (torch.float32, None), (None, torch.float32)]
)
def test_autocast_casts_as_for_a_convolution(
    variant: Variant, dtype: torch.dtype, given: tuple[torch.dtype | None, torch.dtype | None]
) -> None:
    x, weight = image_and_weight(variant, dtype=torch.float32)
    inputs = differentiable((x.to(given[0] or dtype), weight.to(given[1] or dtype)))
    with torch.autocast(variant.device, dtype=dtype):
        out = variant.call(*inputs)
    gradients = torch.autograd.grad(out.sum(), inputs)
    assert out.dtype == dtype
    assert torch.equal(out, variant.call(x.to(dtype), weight.to(dtype)))
    assert [g.dtype for g in gradients] == [t.dtype for t in inputs]


@everywhere
def test_autocast_leaves_float64(variant: Variant) -> None:
    x, weight = image_and_weight(variant)
    with torch.autocast(variant.device, dtype=torch.bfloat16):
        assert variant.call(x, weight).dtype == torch.float64
        with pytest.raises(TypeError, match="weight: expected the dtype of x"):
            variant.call(x, weight.float())


@everywhere
def test_disabled_autocast_casts_nothing(variant: Variant) -> None:
    x, weight = image_and_weight(variant, dtype=torch.float32)
    with (
        torch.autocast(variant.device, dtype=torch.bfloat16),
        torch.autocast(variant.device, enabled=False),
    ):
        assert variant.call(x, weight).dtype == torch.float32


@with_ops
@pytest.mark.parametrize("dtype", HALVES)
def test_autocast_casts_for_the_op_itself(variant: Variant, dtype: torch.dtype) -> None:
    x, weight = image_and_weight(variant, dtype=torch.float32)
    window = Window.of(weight.shape[0]).numbers()
    with torch.autocast(variant.device, dtype=dtype):
        out = ops(variant)(x, weight.to(dtype), window)
    assert torch.equal(out, ops(variant)(x.to(dtype), weight.to(dtype), window))
