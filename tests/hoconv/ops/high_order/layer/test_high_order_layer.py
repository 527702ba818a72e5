"""The high-order layer as one operator: what it computes, and how it behaves as a PyTorch op.

What holds for every operator is in hoconv/tools/testing/test_operators.py.

B batch, C channels, G groups of channels, H height, W width, k kernel size, K = k * k taps,
s kernel size of the generator.
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
from torch.utils.flop_counter import FlopCounterMode

import hoconv
from hoconv.dispatch.implementations import choose
from hoconv.ops.high_order import high_order_layer
from hoconv.ops.high_order.conv2d.window import Window
from hoconv.ops.high_order.layer.operator import OPERATOR
from hoconv.ops.high_order.layer.rule import why_unfused
from hoconv.tools.testing.comparison import differentiable, output_and_gradients
from hoconv.tools.testing.variants import Variant, variants

HALVES = [torch.float16, torch.bfloat16]

everywhere = pytest.mark.parametrize("variant", variants([OPERATOR]), indirect=True)
with_ops = pytest.mark.parametrize(
    "variant", [p for p in variants([OPERATOR]) if "reference" not in p.id], indirect=True
)
on_cpu = pytest.mark.parametrize(
    "variant", [p for p in variants([OPERATOR]) if p.id.endswith("cpp-cpu")], indirect=True
)


def draw(variant: Variant, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).to(variant.device, dtype)


def inputs(
    variant: Variant, B=2, C=4, H=6, W=9, k=3, s=3, G=1, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor]:
    weight = draw(variant, k * k * G, C, s, s, dtype=dtype) * (C * s * s) ** -0.5
    return draw(variant, B, C, H, W, dtype=dtype), weight, draw(variant, k * k * G, dtype=dtype)


def op(variant: Variant, name: str = "") -> torch._ops.OpOverload:
    """An op itself, past the checks of the public function."""
    choose(OPERATOR, variant.impl, variant.device)  # loads it
    return getattr(getattr(torch.ops.hoconv, f"high_order_layer{name}"), variant.impl)


def skip_unless_fused(variant: Variant, x: Tensor, weight: Tensor, k: int) -> None:
    if reason := why_unfused(variant.impl, weight, Window.of(k * k), None):
        pytest.skip(f"not fused: {reason}")


def definition(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    kernel_size: int,
    dilation: int = 1,
    normalize: str | None = None,
    residual: bool = False,
) -> Tensor:
    """By shifted images; zeros outside the image are multiplied like pixels."""
    H, W = x.shape[2:]
    K, s = kernel_size**2, weight.shape[-1]

    def shifted(n: int, step: int) -> Tensor:  # (n * n, B, C, H, W)
        before = step * (n - 1) // 2
        padded = F.pad(x, (before, step * (n - 1) - before) * 2)
        corners = itertools.product(range(0, step * n, step), repeat=2)
        return torch.stack([padded[..., y : y + H, z : z + W] for y, z in corners])

    generated = torch.einsum("nbchw,ocn->bohw", shifted(s, 1), weight.flatten(2))
    if bias is not None:
        generated = generated + bias[:, None, None]
    kernels = generated.unflatten(1, (K, -1)).transpose(0, 1)  # (K, B, G, H, W)
    if normalize:
        kernels = kernels.softmax(0)
    pixels = shifted(kernel_size, dilation).unflatten(2, (kernels.shape[2], -1))
    out = (kernels.unsqueeze(3) * pixels).sum(0).flatten(1, 2)
    return x + out if residual else out


# The value


@everywhere
def test_small_example_computed_by_hand(variant: Variant) -> None:
    x = torch.tensor([[[[1.0, 2.0, 3.0]]]], device=variant.device)
    # The tap on the left is the pixel times ten, the tap below and so on nothing, that in the
    # middle a hundred.
    weight, bias = torch.zeros(9, 1, 1, 1), torch.zeros(9)
    weight[3], bias[4] = 10, 100
    parameters = weight.to(variant.device), bias.to(variant.device)
    out = variant.call(x, *parameters, kernel_size=3)
    assert out.flatten().tolist() == [100, 220, 360]
    out = variant.call(x, *parameters, kernel_size=3, residual=True)
    assert out.flatten().tolist() == [101, 222, 363]
    out = variant.call(x, 0 * weight.to(x), kernel_size=3, normalize="softmax")
    torch.testing.assert_close(out, torch.tensor([[[[3.0, 6.0, 5.0]]]], device=variant.device) / 9)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda t: t,
    "transposed": lambda t: t.mT.contiguous().mT,
    "channels-last": lambda t: t.to(memory_format=torch.channels_last),
    "first two swapped": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    "every third, from the second": lambda t: torch.stack((t, t, t), -1).flatten(-2)[..., 1::3],
    "columns with gaps": lambda t: F.pad(t, (0, 0, 2, 1))[..., 2 : 2 + t.shape[-2], :],
}


@everywhere
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@hypothesis.given(data=st.data())
@hypothesis.settings(max_examples=60)
def test_any_sizes_options_and_strides_give_the_definition(
    variant: Variant, dtype: torch.dtype, data: st.DataObject
) -> None:
    B, H, W = (data.draw(st.integers(1, n), name) for name, n in (("B", 3), ("H", 40), ("W", 19)))
    k, s = data.draw(st.sampled_from((1, 2, 3, 4, 5, 7)), "k"), data.draw(st.integers(1, 5), "s")
    G, group_channels = data.draw(st.integers(1, 2), "G"), data.draw(st.integers(1, 3), "C / G")
    options = {
        "kernel_size": k,
        "dilation": data.draw(st.integers(1, 3) | st.integers(4, 100), "dilation"),
        "normalize": data.draw(st.sampled_from((None, "softmax")), "normalize"),
        "residual": data.draw(st.booleans(), "residual"),
    }
    C, K = G * group_channels, k * k
    shapes = (B, C, H, W), (K * G, C, s, s), (B, C, H, W)
    layouts = [LAYOUTS[data.draw(st.sampled_from(sorted(LAYOUTS)))] for _ in shapes]
    # Whole numbers: exact in any order. A softmax is not, and of large numbers it is flat.
    softmax = options["normalize"] is not None
    x, weight, grad = (
        layout(torch.randint(-3, 4, shape).to(variant.device, dtype) / (4 if softmax else 1))
        for layout, shape in zip(layouts, shapes, strict=True)
    )
    bias = torch.randint(-3, 4, (K * G,)).to(x) if data.draw(st.booleans(), "bias") else None

    results = output_and_gradients(variant.call, (x, weight, bias), options, grad)
    exact = [None if t is None else t.cpu().double() for t in (x, weight, bias)]
    expected = output_and_gradients(definition, exact, options, grad.cpu().double())
    assert results.keys() == expected.keys()
    epsilon = 1e-12 if dtype == torch.float64 else 2e-5
    for name, result in results.items():
        scale = expected[name].abs().max().item() + 1 if softmax else 0
        torch.testing.assert_close(
            result.cpu().double(), expected[name], rtol=0, atol=epsilon * scale, msg=name
        )


@everywhere
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("normalize", [None, "softmax"])
@pytest.mark.parametrize("dilation", [1, 3])
def test_image_that_is_computed_in_many_pieces(
    variant: Variant, dtype: torch.dtype, normalize: str | None, dilation: int
) -> None:
    args = inputs(variant, 2, 2, 150, 300, k=3, s=4, dtype=dtype)
    options: Any = {"kernel_size": 3, "normalize": normalize, "dilation": dilation}
    options["residual"] = True
    results = output_and_gradients(variant.call, args, options)
    expected = output_and_gradients(definition, [t.cpu().double() for t in args], options)
    for name, result in results.items():
        error = (result.cpu() - expected[name]).norm() / expected[name].norm()
        assert error <= 10 * OPERATOR.tolerances[dtype], name  # sums over 90,000 pixels


@everywhere
# PyTorch pads an even kernel by hand, and says so.
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("s", [1, 2, 3, 4])
def test_is_a_convolution_and_the_high_order_convolution(variant: Variant, s: int) -> None:
    x, weight, bias = inputs(variant, k=3, s=s, G=2)
    generated = F.conv2d(x, weight, bias, padding="same").unflatten(1, (9, 2))
    expected = hoconv.high_order_conv2d(x, generated.transpose(0, 1), impl=variant.impl)
    torch.testing.assert_close(variant.call(x, weight, bias, kernel_size=3), expected)


@everywhere
@pytest.mark.parametrize("dilation", [100, 2**40])
def test_taps_far_outside_the_image_see_zeros(variant: Variant, dilation: int) -> None:
    x, weight, bias = inputs(variant, H=3, W=4, k=3, s=1)
    out = variant.call(x, weight, bias, kernel_size=3, dilation=dilation)
    centre = F.conv2d(x, weight[4:5], bias[4:5])
    torch.testing.assert_close(out, centre * x)


# Gradients


@everywhere
@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (1, 2), (0, 2)])
def test_only_some_inputs_want_a_gradient(variant: Variant, wanted: tuple[int, ...]) -> None:
    args = inputs(variant, k=5, s=5)
    every = output_and_gradients(variant.call, args, {})
    leaves = [t.detach().requires_grad_(i in wanted) for i, t in enumerate(args)]
    cotangent = torch.randn(args[0].shape, generator=torch.Generator().manual_seed(1)).to(args[0])
    expected = output_and_gradients(variant.call, args, {}, cotangent)
    variant.call(*leaves).backward(cotangent)
    assert every.keys() == expected.keys()
    for i, leaf in enumerate(leaves):
        if i in wanted:
            assert leaf.grad is not None
            torch.testing.assert_close(leaf.grad, expected[f"gradient of argument {i}"])
        else:
            assert leaf.grad is None


@with_ops
@pytest.mark.parametrize("bias_is_given", [True, False])
def test_autograd_saves_x_and_the_parameters_only(variant: Variant, bias_is_given: bool) -> None:
    x, weight, bias = differentiable(inputs(variant, C=3, k=5, s=5, dtype=torch.float32))
    skip_unless_fused(variant, x, weight, 5)
    saved: list[Tensor] = []

    def pack(t: Tensor) -> Tensor:
        saved.append(t)
        return t

    given = (x, weight, bias) if bias_is_given else (x, weight)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        variant.call(*given).sum().backward()
    assert sorted(t.data_ptr() for t in saved) == sorted(t.data_ptr() for t in given)


@with_ops
@pytest.mark.parametrize("dtype", HALVES)
def test_weights_are_not_rounded_to_half_precision(variant: Variant, dtype: torch.dtype) -> None:
    x, weight, bias = inputs(variant, C=3, H=20, W=40, k=5, s=5, dtype=dtype)
    skip_unless_fused(variant, x, weight, 5)
    exact = definition(*(t.cpu().double() for t in (x, weight, bias)), kernel_size=5)
    error = (variant.call(x, weight, bias).cpu().double() - exact).abs()
    rounded = exact.abs() * torch.finfo(dtype).eps / 2  # of the output
    assert (error <= rounded + 1e-4).all()


# Values that are not finite


def classes(t: Tensor) -> Tensor:
    """0 finite, 1 NaN, 2 inf, 3 -inf"""
    return t.isnan() + 2 * t.isposinf() + 3 * t.isneginf()


@on_cpu
@pytest.mark.parametrize("dtype", OPERATOR.tolerances)
@pytest.mark.parametrize("where", ["x", "weight", "bias", "grad"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("normalize", [None, "softmax"])
@pytest.mark.parametrize("several", [True, False])
def test_nan_and_infinity_are_where_the_definition_has_them(
    variant: Variant,
    dtype: torch.dtype,
    where: str,
    value: float,
    normalize: str | None,
    several: bool,
) -> None:
    for k, s, dilation, W in ((3, 3, 1, 5), (5, 2, 1, 37), (4, 5, 2, 18)):
        x, weight, bias = inputs(variant, H=13, W=W, k=k, s=s, G=2, dtype=dtype)
        grad = draw(variant, *x.shape, dtype=dtype)
        chosen = {"x": x, "weight": weight, "bias": bias, "grad": grad}[where]
        chosen.view(-1)[-1] = value
        if several:
            chosen.view(-1)[:: chosen.numel() // 2] = -value
        options = {"kernel_size": k, "dilation": dilation, "normalize": normalize}
        results = output_and_gradients(variant.call, (x, weight, bias), options, grad)
        exact = [t.double() for t in (x, weight, bias)]
        expected = output_and_gradients(definition, exact, options, grad.double())
        if where == "weight":  # at the edges, zeros are multiplied by it
            for gradients in (results, expected):
                name = "gradient of argument 0"
                gradients[name] = gradients[name][..., s - 1 : W - s + 1]
        for name, result in results.items():
            assert torch.equal(classes(result), classes(expected[name])), (name, k, s)


NOTHING = [(0, 4, 6, 9), (2, 0, 6, 9), (2, 4, 0, 9), (2, 4, 6, 0), (2, 4, 0, 0)]


@everywhere
@pytest.mark.parametrize("shape", NOTHING)
@pytest.mark.parametrize(("k", "s"), [(1, 1), (2, 2), (3, 3)])
def test_nothing_gives_nothing_and_zeros(
    variant: Variant, shape: tuple[int, ...], k: int, s: int
) -> None:
    x, weight, bias = (
        draw(variant, *shape),
        draw(variant, k * k, shape[1], s, s),
        draw(variant, k * k),
    )

    def f(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return variant.call(x, weight, bias, kernel_size=k)

    for args in ((x, weight, bias), (x, weight)):
        leaves = [t.requires_grad_() for t in args]
        assert f(*leaves).shape == shape
        first = torch.autograd.grad(f(*leaves).sum(), leaves, create_graph=True)
        second = torch.autograd.grad(first[0].sum() + first[1].sum(), leaves, allow_unused=True)
        for order in (first, second):
            for leaf, gradient in zip(leaves, order, strict=True):
                if gradient is not None:
                    assert gradient.shape == leaf.shape
                    assert not gradient.any()
        values = tuple(t.detach() for t in args)
        assert torch.func.jvp(f, values, values)[1].shape == shape


@everywhere
@pytest.mark.parametrize("shape", NOTHING[1:])
def test_nothing_is_compiled_exported_and_mapped_over(
    variant: Variant, shape: tuple[int, ...]
) -> None:
    class Layer(torch.nn.Module):
        def forward(self, x: Tensor, weight: Tensor) -> Tensor:
            return variant.call(x, weight, kernel_size=3)

    torch.compiler.reset()  # of other cases, which are of the same code
    x, weight = draw(variant, *shape), draw(variant, 9, shape[1], 3, 3)
    assert torch.export.export(Layer(), (x, weight)).module()(x, weight).shape == shape
    assert torch.compile(Layer(), backend="eager", fullgraph=True)(x, weight).shape == shape
    of_each = torch.func.vmap(torch.func.grad(lambda w, x: Layer()(x[None], w).sum()), (None, 0))
    assert not of_each(weight, x).any()


# As a PyTorch op


@everywhere
@pytest.mark.parametrize("dtype", HALVES)
def test_autocast_casts_as_for_a_convolution(variant: Variant, dtype: torch.dtype) -> None:
    args = inputs(variant, C=3, k=5, s=5, dtype=torch.float32)

    def call(*args: Tensor) -> Tensor:
        with torch.autocast(variant.device, dtype=dtype):
            return variant.call(*args)

    results = output_and_gradients(call, args, {})
    expected = output_and_gradients(variant.call, [t.to(dtype) for t in args], {})
    assert results["output"].dtype == dtype
    for name, result in results.items():
        assert name == "output" or result.dtype == torch.float32
        torch.testing.assert_close(result.to(dtype), expected[name])
    assert call(*(t.double() for t in args)).dtype == torch.float64


@with_ops
def test_op_itself_is_cast_by_autocast(variant: Variant) -> None:
    x, weight, bias = inputs(variant, C=3, k=5, s=5, dtype=torch.float32)
    skip_unless_fused(variant, x, weight, 5)
    with torch.autocast(variant.device, dtype=torch.bfloat16):
        out = op(variant)(x, weight.bfloat16(), bias, 5, 1, False, False, False)
    cast = [t.bfloat16() for t in (x, weight, bias)]
    assert torch.equal(out, op(variant)(*cast, 5, 1, False, False, False))


@with_ops
def test_flops_are_those_of_both_convolutions(variant: Variant) -> None:
    x, weight, bias = differentiable(inputs(variant, 2, 3, 6, 9, k=5, s=5, dtype=torch.float32))
    skip_unless_fused(variant, x, weight, 5)
    with FlopCounterMode(display=False) as forward:
        out = variant.call(x, weight, bias)
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    generator, application = 2 * (2 * 6 * 9) * 25 * 75, 2 * (2 * 6 * 9) * 3 * 25
    assert forward.get_total_flops() == generator + application
    # The weights are generated again; then both gradients of each of the two.
    assert backward.get_total_flops() == 3 * generator + 2 * application


# opcheck looks at the gradients of views among its inputs.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@with_ops
@pytest.mark.parametrize("bias_is_given", [True, False])
@pytest.mark.parametrize("options", [(5, 1, False, False), (5, 2, True, True)])
def test_torch_library_finds_no_fault(
    variant: Variant, bias_is_given: bool, options: tuple[Any, ...]
) -> None:
    x, weight, bias = inputs(variant, C=3, k=5, s=5, dtype=torch.float32)
    skip_unless_fused(variant, x, weight, 5)
    args = [x.to(memory_format=torch.channels_last), weight, bias if bias_is_given else None]
    torch.library.opcheck(op(variant), (*differentiable(args), *options, False))
    args = [draw(variant, *x.shape, dtype=torch.float32), *args]
    tests = ["test_schema", "test_autograd_registration", "test_faketensor"]
    if torch.__version__ >= "2.15":  # 2.11 cannot trace a convolution's second derivative so
        tests.append("test_aot_dispatch_dynamic")
    backward_args = *differentiable(args), *options, False
    torch.library.opcheck(op(variant, "_backward"), backward_args, test_utils=tests)


# Errors

X, WEIGHT = (2, 4, 6, 9), (18, 4, 3, 3)


@pytest.mark.parametrize(
    ("x", "weight", "bias", "message"),
    [
        (X[1:], WEIGHT, None, r"^x: expected 4 dimensions .* \(4, 6, 9\)"),
        (X, WEIGHT[1:], None, r"^generator_weight: expected .* 4 channels .* \(4, 3, 3\)"),
        (X, (18, 3, 3, 3), None, r"^generator_weight: expected .* 4 channels"),
        (X, (18, 4, 3, 5), None, r"^generator_weight: expected .* \(18, 4, 3, 5\)"),
        (X, (18, 4, 0, 0), None, r"^generator_weight: expected a kernel of at least 1 x 1"),
        (X, (17, 4, 3, 3), None, r"^generator_weight: .* k \* k \* G = 9 \* G .*, got 17"),
        (X, (0, 4, 3, 3), None, r"^generator_weight: .*, got 0"),
        (X, (27, 4, 3, 3), None, r"^generator_weight: .* G dividing the 4 channels of x, got 27"),
        (X, WEIGHT, (9,), r"^generator_bias: expected shape \(18,\), got \(9,\)"),
        (X, WEIGHT, (18, 1), r"^generator_bias: expected shape \(18,\), got \(18, 1\)"),
    ],
)
def test_wrong_shape_is_refused_by_name(
    x: tuple[int, ...], weight: tuple[int, ...], bias: tuple[int, ...] | None, message: str
) -> None:
    generator_bias = None if bias is None else torch.zeros(bias)
    with pytest.raises(ValueError, match=message):
        high_order_layer(torch.zeros(x), torch.zeros(weight), generator_bias, kernel_size=3)


@pytest.mark.parametrize("name", ["kernel_size", "dilation"])
@pytest.mark.parametrize("value", [0, -1, 1.0, True, "1", None])
def test_wrong_size_is_refused_by_name(name: str, value: Any) -> None:
    options: dict[str, Any] = {"kernel_size": 3, name: value}
    with pytest.raises(ValueError, match=f"^{name}: expected an int .* got {value!r}$"):
        high_order_layer(torch.zeros(X), torch.zeros(WEIGHT), **options)


def test_other_wrong_options_are_refused_by_name() -> None:
    x, weight = torch.zeros(X), torch.zeros(WEIGHT)
    with pytest.raises(ValueError, match=r"^kernel_size: expected an int from 1 to 31, .* 32$"):
        high_order_layer(x, weight, kernel_size=32)
    normalize: Any = "tanh"
    with pytest.raises(ValueError, match=r"^normalize: expected None, 'softmax' or 'sum', got 't"):
        high_order_layer(x, weight, kernel_size=3, normalize=normalize)


def test_wrong_dtype_and_device_are_refused_by_name() -> None:
    x, weight, bias = torch.zeros(X), torch.zeros(WEIGHT), torch.zeros(18)
    with pytest.raises(TypeError, match=r"^x: expected one of .*, got torch.int64; convert it"):
        high_order_layer(x.long(), weight.long(), kernel_size=3)
    with pytest.raises(TypeError, match=r"^generator_weight: expected the dtype of x, torch.float"):
        high_order_layer(x, weight.double(), kernel_size=3)
    with pytest.raises(TypeError, match=r"^generator_bias: expected the dtype of x, torch.float"):
        high_order_layer(x, weight, bias.double(), kernel_size=3)
    with pytest.raises(ValueError, match=r"^generator_weight: expected the device of x, cpu, got"):
        high_order_layer(x, weight.to("meta"), kernel_size=3)


@on_cpu
@pytest.mark.parametrize(
    ("shapes", "kernel_size"),
    [
        ((X[1:], WEIGHT, (18,)), 3),
        ((X, WEIGHT[1:], (18,)), 3),
        ((X, (18, 3, 3, 3), (18,)), 3),
        ((X, (17, 4, 3, 3), (17,)), 3),
        ((X, (27, 4, 3, 3), (27,)), 3),
        ((X, WEIGHT, (17,)), 3),
        ((X, WEIGHT, (18,)), 0),
        ((X, (144, 4, 3, 3), (144,)), 12),
    ],
)
def test_op_called_past_the_checks_refuses_wrong_shapes(
    variant: Variant, shapes: tuple[tuple[int, ...], ...], kernel_size: int
) -> None:
    tensors = [torch.zeros(shape) for shape in shapes]
    with pytest.raises(RuntimeError, match=r"\b(x|weight|bias|kernel_size): "):
        op(variant)(*tensors, kernel_size, 1, False, False, False)
    with pytest.raises(RuntimeError, match=r"\b(x|weight|bias|kernel_size): "):
        op(variant, "_backward")(tensors[0], *tensors, kernel_size, 1, False, False, False)


@on_cpu
def test_op_called_past_the_checks_refuses_other_tensors(variant: Variant) -> None:
    x, weight, bias = torch.zeros(X), torch.zeros(WEIGHT), torch.zeros(18)
    options = 3, 1, False, False, False
    for args in (
        (x, weight.double(), bias),
        (x, weight, bias.double()),
        (x.double(), weight, bias),
    ):
        with pytest.raises(RuntimeError, match=r"\b(weight|bias): expected the dtype of x"):
            op(variant)(*args, *options)
    with pytest.raises(RuntimeError, match="grad: expected the dtype of x"):
        op(variant, "_backward")(x.double(), x, weight, bias, *options)
    with pytest.raises(RuntimeError, match="grad: expected the shape of x"):
        op(variant, "_backward")(x[..., 1:], x, weight, bias, *options)
    with pytest.raises(RuntimeError, match="dilation: expected at least 1"):
        op(variant)(x, weight, bias, 3, 0, False, False, False)


# CUDA graphs


@pytest.mark.gpu
@pytest.mark.parametrize("impl", ["cpp", "cuda"])
def test_a_training_step_can_be_captured_in_a_cuda_graph(impl: str) -> None:
    layer = hoconv.HighOrderConv2d(3, impl=impl).cuda()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.01)
    x = torch.randn(2, 3, 32, 40, device="cuda")

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = layer(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    start = {name: t.clone() for name, t in layer.state_dict().items()}
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # what a capture needs to find ready
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    layer.load_state_dict(start)
    expected = [step().item() for _ in range(3)]

    layer.load_state_dict(start)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()
    layer.load_state_dict(start)
    losses = []
    for _ in range(3):
        graph.replay()
        losses.append(loss.item())
    torch.testing.assert_close(losses, expected)
