"""What the high-order convolution refuses: the public function by name, and the ops themselves."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import hoconv
from hoconv.ops.high_order.conv2d.window import Window
from hoconv.tools.testing.variants import Variant
from tests.hoconv.ops.high_order.support import image_and_weight, ops, with_ops

X, WEIGHT = (2, 4, 6, 9), (9, 2, 2, 6, 9)
WINDOW = Window.of(9).numbers()


@pytest.mark.parametrize(
    ("x", "weight", "message"),
    [
        (X[1:], WEIGHT, r"^x: expected 4 dimensions .* \(4, 6, 9\)"),
        ((1, *X), WEIGHT, r"^x: expected 4 dimensions"),
        (X, WEIGHT[1:], r"^weight: expected 5 dimensions .* \(2, 2, 6, 9\)"),
        (X, (8, *WEIGHT[1:]), r"^weight: its first dimension must be k \* k .*, got 8"),
        (X, (0, *WEIGHT[1:]), r"^weight: its first dimension .*, got 0"),
        (X, (1024, *WEIGHT[1:]), r"^weight: its first dimension .* 1 to 31, got 1024"),
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


@pytest.mark.parametrize("name", ["dilation", "stride", "scale", "kernel_size"])
@pytest.mark.parametrize("value", [0, -1, 1.0, True, "1", (1, 0), (1, 1, 1), [3]])
def test_wrong_window_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{name}: expected an int .* {re.escape(repr(value))}$"):
        hoconv.high_order_conv2d(torch.zeros(X), torch.zeros(WEIGHT), **{name: value})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kernel_size": 32}, "kernel_size: expected an int from 1 to 31, .* got 32"),
        ({"kernel_size": (3, 2)}, r"weight: its first dimension must be 3 \* 2, .* got 9"),
        ({"padding": "same"}, "padding: expected one of zeros, valid, replicate, reflect, got 's"),
        ({"normalize": "max"}, "normalize: expected None, 'softmax' or 'sum', got 'max'"),
        ({"stride": 2}, r"weight: .* B, H, W = 2, 3, 5 .*\(9, 2, 2, 6, 9\)"),
        ({"scale": (1, 2)}, "weight: .* B, H, W = 2, 6, 18 "),
        ({"padding": "valid"}, "weight: .* B, H, W = 2, 4, 7 "),
        ({"padding": "valid", "dilation": 3}, "x: padding='valid' needs a height of at least 7, "),
        ({"padding": "reflect", "dilation": (1, 9)}, "x: padding='reflect' needs a width of at le"),
    ],
)
def test_option_that_does_not_fit_is_refused_by_name(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        hoconv.high_order_conv2d(torch.zeros(X), torch.zeros(WEIGHT), **options)


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
        ("_backward", (X, X, (9, 2, 2, 6, 8))),
    ],
)
def test_op_called_past_the_checks_refuses_wrong_shapes(
    variant: Variant, name: str, shapes: tuple[tuple[int, ...], ...]
) -> None:
    tensors = [torch.zeros(shape, device=variant.device) for shape in shapes]
    with pytest.raises(RuntimeError, match=r"\b(x|weight|grad): "):
        ops(variant, name)(*tensors, WINDOW)


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
        ops(variant, "_grad_weight")(x, x, size, stride, WINDOW)


@with_ops
@pytest.mark.parametrize(
    ("size", "stride"),
    [
        ([2, 4, 5, 9], [180, 45, 9, 1]),
        ([1, 4, 6, 9], [216, 54, 9, 1]),
        ([2, 3, 6, 9], [162, 54, 9, 1]),
        ([4, 6, 9], [54, 9, 1]),
        ([2, 4, 6, 9], [54, 9, 1]),
    ],
)
def test_input_gradient_refuses_a_wrong_layout(
    variant: Variant, size: list[int], stride: list[int]
) -> None:
    grad, weight = torch.zeros(X, device=variant.device), torch.zeros(WEIGHT, device=variant.device)
    with pytest.raises(RuntimeError, match=r"\b(x|weight|grad|stride): "):
        ops(variant, "_grad_input")(grad, weight, size, stride, WINDOW)


@with_ops
@pytest.mark.parametrize(
    ("position", "number", "message"),
    [
        (0, 0, "kernel_size: expected 1 to 31"),
        (0, 32, "kernel_size: expected 1 to 31"),
        (1, 1, "weight: its first dimension"),
        (2, 0, "dilation: expected at least 1"),
        (3, -3, "dilation: expected at least 1"),
        (4, 0, "stride: expected at least 1"),
        (5, 2, "weight: expected 5 pixels for 9"),
        (6, 0, "scale: expected at least 1"),
        (6, 2, "weight: expected 12 pixels for 6"),
        (8, 4, "padding: expected 0 to 3"),
        (8, 1, "weight: expected 4 pixels for 6"),
    ],
)
def test_op_called_past_the_checks_refuses_a_wrong_window(
    variant: Variant, position: int, number: int, message: str
) -> None:
    x, weight = image_and_weight(variant)
    window = [*WINDOW[:position], number, *WINDOW[position + 1 :]]
    with pytest.raises(RuntimeError, match=message):
        ops(variant)(x, weight, window)
    with pytest.raises(RuntimeError, match="window: expected 9 numbers, got 8"):
        ops(variant)(x, weight, WINDOW[1:])


@with_ops
def test_op_called_past_the_checks_refuses_mixed_dtypes(variant: Variant) -> None:
    x, weight = image_and_weight(variant)
    with pytest.raises(RuntimeError, match="weight: expected the dtype of x"):
        ops(variant)(x, weight.float(), WINDOW)
    with pytest.raises(RuntimeError, match="grad: expected the dtype of x"):
        ops(variant, "_backward")(x.float(), x, weight, WINDOW)
    with pytest.raises(RuntimeError, match="x: expected float32, float64, float16 or bfloat16"):
        ops(variant)(x.int(), weight.int(), WINDOW)
