"""The high-order convolution: what it computes, and how it behaves as a PyTorch op.

What holds for every operator is in ../test_operators.py.

B batch, C channels, G groups of channels, H height, W width, k kernel size.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.flop_counter import FlopCounterMode

import hoconv
from hoconv.high_order.operator import OPERATOR
from hoconv.implementations import choose
from hoconv.operators import Sample
from tests.support import Place, differentiable, output_and_gradients, places

HALVES = [torch.float16, torch.bfloat16]
OPS = ["", "_backward", "_grad_input", "_grad_weight"]

everywhere = pytest.mark.parametrize("place", places([OPERATOR]), indirect=True)
with_ops = pytest.mark.parametrize(
    "place", [p for p in places([OPERATOR]) if "reference" not in p.id], indirect=True
)
on_cuda = pytest.mark.parametrize(
    "place", [p for p in places([OPERATOR]) if p.id.endswith("-cuda")], indirect=True
)
only_cuda = pytest.mark.parametrize(
    "place", [p for p in places([OPERATOR]) if p.id.endswith("cuda-cuda")], indirect=True
)


def draw(place: Place, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).to(place.device, dtype)


def image_and_weight(
    place: Place, B=2, C=4, H=6, W=9, k=3, G=2, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    return draw(place, B, C, H, W, dtype=dtype), draw(place, k * k, B, G, H, W, dtype=dtype)


def ops(place: Place, name: str = "") -> torch._ops.OpOverload:
    """An op itself, past the checks of the public function."""
    choose(OPERATOR, place.impl, place.device)  # loads it
    return getattr(getattr(torch.ops.hoconv, f"high_order_conv2d{name}"), place.impl)


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


# The value


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
    place: Place, k: int, dilation: int, expected: list[list[int]]
) -> None:
    x = torch.tensor([[[[1.0, 2.0], [3.0, 4.0]]]], device=place.device)
    taps = 10.0 ** torch.arange(k * k, device=place.device)
    weight = taps[:, None, None, None, None].expand(-1, 1, 1, 2, 2)
    out = place.call(x, weight, dilation=dilation)
    assert out[0, 0].tolist() == expected


@everywhere
def test_channels_of_a_group_share_their_kernels(place: Place) -> None:
    x = torch.ones(1, 4, 1, 1, device=place.device)
    weight = torch.tensor([2.0, 3.0], device=place.device).view(1, 1, 2, 1, 1)
    assert place.call(x, weight).flatten().tolist() == [2, 2, 3, 3]


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda t: t,
    "transposed": lambda t: t.mT.contiguous().mT,
    "last dimension first": lambda t: t.movedim(-1, 0).contiguous().movedim(0, -1),
    "second dimension last": lambda t: t.movedim(1, -1).contiguous().movedim(-1, 1),
    "first two swapped": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    "every third, from the second": lambda t: torch.stack((t, t, t), -1).flatten(-2)[..., 1::3],
    "rows with gaps": lambda t: F.pad(t, (1, 2))[..., 1 : 1 + t.shape[-1]],
    "columns with gaps": lambda t: F.pad(t, (0, 0, 2, 1))[..., 2 : 2 + t.shape[-2], :],
}


@everywhere
@hypothesis.given(data=st.data())
@hypothesis.settings(max_examples=100)
def test_any_sizes_and_strides_give_the_definition(place: Place, data: st.DataObject) -> None:
    B, H, W = (data.draw(st.integers(1, n), name) for name, n in (("B", 2), ("H", 4), ("W", 19)))
    k, dilation = data.draw(st.integers(1, 5), "k"), data.draw(st.integers(1, 4), "dilation")
    G, group_channels = data.draw(st.integers(1, 2), "G"), data.draw(st.integers(1, 5), "C / G")
    layouts = [LAYOUTS[data.draw(st.sampled_from(sorted(LAYOUTS)))] for _ in range(3)]
    C = G * group_channels
    shapes = ((B, C, H, W), (k * k, B, G, H, W), (B, C, H, W))
    x, weight, grad = (
        layout(torch.randint(-9, 10, shape).to(place.device, torch.float64))
        for layout, shape in zip(layouts, shapes, strict=True)
    )
    results = output_and_gradients(place.call, (x, weight), {"dilation": dilation}, grad)
    for result, expected in zip(
        results.values(), definition(x, weight, grad, dilation), strict=True
    ):
        assert torch.equal(result.cpu(), expected)  # whole numbers: exact in any order


@everywhere
@pytest.mark.parametrize("k", range(1, 12))
@pytest.mark.parametrize("dilation", [1, 2])
def test_same_kernel_at_every_pixel_is_a_depthwise_convolution(
    place: Place, k: int, dilation: int
) -> None:
    x, kernels = draw(place, 2, 4, 7, 20), draw(place, 4, k, k)
    before = dilation * (k - 1) // 2
    after = dilation * (k - 1) - before
    expected = F.conv2d(
        F.pad(x, (before, after, before, after)), kernels[:, None], dilation=dilation, groups=4
    )
    weight = kernels.flatten(1).T[:, None, :, None, None].expand(-1, 2, -1, 7, 20)
    torch.testing.assert_close(place.call(x, weight, dilation=dilation), expected)


@everywhere
@pytest.mark.parametrize("k", [1, 3, 5, 11])
def test_equals_unfold_and_sum(place: Place, k: int) -> None:
    x, weight = image_and_weight(place, k=k, G=1)
    columns = F.unfold(x, k, padding=k // 2).unflatten(1, (4, k * k))
    expected = (columns * weight[:, :, 0].flatten(2).transpose(0, 1)[:, None]).sum(2).view_as(x)
    torch.testing.assert_close(place.call(x, weight), expected)


@everywhere
def test_linear_in_both_arguments(place: Place) -> None:
    (x, weight), (y, other) = image_and_weight(place), image_and_weight(place)
    torch.testing.assert_close(
        place.call(2 * x + y, weight), 2 * place.call(x, weight) + place.call(y, weight)
    )
    torch.testing.assert_close(
        place.call(x, 2 * weight + other), 2 * place.call(x, weight) + place.call(x, other)
    )


@everywhere
@pytest.mark.parametrize("k", [2, 3, 4])
@pytest.mark.parametrize("dilation", [100, 2**40])
def test_taps_far_outside_the_image_see_zeros(place: Place, k: int, dilation: int) -> None:
    x, weight = image_and_weight(place, C=2, H=3, W=4, k=k, G=1)
    centre = weight[4] * x if k == 3 else torch.zeros_like(x)  # an even kernel has no centre
    assert torch.equal(place.call(x, weight, dilation=dilation), centre)


# Dtypes and values that are not finite


@everywhere
@pytest.mark.parametrize("dtype", HALVES)
def test_half_precision_is_accumulated_in_float32(place: Place, dtype: torch.dtype) -> None:
    # Ones added to `large` in half precision are lost. There are twelve on either side of it, so
    # that the order in which they are added does not matter.
    large = 2048 if dtype == torch.float16 else 256
    C, H, W, k = 25, 5, 5, 5
    x = torch.ones(1, C, H, W, dtype=dtype, device=place.device)
    weight = torch.ones(k * k, 1, 1, H, W, dtype=dtype, device=place.device)
    weight[12] = large
    results = output_and_gradients(place.call, (x, weight), {}, x)
    assert results["output"][0, 0, 2, 2] == large + 24
    assert results["gradient of argument 0"][0, 0, 2, 2] == large + 24
    grad = x.clone()
    grad[:, 12] = large
    results = output_and_gradients(place.call, (x, weight), {}, grad)
    assert results["gradient of argument 1"][12, 0, 0, 2, 2] == large + 24


def classes(t: Tensor) -> Tensor:
    """0 finite, 1 NaN, 2 inf, 3 -inf"""
    return t.isnan() + 2 * t.isposinf() + 3 * t.isneginf()


@everywhere
@pytest.mark.parametrize("dtype", OPERATOR.tolerances)
@pytest.mark.parametrize("where", ["x", "weight", "grad"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_values_that_are_not_finite_go_where_the_definition_puts_them(
    place: Place, dtype: torch.dtype, where: str, value: float
) -> None:
    for k, dilation, W in ((3, 1, 5), (5, 1, 37), (4, 2, 18)):
        x, weight = image_and_weight(place, H=7, W=W, k=k, dtype=dtype)
        tensors = {"x": x, "weight": weight, "grad": draw(place, *x.shape, dtype=dtype)}
        chosen = tensors[where]
        for corner in (0, -1):
            chosen[..., corner, corner] = value
        chosen[..., 3, W // 2] = -value
        x, weight, grad = tensors.values()
        results = output_and_gradients(place.call, (x, weight), {"dilation": dilation}, grad)
        reference = Place(OPERATOR, "reference", place.device)
        expected = output_and_gradients(reference.call, (x, weight), {"dilation": dilation}, grad)
        for name, result in results.items():
            assert torch.equal(classes(result), classes(expected[name])), (name, k)


@everywhere
@pytest.mark.parametrize("dtype", HALVES)
def test_sums_too_large_for_the_dtype_are_infinite(place: Place, dtype: torch.dtype) -> None:
    x, weight = image_and_weight(place, dtype=dtype)
    x, weight = x.abs() + 1, torch.full_like(weight, torch.finfo(dtype).max)
    assert place.call(x, weight).isposinf().all()
    assert place.call(-x, weight).isneginf().all()


@everywhere
def test_empty_tensors_give_empty_results_or_zeros(place: Place) -> None:
    for shape in ((0, 4, 6, 9), (2, 0, 6, 9), (2, 4, 0, 9), (2, 4, 6, 0), (0, 0, 0, 0)):
        B, C, H, W = shape
        x, weight = image_and_weight(place, B, C, H, W)
        results = output_and_gradients(place.call, (x, weight), {})
        sizes = [tuple(result.shape) for result in results.values()]
        assert sizes == [shape, shape, (9, B, 2, H, W)]
        assert not results["gradient of argument 1"].any()


# Strides


@everywhere
def test_output_has_the_memory_format_of_x(place: Place) -> None:
    x, weight = image_and_weight(place)
    for memory_format in (torch.contiguous_format, torch.channels_last):
        out = place.call(x.to(memory_format=memory_format), weight)
        assert out.is_contiguous(memory_format=memory_format)


@everywhere
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_output_gradient_may_have_any_strides(place: Place, dtype: torch.dtype) -> None:
    x, weight = image_and_weight(place, W=33, dtype=dtype)
    dense = draw(place, *x.shape, dtype=dtype)
    strided = {name: layout(dense) for name, layout in LAYOUTS.items()}
    strided["channels-last"] = dense.to(memory_format=torch.channels_last)
    expected = output_and_gradients(place.call, (x, weight), {}, dense)
    for layout, grad in strided.items():
        results = output_and_gradients(place.call, (x, weight), {}, grad)
        assert all(torch.equal(results[name], expected[name]) for name in results), layout
    one = torch.ones((), dtype=dtype, device=place.device)
    expected = output_and_gradients(place.call, (x, weight), {}, one.expand_as(x).contiguous())
    results = output_and_gradients(place.call, (x, weight), {}, one.expand_as(x))  # as of a sum
    assert all(torch.equal(results[name], expected[name]) for name in results)


@everywhere
def test_sizes_of_one_may_have_any_stride(place: Place) -> None:
    for shape in ((1, 1, 5, 9), (2, 1, 1, 9), (2, 3, 5, 1), (1, 1, 1, 1)):
        x, weight = image_and_weight(place, *shape, G=1)
        strides = [7 if size == 1 else x.stride(i) for i, size in enumerate(shape)]
        odd = x.as_strided(shape, strides)
        assert torch.equal(place.call(odd, weight), place.call(x, weight))


@everywhere
def test_negative_view_is_read_with_its_sign(place: Place) -> None:
    x, weight = image_and_weight(place)
    negative = torch.complex(x, x).conj().imag
    assert negative.is_neg()
    assert torch.equal(place.call(negative, weight), place.call(-x, weight))


def generated(place: Place, channels_last: bool) -> tuple[Tensor, Tensor]:
    """What a generator gives, and the weight that is a view of it."""
    output = draw(place, 2, 25 * 2, 6, 9)
    if channels_last:
        output = output.to(memory_format=torch.channels_last)
    output.requires_grad_()
    return output, output.unflatten(1, (25, 2)).transpose(0, 1)


@with_ops
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("x_needs_gradient", [False, True])
def test_gradient_of_a_generators_output_comes_in_its_layout(
    place: Place, channels_last: bool, x_needs_gradient: bool
) -> None:
    output, weight = generated(place, channels_last)
    seen = []
    weight.register_hook(seen.append)
    x = draw(place, 2, 4, 6, 9).requires_grad_(x_needs_gradient)
    place.call(x, weight).sum().backward()
    assert seen[0].stride() == weight.stride()
    assert output.grad is not None
    assert output.grad.stride() == output.stride()
    # The gradient that arrives is the kernel's own: the views on the way copied nothing.
    assert output.grad.data_ptr() == seen[0].data_ptr()


@with_ops
def test_gradient_of_an_expanded_weight_is_dense(place: Place) -> None:
    x, weight = draw(place, 2, 4, 6, 9), draw(place, 9, 1, 1, 1, 1).expand(9, 2, 2, 6, 9)
    for x_needs_gradient in (False, True):
        leaf = weight.detach().requires_grad_()
        out = place.call(x.detach().requires_grad_(x_needs_gradient), leaf)
        (gradient,) = torch.autograd.grad(out.sum(), leaf)
        assert gradient.is_contiguous()


# Autograd


@with_ops
@pytest.mark.parametrize(
    ("wanted", "saved"), [("x", {"weight"}), ("weight", {"x"}), ("both", {"x", "weight"})]
)
def test_only_what_the_backward_needs_is_saved_and_not_copied(
    place: Place, wanted: str, saved: set[str]
) -> None:
    x, weight = image_and_weight(place)
    x.requires_grad_(wanted != "weight")
    weight.requires_grad_(wanted != "x")
    packed: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        place.call(x, weight)
    names = {x.data_ptr(): "x", weight.data_ptr(): "weight"}
    assert {names[t.data_ptr()] for t in packed} == saved
    assert len(packed) == len(saved)


@everywhere
def test_nothing_is_saved_without_gradients(place: Place) -> None:
    x, weight = image_and_weight(place)
    weight.requires_grad_()
    packed: list[Tensor] = []
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t),
        torch.no_grad(),
    ):
        assert not place.call(x, weight).requires_grad
    assert not packed


@everywhere
def test_inference_mode_gives_the_same_bits(place: Place) -> None:
    x, weight = image_and_weight(place)
    expected = place.call(x, weight)
    with torch.inference_mode():
        assert torch.equal(place.call(x, weight), expected)


@everywhere
@pytest.mark.parametrize("wanted", [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize(("k", "dilation"), [(2, 1), (3, 2)])
def test_gradients_of_either_argument_alone_can_be_differentiated(
    place: Place, wanted: tuple[bool, bool], k: int, dilation: int
) -> None:
    x, weight = image_and_weight(place, B=1, C=2, H=2, W=3, k=k)
    inputs = [t.requires_grad_(want) for t, want in zip((x, weight), wanted, strict=True)]

    def function(x: Tensor, weight: Tensor) -> Tensor:
        return place.call(x, weight, dilation=dilation)

    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(function, inputs)


@everywhere
@pytest.mark.parametrize("of", ["x", "weight", "both"])
def test_gradient_penalty_agrees_with_the_reference(place: Place, of: str) -> None:
    x, weight = image_and_weight(place)

    def penalty_gradients(impl: str) -> list[Tensor]:
        inputs = differentiable((x, weight))
        out = OPERATOR.function(*inputs, impl=impl)
        gradients = torch.autograd.grad(out.square().sum(), inputs, create_graph=True)
        chosen = {"x": gradients[:1], "weight": gradients[1:], "both": gradients}[of]
        penalty = torch.stack([g.square().sum() for g in chosen]).sum()
        return list(torch.autograd.grad(penalty, inputs))

    for result, expected in zip(
        penalty_gradients(place.impl), penalty_gradients("reference"), strict=True
    ):
        torch.testing.assert_close(result, expected)


def op_arguments(place: Place, name: str) -> tuple[Any, ...]:
    """Arguments of an op, the weight strided as a generator's output."""
    grad, x = draw(place, 2, 4, 3, 4), draw(place, 2, 4, 3, 4)
    weight = draw(place, 2, 9 * 2, 3, 4).unflatten(1, (9, 2)).transpose(0, 1)
    size, stride = list(weight.shape), list(weight.stride())
    arguments = {
        "": (x, weight, 1),
        "_backward": (grad, x, weight, 1),
        "_grad_input": (grad, weight, 1),
        "_grad_weight": (grad, x, size, stride, 1),
    }
    return tuple(differentiable(arguments[name]))


