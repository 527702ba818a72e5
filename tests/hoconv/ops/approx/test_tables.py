"""Look-up tables of integers: exact sums of products."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from hoconv.approx import (
    LookupTable,
    TableConv2d,
    TableLinear,
    convert,
    multiplier,
    table_matmul,
)
from hoconv.dispatch.implementations import resolve
from hoconv.ops.approx.layers import quantization
from hoconv.ops.approx.operator import MATMUL
from hoconv.ops.approx.ops import OPS
from hoconv.tools.testing.variants import Variant, variants
from tests.hoconv.ops.approx.tables import exact, narrow, operands, random_table

everywhere = pytest.mark.parametrize("variant", variants([MATMUL]), indirect=True)
signs = pytest.mark.parametrize("signed", [True, False])


def product(a: Tensor, b: Tensor, table: LookupTable, variant: Variant) -> Tensor:
    """Calls a variant; returns the result on the CPU."""
    return table_matmul(a.to(variant.device), b.to(variant.device), table, impl=variant.impl).cpu()


def looked_up(a: Tensor, b: Tensor, table: LookupTable) -> Tensor:
    rows, columns = (t.contiguous().view(torch.uint8).numpy().astype(int) for t in (a, b))
    out = np.zeros((*rows.shape[:2], columns.shape[2]), np.int32)
    for k in range(rows.shape[2]):
        out += table.products.cpu().numpy()[rows[:, :, k, None], columns[:, None, k]]
    return torch.from_numpy(out)


@everywhere
@signs
def test_the_exact_table_multiplies_integers(variant: Variant, signed: bool) -> None:
    table = exact(signed)
    a, b = operands(table, 2, 5, 300), operands(table, 2, 300, 7)
    out = product(a, b, table, variant)
    assert out.dtype == torch.int32
    assert torch.equal(out.long(), a.long() @ b.long())


@everywhere
@settings(max_examples=40)
@given(
    sizes=st.tuples(*[st.integers(0, 2)] * 1, *[st.integers(0, 40)] * 3),
    signed=st.booleans(),
    transposed=st.booleans(),
)
def test_any_table_is_looked_up_by_bytes(
    variant: Variant, sizes: Any, signed: bool, transposed: bool
) -> None:
    B, M, K, N = sizes
    table = random_table(signed)
    a = operands(table, B, K, M).mT if transposed else operands(table, B, M, K)
    b = operands(table, B, K, N)
    assert torch.equal(product(a, b, table, variant), looked_up(a, b, table))


def in_a_register(products: np.ndarray, text: str, signed: bool) -> np.ndarray:
    """Adds products (K, ...) one by one in a register of so many bits."""
    kind, bits = text.split(":bits=")
    size = 1 << int(bits)
    least = -size // 2 if signed else 0
    total = np.zeros(products.shape[1:], np.int64)
    for product in products.astype(np.int64):
        total = total + product
        if kind == "wrap":
            total = (total - least) % size + least
        else:
            total = np.minimum(np.maximum(total, least), least + size - 1)
    return total


@everywhere
@signs
@pytest.mark.parametrize(
    "register", [f"{kind}:bits={bits}" for kind in ("saturate", "wrap") for bits in (9, 16, 31, 32)]
)
@pytest.mark.parametrize("most", [3, 2**15 - 1, 2**31 - 1])
def test_sums_are_kept_in_a_register(
    variant: Variant, signed: bool, register: str, most: int
) -> None:
    if not signed:
        register = register.replace("32", "31")
    table = random_table(signed, -most - 1, most)
    for B, M, K, N in ((2, 9, 70, 5), (1, 3, 33, 131), (1, 1, 0, 2)):
        a, b = operands(table, B, M, K), operands(table, B, K, N)
        rows, columns = (t.view(torch.uint8).numpy() for t in (a, b))
        products = table.products.cpu().numpy()[rows[..., None], columns[:, None]]  # (B, M, K, N)
        expected = in_a_register(np.moveaxis(products, 2, 0), register, signed)
        out = table_matmul(
            a.to(variant.device), b.to(variant.device), table, accumulator=register,
            impl=variant.impl,
        )  # fmt: skip
        assert out.dtype == torch.int32
        assert np.array_equal(out.cpu().numpy(), expected)


@pytest.mark.parametrize(
    ("register", "signed"),
    [("saturate", True), ("saturate:bits=33", True), ("wrap:bits=32", False), ("wrap:bits=1", True),
     ("clamp:bits=8", True), ("saturate:keep=8", True), (16, True)],
)  # fmt: skip
def test_other_registers_are_refused(register: Any, signed: bool) -> None:
    message = "^accumulator: expected None, 'saturate:bits=n' or 'wrap:bits=n', n from 2 to 3"
    table = exact(signed)
    a, b = operands(table, 1, 2, 3), operands(table, 1, 3, 2)
    with pytest.raises(ValueError, match=message):
        table_matmul(a, b, table, accumulator=register)
    with pytest.raises(ValueError, match=message):
        TableLinear(2, 3, table=table, accumulator=register)
    with pytest.raises(ValueError, match=message):
        convert(nn.Sequential(nn.Linear(2, 3)), table, accumulator=register)


@everywhere
@signs
@pytest.mark.parametrize("register", ["saturate:bits=9", "wrap:bits=9"])
def test_terms_of_zero_points_are_added_after_the_register(
    variant: Variant, signed: bool, register: str
) -> None:
    table = random_table(signed, -300, 300)
    x = (torch.rand(7, 40, device=variant.device) + 1).requires_grad_()
    layer = TableLinear(40, 6, table=table, accumulator=register, bias=False, impl=variant.impl)
    layer.to(variant.device)(x).sum().backward()
    (scale_a, zero_a), (scale_b, zero_b) = layer.quantizer(x, layer.weight)[2:]
    a, b = (  # integers
        (t.detach() / scale).round().long() + zero
        for t, scale, zero in ((x, scale_a, zero_a), (layer.weight.mT, scale_b, zero_b))
    )
    limits = (-128, 127) if signed else (0, 255)
    a, b = a.clamp(*limits), b.clamp(*limits)
    sums = table_matmul(
        a[None].to(table.dtype), b[None].to(table.dtype), table, accumulator=register
    )[0]
    total = sums.long() - zero_b * a.sum(1, True) - zero_a * b.sum(0) + 40 * zero_a * zero_b
    expected = (scale_a.double() * scale_b * total).float()
    out = layer.eval()(x)
    torch.testing.assert_close(out, expected)
    unlimited = copy.deepcopy(layer)
    unlimited.quantizer.accumulator = None
    assert not torch.equal(out, unlimited(x))
    # The gradient is that of an exact sum.
    found, x.grad = x.grad, None
    unlimited(x).sum().backward()
    assert found is not None
    assert x.grad is not None
    assert torch.equal(found, x.grad)


@everywhere
@pytest.mark.parametrize("register", ["saturate:bits=10", "wrap:bits=10"])
@pytest.mark.parametrize("groups", [2, 4])
def test_a_convolution_adds_in_the_order_of_the_weight(
    variant: Variant, register: str, groups: int
) -> None:
    table, C = random_table(True, -300, 300), 4 // groups
    conv = TableConv2d(4, 8, 3, padding=1, groups=groups, table=table, accumulator=register,
                       impl=variant.impl)  # fmt: skip
    conv.to(variant.device)
    x = torch.randn(2, 4, 5, 6, device=variant.device)
    out = conv(x)
    assert conv.bias is not None
    for group in range(groups):
        rows = nn.functional.unfold(x[:, C * group : C * group + C], 3, padding=1).mT
        linear = TableLinear(9 * C, 8, table=table, accumulator=register, impl=variant.impl)
        linear.to(variant.device)
        linear.weight.data, linear.bias.data = conv.weight.data.flatten(1), conv.bias.data
        linear.quantizer.load_state_dict(conv.quantizer.state_dict())
        mine = slice(2 * C * group, 2 * C * (group + 1))
        expected = linear.eval()(rows).mT.unflatten(2, (5, 6))[:, mine]
        torch.testing.assert_close(out[:, mine], expected)


@everywhere
@signs
@pytest.mark.parametrize(("p", "q"), [(2, 2), (3, 8), (8, 4), (7, 7)])
def test_tables_of_fewer_bits_are_looked_up_by_the_lowest_ones(
    variant: Variant, signed: bool, p: int, q: int
) -> None:
    table = narrow(p, q, signed)
    assert table.bits == (p, q)
    a, b = operands(table, 2, 9, 40), operands(table, 2, 40, 11)  # of all bytes
    rows, columns = a.numpy().astype(int) % (1 << p), b.numpy().astype(int) % (1 << q)
    products = table.products.cpu().numpy()[rows[:, :, :, None], columns[:, None]]
    assert (product(a, b, table, variant).numpy() == products.sum(2)).all()


@everywhere
@pytest.mark.parametrize(
    ("least", "most"), [(-(2**15), 2**15 - 1), (0, 2**16 - 1), (-1, 2**15), (-(2**20), 2**20)]
)
@pytest.mark.parametrize(
    ("B", "M", "K", "N"), [(3, 130, 33, 65), (1, 257, 100, 129), (2, 9, 1, 64)]
)
def test_large_products_of_tables_of_every_width(
    variant: Variant, least: int, most: int, B: int, M: int, K: int, N: int
) -> None:
    table = random_table(False, least, most)
    a, b = operands(table, B, M, K), operands(table, B, N, K).mT
    assert torch.equal(product(a, b, table, variant), looked_up(a, b, table))


# opcheck looks at the gradients of views among its inputs.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@everywhere
def test_torch_library_finds_no_fault(variant: Variant, tmp_path: Path) -> None:
    table = random_table(True)
    ops, device = OPS[variant.impl], torch.device(variant.device)
    a, b = (operands(table, *shape).to(device) for shape in ((2, 3, 4), (2, 4, 5)))
    products, slopes = table.on(device), torch.randn(256, 256, device=device)
    torch.library.opcheck(ops.table_matmul.overload, (a, b, products))
    torch.library.opcheck(ops.table_matmul.overload, (a, b, products, -9, 90))
    source = tmp_path / "mul12s.c"
    source.write_text("int32_t mul12s(int16_t a, int16_t b) { return a * b; }")
    code = multiplier(source).code  # pyright: ignore[reportAttributeAccessIssue]
    given = a.int(), b.int(), None, code, True
    torch.library.opcheck(ops.function_matmul.overload, (*given, "wrap:bits=9"))
    torch.library.opcheck(ops.function_multiply.overload, (given[0], given[0] + 1, code))
    grad = torch.randn(2, 3, 5, device=device)
    a, b = (t.view(torch.uint8) for t in (a, b))
    torch.library.opcheck(ops.table_derivative.overload, (grad, a, b, slopes))
    grid = torch.tensor(0.25, device=device), torch.tensor(3, dtype=torch.int32, device=device)
    image, filters = (operands(table, *shape).to(device) for shape in ((2, 3, 5, 6), (6, 1, 3, 2)))
    depthwise = image, filters, products, [1, 2], [1, 0], [1, 1], True
    torch.library.opcheck(ops.table_depthwise.overload, depthwise)
    torch.library.opcheck(ops.table_depthwise.overload, (*depthwise, -9, 90, True, *grid, *grid))
    torch.library.opcheck(ops.windows.overload, (image, grid[1], [3, 2], [1, 2], [1, 0], [1, 1], 3))
    for is_byte in (True, False):
        real = torch.randint(-20, 20, (3, 4), device=device) * 0.25
        torch.library.opcheck(ops.integers.overload, (real, *grid, is_byte))
    sums = torch.arange(2 * 6 * 3, device=device).view(2, 6, 3)
    totals = sums, sums[..., 0].contiguous(), sums[:, 0].contiguous(), *grid, *grid, 9, 2
    torch.library.opcheck(ops.integer_total.overload, totals)
    left, right, x, weight = (
        (torch.randint(-20, 20, shape, device=device) * 0.25).requires_grad_()
        for shape in ((2, 3, 4), (2, 4, 5), (2, 4, 5, 6), (6, 2, 3, 3))
    )
    windows = [1, 2], [1, 0], [1, 1], 2
    for of, *terms in (
        (products, None, None, None), (products, None, slopes[:1], slopes[:2]),
        (products, None, slopes, None), (None, code, None, None),
    ):  # fmt: skip
        grids = *grid, *grid, of, *terms, True, "saturate:bits=9"
        torch.library.opcheck(ops.integer_conv2d.overload, (x, weight, *grids, *windows))
        torch.library.opcheck(ops.integer_product.overload, (left, right, *grids))


def test_layers_name_the_operator_that_they_dispatch(monkeypatch: pytest.MonkeyPatch) -> None:
    dispatched = []

    def record(operator: str, impl: str, device_type: str) -> str:
        dispatched.append(operator)
        return resolve(operator, impl, device_type)

    monkeypatch.setattr(quantization, "resolve", record)
    table = exact(True)
    for layer, shape in ((TableConv2d(2, 3, 1, table=table), (1, 2, 4, 4)),
                         (TableLinear(2, 3, table=table), (1, 2))):  # fmt: skip
        layer(torch.randn(shape))
        assert dispatched.pop() == layer.operator.name


def test_wrong_operands_are_refused_by_name() -> None:
    table = exact(True)
    a, b = operands(table, 1, 2, 3), operands(table, 1, 3, 2)
    with pytest.raises(
        TypeError, match=r"^a: expected torch\.int8 for a signed table, got torch.u"
    ):
        table_matmul(a.view(torch.uint8), b, table)
    with pytest.raises(TypeError, match=r"^b: expected torch\.uint8 for an unsigned table, got"):
        table_matmul(a.view(torch.uint8), b, exact(False))
    with pytest.raises(ValueError, match=r"^b: expected \(B, K, N\) for a of shape"):
        table_matmul(a, a, table)
    huge = LookupTable(np.full((256, 256), 2**30), signed=True)
    with pytest.raises(ValueError, match=r"^a: a sum of 3 products of up to 1073741824 could"):
        table_matmul(a, b, huge)


@everywhere
def test_tables_of_any_layout_are_read(variant: Variant, tmp_path: Path) -> None:
    table = random_table(True)
    a, b = (torch.randint(-128, 128, shape, dtype=torch.int8, device=variant.device)
            for shape in ((1, 3, 5), (1, 5, 4)))  # fmt: skip
    expected = table_matmul(a, b, table, impl=variant.impl)
    products = table.products.cpu().numpy()
    every_other = products.repeat(2, 1)[:, ::2]
    for array in (np.asfortranarray(products), products.astype(">i4"), every_other):
        np.save(tmp_path / "table.npy", array)
        read = LookupTable.load(tmp_path / "table.npy", signed=True)
        for one in (read, LookupTable(array, signed=True)):
            assert torch.equal(table_matmul(a, b, one, impl=variant.impl), expected)
