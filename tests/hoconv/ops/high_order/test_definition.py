"""The high-order convolution: what it computes, of any sizes and strides.

What holds for every operator is in hoconv/tools/testing/test_operators.py.

B batch, C channels, G groups of channels, H height, W width, k kernel size.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor

from hoconv.dispatch.registration import gradient_layout
from hoconv.ops.high_order.conv2d.window import Window
from hoconv.tools.testing.comparison import output_and_gradients
from hoconv.tools.testing.variants import Variant
from tests.hoconv.ops.high_order.support import (
    LAYOUTS,
    draw,
    everywhere,
    image_and_weight,
    ops,
    with_ops,
)


def definition(x: Tensor, weight: Tensor, grad: Tensor, dilation: int) -> tuple[Tensor, ...]:
    """The output and both gradients, number by number."""
    K, B, G, H, W = weight.shape
    C, k = x.shape[1], round(K**0.5)
    before = dilation * (k - 1) // 2
    xs, ws, gs = x.tolist(), weight.tolist(), grad.tolist()
    out = torch.zeros(B, C, H, W, dtype=torch.float64)
    grad_x, grad_weight = torch.zeros_like(out), torch.zeros(K, B, G, H, W, dtype=torch.float64)
    for b, c, h, w, i in itertools.product(*map(range, (B, C, H, W, K))):
        g = c // (C // G)
        y, z = h + dilation * (i // k) - before, w + dilation * (i % k) - before
        if 0 <= y < H and 0 <= z < W:
            out[b, c, h, w] += ws[i][b][g][h][w] * xs[b][c][y][z]
            grad_x[b, c, y, z] += ws[i][b][g][h][w] * gs[b][c][h][w]
            grad_weight[i, b, g, h, w] += xs[b][c][y][z] * gs[b][c][h][w]
    return out, grad_x, grad_weight


@everywhere
@pytest.mark.parametrize(
    ("k", "dilation", "expected"),
    [
        (1, 1, [[1, 2], [3, 4]]),
        (2, 1, [[4321, 402], [43, 4]]),  # an even kernel reaches to the right and down
        (2, 2, [[4000, 300], [20, 1]]),
        (2, 3, [[0, 0], [0, 1]]),
    ],
)
def test_small_example_computed_by_hand(
    variant: Variant, k: int, dilation: int, expected: list[list[int]]
) -> None:
    x = torch.tensor([[[[1.0, 2.0], [3.0, 4.0]]]], device=variant.device)
    taps = 10.0 ** torch.arange(k * k, device=variant.device)
    weight = taps[:, None, None, None, None].expand(-1, 1, 1, 2, 2)
    out = variant.call(x, weight, dilation=dilation)
    assert out[0, 0].tolist() == expected


@everywhere
def test_channels_of_a_group_share_their_kernels(variant: Variant) -> None:
    x = torch.ones(1, 4, 1, 1, device=variant.device)
    weight = torch.tensor([2.0, 3.0], device=variant.device).view(1, 1, 2, 1, 1)
    assert variant.call(x, weight).flatten().tolist() == [2, 2, 3, 3]


@everywhere
@hypothesis.given(data=st.data())
@hypothesis.settings(max_examples=100)
def test_any_sizes_and_strides_give_the_definition(variant: Variant, data: st.DataObject) -> None:
    B, H, W = (data.draw(st.integers(1, n), name) for name, n in (("B", 2), ("H", 4), ("W", 19)))
    k = data.draw(st.integers(1, 5), "k")
    dilation = data.draw(st.integers(1, 4) | st.integers(5, 50), "dilation")
    G, group_channels = data.draw(st.integers(1, 2), "G"), data.draw(st.integers(1, 5), "C / G")
    layouts = [LAYOUTS[data.draw(st.sampled_from(sorted(LAYOUTS)))] for _ in range(3)]
    C = G * group_channels
    shapes = ((B, C, H, W), (k * k, B, G, H, W), (B, C, H, W))
    x, weight, grad = (
        layout(torch.randint(-9, 10, shape).to(variant.device, torch.float64))
        for layout, shape in zip(layouts, shapes, strict=True)
    )
    results = output_and_gradients(variant.call, (x, weight), {"dilation": dilation}, grad)
    for result, expected in zip(
        results.values(), definition(x, weight, grad, dilation), strict=True
    ):
        assert torch.equal(result.cpu(), expected)  # whole numbers: exact in any order


@everywhere
@pytest.mark.parametrize("k", range(1, 12))
@pytest.mark.parametrize("dilation", [1, 2])
def test_same_kernel_at_every_pixel_is_a_depthwise_convolution(
    variant: Variant, k: int, dilation: int
) -> None:
    x, kernels = draw(variant, 2, 4, 7, 20), draw(variant, 4, k, k)
    before = dilation * (k - 1) // 2
    after = dilation * (k - 1) - before
    expected = F.conv2d(
        F.pad(x, (before, after, before, after)), kernels[:, None], dilation=dilation, groups=4
    )
    weight = kernels.flatten(1).T[:, None, :, None, None].expand(-1, 2, -1, 7, 20)
    torch.testing.assert_close(variant.call(x, weight, dilation=dilation), expected)


@everywhere
@pytest.mark.parametrize("k", [1, 3, 5, 11])
def test_equals_unfold_and_sum(variant: Variant, k: int) -> None:
    x, weight = image_and_weight(variant, k=k, G=1)
    columns = F.unfold(x, k, padding=k // 2).unflatten(1, (4, k * k))
    expected = (columns * weight[:, :, 0].flatten(2).transpose(0, 1)[:, None]).sum(2).view_as(x)
    torch.testing.assert_close(variant.call(x, weight), expected)


@everywhere
def test_linear_in_both_arguments(variant: Variant) -> None:
    (x, weight), (y, other) = image_and_weight(variant), image_and_weight(variant)
    torch.testing.assert_close(
        variant.call(2 * x + y, weight), 2 * variant.call(x, weight) + variant.call(y, weight)
    )
    torch.testing.assert_close(
        variant.call(x, 2 * weight + other), 2 * variant.call(x, weight) + variant.call(x, other)
    )


@everywhere
@pytest.mark.parametrize("k", [2, 3, 4])
@pytest.mark.parametrize("dilation", [100, 2**40])
def test_taps_far_outside_the_image_see_zeros(variant: Variant, k: int, dilation: int) -> None:
    x, weight = image_and_weight(variant, C=2, H=3, W=4, k=k, G=1)
    centre = weight[4] * x if k == 3 else torch.zeros_like(x)  # an even kernel has no centre
    assert torch.equal(variant.call(x, weight, dilation=dilation), centre)


@everywhere
def test_empty_tensors_give_empty_results_or_zeros(variant: Variant) -> None:
    for shape in ((0, 4, 6, 9), (2, 0, 6, 9), (2, 4, 0, 9), (2, 4, 6, 0), (0, 0, 0, 0)):
        B, C, H, W = shape
        x, weight = image_and_weight(variant, B, C, H, W)
        results = output_and_gradients(variant.call, (x, weight), {})
        sizes = [tuple(result.shape) for result in results.values()]
        assert sizes == [shape, shape, (9, B, 2, H, W)]
        assert not results["gradient of argument 1"].any()


# Sizes past 2 ** 31 elements


def free_bytes(device: str) -> int:
    if device == "cuda":
        return torch.cuda.mem_get_info()[0]
    info = Path("/proc/meminfo").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in info if line.startswith("MemAvailable"))


@with_ops
@pytest.mark.slow
@pytest.mark.parametrize(
    ("B", "C", "H", "W", "k"),
    [
        pytest.param(86, 1, 1000, 1000, 5, id="weight"),
        pytest.param(2, 1075, 1000, 1000, 1, id="image"),
    ],
)
def test_more_than_two_to_the_31_elements(
    variant: Variant, B: int, C: int, H: int, W: int, k: int
) -> None:
    elements = max(B * C * H * W, k * k * B * H * W)
    assert elements > 2**31
    if free_bytes(variant.device) < 5 * elements:
        pytest.skip("not enough memory")
    half: dict[str, Any] = {"dtype": torch.float16, "device": variant.device}
    # All zeros but the last image, whose results are as they are when it is alone.
    x = torch.zeros(B, C, H, W, **half)
    weight = torch.zeros(k * k, B, 1, H, W, **half)
    for t in (x[-1:], weight[:, -1:]):
        t.copy_(torch.randint(-4, 5, t.shape[-2:], **half))
    last_x, last_weight = x[-1:], weight[:, -1:].clone()

    window = Window.of(k * k).numbers()
    out = ops(variant)(x, weight, window)
    assert torch.equal(out[-1:], ops(variant)(last_x, last_weight, window))
    del out
    grad_x = ops(variant, "_grad_input")(x, weight, *gradient_layout(x), window)
    layout = gradient_layout(last_x)
    last_grad = ops(variant, "_grad_input")(last_x, last_weight, *layout, window)
    assert torch.equal(grad_x[-1:], last_grad)
    del grad_x
    layout = gradient_layout(weight)
    del weight
    grad_weight = ops(variant, "_grad_weight")(x, x, *layout, window)
    layout = gradient_layout(last_weight)
    expected = ops(variant, "_grad_weight")(last_x, last_x, *layout, window)
    assert torch.equal(grad_weight[:, -1:], expected)
    assert not grad_weight[:, 0].any()
