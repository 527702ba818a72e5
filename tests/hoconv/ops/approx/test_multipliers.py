"""Single products: against the published simulator's, the specification in integers, each other."""

from __future__ import annotations

import csv
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import forward_ad

from hoconv import approx
from hoconv.ops.approx.multipliers import MULTIPLIERS, Logarithmic
from hoconv.ops.approx.operator import MATMUL, MULTIPLY
from hoconv.tools.testing.variants import Variant, variants

everywhere = pytest.mark.parametrize("variant", variants([MULTIPLY]), indirect=True)
matmul_everywhere = pytest.mark.parametrize("variant", variants([MATMUL]), indirect=True)
every_multiplier = pytest.mark.parametrize("multiplier", MULTIPLIERS)
LOGARITHMIC = [name for name in MULTIPLIERS if name != "exact"]

SPECIAL = [
    0x00000000, 0x00000001, 0x007FFFFF, 0x00800000, 0x00800001, 0x00FFFFFF, 0x20000000, 0x3F000000,
    0x3F7D8000, 0x3F7FFFFF, 0x3F800000, 0x3F800001, 0x3FC00000, 0x3FFFFFFF, 0x40490FDB, 0x5F800000,
    0x7F000000, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FC00000,
]  # fmt: skip


def floats(bits: Any) -> Tensor:
    return torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32)


def bits(t: Tensor) -> Tensor:
    """With every NaN as one."""
    return torch.where(t.isnan(), torch.nan, t).cpu().contiguous().view(torch.int32)


def specified(a: int, b: int, keep: int, corrected: bool) -> int | None:
    """The specification of a product, on bit patterns; None where it is IEEE's."""
    (ea, ma), (eb, mb) = ((x >> 23 & 0xFF, x & 0x7FFFFF) for x in (a, b))
    if 255 in (ea, eb):
        return None
    if 0 in (ea, eb):
        return 0
    t = 23 - keep
    kept = (1 << 23) - (1 << t)
    lowest = 1 << t if corrected and t else 0
    M = ((ma & kept) | lowest) + ((mb & kept) | lowest)
    c, F = M >> 23, M & 0x7FFFFF
    R = F + ((0xA0000 >> c) & kept if corrected else 0)
    e = ea + eb - 127 + c
    if c:
        m = F if R >= 1 << 23 else R
    elif R >= 1 << 23:
        e, m = e + 1, (R - (1 << 23)) >> 1
    else:
        m = R
    sign = (a ^ b) & 0x80000000
    if e <= 0:
        return 0
    return sign | 0x7F800000 if e >= 255 else sign | e << 23 | m & kept


def product(variant: Variant, a: Tensor, b: Tensor, multiplier: str) -> Tensor:
    """Returns the bits of the products of the elements of a and b (n,).

    A variant of the matrix product multiplies matrices of one element: a sum of one term from +0 is
    the product.
    """
    a, b = a.to(variant.device), b.to(variant.device)
    if variant.operator is MULTIPLY:
        return bits(variant.call(a, b, multiplier))
    return bits(variant.call(a[:, None, None], b[:, None, None], multiplier)).flatten()


@pytest.mark.data
@pytest.mark.parametrize("variant", variants([MULTIPLY, MATMUL]), indirect=True)
def test_products_are_the_published_simulators(variant: Variant) -> None:
    folder = os.environ.get("HOCONV_DATA_DIR")
    path = Path(folder or "", "mbm", "vectors.csv")
    if folder is None or not path.exists():
        pytest.skip("mbm/vectors.csv is not in HOCONV_DATA_DIR")
    with path.open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 7923
    families = {"MBM": "mbm", "MIT": "mitchell"}
    for simulated in {row["multiplier"] for row in rows}:  # AT_MBM32_m23
        name = families[simulated[3:6]] + simulated[6:8]
        a, b, expected = (
            floats([int(row[column], 16) for row in rows if row["multiplier"] == simulated])
            for column in ("a_hex", "b_hex", "product_hex")
        )
        assert torch.equal(product(variant, a, b, name), bits(expected)), name