@with_ops
@pytest.mark.parametrize("name", OPS)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_torch_library_finds_no_fault_in_any_op(place: Place, name: str) -> None:
    torch.library.opcheck(ops(place, name), op_arguments(place, name))


@with_ops
@pytest.mark.parametrize("name", OPS)
def test_every_op_can_be_differentiated_twice(place: Place, name: str) -> None:
    op, arguments = ops(place, name), op_arguments(place, name)
    inputs = [a.detach().clone().requires_grad_() for a in arguments if isinstance(a, Tensor)]
    rest = [a for a in arguments if not isinstance(a, Tensor)]

    def function(*tensors: Tensor) -> Any:
        return op(*tensors, *rest)

    assert torch.autograd.gradcheck(function, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, inputs, fast_mode=True)


@with_ops
@pytest.mark.parametrize("dtype", OPERATOR.tolerances)
def test_gradients_alone_have_the_bits_of_both_together(place: Place, dtype: torch.dtype) -> None:
    for sample in place.samples(dtype):
        x, weight = sample.args
        dilation, grad = sample.kwargs.get("dilation", 1), torch.randn_like(x)
        grad_x, grad_weight = ops(place, "_backward")(grad, x, weight, dilation)
        alone = ops(place, "_grad_input")(grad, weight, dilation)
        assert torch.equal(alone, grad_x), sample.name
        layout = list(grad_weight.shape), list(grad_weight.stride())
        alone = ops(place, "_grad_weight")(grad, x, *layout, dilation)
        assert torch.equal(alone, grad_weight), sample.name
        assert alone.stride() == grad_weight.stride(), sample.name


