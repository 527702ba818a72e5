"""The dynamic 1-D convolution: what it computes, and how it behaves as a PyTorch op.

What holds for every operator is in hoconv/tools/testing/test_operators.py.

B batch, C channels, H heads, K taps, T time steps.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import hypothesis
import pytest
import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import hoconv
from hoconv.dispatch.declaration import Sample
from hoconv.dispatch.implementations import choose
from hoconv.ops.dynamic_conv1d.operator import OPERATOR
from hoconv.tools.testing.comparison import differentiable, output_and_gradients, relative_error
from hoconv.tools.testing.variants import Variant, variants

HALVES = [torch.float16, torch.bfloat16]
OPS = ["", "_grad_input", "_grad_weight"]
SHARED = [(), ("batch",), ("time",), ("batch", "time")]

everywhere = pytest.mark.parametrize("variant", variants([OPERATOR]), indirect=True)
with_ops = pytest.mark.parametrize(
    "variant", [p for p in variants([OPERATOR]) if "reference" not in p.id], indirect=True
)
gpu_kernels = pytest.mark.parametrize(
    "variant",
    [p for p in variants([OPERATOR]) if p.id.endswith(("triton-cuda", "cuda-cuda"))],
    indirect=True,
)
any_sharing = pytest.mark.parametrize("shared", SHARED, ids=lambda s: " and ".join(s) or "none")


def draw(variant: Variant, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).to(variant.device, dtype)


def inputs(
    variant: Variant, B=2, C=6, T=9, K=3, H=2, shared: tuple[str, ...] = (),
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    weight = (1 if "batch" in shared else B, H, K, 1 if "time" in shared else T)
    return draw(variant, B, C, T, dtype=dtype), draw(variant, *weight, dtype=dtype)


def ops(variant: Variant, name: str = "") -> torch._ops.OpOverload:
    """An op itself, past the checks of the public function."""
    choose(OPERATOR, variant.impl, variant.device)  # loads it
    return getattr(getattr(torch.ops.hoconv, f"dynamic_conv1d{name}"), variant.impl)


def definition(x: Tensor, weight: Tensor, grad: Tensor, padding: int) -> tuple[Tensor, ...]:
    """The output and both gradients, number by number."""
    (B, C, T), (batch, H, K, steps) = x.shape, weight.shape
    xs, ws, gs = x.tolist(), weight.tolist(), grad.tolist()
    out = torch.zeros(B, C, T, dtype=torch.float64)
    grad_x, grad_weight = torch.zeros_like(out), torch.zeros(weight.shape, dtype=torch.float64)
    for b, c, t, j in itertools.product(*map(range, (B, C, T, K))):
        at = b % batch, c // (C // H), j, t % steps
        w, s = ws[at[0]][at[1]][at[2]][at[3]], t + j - padding
        if 0 <= s < T:
            out[b, c, t] += w * xs[b][c][s]
            grad_x[b, c, s] += w * gs[b][c][t]
            grad_weight[at] += xs[b][c][s] * gs[b][c][t]
    return out, grad_x, grad_weight


# The value


@everywhere
@pytest.mark.parametrize(
    ("padding", "expected"),
    [(2, [100, 210, 321, 432]), (1, [210, 321, 432, 43]), (0, [321, 432, 43, 4])],
)
def test_small_example_computed_by_hand(
    variant: Variant, padding: int, expected: list[int]
) -> None:
    x = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]], device=variant.device)
    weight = 10.0 ** torch.arange(3, device=variant.device)[None, None, :, None]
    assert variant.call(x, weight, padding=padding)[0, 0].tolist() == expected


@everywhere
def test_consecutive_channels_share_the_kernels_of_a_head(variant: Variant) -> None:
    x = torch.ones(1, 4, 1, device=variant.device)
    weight = torch.tensor([2.0, 3.0], device=variant.device).view(1, 2, 1, 1)
    assert variant.call(x, weight, padding=0).flatten().tolist() == [2, 2, 3, 3]


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda t: t,
    "transposed": lambda t: t.mT.contiguous().mT,
    "last dimension first": lambda t: t.movedim(-1, 0).contiguous().movedim(0, -1),
    "second dimension last": lambda t: t.movedim(1, -1).contiguous().movedim(-1, 1),
    "every third, from the second": lambda t: torch.stack((t, t, t), -1).flatten(-2)[..., 1::3],
    "rows with gaps": lambda t: F.pad(t, (1, 2))[..., 1 : 1 + t.shape[-1]],
}


@everywhere
@hypothesis.given(data=st.data())
@hypothesis.settings(max_examples=100)
def test_any_sizes_and_strides_give_the_definition(variant: Variant, data: st.DataObject) -> None:
    B, T = data.draw(st.integers(1, 3), "B"), data.draw(st.integers(1, 40), "T")
    H, head_channels = data.draw(st.integers(1, 3), "H"), data.draw(st.integers(1, 9), "C / H")
    K = data.draw(st.integers(1, 12), "K")
    padding = data.draw(st.integers(0, K - 1), "padding")
    batch = data.draw(st.sampled_from((1, B)), "weight's batch")
    steps = data.draw(st.sampled_from((1, T)), "weight's steps")
    layouts = [LAYOUTS[data.draw(st.sampled_from(sorted(LAYOUTS)))] for _ in range(3)]
    shapes = ((B, H * head_channels, T), (batch, H, K, steps), (B, H * head_channels, T))
    x, weight, grad = (
        layout(torch.randint(-9, 10, shape).to(variant.device, torch.float64))
        for layout, shape in zip(layouts, shapes, strict=True)
    )
    results = output_and_gradients(variant.call, (x, weight), {"padding": padding}, grad)
    expected = definition(x, weight, grad, padding)
    for result, exact in zip(results.values(), expected, strict=True):
        assert torch.equal(result.cpu(), exact)  # whole numbers: exact in any order


@everywhere
@any_sharing
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("C", "T", "K", "padding"), [(66, 300, 31, 30), (66, 257, 34, 16), (8, 1100, 4, 2)]
)
def test_sequences_longer_than_a_tile_give_the_definition(
    variant: Variant,
    shared: tuple[str, ...],
    dtype: torch.dtype,
    C: int,
    T: int,
    K: int,
    padding: int,
) -> None:
    x, weight = (
        torch.randint(-3, 4, t.shape).to(t) for t in inputs(variant, 2, C, T, K, 2, shared, dtype)
    )
    grad = torch.randint(-3, 4, x.shape).to(x)
    reference = Variant(OPERATOR, "reference", "cpu")
    results = output_and_gradients(variant.call, (x, weight), {"padding": padding}, grad)
    exact = output_and_gradients(
        reference.call, (x.cpu(), weight.cpu()), {"padding": padding}, grad.cpu()
    )
    for name, result in results.items():
        assert torch.equal(result.cpu(), exact[name]), name


@everywhere
@pytest.mark.parametrize("K", [1, 2, 3, 8, 31])
def test_weight_shared_by_all_is_a_depthwise_convolution(variant: Variant, K: int) -> None:
    x, weight = inputs(variant, K=K, shared=("batch", "time"))
    per_channel = weight[0].repeat_interleave(3, 0).transpose(1, 2)  # (C, 1, K)
    for padding in {0, (K - 1) // 2, K - 1}:
        expected = F.conv1d(F.pad(x, (padding, K - 1 - padding)), per_channel, groups=6)
        torch.testing.assert_close(variant.call(x, weight, padding=padding), expected)


# Shared weights


@everywhere
@any_sharing
def test_shared_weight_equals_its_expansion(variant: Variant, shared: tuple[str, ...]) -> None:
    x, weight = inputs(variant, shared=shared)
    expanded = weight.expand(2, -1, -1, 9)
    out = variant.call(x, weight, padding=1)
    assert torch.equal(out, variant.call(x, expanded, padding=1))
    assert torch.equal(out, variant.call(x, expanded.contiguous(), padding=1))


@everywhere
@any_sharing
def test_gradient_of_a_shared_weight_sums_over_its_uses(
    variant: Variant, shared: tuple[str, ...]
) -> None:
    x, weight = inputs(variant, 3, 8, 45, 5, shared=shared)
    grad = torch.randn_like(x)
    in_full = weight.expand(3, -1, -1, 45).clone()
    gradient = output_and_gradients(variant.call, (x, weight), {"padding": 2}, grad)
    expected = output_and_gradients(variant.call, (x, in_full), {"padding": 2}, grad)
    name = "gradient of argument 1"
    torch.testing.assert_close(gradient[name], expected[name].sum_to_size(weight.shape))


class LargestTensor(TorchDispatchMode):
    """Notes the elements of the largest tensor that any operation returns."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(t, Tensor):
                self.elements = max(self.elements, t.numel())
        return out