@everywhere
@pytest.mark.parametrize("multiplier", LOGARITHMIC)
@given(st.lists(st.tuples(*[st.integers(0, 2**32 - 1) | st.sampled_from(SPECIAL)] * 2), min_size=1))
def test_products_are_those_of_the_specification(
    variant: Variant, multiplier: str, pairs: list[tuple[int, int]]
) -> None:
    definition = MULTIPLIERS[multiplier]
    assert isinstance(definition, Logarithmic)
    a, b = floats([p[0] for p in pairs]), floats([p[1] for p in pairs])
    wanted = (specified(*pair, definition.keep, definition.corrected) for pair in pairs)
    ieee = bits(a * b).tolist()
    expected = [i if w is None else w for w, i in zip(wanted, ieee, strict=True)]
    out = variant.call(a.to(variant.device), b.to(variant.device), multiplier)
    assert torch.equal(bits(out), bits(floats(expected)))


@everywhere
@every_multiplier
def test_special_values_give_the_bits_of_the_reference(variant: Variant, multiplier: str) -> None:
    values = floats(SPECIAL + [x | 0x80000000 for x in SPECIAL])
    expected = approx.multiply(values[:, None], values, multiplier, impl="reference")
    device = values.to(variant.device)
    assert torch.equal(bits(variant.call(device[:, None], device, multiplier)), bits(expected))
    assert torch.equal(bits(expected), bits(expected.mT))  # symmetric


@everywhere
@every_multiplier
def test_random_bits_give_the_bits_of_the_reference(variant: Variant, multiplier: str) -> None:
    a, b = torch.randint(-(2**31), 2**31, (2, 100_000)).to(torch.int32).view(torch.float32)
    expected = approx.multiply(a, b, multiplier, impl="reference")
    out = variant.call(a.to(variant.device), b.to(variant.device), multiplier)
    assert torch.equal(bits(out), bits(expected))


# Of the operands of a block of products: their exponents, and the share of them that is replaced by
# special values. The fast form of a matrix product holds in the first, in parts of the second, and
# nowhere in the third.
BLOCKS = (((97, 157), 0.0), ((0, 254), 0.01), ((0, 255), 0.05))