# Autocast


@everywhere
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    "given", [(torch.float32, torch.float32), (torch.float32, None), (None, torch.float32)]
)
def test_autocast_casts_as_for_a_convolution(
    place: Place, dtype: torch.dtype, given: tuple[torch.dtype | None, torch.dtype | None]
) -> None:
    x, weight = image_and_weight(place, dtype=torch.float32)
    inputs = differentiable((x.to(given[0] or dtype), weight.to(given[1] or dtype)))
    with torch.autocast(place.device, dtype=dtype):
        out = place.call(*inputs)
    gradients = torch.autograd.grad(out.sum(), inputs)
    assert out.dtype == dtype
    assert torch.equal(out, place.call(x.to(dtype), weight.to(dtype)))
    assert [g.dtype for g in gradients] == [t.dtype for t in inputs]


@everywhere
def test_autocast_leaves_float64(place: Place) -> None:
    x, weight = image_and_weight(place)
    with torch.autocast(place.device, dtype=torch.bfloat16):
        assert place.call(x, weight).dtype == torch.float64
        with pytest.raises(TypeError, match="weight: expected the dtype of x"):
            place.call(x, weight.float())


@everywhere
def test_disabled_autocast_casts_nothing(place: Place) -> None:
    x, weight = image_and_weight(place, dtype=torch.float32)
    with (
        torch.autocast(place.device, dtype=torch.bfloat16),
        torch.autocast(place.device, enabled=False),
    ):
        assert place.call(x, weight).dtype == torch.float32


