"""The high-order convolution as a PyTorch op: registration, FLOP counts, compilation, threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.flop_counter import FlopCounterMode

from hoconv.dispatch.declaration import Sample
from hoconv.dispatch.registration import gradient_layout
from hoconv.ops.high_order.conv2d.operator import OPERATOR
from hoconv.ops.high_order.conv2d.window import Window
from hoconv.tools.testing.comparison import differentiable, output_and_gradients
from hoconv.tools.testing.variants import Variant
from tests.hoconv.ops.high_order.support import (
    draw,
    everywhere,
    image_and_weight,
    ops,
    window_of,
    with_ops,
)

OPS = ["", "_backward", "_grad_input", "_grad_weight"]


def op_arguments(variant: Variant, name: str) -> tuple[Any, ...]:
    """Arguments of an op, the weight strided as a generator's output."""
    grad, x = draw(variant, 2, 4, 3, 4), draw(variant, 2, 4, 3, 4)
    weight = draw(variant, 2, 9 * 2, 3, 4).unflatten(1, (9, 2)).transpose(0, 1)
    window = Window.of(9).numbers()
    arguments = {
        "": (x, weight, window),
        "_backward": (grad, x, weight, window),
        "_grad_input": (grad, weight, *gradient_layout(x), window),
        "_grad_weight": (grad, x, *gradient_layout(weight), window),
    }
    return tuple(differentiable(arguments[name]))


@with_ops
@pytest.mark.parametrize("name", OPS)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_torch_library_finds_no_fault_in_any_op(variant: Variant, name: str) -> None:
    torch.library.opcheck(ops(variant, name), op_arguments(variant, name))


@with_ops
@pytest.mark.parametrize("name", OPS)
def test_every_op_can_be_differentiated_twice(variant: Variant, name: str) -> None:
    op, arguments = ops(variant, name), op_arguments(variant, name)
    inputs = [a.detach().clone().requires_grad_() for a in arguments if isinstance(a, Tensor)]
    rest = [a for a in arguments if not isinstance(a, Tensor)]

    def function(*tensors: Tensor) -> Any:
        return op(*tensors, *rest)

    assert torch.autograd.gradcheck(function, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, inputs, fast_mode=True)


@with_ops
@pytest.mark.parametrize("dtype", OPERATOR.tolerances)
def test_gradients_alone_have_the_bits_of_both_together(
    variant: Variant, dtype: torch.dtype
) -> None:
    for sample in variant.samples(dtype):
        x, weight = sample.args
        window = window_of(sample)
        grad = torch.randn_like(ops(variant)(x, weight, window))
        grad_x, grad_weight = ops(variant, "_backward")(grad, x, weight, window)
        alone = ops(variant, "_grad_input")(grad, weight, *gradient_layout(x), window)
        assert torch.equal(alone, grad_x), sample.name
        assert alone.stride() == grad_x.stride(), sample.name
        alone = ops(variant, "_grad_weight")(grad, x, *gradient_layout(weight), window)
        assert torch.equal(alone, grad_weight), sample.name
        assert alone.stride() == grad_weight.stride(), sample.name


@with_ops
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_torch_library_finds_no_fault_for_any_window(variant: Variant) -> None:
    for sample in variant.samples(torch.float32):
        arguments = *differentiable(sample.args), window_of(sample)
        utils = ("test_schema", "test_faketensor")
        torch.library.opcheck(ops(variant), arguments, test_utils=utils)


@with_ops
def test_flop_counter_counts_what_the_declaration_says(variant: Variant) -> None:
    for sample in variant.samples(torch.float32):
        cost = OPERATOR.cost(sample)
        x, weight = inputs = differentiable(sample.args)
        with FlopCounterMode(display=False) as forward:
            out = variant.call(*inputs, **sample.kwargs)
        assert forward.get_total_flops() == cost.forward_flops, sample.name
        with FlopCounterMode(display=False) as backward:
            torch.autograd.grad(out.sum(), inputs)
        assert backward.get_total_flops() == cost.backward_flops, sample.name
        for one in (x, weight):
            out = variant.call(*(t if t is one else t.detach() for t in inputs), **sample.kwargs)
            with FlopCounterMode(display=False) as backward:
                torch.autograd.grad(out.sum(), one)
            assert 2 * backward.get_total_flops() == cost.backward_flops, sample.name


def test_cost_of_a_call_written_out() -> None:
    x, weight = torch.zeros(2, 6, 4, 5), torch.zeros(9, 2, 3, 4, 5)
    cost = OPERATOR.cost(Sample((x, weight)))
    assert cost.forward_bytes == 4 * (x.numel() + weight.numel() + x.numel())
    assert cost.backward_bytes == 4 * (3 * x.numel() + 2 * weight.numel())
    assert cost.forward_flops == 2 * 9 * x.numel()
    assert cost.backward_flops == 2 * cost.forward_flops


@everywhere
def test_one_compiled_graph_serves_all_sizes(variant: Variant) -> None:
    torch.compiler.reset()
    backend = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(variant.call, fullgraph=True, dynamic=True, backend=backend)
    compilations = []
    # At first all sizes differ: those that are equal are taken to stay so.
    for B, H, W in ((5, 6, 7), (3, 8, 10), (12, 20, 12)):
        inputs = image_and_weight(variant, B=B, H=H, W=W)
        results = output_and_gradients(compiled, inputs, {})
        expected = output_and_gradients(variant.call, inputs, {})
        for name, result in results.items():
            torch.testing.assert_close(result, expected[name])
        compilations.append(backend.frame_count)
    assert len(set(compilations)) == 1


@everywhere
def test_exported_once_serves_all_batch_sizes(variant: Variant) -> None:
    class Call(torch.nn.Module):
        def forward(self, x: Tensor, weight: Tensor) -> Tensor:
            return variant.call(x, weight, dilation=2)

    batch = torch.export.Dim("batch", min=2, max=64)
    exported = torch.export.export(
        Call(), image_and_weight(variant), dynamic_shapes=({0: batch}, {1: batch})
    )
    inputs = image_and_weight(variant, B=7)
    torch.testing.assert_close(exported.module()(*inputs), variant.call(*inputs, dilation=2))


@everywhere
def test_compiles_within_autocast(variant: Variant) -> None:
    torch.compiler.reset()

    def call(x: Tensor, weight: Tensor) -> Tensor:
        with torch.autocast(variant.device, dtype=torch.bfloat16):
            return variant.call(x, weight)

    inputs = image_and_weight(variant, dtype=torch.float32)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    results = output_and_gradients(compiled, inputs, {})
    expected = output_and_gradients(call, inputs, {})
    assert results["output"].dtype == torch.bfloat16
    for name, result in results.items():
        torch.testing.assert_close(result, expected[name])


@everywhere
def test_called_from_several_python_threads_gives_the_same_bits(variant: Variant) -> None:
    inputs = image_and_weight(variant, B=4, H=24, W=40)
    expected = output_and_gradients(variant.call, inputs, {})
    with ThreadPoolExecutor(4) as pool:
        tasks = [pool.submit(output_and_gradients, variant.call, inputs, {}) for _ in range(16)]
        for task in tasks:
            assert all(torch.equal(t, expected[name]) for name, t in task.result().items())