@pytest.mark.slow
@pytest.mark.parametrize(
    "variant", [p for p in variants([MULTIPLY, MATMUL]) if p.values[0].impl != "reference"],
    indirect=True,
)  # fmt: skip
@every_multiplier
def test_a_hundred_million_products_have_the_bits_of_the_reference(
    variant: Variant, multiplier: str
) -> None:
    special = floats(SPECIAL + [x | 0x80000000 for x in SPECIAL])
    side = 1024
    for block in range(-(-(10**8) // side**2)):
        (least, most), share = BLOCKS[block % len(BLOCKS)]
        exponents = torch.randint(least, most + 1, (2, side)) << 23
        signs = torch.randint(-1, 1, (2, side)) << 31
        values = (torch.randint(2**23, (2, side)) | exponents | signs).to(torch.int32)
        drawn = special[torch.randint(len(special), (2, side))]
        values = torch.where(torch.rand(2, side) < share, drawn, values.view(torch.float32))
        a, b = values[0][:, None], values[1][None]
        expected = bits(approx.multiply(a, b, multiplier, impl="reference"))
        out = bits(variant.call(a.to(variant.device), b.to(variant.device), multiplier))
        if variant.operator is MATMUL:  # a sum begins with +0
            expected = torch.where(expected == -(2**31), 0, expected)
        assert torch.equal(out, expected), f"block {block}"


@matmul_everywhere
@pytest.mark.parametrize("multiplier", LOGARITHMIC)
def test_every_pair_of_mantissas_in_the_fast_form_of_a_matrix_product(
    variant: Variant, multiplier: str
) -> None:
    definition = MULTIPLIERS[multiplier]
    assert isinstance(definition, Logarithmic)
    if definition.keep <= 7:
        mantissas = torch.arange(2**definition.keep) << (23 - definition.keep)
        mantissas = torch.cat((mantissas, torch.randint(0, 2**23, (64,))))
    else:
        edges = torch.tensor([0, 2**22, 2**23 - 1, 2**23 - 0x50000, 2**23 - 0xA0000])
        near = (edges[:, None] + torch.arange(-8, 9)).flatten() % 2**23
        mantissas = torch.cat((near, torch.randint(0, 2**23, (900,))))
    values = floats((mantissas | 127 << 23).tolist())
    # One term of a sum from +0 is the product. Signs, and numbers that are far apart.
    for scale in (1.0, -1.0, 2.0**60):
        left, right = (t.to(variant.device) for t in ((values * scale)[:, None], values[None]))
        out = variant.call(left, right, multiplier)
        expected = approx.multiply(
            (values * scale)[:, None], values[None], multiplier, impl="reference"
        )
        assert torch.equal(bits(out), bits(expected))


@matmul_everywhere
@pytest.mark.parametrize("multiplier", LOGARITHMIC)
def test_matrix_products_at_the_ends_of_the_exponents(variant: Variant, multiplier: str) -> None:
    # Products just above and below the least normal number, and below and above the largest.
    mantissas = torch.cat((torch.tensor([0, 2**22, 2**23 - 1]), torch.randint(0, 2**23, (60,))))
    for total in (*range(123, 132), *range(376, 385)):
        for exponent in (1, 5, 9, 63, 126):
            if not 1 <= total - exponent <= 254:
                continue
            a, b = (floats((mantissas | e << 23).tolist()) for e in (exponent, total - exponent))
            out = variant.call(
                a[:, None].to(variant.device), b[None].to(variant.device), multiplier
            )
            expected = MULTIPLIERS[multiplier].multiply(a[:, None], b[None])
            assert torch.equal(bits(out), bits(expected)), (exponent, total)


def test_one_times_one_shows_the_correction() -> None:
    one = torch.ones(())
    assert approx.multiply(one, one, "mbm32").item() == 1.078125
    assert approx.multiply(one, one, "mitchell32").item() == 1
    assert approx.multiply(one, one, "exact").item() == 1


# Derivatives


@pytest.mark.parametrize("multiplier", ["mitchell32", "mbm32", "exact"])
def test_analytic_derivative_is_the_slope_between_jumps(multiplier: str) -> None:
    a, b = torch.randn(2, 20_000).mul(3)
    step = torch.exp2(a.abs().log2().floor() - 12)
    a = (a / step).round() * step  # so that a + step is exact
    below, here, above = (approx.multiply(a + i * step, b, multiplier) for i in (-1, 0, 1))
    left, right = (here - below) / step, (above - here) / step
    smooth = (left - right).abs() <= 1e-3 * right.abs()
    assert smooth.float().mean() > 0.95
    leaf = a.clone().requires_grad_()
    approx.multiply(leaf, b, multiplier, gradient="analytic").sum().backward()
    assert leaf.grad is not None
    torch.testing.assert_close(leaf.grad[smooth], right[smooth], rtol=2e-3, atol=0)


def test_analytic_derivative_with_few_bits_is_the_slope_of_the_staircase() -> None:
    # Of mbm16 a stair is two units of its seven bits wide.
    a, b = torch.rand(2, 20_000) + 1
    here, above = (approx.multiply(a + i * 2**-6, b, "mbm16") for i in (0, 1))
    slope = (above - here) * 2**6
    leaf = a.clone().requires_grad_()
    approx.multiply(leaf, b, "mbm16", gradient="analytic").sum().backward()
    assert leaf.grad is not None
    assert set(leaf.grad.tolist()) == {1.0, 2.0}  # b is from 1 to 2
    assert (slope == leaf.grad).float().mean() > 0.85  # the others are at a jump


def test_derivative_at_zero_trains_and_at_infinity_is_ieee() -> None:
    a = torch.tensor([0.0, 0.0, 1.5, torch.inf, 2.0]).requires_grad_()
    b = torch.tensor([-3.0, 0.0, 0.0, -2.5, torch.inf])
    approx.multiply(a, b, "mbm16", gradient="analytic").nan_to_num(0, 0, 0).sum().backward()
    assert a.grad is not None
    assert a.grad.tolist()[:3] == [-2.0, 0.0, 0.0]
    product = MULTIPLIERS["mbm16"].derivative(a.detach(), b)
    assert product.tolist()[3:] == [-2.5, torch.inf]


@everywhere
@pytest.mark.parametrize("multiplier", ["mbm16", "exact"])
def test_kinds_of_gradients_of_a_product(variant: Variant, multiplier: str) -> None:
    grad, a, b = (t.to(variant.device) for t in torch.randn(3, 50))

    def gradients(gradient: Any) -> tuple[Tensor, Tensor]:
        leaves = a.clone().requires_grad_(), b.clone().requires_grad_()
        out = variant.call(*leaves, multiplier, gradient=gradient)
        d_a, d_b = torch.autograd.grad(out, leaves, grad)
        return d_a, d_b

    kinds = {kind: gradients(kind) for kind in ("approx", "ste", "analytic")}
    assert torch.equal(kinds["approx"][0], variant.call(grad, b, multiplier))
    assert torch.equal(kinds["approx"][1], variant.call(grad, a, multiplier))
    assert torch.equal(kinds["ste"][0], grad * b)
    assert torch.equal(kinds["ste"][1], grad * a)
    for first, second in (("approx", "ste"), ("analytic", "approx"), ("ste", "analytic")):
        d_a, d_b = gradients((first, second))
        assert torch.equal(d_a, kinds[first][0])
        assert torch.equal(d_b, kinds[second][1])


@everywhere
@pytest.mark.parametrize("gradient", ["approx", "ste", "analytic"])
@pytest.mark.parametrize("multiplier", ["mbm16", "exact"])
def test_negated_views_are_numbers_as_others_are(
    variant: Variant, gradient: str, multiplier: str
) -> None:
    a, b = (torch.randn(2, 7, device=variant.device) for _ in range(2))

    def negated(t: Tensor) -> Tensor:
        view = torch.complex(torch.zeros_like(t), t).conj().imag
        assert view.is_neg()
        return view

    def results(a: Tensor, b: Tensor) -> list[Tensor]:
        a, b = a.requires_grad_(), b.requires_grad_()
        out = variant.call(a, b, multiplier, gradient=gradient)
        return [out, *torch.autograd.grad(out, (a, b), negated(torch.ones_like(out)))]

    expected = results(-a, -b)
    for result, other in zip(results(negated(a), negated(b)), expected, strict=True):
        assert torch.equal(result.resolve_neg(), other.resolve_neg())


@everywhere
def test_analytic_gradient_of_exact_products_keeps_the_sign_of_zero(variant: Variant) -> None:
    a, zero = (
        torch.ones(3, 1, device=variant.device),
        torch.tensor([-0.0, 0.0], device=variant.device),
    )
    leaf = a.requires_grad_()
    for factor in zero:
        out = variant.call(leaf, factor, "exact", gradient="analytic")
        (gradient,) = torch.autograd.grad(out.sum(), leaf)
        assert torch.equal(gradient.signbit(), factor.signbit().expand(3, 1))


# What is refused


def test_unknown_multiplier_is_refused_with_the_known_ones() -> None:
    names = r"exact, mitchell32, mitchell16, mbm32, mbm16, mbm14, mbm12, mbm10"
    families = "mbm, mitchell, lmul, drum, truncated, rounded, a family with its parameter, such as"
    message = f"expected one of {names}, {families} mbm:keep=9, or a file; got 'mbm8'$"
    for call in (approx.multiply, approx.matmul):
        with pytest.raises(ValueError, match=message):
            call(torch.ones(1, 1), torch.ones(1, 1), "mbm8")


@pytest.mark.parametrize("gradient", ["exact", ("ste",), ("ste", "approx", "ste"), ("ste", "no")])
def test_unknown_gradient_is_refused_with_the_known_ones(gradient: Any) -> None:
    with pytest.raises(ValueError, match=r"^gradient: expected one of approx, ste, analytic, or"):
        approx.multiply(torch.ones(1), torch.ones(1), "mbm16", gradient=gradient)


@pytest.mark.parametrize("gradient", [3, None, 1.5])
def test_gradient_of_another_type_is_refused_with_the_known_ones(gradient: Any) -> None:
    one = torch.ones(1, 1, 1, 1)
    for call in (approx.multiply, approx.matmul, approx.conv2d):
        with pytest.raises(TypeError, match=f"^gradient: expected one of .*; got {gradient}$"):
            call(one, one, "mbm16", gradient=gradient)


@pytest.mark.parametrize("gradient", [3, 1.5])
def test_gradient_of_another_type_is_refused_by_layers(gradient: Any) -> None:
    with pytest.raises(TypeError, match=f"^gradient: expected one of .*; got {gradient}$"):
        approx.ApproxConv2d(1, 1, 1, gradient=gradient)
    with pytest.raises(TypeError, match=f"^gradient: expected one of .*; got {gradient}$"):
        approx.ApproxLinear(1, 1, gradient=gradient)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int32])