@with_ops
@pytest.mark.parametrize("dtype", HALVES)
def test_autocast_casts_for_the_op_itself(place: Place, dtype: torch.dtype) -> None:
    x, weight = image_and_weight(place, dtype=torch.float32)
    with torch.autocast(place.device, dtype=dtype):
        out = ops(place)(x, weight.to(dtype), 1)
    assert torch.equal(out, ops(place)(x.to(dtype), weight.to(dtype), 1))


# What tools see


@with_ops
def test_flop_counter_counts_what_the_declaration_says(place: Place) -> None:
    for sample in place.samples(torch.float32):
        cost = OPERATOR.cost(sample)
        x, weight = inputs = differentiable(sample.args)
        with FlopCounterMode(display=False) as forward:
            out = place.call(*inputs, **sample.kwargs)
        assert forward.get_total_flops() == cost.forward_flops, sample.name
        with FlopCounterMode(display=False) as backward:
            torch.autograd.grad(out.sum(), inputs)
        assert backward.get_total_flops() == cost.backward_flops, sample.name
        for one in (x, weight):
            out = place.call(*(t if t is one else t.detach() for t in inputs), **sample.kwargs)
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
def test_one_compiled_graph_serves_all_sizes(place: Place) -> None:
    torch.compiler.reset()
    backend = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(place.call, fullgraph=True, dynamic=True, backend=backend)
    compilations = []
    # At first all sizes differ: those that are equal are taken to stay so.
    for B, H, W in ((5, 6, 7), (3, 8, 10), (12, 20, 12)):
        inputs = image_and_weight(place, B=B, H=H, W=W)
        results = output_and_gradients(compiled, inputs, {})
        expected = output_and_gradients(place.call, inputs, {})
        for name, result in results.items():
            torch.testing.assert_close(result, expected[name])
        compilations.append(backend.frame_count)
    assert len(set(compilations)) == 1


