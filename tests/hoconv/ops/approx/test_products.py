"""Matrix products and convolutions: every implementation's bits are the reference's, and the
reference is what the documentation says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hoconv import approx
from hoconv.dispatch.implementations import choose, obstacle
from hoconv.ops.approx.multipliers import MULTIPLIERS
from hoconv.ops.approx.operator import CONV2D, MATMUL
from hoconv.ops.approx.ops import OPS
from hoconv.tools.testing.comparison import output_and_gradients
from hoconv.tools.testing.variants import Variant, variants
from tests.hoconv.ops.approx.test_multipliers import SPECIAL, bits, every_multiplier, floats

matmul_everywhere = pytest.mark.parametrize("variant", variants([MATMUL]), indirect=True)
conv2d_everywhere = pytest.mark.parametrize("variant", variants([CONV2D]), indirect=True)

# How operands are drawn: what a kernel may not take for granted.
KINDS = ("normal", "half zeros", "many magnitudes", "near the limits", "special values")


def draw(kind: str, *shape: int) -> Tensor:
    values = torch.randn(shape)
    if kind == "half zeros":
        return torch.where(torch.rand(shape) < 0.5, 0.0, values)
    if kind == "many magnitudes":
        return values * torch.randint(-40, 40, shape).double().exp2().float()
    if kind == "near the limits":
        return values * torch.where(torch.rand(shape) < 0.5, 2.0**-63, 2.0**62.5)
    if kind == "special values":
        special = floats(SPECIAL + [x | 0x80000000 for x in SPECIAL])
        drawn = special[torch.randint(0, len(special), shape)]
        return torch.where(torch.rand(shape) < 0.05, drawn, values)
    return values


def results(
    function: Any, args: list[Tensor], device: str, grad: Tensor, **options: Any
) -> list[Tensor]:
    """The output and the gradients, as bits."""
    leaves = [a.to(device).requires_grad_() for a in args]
    out = function(*leaves, **options)
    gradients = torch.autograd.grad(out, leaves, grad.to(device).reshape(out.shape))
    return [bits(t.detach()) for t in (out, *gradients)]


def assert_same_bits(variant: Variant, args: list[Tensor], grad: Tensor, **options: Any) -> None:
    got = results(variant.call, args, variant.device, grad, **options)
    function = variant.operator.function
    expected = results(function, args, "cpu", grad, impl="reference", **options)
    for name, a, b in zip(("output", "first", "second"), got, expected, strict=True):
        assert torch.equal(a, b), f"{name}: {int((a != b).sum())} of {a.numel()} differ"


def same_bits_variants(operator: Any) -> Any:
    """All but the reference itself."""
    chosen = [p for p in variants([operator]) if p.values[0].impl != "reference"]
    return pytest.mark.parametrize("variant", chosen, indirect=True)


# Order


def test_sums_are_chunks_of_1024_in_ascending_order() -> None:
    K = 2500
    a, b = torch.randn(2, K)
    products = approx.multiply(a, b, "mbm16")
    total = torch.zeros(())
    for first in range(0, K, 1024):
        chunk = torch.zeros(())
        for product in products[first : first + 1024]:
            chunk = chunk + product
        total = total + chunk
    out = approx.matmul(a[None], b[:, None], "mbm16", impl="reference")
    assert torch.equal(bits(out.flatten()), bits(total[None]))


def test_the_convolution_and_its_gradients_sum_in_the_documented_order() -> None:
    x = torch.randn(2, 2, 5, 4).requires_grad_()
    weight = torch.randn(3, 2, 2, 3).requires_grad_()
    grad = torch.randn(2, 3, 3, 4)
    options = {"stride": (2, 1), "padding": (1, 1), "dilation": (2, 1)}
    out = approx.conv2d(x, weight, "mbm16", impl="reference", **options)  # pyright: ignore
    out.backward(grad)
    padded = F.pad(x.detach(), (1, 1, 1, 1))
    w = weight.detach()

    def total(terms: list[tuple[Tensor, Tensor]]) -> float:
        sum = torch.zeros(())
        for a, b in terms:
            sum = sum + approx.multiply(a, b, "mbm16")
        return sum.item()

    taps = [(r, s) for r in range(2) for s in range(3)]
    pixels = [(b, i, j) for b in range(2) for i in range(3) for j in range(4)]
    for b, i, j in pixels:
        for o in range(3):
            terms = [(padded[b, c, 2 * i + 2 * r, j + s], w[o, c, r, s])
                     for c in range(2) for r, s in taps]  # fmt: skip
            assert out[b, o, i, j].item() == total(terms)
    assert weight.grad is not None
    assert x.grad is not None
    for o in range(3):
        for c in range(2):
            for r, s in taps:
                terms = [(grad[b, o, i, j], padded[b, c, 2 * i + 2 * r, j + s])
                         for b, i, j in pixels]  # fmt: skip
                assert weight.grad[o, c, r, s].item() == total(terms)
    for b in range(2):
        for c in range(2):
            for h in range(5):
                for v in range(4):
                    terms = [
                        (grad[b, o, i, j], w[o, c, r, s])
                        for o in range(3) for r, s in taps
                        for i in range(3) for j in range(4)
                        if (2 * i + 2 * r - 1, j + s - 1) == (h, v)
                    ]  # fmt: skip
                    assert x.grad[b, c, h, v].item() == total(terms)


# Bits


@same_bits_variants(MATMUL)
@settings(max_examples=60)
@given(
    sizes=st.tuples(st.integers(0, 3), *[st.integers(1, 40)] * 3),
    multiplier=st.sampled_from(list(MULTIPLIERS)),
    kinds=st.tuples(*[st.sampled_from(KINDS)] * 3),
    transposed=st.booleans(),
)
def test_any_matrix_product_has_the_bits_of_the_reference(
    variant: Variant, sizes: Any, multiplier: str, kinds: Any, transposed: bool
) -> None:
    B, M, K, N = sizes
    a = draw(kinds[0], B, K, M).mT if transposed else draw(kinds[0], B, M, K)
    args = [a, draw(kinds[1], B, K, N)]
    assert_same_bits(variant, args, draw(kinds[2], B, M, N), multiplier=multiplier)


@same_bits_variants(MATMUL)
@pytest.mark.parametrize(
    ("M", "K", "N"), [(1, 3000, 1), (130, 20, 3), (3, 20, 130), (129, 1025, 2), (5, 1, 300)]
)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("multiplier", ["mbm16", "mbm32", "exact"])
def test_large_matrix_products_have_the_bits_of_the_reference(
    variant: Variant, M: int, K: int, N: int, kind: str, multiplier: str
) -> None:
    args = [draw(kind, M, K), draw("normal", K, N)]
    assert_same_bits(variant, args, draw("half zeros", M, N), multiplier=multiplier)


@same_bits_variants(CONV2D)
@settings(max_examples=120)
@given(data=st.data())
def test_any_convolution_has_the_bits_of_the_reference(variant: Variant, data: Any) -> None:
    def number(low: int, high: int) -> int:
        return data.draw(st.integers(low, high))

    G, kernel = number(1, 3), (number(1, 3), number(1, 3))
    stride, padding, dilation = (
        (number(low, high), number(low, high)) for low, high in ((1, 3), (0, 3), (1, 2))
    )
    channels, filters = number(1, 3), number(1, 4)
    size = [number(max(1, dilation[i] * (kernel[i] - 1) + 1 - 2 * padding[i]), 9) for i in range(2)]
    x = draw(data.draw(st.sampled_from(KINDS)), number(1, 3), G * channels, *size)
    weight = draw(data.draw(st.sampled_from(KINDS)), G * filters, channels, *kernel)
    options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": G}
    grad = draw(
        data.draw(st.sampled_from(KINDS)),
        *F.conv2d(x, weight, stride=stride, padding=padding, dilation=dilation, groups=G).shape,
    )
    multiplier = data.draw(st.sampled_from(list(MULTIPLIERS)))
    assert_same_bits(variant, [x, weight], grad, multiplier=multiplier, **options)


@same_bits_variants(CONV2D)
@every_multiplier
def test_a_layer_of_a_network_has_the_bits_of_the_reference(
    variant: Variant, multiplier: str
) -> None:
    x, weight = draw("half zeros", 2, 20, 9, 9), draw("normal", 33, 20, 3, 3)
    grad = draw("many magnitudes", 2, 33, 9, 9)
    assert_same_bits(variant, [x, weight], grad, multiplier=multiplier, padding=1)


# On a GPU the kernel of a gradient depends on how many of its elements are zero.
@same_bits_variants(CONV2D)
@pytest.mark.parametrize("multiplier", ["mbm16", "exact"])
@pytest.mark.parametrize("density", [0.1, 0.5, 1.0])
def test_gradients_of_any_density_have_the_bits_of_the_reference(
    variant: Variant, density: float, multiplier: str
) -> None:
    x, weight = draw("half zeros", 3, 64, 5, 7), draw("normal", 20, 64, 3, 3)
    grad = torch.where(torch.rand(3, 20, 5, 7) < density, draw("normal", 3, 20, 5, 7), 0.0)
    assert_same_bits(variant, [x, weight], grad, multiplier=multiplier, padding=1)


@pytest.mark.gpu
@pytest.mark.parametrize("multiplier", ["mbm16", "mbm32", "mitchell16", "exact"])
@pytest.mark.parametrize(
    ("channels", "size", "filters"), [(1, 28, 64), (64, 14, 128), (128, 7, 256)]
)
@pytest.mark.parametrize(
    ("kind", "density"),
    [("normal", 0.15), ("normal", 0.5), ("normal", 1.0), ("many magnitudes", 0.15)],
)
def test_layers_that_fill_a_gpu_have_the_bits_of_the_cpu(
    kind: str, density: float, channels: int, size: int, filters: int, multiplier: str
) -> None:
    """The tiles of large products, which the reference takes too long for."""
    if reason := obstacle(CONV2D, "cpp", "cpu"):
        pytest.skip(reason)
    x, weight = (
        draw("half zeros", 128, channels, size, size),
        draw("normal", filters, channels, 3, 3),
    )
    grad = draw(kind, 128, filters, size, size)
    grad = torch.where(torch.rand(grad.shape) < density, grad, 0.0)
    options = {"multiplier": multiplier, "padding": 1}
    got = results(approx.conv2d, [x, weight], "cuda", grad, impl="cuda", **options)
    expected = results(approx.conv2d, [x, weight], "cpu", grad, impl="cpp", **options)
    for name, a, b in zip(("output", "input", "weight"), got, expected, strict=True):
        assert torch.equal(a, b), f"{name}: {int((a != b).sum())} of {a.numel()} differ"


@conv2d_everywhere
@pytest.mark.parametrize("multiplier", ["mbm16", "exact"])
def test_only_pixels_that_meet_an_infinite_weight_get_its_gradient(
    variant: Variant, multiplier: str
) -> None:
    weight = torch.ones(1, 1, 2, 2)
    weight[0, 0, 1, 1] = torch.inf
    x = torch.zeros(1, 1, 3, 5, device=variant.device, requires_grad=True)
    out = variant.call(x, weight.to(variant.device), multiplier, stride=2, padding=(1, 0))
    (grad,) = torch.autograd.grad(out, x, torch.ones_like(out))
    infinite = torch.zeros(3, 5, dtype=torch.bool)
    infinite[::2, 1::2] = True  # row -1 is padding: taps of row 1 fall on even rows
    assert torch.equal(grad[0, 0].isinf().cpu(), infinite)
    assert not grad.isnan().any()


@conv2d_everywhere
@pytest.mark.parametrize("multiplier", ["mbm16", "exact"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 1e-40, -0.0])
def test_a_weight_of_negative_zero_is_an_operand(
    variant: Variant, multiplier: str, value: float
) -> None:
    def results(variant: Variant, channels: int, filters: int) -> dict[str, Tensor]:
        torch.manual_seed(0)
        x = torch.randn(2, channels, 5, 6)
        weight = torch.randn(filters, channels, 3, 2)
        weight[::2, :, 1] = -0.0
        weight[0, 0, 0, 0] = value
        cotangent = torch.randn(2, filters, 3, 4)
        cotangent[:, ::2, 1] = -0.0
        cotangent[0, 0, 0, 0] = cotangent[1, -1, 2, 2] = value
        args = [t.to(variant.device) for t in (x, weight)]
        options = {"multiplier": multiplier, "stride": 2, "padding": 1}
        return output_and_gradients(variant.call, args, options, cotangent)

    reference = Variant(variant.operator, "reference", "cpu")
    # Of many filters and of few: either operand may be the left one.
    for channels, filters in ((1, 1), (1, 40), (40, 1), (17, 17)):
        expected = results(reference, channels, filters)
        for name, found in results(variant, channels, filters).items():
            torch.testing.assert_close(
                found.cpu(), expected[name], rtol=0, atol=0, equal_nan=True, msg=name
            )


@matmul_everywhere
def test_operands_may_lie_far_apart_in_memory(variant: Variant) -> None:
    a = torch.randn(5, 7 * 1024, device=variant.device)[:, ::1024]
    b = torch.randn(7, 3 * 64, device=variant.device)[:, ::64]
    dense = variant.call(a.contiguous(), b.contiguous(), "mbm16")
    assert torch.equal(bits(variant.call(a, b, "mbm16")), bits(dense))


@pytest.mark.gpu
def test_what_lies_between_elements_takes_no_memory() -> None:
    wide = torch.ones(1024, 4096, device="cuda")
    b = torch.ones(2, 2, device="cuda")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    approx.matmul(wide[:, :2], b, "mbm16", impl="cuda")
    assert torch.cuda.max_memory_allocated() - before < wide.nbytes / 4


@matmul_everywhere
@every_multiplier
@pytest.mark.parametrize("small", [2.0**-60, 2.0**-100])
def test_an_infinite_number_among_small_ones(
    variant: Variant, multiplier: str, small: float
) -> None:
    """Their exponents add up to one that a product may have."""
    for infinite, finite in (
        (torch.randn(9, 70), torch.randn(70, 33) * small),
        (torch.randn(9, 70) * small, torch.randn(70, 33)),
    ):
        (infinite if infinite.abs().max() > 1e-3 else finite)[-1, 0] = torch.inf
        finite[torch.rand(finite.shape) < 0.3] = 0
        got = variant.call(infinite.to(variant.device), finite.to(variant.device), multiplier)
        expected = approx.matmul(infinite, finite, multiplier, impl="reference")
        assert torch.equal(bits(got), bits(expected))


# As an operator of PyTorch


@pytest.mark.parametrize("impl", ["reference", "cpp"])
def test_torch_library_finds_no_fault(impl: str) -> None:
    if reason := obstacle(MATMUL, impl, "cpu"):
        pytest.skip(reason)
    choose(MATMUL, impl, "cpu")  # loads it
    ops = OPS[impl]
    a, b, grad = torch.randn(2, 3, 4), torch.randn(2, 4, 5), torch.randn(2, 3, 5)
    x, weight = torch.randn(2, 4, 6, 5), torch.randn(6, 2, 3, 2)
    windows = ([2, 1], [1, 0], [1, 2], 2)
    out = ops.conv2d(x, weight, *windows, "mbm16")
    for op, args in (
        (ops.multiply, (a, a)),
        (ops.matmul, (a, b)),
        (ops.matmul, (a.mT.contiguous().mT, b)),
        (ops.matmul, (a[0], b[0].mT.contiguous().mT)),
        (ops.matmul_derivative, (grad, a, b)),
        (ops.matmul_derivative, (grad[0], a[0], b[0])),
        (ops.conv2d, (x, weight, *windows)),
        (ops.conv2d_backward_input, (out, weight, list(x.shape), *windows)),
        (ops.conv2d_backward_weight, (out, x, list(weight.shape), *windows)),
    ):
        torch.library.opcheck(op.overload, (*args, "mbm16"))
    entries = torch.zeros(8, 8, dtype=torch.int32)  # every product of mantissas is 1
    for op, args in (
        (ops.multiply, (a, a)),
        (ops.matmul, (a, b)),
        (ops.conv2d, (x, weight, *windows)),
        (ops.conv2d_backward_input, (out, weight, list(x.shape), *windows)),
        (ops.conv2d_backward_weight, (out, x, list(weight.shape), *windows)),
    ):
        torch.library.opcheck(op.overload, (*args, "", entries))


def test_floating_point_operations_are_counted() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    x, weight = torch.randn(2, 4, 6, 6, requires_grad=True), torch.randn(8, 2, 3, 3)
    with FlopCounterMode(display=False) as counter:
        approx.conv2d(x, weight.requires_grad_(), "mbm16", groups=2, padding=1).sum().backward()
    assert counter.get_total_flops() == 3 * 2 * (2 * 8 * 6 * 6) * (2 * 3 * 3)
    with FlopCounterMode(display=False) as counter:
        approx.matmul(torch.randn(3, 4, 5), torch.randn(5, 6), "mbm16")
    assert counter.get_total_flops() == 2 * 3 * 4 * 5 * 6


# Gradients


@conv2d_everywhere
@pytest.mark.parametrize("groups", [1, 2])
def test_straight_through_is_the_gradient_of_pytorchs_convolution(
    variant: Variant, groups: int
) -> None:
    x, weight = torch.randn(2, 4, 7, 6, device=variant.device), torch.randn(6, 4 // groups, 3, 2)
    args, options = [x, weight.to(variant.device)], {"stride": (2, 1), "padding": (1, 0)}
    options["dilation"] = (1, 2)
    expected = output_and_gradients(F.conv2d, args, {**options, "groups": groups})
    got = output_and_gradients(
        lambda *a: variant.call(*a, "mbm16", groups=groups, gradient="ste", **options), args, {}
    )
    for name in list(expected)[1:]:
        torch.testing.assert_close(got[name], expected[name])


@conv2d_everywhere
def test_exact_is_pytorchs_convolution(variant: Variant) -> None:
    args = [torch.randn(2, 4, 7, 6).to(variant.device), torch.randn(6, 2, 3, 3).to(variant.device)]
    for gradient in ("approx", "ste", "analytic"):
        expected = output_and_gradients(F.conv2d, args, {"padding": 1, "groups": 2, "stride": 2})
        got = output_and_gradients(
            lambda *a, g=gradient: variant.call(
                *a, "exact", padding=1, groups=2, stride=2, gradient=g
            ),
            args, {},
        )  # fmt: skip
        for name, value in expected.items():
            torch.testing.assert_close(got[name], value)


@matmul_everywhere
@pytest.mark.parametrize("multiplier", ["mbm16", "mbm32", "mitchell32"])
def test_analytic_gradient_of_a_matrix_product_sums_the_multipliers_derivatives(
    variant: Variant, multiplier: str
) -> None:
    a, b, grad = torch.randn(5, 6), torch.randn(6, 7), torch.randn(5, 7)
    _, d_a, d_b = results(
        lambda *t: variant.call(*t, multiplier, gradient="analytic"), [a, b], variant.device, grad
    )
    derivative = MULTIPLIERS[multiplier].derivative
    slopes = derivative(a[:, :, None], b)  # (M, K, N)
    expected = (grad[:, None] * slopes).sum(2)
    torch.testing.assert_close(d_a.view(torch.float32), expected)
    slopes = derivative(b[None], a[:, :, None])
    expected = (grad[:, None] * slopes).sum(0)
    torch.testing.assert_close(d_b.view(torch.float32), expected)


@conv2d_everywhere
def test_analytic_gradient_of_a_convolution_is_that_of_the_matrix_product(variant: Variant) -> None:
    G, options = 2, {"stride": (2, 1), "padding": (1, 0), "dilation": (1, 2)}
    args = [torch.randn(2, 4, 7, 6).to(variant.device), torch.randn(6, 2, 3, 2).to(variant.device)]

    def unfolded(x: Tensor, weight: Tensor) -> Tensor:
        columns = F.unfold(x, (3, 2), options["dilation"], options["padding"], options["stride"])
        columns = columns.unflatten(1, (G, -1))
        filters = weight.unflatten(0, (G, -1)).flatten(2)
        out = approx.matmul(filters, columns, "mbm32", gradient="analytic", impl=variant.impl)
        return out.flatten(1, 2).unflatten(2, (4, 4))

    def convolved(x: Tensor, weight: Tensor) -> Tensor:
        return variant.call(x, weight, "mbm32", groups=G, gradient="analytic", **options)

    expected = output_and_gradients(unfolded, args, {})
    for name, value in output_and_gradients(convolved, args, {}).items():
        torch.testing.assert_close(value, expected[name])


@conv2d_everywhere
def test_each_gradient_of_a_convolution_is_switched_on_its_own(variant: Variant) -> None:
    args = [torch.randn(2, 3, 5, 5).to(variant.device), torch.randn(4, 3, 3, 3).to(variant.device)]

    def gradients(gradient: Any) -> list[Tensor]:
        named = output_and_gradients(
            lambda *a: variant.call(*a, "mbm16", gradient=gradient), args, {}
        )
        return list(named.values())[1:]

    kinds = {kind: gradients(kind) for kind in ("approx", "ste", "analytic")}
    for first in kinds:
        for second in kinds:
            d_x, d_weight = gradients((first, second))
            torch.testing.assert_close(d_x, kinds[first][0], rtol=1e-6, atol=1e-6)
            torch.testing.assert_close(d_weight, kinds[second][1], rtol=1e-6, atol=1e-5)
    assert not torch.allclose(kinds["approx"][0], kinds["ste"][0], rtol=1e-3)


# What is refused


@pytest.mark.parametrize(
    ("x", "weight", "options", "message"),
    [
        ((2, 3, 5), (4, 3, 3, 3), {}, r"x: expected 4 dimensions .*got shape \(2, 3, 5\)"),
        ((2, 3, 5, 5), (4, 3, 3), {}, r"weight: expected 4 dimensions .*got shape \(4, 3, 3\)"),
        ((2, 3, 5, 5), (4, 3, 0, 3), {}, r"weight: expected .* at least 1 x 1, got"),
        ((2, 3, 5, 5), (4, 2, 3, 3), {}, r"weight: expected \(O, 3, R, S\).*got shape \(4, 2, 3"),
        ((2, 4, 5, 5), (3, 2, 3, 3), {"groups": 2}, r"weight: expected .* divisible by groups=2"),
        ((2, 3, 5, 5), (4, 3, 3, 3), {"groups": 2}, "groups: expected a divisor of the 3 channels"),
        ((2, 3, 5, 5), (4, 3, 3, 3), {"stride": 0}, "stride: expected at least 1, got 0"),
        ((2, 3, 5, 5), (4, 3, 3, 3), {"padding": -1}, "padding: expected at least 0, got -1"),
        ((2, 3, 5, 5), (4, 3, 3, 3), {"dilation": (1,)}, r"dilation: expected an int or a pair"),
        ((2, 3, 5, 5), (4, 3, 3, 3), {"dilation": 3}, "weight: its kernel .* is larger than x"),
        ((2, 3, 5, 5), (4, 3, 3, 3), {"padding": "full"}, "padding: expected .* got 'full'"),
        ((2, 3, 5, 5), (4, 3, 3, 3), {"padding": "same", "stride": 2}, "padding: 'same' needs"),
    ],
)
def test_wrong_convolutions_are_refused_by_name(
    x: Any, weight: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        approx.conv2d(torch.ones(x), torch.ones(weight), "mbm16", **options)


@pytest.mark.parametrize("name", ["stride", "padding", "dilation"])
@pytest.mark.parametrize("value", [1.0, None, True, (1, 2.0), (1, None), (True, 1), torch.ones(2)])
def test_windows_of_another_type_are_refused_by_name(name: str, value: Any) -> None:
    x, weight = torch.ones(1, 1, 5, 5), torch.ones(1, 1, 2, 2)
    options: dict[str, Any] = {name: value}
    with pytest.raises(TypeError, match=f"^{name}: expected an int or a pair of them, got "):
        approx.conv2d(x, weight, "mbm16", **options)


@pytest.mark.parametrize(
    ("a", "b"), [((3,), (3, 4)), ((2, 3), (3,)), ((2, 3), (4, 3)), ((2, 2, 3), (3, 3, 4))]
)
def test_wrong_matrices_are_refused_by_name(a: Any, b: Any) -> None:
    with pytest.raises(ValueError, match=r"^b: expected \(K, N\) or \(\.\.\., K, N\)"):
        approx.matmul(torch.ones(a), torch.ones(b), "mbm16")