def test_other_dtypes_are_refused_by_name(dtype: torch.dtype) -> None:
    one = torch.ones(1)
    with pytest.raises(TypeError, match=f"^a: expected float32, .*got {dtype}; convert it"):
        approx.multiply(one.to(dtype), one, "mbm16")
    with pytest.raises(TypeError, match=f"^b: expected float32, .*got {dtype}; convert it"):
        approx.multiply(one, one.to(dtype), "mbm16")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_converts_half_precision_to_float32(dtype: torch.dtype) -> None:
    a, b = torch.randn(2, 9).to(dtype)
    with torch.autocast("cpu", dtype=dtype):
        out = approx.multiply(a, b, "mbm16")
    assert out.dtype == torch.float32
    assert torch.equal(out, approx.multiply(a.float(), b.float(), "mbm16"))


def test_shapes_that_do_not_broadcast_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"^b: expected a shape that broadcasts .*\(3,\), got"):
        approx.multiply(torch.ones(3), torch.ones(4), "mbm16")


def test_a_second_derivative_is_refused() -> None:
    a = torch.randn(3, requires_grad=True)
    out = approx.multiply(a, torch.randn(3), "mbm16")
    (gradient,) = torch.autograd.grad(out.sum(), a, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        (a + gradient).sum().backward()


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # by PyTorch itself
@pytest.mark.parametrize("inner", [lambda f: f, torch.func.grad, torch.func.jacrev])
def test_forward_mode_is_refused_with_what_there_is(inner: Any) -> None:
    a, b = torch.randn(2, 1, 1, 3, 3)
    for product in (approx.multiply, approx.matmul, approx.conv2d):
        loss = inner(lambda a, product=product: product(a, b, "mbm16").sum())
        with pytest.raises(NotImplementedError, match="use reverse mode: backward"):
            torch.func.jvp(loss, (a,), (b,))
        with pytest.raises(NotImplementedError, match="use reverse mode: backward"):
            torch.func.jacfwd(loss)(a)
        with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="use reverse mode:"):
            loss(forward_ad.make_dual(a, b))