@everywhere
def test_exported_once_serves_all_batch_sizes(place: Place) -> None:
    class Call(torch.nn.Module):
        def forward(self, x: Tensor, weight: Tensor) -> Tensor:
            return place.call(x, weight, dilation=2)

    batch = torch.export.Dim("batch", min=2, max=64)
    exported = torch.export.export(
        Call(), image_and_weight(place), dynamic_shapes=({0: batch}, {1: batch})
    )
    inputs = image_and_weight(place, B=7)
    torch.testing.assert_close(exported.module()(*inputs), place.call(*inputs, dilation=2))


@everywhere
def test_compiles_within_autocast(place: Place) -> None:
    torch.compiler.reset()

    def call(x: Tensor, weight: Tensor) -> Tensor:
        with torch.autocast(place.device, dtype=torch.bfloat16):
            return place.call(x, weight)

    inputs = image_and_weight(place, dtype=torch.float32)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    results = output_and_gradients(compiled, inputs, {})
    expected = output_and_gradients(call, inputs, {})
    assert results["output"].dtype == torch.bfloat16
    for name, result in results.items():
        torch.testing.assert_close(result, expected[name])


@everywhere
def test_called_from_several_python_threads_gives_the_same_bits(place: Place) -> None:
    inputs = image_and_weight(place, B=4, H=24, W=40)
    expected = output_and_gradients(place.call, inputs, {})
    with ThreadPoolExecutor(4) as pool:
        tasks = [pool.submit(output_and_gradients, place.call, inputs, {}) for _ in range(16)]
        for task in tasks:
            assert all(torch.equal(t, expected[name]) for name, t in task.result().items())


