"""The high-order convolution on a GPU: memory, streams, CUDA graphs, several devices."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hoconv import high_order_conv2d
from hoconv.ops.high_order.conv2d.operator import OPERATOR
from hoconv.ops.high_order.conv2d.window import Window, make_pair
from hoconv.tools.testing.comparison import differentiable, output_and_gradients
from hoconv.tools.testing.variants import Variant
from tests.hoconv.ops.high_order.support import image_and_weight, on_cuda, only_cuda


@only_cuda
@pytest.mark.parametrize("dtype", OPERATOR.tolerances)
def test_peak_memory_is_the_output_and_the_gradients(variant: Variant, dtype: torch.dtype) -> None:
    x, weight = differentiable(image_and_weight(variant, 8, 4, 256, 256, k=5, dtype=dtype))
    grad = torch.randn_like(x)
    variant.call(x[..., :8, :8], weight[..., :8, :8]).sum().backward()  # what is allocated once
    x.grad = weight.grad = None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = variant.call(x, weight)
    out.backward(grad)
    extra = torch.cuda.max_memory_allocated() - before
    assert extra <= out.nbytes + x.nbytes + weight.nbytes + 3 * 2**21  # rounded up, each


@on_cuda
def test_runs_in_the_stream_of_the_caller(variant: Variant) -> None:
    inputs = image_and_weight(variant, H=512, W=512)
    expected = output_and_gradients(variant.call, inputs, {})
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        results = output_and_gradients(variant.call, [t.clone() for t in inputs], {})
        for name, result in results.items():
            assert torch.equal(result, expected[name])


@only_cuda
def test_captured_in_a_cuda_graph_gives_the_same_bits(variant: Variant) -> None:
    inputs = image_and_weight(variant, dtype=torch.float32)
    output_and_gradients(variant.call, inputs, {})
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = variant.call(*inputs)
    for t in inputs:
        t.normal_()
    graph.replay()
    assert torch.equal(results, variant.call(*inputs))


@only_cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices")
def test_runs_on_a_device_that_is_not_the_current_one(variant: Variant) -> None:
    inputs = image_and_weight(variant, dtype=torch.float32)
    expected = output_and_gradients(variant.call, inputs, {})
    there = [t.to("cuda:1") for t in inputs]
    results = output_and_gradients(variant.call, there, {})
    for name, result in results.items():
        assert result.device == there[0].device
        assert torch.equal(result.cpu(), expected[name].cpu())


# B, C, G, H, W, kernel size, elements before the weights, other options.
_CHANNELS_LAST: list[tuple[int, int, int, int, int, Any, int, dict[str, Any]]] = [
    (2, 3, 1, 37, 61, 3, 0, {}),
    (2, 3, 1, 33, 129, 5, 3, {}),  # misaligned
    (1, 4, 1, 40, 66, 7, 1, {}),
    (1, 1, 1, 28, 28, 5, 0, {}),
    (2, 2, 1, 35, 70, 4, 0, {}),  # an even kernel: padded in shared memory
    (2, 3, 1, 35, 71, 4, 1, {}),
    (1, 3, 1, 23, 45, (3, 8), 5, {}),
    (1, 3, 1, 60, 70, 21, 1, {}),  # threads share a row of pixels
    (1, 2, 1, 33, 40, 31, 0, {}),
    (2, 6, 2, 30, 50, 3, 2, {}),
    (1, 12, 4, 20, 33, 9, 0, {}),
    (2, 5, 1, 30, 50, 3, 0, {}),  # more channels than they take
    (2, 3, 1, 30, 50, 5, 0, {"padding": "valid"}),
    (2, 3, 1, 30, 50, 5, 0, {"padding": "replicate"}),
    (2, 3, 1, 30, 50, 5, 1, {"padding": "reflect", "stride": 2}),
    (2, 3, 1, 30, 50, 5, 0, {"dilation": (2, 3)}),
    (2, 3, 1, 30, 50, 3, 0, {"scale": 2}),
    (2, 4, 2, 30, 50, 3, 1, {"stride": (1, 3), "scale": (3, 1), "padding": "replicate"}),
]


@only_cuda
@pytest.mark.parametrize("dtype", OPERATOR.tolerances)
@pytest.mark.parametrize("call", _CHANNELS_LAST, ids=str)
def test_weights_of_a_channels_last_generator(
    variant: Variant, call: tuple[Any, ...], dtype: torch.dtype
) -> None:
    B, C, G, H, W, kernel_size, before, options = call
    height, width = make_pair("kernel_size", kernel_size)
    window = Window.of(height * width, (height, width), **options)
    rows, columns = window.output_size(H, W)
    draw = torch.Generator(variant.device).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        wide = torch.randn(shape, device=variant.device, dtype=torch.float64, generator=draw)
        return wide.to(dtype)

    x = normal(B, C, H, W).contiguous(memory_format=torch.channels_last)
    pixels = normal(before + B * rows * columns * height * width * G)[before:]
    weight = pixels.view(B, rows, columns, height * width, G).permute(3, 0, 4, 1, 2)
    arguments = {"kernel_size": kernel_size, **options}
    results = output_and_gradients(variant.call, (x, weight), arguments, rounded_to=dtype)
    expected = output_and_gradients(
        lambda *t, **o: high_order_conv2d(*t, impl="reference", **o),
        (x.double(), weight.double()), arguments, rounded_to=dtype,
    )  # fmt: skip
    for name, result in results.items():
        error = (result.double() - expected[name]).norm() / expected[name].norm()
        # Of the result's rounding, and of sums of up to 961 products in float32.
        exact = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
        assert error <= 4 * torch.finfo(dtype).eps + 16 * exact, name