@with_ops
def test_gradient_of_a_shared_weight_is_never_held_in_full(variant: Variant) -> None:
    x, weight = differentiable(inputs(variant, 4, 4, 50, 20, shared=("batch", "time")))
    with LargestTensor() as largest:
        variant.call(x, weight, padding=19).square().sum().backward()
    assert largest.elements == x.numel() < 4 * 2 * 20 * 50


@everywhere
@any_sharing
def test_nothing_to_sum_gives_zero_gradients(variant: Variant, shared: tuple[str, ...]) -> None:
    for B, C, T in ((0, 6, 9), (2, 0, 9), (2, 6, 0), (0, 0, 0)):
        x, weight = inputs(variant, B, C, T, shared=shared)
        results = output_and_gradients(variant.call, (x, weight), {"padding": 1})
        assert [r.shape for r in results.values()] == [x.shape, x.shape, weight.shape]
        assert not results["gradient of argument 1"].any()


# Dtypes and values that are not finite


@everywhere
@pytest.mark.parametrize("dtype", HALVES)
def test_half_precision_is_accumulated_in_float32(variant: Variant, dtype: torch.dtype) -> None:
    large = 2048 if dtype == torch.float16 else 256  # one more is lost in half precision
    x = torch.ones(1, 25, 25, dtype=dtype, device=variant.device)
    weight = torch.ones(1, 1, 25, 25, dtype=dtype, device=variant.device)
    weight[:, :, 12] = large
    results = output_and_gradients(variant.call, (x, weight), {"padding": 12}, x)
    assert results["output"][0, 0, 12] == large + 24
    assert results["gradient of argument 0"][0, 0, 12] == large + 24
    grad = x.clone()
    grad[:, 12] = large
    results = output_and_gradients(variant.call, (x, weight), {"padding": 12}, grad)
    assert results["gradient of argument 1"][0, 0, 12, 12] == large + 24