# What only a GPU has


@only_cuda
@pytest.mark.parametrize("dtype", OPERATOR.tolerances)
def test_peak_memory_is_the_output_and_the_gradients(place: Place, dtype: torch.dtype) -> None:
    x, weight = differentiable(image_and_weight(place, 8, 4, 256, 256, k=5, dtype=dtype))
    grad = torch.randn_like(x)
    place.call(x[..., :8, :8], weight[..., :8, :8]).sum().backward()  # what is allocated once
    x.grad = weight.grad = None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = place.call(x, weight)
    out.backward(grad)
    extra = torch.cuda.max_memory_allocated() - before
    assert extra <= out.nbytes + x.nbytes + weight.nbytes + 3 * 2**21  # rounded up, each


@on_cuda
def test_runs_in_the_stream_of_the_caller(place: Place) -> None:
    inputs = image_and_weight(place, H=512, W=512)
    expected = output_and_gradients(place.call, inputs, {})
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        results = output_and_gradients(place.call, [t.clone() for t in inputs], {})
        for name, result in results.items():
            assert torch.equal(result, expected[name])


@only_cuda
def test_captured_in_a_cuda_graph_gives_the_same_bits(place: Place) -> None:
    inputs = image_and_weight(place, dtype=torch.float32)
    output_and_gradients(place.call, inputs, {})
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = place.call(*inputs)
    for t in inputs:
        t.normal_()
    graph.replay()
    assert torch.equal(results, place.call(*inputs))


