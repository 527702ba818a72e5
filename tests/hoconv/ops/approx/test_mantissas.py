"""Multipliers by a table of the products of mantissas: files, functions, families."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hoconv import ApproxConv2d, ApproxLinear, approx
from hoconv.approx import MULTIPLIERS, MantissaTable, multiplier
from hoconv.ops.approx.multipliers import Logarithmic
from hoconv.ops.approx.operator import CONV2D, MATMUL, MULTIPLY
from hoconv.tools.testing.variants import Variant, variants
from tests.hoconv.ops.approx.test_multipliers import SPECIAL, bits, floats

everywhere = pytest.mark.parametrize("variant", variants([MULTIPLY, MATMUL]), indirect=True)
conv2d_everywhere = pytest.mark.parametrize("variant", variants([CONV2D]), indirect=True)
NAMES = [("mbm16", 7), ("mbm14", 5), ("mbm12", 3), ("mbm10", 1), ("mitchell16", 7)]


def significands(n: int) -> tuple[Tensor, Tensor]:
    every = 1 + torch.arange(1 << n) / (1 << n)
    return every[:, None], every[None]


def write(path: Path, name: str, n: int, width: int) -> Path:
    """Writes the products of a multiplier as ApproxTrain does."""
    found = MULTIPLIERS[name].multiply(*significands(n)).view(torch.int32).numpy()
    carry, mantissa = (found >> 23) - 127, found & 0x7FFFFF
    if width == 1:
        (carry << 7 | mantissa >> (23 - n)).astype(np.uint8).tofile(path)
    else:
        (carry.astype(np.uint32) << 31 | mantissa).astype("<u4").tofile(path)
    return path


def lopsided(a: Tensor, b: Tensor) -> Tensor:
    """A product of 4 bits of a and of 2 bits of b."""
    bits_a, bits_b = (t.contiguous().view(torch.int32) for t in torch.broadcast_tensors(a, b))
    cut_a, cut_b = bits_a >> 19 << 19, bits_b >> 21 << 21
    return cut_a.view(torch.float32) * cut_b.view(torch.float32)


def of_floats(source: Any, mantissa_bits: int | None = None) -> MantissaTable:
    found = multiplier(source, mantissa_bits=mantissa_bits)
    assert isinstance(found, MantissaTable)
    return found


def product(variant: Variant, a: Tensor, b: Tensor, by: Any) -> Tensor:
    """The bits of the products of a (m,) and b (n,): (m, n)."""
    a, b = a.to(variant.device)[:, None], b.to(variant.device)[None]
    return bits(variant.call(a, b, by))


def numbers() -> Tensor:
    special = floats(SPECIAL + [x | 0x80000000 for x in SPECIAL])
    some = torch.randint(-(2**31), 2**31, (150,)).to(torch.int32).view(torch.float32)
    return torch.cat((special, some, torch.randn(150)))


@everywhere
@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize(("name", "n"), NAMES)
def test_files_of_mantissas_give_the_products_of_the_named_multipliers(
    variant: Variant, tmp_path: Path, name: str, n: int, width: int
) -> None:
    table = of_floats(write(tmp_path / f"T_{n}.bin", name, n, width))
    assert table.bits == n
    a, b = numbers(), numbers()
    assert torch.equal(product(variant, a, b, table), product(variant, a, b, name))


@everywhere
@pytest.mark.parametrize("n", [9, 11])
def test_a_family_of_many_bits_is_its_definition(variant: Variant, n: int) -> None:
    a, b = numbers(), numbers()
    for name, corrected in (("mbm", True), ("mitchell", False)):
        expected = Logarithmic(n, corrected).multiply(a[:, None], b[None])
        if variant.operator is MATMUL:
            expected = expected + 0.0  # a sum begins with +0
        assert torch.equal(product(variant, a, b, f"{name}:keep={n}"), bits(expected))


@everywhere
def test_the_first_operand_is_the_tables_first(variant: Variant) -> None:
    table = of_floats(lopsided, 4)
    for m, n in ((40, 3), (3, 40), (200, 150)):  # whichever a kernel takes first
        a, b = torch.randn(m), torch.randn(n)
        expected = bits(lopsided(a[:, None], b[None]))
        assert torch.equal(product(variant, a, b, table), expected)


SAMPLES: dict[str, list[tuple[float, float, float]]] = {
    # By hand, from the papers' definitions.
    "lmul:keep=7": [
        (1.0, 1.0, 1.0625),
        (1.5, 1.5, 2.125),
        (1.25, 1.25, 1.5625),
        (-2.0, 3.0, -6.25),
    ],
    "lmul:keep=3": [(1.0, 1.0, 1.125), (1.5, 1.25, 1.875)],
    "lmul:keep=4": [(1.0, 1.0, 1.125)],
    "drum:k=4": [(1.0, 1.0, 1.125**2), (1.99, 1.99, 1.875**2), (8.0, -1.0, -8 * 1.125**2)],
    "drum": [(1.0, 1.0, 1.03125**2)],
    "truncated:keep=2": [(1.99, 1.99, 1.75**2), (1.24, 3.0, 3.0), (-1.5, 1.25, -1.875)],
    "rounded:keep=2": [(1.99, 1.99, 4.0), (1.125, 1.0, 1.25), (1.1, 1.9, 2.0), (1.5, 1.25, 1.875)],
    "mbm:keep=7": [(1.0, 1.0, 1.09375)],
    "mitchell:keep=4": [(1.5, 1.5, 2.0), (1.25, 1.5, 1.75)],
}


@everywhere
@pytest.mark.parametrize("name", SAMPLES)
def test_families_are_the_papers_definitions(variant: Variant, name: str) -> None:
    for a, b, expected in SAMPLES[name]:
        found = product(variant, torch.tensor([a]), torch.tensor([b]), name)
        assert found.view(torch.float32).item() == expected, (a, b)


@everywhere
@pytest.mark.parametrize("gradient", ["approx", "ste", ("approx", "ste")])
def test_gradients_are_those_of_the_named_multiplier(variant: Variant, gradient: Any) -> None:
    a, b = torch.randn(5, 5, device=variant.device), torch.randn(5, 5, device=variant.device)

    def results(by: Any) -> list[Tensor]:
        leaves = a.clone().requires_grad_(), b.clone().requires_grad_()
        out = variant.call(*leaves, by, gradient=gradient)
        return [out, *torch.autograd.grad(out.square().sum(), leaves)]

    for found, expected in zip(results("mbm:keep=7"), results("mbm16"), strict=True):
        assert torch.equal(found, expected)


@conv2d_everywhere
@pytest.mark.parametrize(
    "options",
    [{}, {"stride": 2, "padding": (1, 2), "dilation": (2, 1)}, {"groups": 2, "padding": 1}],
)
def test_convolutions_are_those_of_the_named_multiplier(variant: Variant, options: Any) -> None:
    x = torch.randn(2, 4, 9, 8, device=variant.device)
    weight = torch.randn(6, 4 // options.get("groups", 1), 3, 2, device=variant.device)
    weight[0, 0, 0, 0] = torch.inf  # whose products with elements that are left out would be NaN

    def results(by: Any) -> list[Tensor]:
        leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
        out = variant.call(*leaves, by, **options)
        return [out, *torch.autograd.grad(out, leaves, torch.ones_like(out))]

    for found, expected in zip(results("mbm:keep=5"), results("mbm14"), strict=True):
        assert torch.equal(bits(found), bits(expected))


@everywhere
@pytest.mark.parametrize("sparse", [False, True])
def test_large_products_have_the_bits_of_the_reference(variant: Variant, sparse: bool) -> None:
    if variant.operator is MULTIPLY:
        pytest.skip("it sums nothing")
    table = of_floats(lopsided, 4)
    for M, K, N in ((130, 70, 150), (3, 2100, 260), (260, 40, 3)):
        a, b = torch.randn(M, K), torch.randn(K, N)
        if sparse:
            a, b = (t * (torch.rand_like(t) < 0.3) for t in (a, b))
        expected = approx.matmul(a, b, table, impl="reference")
        found = variant.call(a.to(variant.device), b.to(variant.device), table)
        assert torch.equal(bits(found), bits(expected))


def test_functions_in_c_and_in_python_define_multipliers(tmp_path: Path) -> None:
    path = tmp_path / "cut.c"
    path.write_text(
        "#include <stdint.h>\n#include <string.h>\n"
        "static float cut(float x, int n) {\n  uint32_t b; memcpy(&b, &x, 4);\n"
        "  b = b >> n << n; memcpy(&x, &b, 4); return x;\n}\n"
        "float lopsided(float a, float b) { return cut(a, 19) * cut(b, 21); }\n"
    )
    a, b = torch.randn(2, 1000)
    expected = lopsided(a, b)
    for table in (of_floats(path, 4), of_floats(lopsided, 4), of_floats(lopsided, 7)):
        for impl in ("reference", "cpp"):
            assert torch.equal(approx.multiply(a, b, table, impl=impl), expected)
    for source in (path, lopsided):
        with pytest.raises(ValueError, match=r"lopsided|cut\.c.* mantissas of 3 bits .*; give the"):
            multiplier(source, mantissa_bits=3)
    with pytest.raises(
        ValueError, match=r"expected one function of two integers, .*; it has cut\("
    ):
        multiplier(path)
    with pytest.raises(
        ValueError, match=r"^bits, signed: expected both .*, or mantissa_bits if it"
    ):
        multiplier(lopsided)


def test_layers_learn_and_are_saved_with_their_multiplier() -> None:
    for layer, shape in (
        (ApproxLinear(6, 4, multiplier="drum:k=5"), (3, 6)),
        (ApproxConv2d(2, 4, 3, multiplier="lmul"), (2, 2, 5, 5)),
    ):
        assert layer.gradient == "approx"
        x = torch.randn(shape)
        layer(x).square().sum().backward()
        assert layer.weight.grad is not None
        assert layer.weight.grad.norm() > 0
        expected = layer(x)
        for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
            assert torch.equal(other(x), expected)
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
        assert torch.equal(compiled(x), expected)
        exported = torch.export.export(layer, (x,)).module()
        assert torch.equal(exported(x), expected)
        assert "MantissaTable(" in repr(layer)


def test_transforms_of_products_are_their_gradients() -> None:
    a, b = torch.randn(2, 4, 4)

    def loss(a: Tensor, by: Any) -> Tensor:
        return approx.matmul(a, b, by, impl="reference").square().sum()

    for transform in (
        torch.func.grad,
        torch.func.jacrev,
        lambda f: torch.func.vmap(torch.func.grad(f), (0, None)),
    ):
        x = a if transform in (torch.func.grad, torch.func.jacrev) else torch.randn(3, 4, 4)
        assert torch.equal(transform(loss)(x, "mbm:keep=7"), transform(loss)(x, "mbm16"))


@pytest.mark.parametrize(
    ("name", "size", "options", "message"),
    [
        ("T_7.bin", 100, {}, r"T_7\.bin: expected 16,384 products of mantissas of .* has 100"),
        ("T_8.bin", 4**8, {}, r"T_8\.bin: expected 65,536 products .*; it has 65,536 bytes"),
        ("T.bin", 16384, {"mantissa_bits": 12}, r"T\.bin: expected 16,777,216 products"),
        ("T_5.bin", 1024, {"mantissa_bits": 5, "signed": True}, r"^mantissa_bits: expected none w"),
        ("T.bin", 16384, {}, r"T\.bin: its products fit no reading"),
    ],
)  # fmt: skip
def test_wrong_files_are_refused(
    tmp_path: Path, name: str, size: int, options: Any, message: str
) -> None:
    path = tmp_path / name
    path.write_bytes(bytes(size))
    with pytest.raises(ValueError, match=message) as refused:
        multiplier(path, **options)
    assert "\n" not in str(refused.value)


def test_entries_that_are_no_mantissas_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "T_3.bin"
    path.write_bytes(bytes(10) + b"\x08" + bytes(53))
    with pytest.raises(ValueError, match=r"T_3\.bin: product 10 is 0x8; expected a mantissa of 3 "):
        multiplier(path)
    path.write_bytes(bytes(4 * 64 - 4) + b"\x00\x00\x80\x3f")
    with pytest.raises(
        ValueError, match=r"T_3\.bin: product 63 is 0x3f800000; expected a mantissa"
    ):
        multiplier(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mbm:keep=12", "expected mbm or mbm:keep=n, n from 1 to 11; got 'mbm:keep=12'"),
        ("mbm:keep=", "expected mbm or mbm:keep=n, n from 1 to 11"),
        ("drum:keep=4", "expected drum or drum:k=n, n from 2 to 12; got 'drum:keep=4'"),
        ("drum:k=1", "expected drum or drum:k=n, n from 2 to 12; got 'drum:k=1'"),
        ("rounded:keep=11", "expected rounded or rounded:keep=n, n from 1 to 10"),
        ("karatsuba:keep=3", "expected one of exact, .*, rounded, a family with its parameter"),
    ],
)
def test_wrong_parameters_are_refused_with_the_right_ones(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        approx.multiply(torch.ones(1), torch.ones(1), text)


@pytest.mark.parametrize(
    ("products", "error", "message"),
    [
        (torch.ones(3, 3), ValueError, r"expected shape \(2\^n, 2\^n\) .*, got \(3, 3\)"),
        (torch.ones(2, 4), ValueError, r"expected shape \(2\^n, 2\^n\) .*, got \(2, 4\)"),
        (torch.ones(()), ValueError, r"expected shape .*, got \(\)$"),
        (torch.zeros(4, 4), ValueError, r"expected numbers from 0\.25 to less than 8, got 0\.0"),
        (torch.full((4, 4), torch.nan), ValueError, r"expected numbers from 0\.25"),
        (torch.ones(4, 4).double(), TypeError, r"expected a float32 tensor, got torch\.float64"),
        ([[1.0]], TypeError, r"expected a float32 tensor, got list"),
    ],
)
def test_wrong_products_are_refused(products: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^products: {message}"):
        MantissaTable(products)


def test_a_table_has_no_derivative_of_its_own() -> None:
    match = r"^gradient: expected approx or ste for MantissaTable\(7 bits, of lmul:keep=7\), which"
    for gradient in ("analytic", ("ste", "analytic")):
        with pytest.raises(ValueError, match=match):
            approx.multiply(torch.ones(1), torch.ones(1), "lmul", gradient=gradient)
        with pytest.raises(ValueError, match=match):
            ApproxLinear(2, 2, multiplier="lmul", gradient=gradient)


def test_a_table_of_inference_mode_serves_gradients_later() -> None:
    a = torch.randn(5)
    with torch.inference_mode():
        table = of_floats(lopsided, 4)
        approx.multiply(a, a, table)
        family = approx.multiply(a, a, "drum:k=11")
    leaf = a.clone().requires_grad_()
    for by in (table, "drum:k=11"):
        approx.multiply(leaf, a, by).sum().backward()
    assert torch.equal(approx.multiply(a, a, "drum:k=11"), family)
