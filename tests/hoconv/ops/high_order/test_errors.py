"""What the high-order convolution refuses: the public function by name, and the ops themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hoconv
from hoconv.tools.testing.variants import Variant
from tests.hoconv.ops.high_order.support import image_and_weight, ops, with_ops

X, WEIGHT = (2, 4, 6, 9), (9, 2, 2, 6, 9)


@pytest.mark.parametrize(
    ("x", "weight", "message"),
    [
        (X[1:], WEIGHT, r"^x: expected 4 dimensions .* \(4, 6, 9\)"),
        ((1, *X), WEIGHT, r"^x: expected 4 dimensions"),
        (X, WEIGHT[1:], r"^weight: expected 5 dimensions .* \(2, 2, 6, 9\)"),
        (X, (8, *WEIGHT[1:]), r"^weight: its first dimension must be k \* k .*, got 8"),
        (X, (0, *WEIGHT[1:]), r"^weight: its first dimension .*, got 0"),
        (X, (144, *WEIGHT[1:]), r"^weight: its first dimension .* 1 to 11, got 144"),
        (X, (9, 3, 2, 6, 9), r"^weight: expected .* B, H, W = 2, 6, 9 .*\(9, 3, 2, 6, 9\)"),
        (X, (9, 2, 2, 5, 9), r"^weight: expected .* B, H, W = 2, 6, 9"),
        (X, (9, 2, 2, 6, 1), r"^weight: expected .* B, H, W = 2, 6, 9"),
        (X, (9, 2, 3, 6, 9), r"^weight: its number of groups .* divide the 4 channels .* got 3"),
        (X, (9, 2, 0, 6, 9), r"^weight: its number of groups .* got 0"),
        (X, (9, 2, 8, 6, 9), r"^weight: its number of groups .* got 8"),
    ],
)
def test_wrong_shape_is_refused_by_name(
    x: tuple[int, ...], weight: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        hoconv.high_order_conv2d(torch.zeros(x), torch.zeros(weight))


@pytest.mark.parametrize("dilation", [0, -1, 1.0, True, "1", None])
def test_wrong_dilation_is_refused_by_name(dilation: Any) -> None:
    with pytest.raises(ValueError, match=f"^dilation: expected an int .* {dilation!r}$"):
        hoconv.high_order_conv2d(torch.zeros(X), torch.zeros(WEIGHT), dilation=dilation)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool, torch.complex64])
def test_dtype_that_is_not_supported_is_refused_by_name(dtype: torch.dtype) -> None:
    x, weight = torch.zeros(X, dtype=dtype), torch.zeros(WEIGHT, dtype=dtype)
    with pytest.raises(TypeError, match=rf"^x: expected one of .*, got {dtype}; convert it"):
        hoconv.high_order_conv2d(x, weight)


def test_other_dtype_of_weight_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match=r"^weight: expected the dtype of x, torch.float32, got"):
        hoconv.high_order_conv2d(torch.zeros(X), torch.zeros(WEIGHT).double())


def test_other_device_of_weight_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"^weight: expected the device of x, cpu, got meta"):
        hoconv.high_order_conv2d(torch.zeros(X), torch.zeros(WEIGHT, device="meta"))


@with_ops
@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        ("", (X[1:], WEIGHT)),
        ("", (X, WEIGHT[1:])),
        ("", (X, (8, *WEIGHT[1:]))),
        ("", (X, (9, 1, 2, 6, 9))),
        ("", (X, (9, 2, 2, 5, 9))),
        ("", (X, (9, 2, 3, 6, 9))),
        ("_backward", ((2, 4, 6, 8), X, WEIGHT)),
        ("_backward", (X[1:], X, WEIGHT)),
        ("_backward", (X, X, (9, 2, 3, 6, 9))),
        ("_grad_input", (X, (9, 1, 2, 6, 9))),
        ("_grad_input", (X[1:], WEIGHT)),
    ],
)
def test_op_called_past_the_checks_refuses_wrong_shapes(
    variant: Variant, name: str, shapes: tuple[tuple[int, ...], ...]
) -> None:
    tensors = [torch.zeros(shape, device=variant.device) for shape in shapes]
    with pytest.raises(RuntimeError, match=r"\b(x|weight|grad): "):
        ops(variant, name)(*tensors, 1)


@with_ops
@pytest.mark.parametrize(
    ("size", "stride"),
    [
        ([8, 2, 2, 6, 9], [216, 108, 54, 9, 1]),
        ([9, 1, 2, 6, 9], [216, 108, 54, 9, 1]),
        ([9, 2, 2, 6], [216, 108, 54, 9]),
        ([9, 2, 2, 6, 9], [216, 108, 54, 9]),
    ],
)
def test_weight_gradient_refuses_a_wrong_layout(
    variant: Variant, size: list[int], stride: list[int]
) -> None:
    x = torch.zeros(X, device=variant.device)
    with pytest.raises(RuntimeError, match=r"\b(weight|stride): "):
        ops(variant, "_grad_weight")(x, x, size, stride, 1)


@with_ops
@pytest.mark.parametrize("dilation", [0, -3])
def test_op_called_past_the_checks_refuses_a_wrong_dilation(
    variant: Variant, dilation: int
) -> None:
    x, weight = image_and_weight(variant)
    with pytest.raises(RuntimeError, match="dilation: expected at least 1"):
        ops(variant)(x, weight, dilation)


@with_ops
def test_op_called_past_the_checks_refuses_mixed_dtypes(variant: Variant) -> None:
    x, weight = image_and_weight(variant)
    with pytest.raises(RuntimeError, match="weight: expected the dtype of x"):
        ops(variant)(x, weight.float(), 1)
    with pytest.raises(RuntimeError, match="grad: expected the dtype of x"):
        ops(variant, "_backward")(x.float(), x, weight, 1)
    with pytest.raises(RuntimeError, match="x: expected float32, float64, float16 or bfloat16"):
        ops(variant)(x.int(), weight.int(), 1)