def classes(t: Tensor) -> Tensor:
    """0 finite, 1 NaN, 2 inf, 3 -inf"""
    return t.isnan() + 2 * t.isposinf() + 3 * t.isneginf()


@everywhere
@any_sharing
@pytest.mark.parametrize("where", ["x", "weight", "grad"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_nan_and_infinity_are_where_the_definition_has_them(
    variant: Variant, shared: tuple[str, ...], where: str, value: float
) -> None:
    for dtype, T, K in itertools.product(OPERATOR.tolerances, (7, 150), (5, 8)):
        x, weight = inputs(variant, 2, 8, T, K, shared=shared, dtype=dtype)
        tensors = {"x": x, "weight": weight, "grad": draw(variant, *x.shape, dtype=dtype)}
        chosen = tensors[where].view(-1)
        chosen[0] = chosen[-1] = value
        chosen[len(chosen) // 2] = -value
        x, weight, grad = tensors.values()
        options = {"padding": K // 2}
        results = output_and_gradients(variant.call, (x, weight), options, grad)
        reference = Variant(OPERATOR, "reference", variant.device)
        expected = output_and_gradients(reference.call, (x, weight), options, grad)
        for name, result in results.items():
            assert torch.equal(classes(result), classes(expected[name])), (name, dtype, T, K)


# Strides


@with_ops
def test_output_and_gradients_have_the_strides_of_the_inputs(variant: Variant) -> None:
    x, grad = draw(variant, 2, 9, 6).mT, draw(variant, 2, 9, 6).mT
    generated = draw(variant, 2, 9, 2 * 3)  # of a Linear, whose input is (B, T, C)
    weight = generated.unflatten(2, (2, 3)).permute(0, 2, 3, 1)
    results = output_and_gradients(variant.call, (x, weight), {"padding": 1}, grad)
    assert [r.stride() for r in results.values()] == [x.stride(), x.stride(), weight.stride()]


@everywhere
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_output_gradient_may_have_any_strides(variant: Variant, dtype: torch.dtype) -> None:
    x, weight = inputs(variant, T=33, dtype=dtype)
    dense = draw(variant, *x.shape, dtype=dtype)
    expected = output_and_gradients(variant.call, (x, weight), {"padding": 1}, dense)
    for layout, strided in LAYOUTS.items():
        results = output_and_gradients(variant.call, (x, weight), {"padding": 1}, strided(dense))
        for name, result in results.items():  # sums of PyTorch's own follow the strides
            error = relative_error(result, expected[name])
            assert error <= OPERATOR.tolerances[dtype], (layout, name)
    one = torch.ones((), dtype=dtype, device=variant.device)
    expected = output_and_gradients(
        variant.call, (x, weight), {"padding": 1}, one.expand_as(x).contiguous()
    )
    results = output_and_gradients(variant.call, (x, weight), {"padding": 1}, one.expand_as(x))
    assert all(torch.equal(results[name], expected[name]) for name in results)


# Autograd


@with_ops
@pytest.mark.parametrize(
    ("wanted", "saved"), [("x", {"weight"}), ("weight", {"x"}), ("both", {"x", "weight"})]
)
def test_only_what_the_backward_needs_is_saved_and_not_copied(
    variant: Variant, wanted: str, saved: set[str]
) -> None:
    x, weight = inputs(variant)
    x.requires_grad_(wanted != "weight")
    weight.requires_grad_(wanted != "x")
    packed: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        variant.call(x, weight, padding=1)
    names = {x.data_ptr(): "x", weight.data_ptr(): "weight"}
    assert {names[t.data_ptr()] for t in packed} == saved
    assert len(packed) == len(saved)


@everywhere
@any_sharing
@pytest.mark.parametrize("wanted", [(True, False), (False, True), (True, True)])
def test_gradients_of_either_argument_alone_can_be_differentiated(
    variant: Variant, shared: tuple[str, ...], wanted: tuple[bool, bool]
) -> None:
    tensors = inputs(variant, 2, 4, 3, 2, shared=shared)
    leaves = [t.requires_grad_(want) for t, want in zip(tensors, wanted, strict=True)]

    def function(x: Tensor, weight: Tensor) -> Tensor:
        return variant.call(x, weight, padding=1)

    assert torch.autograd.gradcheck(function, leaves)
    assert torch.autograd.gradgradcheck(function, leaves)


@everywhere
def test_gradient_penalty_agrees_with_the_reference(variant: Variant) -> None:
    tensors = inputs(variant, shared=("time",))

    def penalty_gradients(impl: str) -> tuple[Tensor, ...]:
        leaves = differentiable(tensors)
        out = OPERATOR.function(*leaves, padding=2, impl=impl)
        gradients = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
        penalty = torch.stack([g.square().sum() for g in gradients]).sum()
        return torch.autograd.grad(penalty, leaves)

    expected = penalty_gradients("reference")
    for result, exact in zip(penalty_gradients(variant.impl), expected, strict=True):
        torch.testing.assert_close(result, exact)


def op_arguments(variant: Variant, name: str, shared: tuple[str, ...]) -> tuple[Any, ...]:
    x, weight = inputs(variant, 2, 4, 5, shared=shared)
    grad = torch.randn_like(x)
    arguments = {
        "": (x, weight, 1),
        "_grad_input": (grad, weight, 1),
        "_grad_weight": (grad, x, list(weight.shape), list(weight.stride()), 1),
    }
    return tuple(differentiable(arguments[name]))


@with_ops
@any_sharing
@pytest.mark.parametrize("name", OPS)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_torch_library_finds_no_fault_in_any_op(
    variant: Variant, name: str, shared: tuple[str, ...]
) -> None:
    torch.library.opcheck(ops(variant, name), op_arguments(variant, name, shared))


@with_ops
@any_sharing
@pytest.mark.parametrize("name", OPS)
def test_every_op_can_be_differentiated_twice(
    variant: Variant, name: str, shared: tuple[str, ...]
) -> None:
    op, arguments = ops(variant, name), op_arguments(variant, name, shared)
    leaves = [a.detach().clone().requires_grad_() for a in arguments if isinstance(a, Tensor)]
    rest = [a for a in arguments if not isinstance(a, Tensor)]

    def function(*tensors: Tensor) -> Any:
        return op(*tensors, *rest)

    assert torch.autograd.gradcheck(function, leaves, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, leaves, fast_mode=True)


# Autocast and what tools see


@everywhere
@pytest.mark.parametrize("dtype", HALVES)
def test_autocast_casts_as_for_a_convolution(variant: Variant, dtype: torch.dtype) -> None:
    x, weight = inputs(variant, dtype=torch.float32)
    leaves = differentiable((x, weight.to(dtype)))
    with torch.autocast(variant.device, dtype=dtype):
        out = variant.call(*leaves, padding=1)
    assert torch.equal(out, variant.call(x.to(dtype), weight.to(dtype), padding=1))
    gradients = torch.autograd.grad(out.sum(), leaves)
    assert [g.dtype for g in gradients] == [torch.float32, dtype]


@with_ops
@pytest.mark.parametrize("dtype", HALVES)
def test_autocast_casts_for_the_op_itself(variant: Variant, dtype: torch.dtype) -> None:
    x, weight = inputs(variant, dtype=torch.float32)
    with torch.autocast(variant.device, dtype=dtype):
        out = ops(variant)(x, weight.to(dtype), 1)
    assert torch.equal(out, ops(variant)(x.to(dtype), weight.to(dtype), 1))


@with_ops
def test_flop_counter_counts_what_the_declaration_says(variant: Variant) -> None:
    for sample in variant.samples(torch.float32):
        cost, leaves = OPERATOR.cost(sample), differentiable(sample.args)
        with FlopCounterMode(display=False) as forward:
            out = variant.call(*leaves, **sample.kwargs)
        assert forward.get_total_flops() == cost.forward_flops, sample.name
        with FlopCounterMode(display=False) as backward:
            torch.autograd.grad(out.sum(), leaves)
        assert backward.get_total_flops() == cost.backward_flops, sample.name


def test_cost_of_a_call_written_out() -> None:
    x, weight = torch.zeros(2, 6, 5), torch.zeros(2, 3, 4, 1)
    cost = OPERATOR.cost(Sample((x, weight), {"padding": 3}))
    assert cost.forward_bytes == 4 * (60 + 24 + 60)
    assert cost.backward_bytes == 4 * (3 * 60 + 2 * 24)
    assert cost.forward_flops == 2 * 4 * 60
    assert cost.backward_flops == 2 * cost.forward_flops


@everywhere
@any_sharing
def test_one_compiled_graph_serves_all_sizes(variant: Variant, shared: tuple[str, ...]) -> None:
    torch.compiler.reset()
    backend = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(variant.call, fullgraph=True, dynamic=True, backend=backend)
    compilations = []
    for B, T in ((5, 7), (3, 10), (12, 20)):
        tensors = inputs(variant, B=B, T=T, shared=shared)
        results = output_and_gradients(compiled, tensors, {"padding": 2})
        expected = output_and_gradients(variant.call, tensors, {"padding": 2})
        for name, result in results.items():
            torch.testing.assert_close(result, expected[name])
        compilations.append(backend.frame_count)
    assert len(set(compilations)) == 1


@gpu_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_peak_memory_is_the_output_and_the_gradients(variant: Variant, dtype: torch.dtype) -> None:
    tensors = inputs(variant, 8, 256, 1024, 31, 4, ("batch", "time"), dtype)
    x, weight = differentiable(tensors)
    grad = torch.randn_like(x)
    variant.call(x[..., :8], weight, padding=30).sum().backward()  # what is allocated once
    x.grad = weight.grad = None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = variant.call(x, weight, padding=30)
    out.backward(grad)
    extra = torch.cuda.max_memory_allocated() - before
    assert extra <= out.nbytes + x.nbytes + 3 * 2**21


@gpu_kernels
@any_sharing
def test_captured_in_a_cuda_graph_gives_the_same_bits(
    variant: Variant, shared: tuple[str, ...]
) -> None:
    x, weight = inputs(variant, 2, 8, 300, 7, shared=shared, dtype=torch.float32)
    grad = torch.randn_like(x)
    output_and_gradients(variant.call, (x, weight), {"padding": 3}, grad)  # compiles the kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = output_and_gradients(variant.call, (x, weight), {"padding": 3}, grad)
    for t in (x, weight, grad):
        t.normal_()
    graph.replay()
    expected = output_and_gradients(variant.call, (x, weight), {"padding": 3}, grad)
    assert all(torch.equal(captured[name], expected[name]) for name in expected)


# Errors

X, WEIGHT = (2, 6, 9), (2, 3, 5, 9)


@pytest.mark.parametrize(
    ("x", "weight", "message"),
    [
        (X[1:], WEIGHT, r"^x: expected 3 dimensions \(B, C, T\), got shape \(6, 9\)"),
        (X, WEIGHT[1:], r"^weight: expected 4 dimensions .* got shape \(3, 5, 9\)"),
        (X, (3, 3, 5, 9), r"^weight: expected .* B, T = 2, 9 .* got shape \(3, 3, 5, 9\)"),
        (X, (2, 3, 5, 8), r"^weight: expected .* B, T = 2, 9"),
        (X, (0, 3, 5, 9), r"^weight: expected .* B, T = 2, 9"),
        (X, (2, 4, 5, 9), r"^weight: its number of heads .* divide the 6 channels .* got 4"),
        (X, (2, 0, 5, 9), r"^weight: its number of heads .* got 0"),
        (X, (2, 12, 5, 9), r"^weight: its number of heads .* got 12"),
        (X, (2, 3, 0, 9), r"^weight: expected at least 1 tap .* got 0"),
    ],
)
def test_wrong_shape_is_refused_by_name(
    x: tuple[int, ...], weight: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        hoconv.dynamic_conv1d(torch.zeros(x), torch.zeros(weight), padding=0)


@pytest.mark.parametrize("padding", [-1, 5, 1.0, True, "same", None])
def test_wrong_padding_is_refused_by_name(padding: Any) -> None:
    with pytest.raises(
        ValueError, match=f"^padding: expected an int from 0 to .* 4, got {padding!r}"
    ):
        hoconv.dynamic_conv1d(torch.zeros(X), torch.zeros(WEIGHT), padding=padding)


def test_wrong_dtype_or_device_is_refused_by_name() -> None:
    x, weight = torch.zeros(X), torch.zeros(WEIGHT)
    with pytest.raises(TypeError, match=r"^x: expected one of .*, got torch.int64; convert it"):
        hoconv.dynamic_conv1d(x.long(), weight.long(), padding=0)
    with pytest.raises(TypeError, match=r"^weight: expected the dtype of x, torch.float32, got"):
        hoconv.dynamic_conv1d(x, weight.double(), padding=0)
    with pytest.raises(ValueError, match=r"^weight: expected the device of x, cpu, got meta"):
        hoconv.dynamic_conv1d(x, weight.to("meta"), padding=0)


@with_ops
@pytest.mark.parametrize(
    ("name", "shapes", "padding", "message"),
    [
        ("", (X[1:], WEIGHT), 0, "x: "),
        ("", (X, WEIGHT[1:]), 0, "weight: "),
        ("", (X, (3, *WEIGHT[1:])), 0, "weight: "),
        ("", (X, (2, 4, 5, 9)), 0, "weight: "),
        ("", (X, (2, 3, 5, 8)), 0, "weight: "),
        ("", (X, (2, 3, 0, 9)), 0, "weight: "),
        ("", (X, WEIGHT), 5, "padding: expected 0 to 4, got 5"),
        ("", (X, WEIGHT), -1, "padding: expected 0 to 4, got -1"),
        ("_grad_input", (X, (2, 4, 5, 9)), 0, "weight: "),
        ("_grad_input", (X[1:], WEIGHT), 0, "x: "),
    ],
)
def test_op_called_past_the_checks_refuses_what_does_not_fit(
    variant: Variant, name: str, shapes: tuple[tuple[int, ...], ...], padding: int, message: str
) -> None:
    tensors = [torch.zeros(shape, device=variant.device) for shape in shapes]
    with pytest.raises(RuntimeError, match=message):
        ops(variant, name)(*tensors, padding)


@with_ops
def test_weight_gradient_op_refuses_shapes_that_do_not_fit(variant: Variant) -> None:
    x, size, stride = torch.zeros(X, device=variant.device), list(WEIGHT), [135, 45, 9, 1]
    op = ops(variant, "_grad_weight")
    assert op(x, x, size, stride, 0).shape == WEIGHT
    with pytest.raises(RuntimeError, match="weight: "):
        op(x, x, [2, 3, 5, 8], stride, 0)
    with pytest.raises(RuntimeError, match="stride: "):
        op(x, x, size, stride[1:], 0)
    with pytest.raises(RuntimeError, match="grad: expected the shape of x"):
        op(x[:, :3], x, size, stride, 0)
    with pytest.raises(RuntimeError, match="grad: expected the dtype of x"):
        op(x.double(), x, size, stride, 0)
    with pytest.raises(RuntimeError, match="x: expected float32, float64, float16 or bfloat16"):
        op(x.int(), x.int(), size, stride, 0)
