"""The high-order convolution on a GPU: memory, streams, CUDA graphs, several devices."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hoconv import high_order_conv2d
from hoconv.ops.high_order.conv2d.operator import OPERATOR
from hoconv.tools.testing.comparison import differentiable, output_and_gradients
from hoconv.tools.testing.variants import Variant
from tests.hoconv.ops.high_order.support import (
    CHANNELS_LAST,
    generated_last,
    image_and_weight,
    is_close,
    on_cuda,
    only_cuda,
)


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


@only_cuda
@pytest.mark.parametrize("dtype", OPERATOR.tolerances)
@pytest.mark.parametrize("call", CHANNELS_LAST, ids=str)
def test_weights_of_a_channels_last_generator(
    variant: Variant, call: tuple[Any, ...], dtype: torch.dtype
) -> None:
    x, weight, arguments = generated_last(call, variant.device, dtype)
    results = output_and_gradients(variant.call, (x, weight), arguments, rounded_to=dtype)
    expected = output_and_gradients(
        lambda *t, **o: high_order_conv2d(*t, impl="reference", **o),
        (x.double(), weight.double()), arguments, rounded_to=dtype,
    )  # fmt: skip
    for name, result in results.items():
        assert is_close(result, expected[name]), name