@only_cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices")
def test_runs_on_a_device_that_is_not_the_current_one(place: Place) -> None:
    inputs = image_and_weight(place, dtype=torch.float32)
    expected = output_and_gradients(place.call, inputs, {})
    there = [t.to("cuda:1") for t in inputs]
    results = output_and_gradients(place.call, there, {})
    for name, result in results.items():
        assert result.device == there[0].device
        assert torch.equal(result.cpu(), expected[name].cpu())


# Errors

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
    place: Place, name: str, shapes: tuple[tuple[int, ...], ...]
) -> None:
    tensors = [torch.zeros(shape, device=place.device) for shape in shapes]
    with pytest.raises(RuntimeError, match=r"\b(x|weight|grad): "):
        ops(place, name)(*tensors, 1)


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
    place: Place, size: list[int], stride: list[int]
) -> None:
    x = torch.zeros(X, device=place.device)
    with pytest.raises(RuntimeError, match=r"\b(weight|stride): "):
        ops(place, "_grad_weight")(x, x, size, stride, 1)


@with_ops
@pytest.mark.parametrize("dilation", [0, -3])
def test_op_called_past_the_checks_refuses_a_wrong_dilation(place: Place, dilation: int) -> None:
    x, weight = image_and_weight(place)
    with pytest.raises(RuntimeError, match="dilation: expected at least 1"):
        ops(place)(x, weight, dilation)


@with_ops
def test_op_called_past_the_checks_refuses_mixed_dtypes(place: Place) -> None:
    x, weight = image_and_weight(place)
    with pytest.raises(RuntimeError, match="weight: expected the dtype of x"):
        ops(place)(x, weight.float(), 1)
    with pytest.raises(RuntimeError, match="grad: expected the dtype of x"):
        ops(place, "_backward")(x.float(), x, weight, 1)
    with pytest.raises(RuntimeError, match="x: expected float32, float64, float16 or bfloat16"):
        ops(place)(x.int(), weight.int(), 1)


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
    place: Place, B: int, C: int, H: int, W: int, k: int
) -> None:
    elements = max(B * C * H * W, k * k * B * H * W)
    assert elements > 2**31
    if free_bytes(place.device) < 5 * elements:
        pytest.skip("not enough memory")
    half: dict[str, Any] = {"dtype": torch.float16, "device": place.device}
    # All zeros but the last image, whose results are as they are when it is alone.
    x = torch.zeros(B, C, H, W, **half)
    weight = torch.zeros(k * k, B, 1, H, W, **half)
    for t in (x[-1:], weight[:, -1:]):
        t.copy_(torch.randint(-4, 5, t.shape[-2:], **half))
    last_x, last_weight = x[-1:], weight[:, -1:].clone()

    out = ops(place)(x, weight, 1)
    assert torch.equal(out[-1:], ops(place)(last_x, last_weight, 1))
    del out
    grad_x = ops(place, "_grad_input")(x, weight, 1)
    assert torch.equal(grad_x[-1:], ops(place, "_grad_input")(last_x, last_weight, 1))
    del grad_x
    layout = list(weight.shape), list(weight.stride())
    del weight
    grad_weight = ops(place, "_grad_weight")(x, x, *layout, 1)
    layout = list(last_weight.shape), list(last_weight.stride())
    expected = ops(place, "_grad_weight")(last_x, last_x, *layout, 1)
    assert torch.equal(grad_weight[:, -1:], expected)
    assert not grad_weight[:, 0].any()
