"""Look-up tables of integers: files, exact sums, quantised layers."""

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
from torch.utils.checkpoint import checkpoint

from hoconv.approx import (
    LookupTable,
    Observer,
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

everywhere = pytest.mark.parametrize("variant", variants([MATMUL]), indirect=True)
signs = pytest.mark.parametrize("signed", [True, False])


def integers(signed: bool) -> np.ndarray:
    """All 8-bit integers, in the order of their bytes."""
    return np.arange(256).astype(np.uint8).astype(np.int8 if signed else np.uint8).astype(np.int64)


def exact(signed: bool) -> LookupTable:
    values = integers(signed)
    return LookupTable(values[:, None] * values, signed=signed)


def random_table(signed: bool, least: int = -(2**15), most: int = 2**15 - 1) -> LookupTable:
    products = np.random.default_rng(0).integers(least, most + 1, (256, 256))
    products.flat[[0, -1]] = least, most
    return LookupTable(products, signed=signed)


def narrow(p: int, q: int, signed: bool) -> LookupTable:
    """A random table of operands of p and q bits."""
    products = np.random.default_rng(p * q).integers(-(2**15), 2**15, (1 << p, 1 << q))
    return LookupTable(products, signed=signed)


def operands(table: LookupTable, *shape: int) -> Tensor:
    return torch.randint(0, 256, shape).to(torch.uint8).view(table.dtype)


# Files


@signs
@pytest.mark.parametrize("shape", [(256, 256), (65536,)])
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_reads_npy_files(tmp_path: Path, signed: bool, shape: Any, dtype: Any) -> None:
    table = random_table(signed)
    np.save(tmp_path / "table.npy", table.products.numpy().reshape(shape).astype(dtype))
    read = LookupTable.load(tmp_path / "table.npy", signed=signed)
    assert torch.equal(read.products, table.products)
    assert read.signed == signed


@signs
@pytest.mark.parametrize("width", [2, 4])
def test_reads_raw_files(tmp_path: Path, signed: bool, width: int) -> None:
    products = exact(signed).products.numpy()
    kind = "i" if signed or width == 4 else "u"
    (tmp_path / "table.bin").write_bytes(products.astype(f"<{kind}{width}").tobytes())
    read = LookupTable.load(tmp_path / "table.bin", signed=signed)
    assert torch.equal(read.products, torch.from_numpy(products))


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


def header(shape: str, dtype: str = "'<i2'") -> bytes:
    text = f"{{'descr': {dtype}, 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text


@pytest.mark.parametrize(
    "contents",
    [
        header("(256, 256)") + bytes(1000),
        header("(1000000, 1000000, 1000)") + bytes(1000),
        header("(9223372036854775807, 3)"),
        header("(-256, -256)") + bytes(131072),
        header("(256, 256)", "'|O'") + bytes(1000),
        header("(256, 256)", "[('a', '<i2')]") + bytes(1000),
        header("(256, 256") + bytes(1000),
        header("(256, 'a')") + bytes(1000),
        header("256") + bytes(1000),
        header("()"),
        header("(0, 256)"),
        b"\x93NUMPY\x01\x00\xff",
        b"\x93NUMPY\x09\x00\xff\xff",
        b"PK\x03\x04" + bytes(100),
        b"",
    ],
)
def test_absurd_headers_are_refused(tmp_path: Path, contents: bytes) -> None:
    path = tmp_path / "table.npy"
    path.write_bytes(contents)
    with pytest.raises(ValueError, match=r"table\.npy: "):
        LookupTable.load(path, signed=True)


@pytest.mark.parametrize("training", [True, False])
def test_layers_on_meta_tell_shapes_and_leave_the_table_alone(training: bool) -> None:
    table = random_table(False)
    for layer, shape, expected in (
        (TableLinear(4, 5, table=table, device="meta"), (3, 4), (3, 5)),
        (TableConv2d(4, 5, 3, table=table, device="meta"), (2, 4, 6, 6), (2, 5, 4, 4)),
    ):
        x = torch.empty(shape, device="meta", requires_grad=True)
        out = layer.train(training)(x)
        out.sum().backward()
        assert (out.device.type, out.shape, out.dtype) == ("meta", expected, torch.float32)
        assert x.grad is not None
        assert x.grad.shape == shape
    assert table.products.device.type == "cpu"


def test_malformed_files_are_refused_with_what_they_are(tmp_path: Path) -> None:
    path = tmp_path / "table.bin"
    path.write_bytes(bytes(1000))
    with pytest.raises(ValueError, match=r"table\.bin: expected 2\^p rows .*; it has 1,000$"):
        LookupTable.load(path, signed=True)
    path = tmp_path / "table.npy"
    path.write_bytes(b"no numpy file")
    with pytest.raises(ValueError, match=r"table\.npy: not a readable \.npy file"):
        LookupTable.load(path, signed=True)
    for array, message in (
        (np.zeros((512, 512), int), r"expected shape \(2\^p, 2\^q\) .*, got \(512, 512\)"),
        (np.zeros((256, 256)), "expected integers, got float64"),
        (np.full((256, 256), 2**31), "expected numbers that fit int32, got 2147483648"),
    ):
        np.save(path, array)
        with pytest.raises(ValueError, match=rf"table\.npy: products: {message}"):
            LookupTable.load(path, signed=True)
    np.save(path, np.array([{}]), allow_pickle=True)
    with pytest.raises(ValueError, match=r"table\.npy: not a readable"):
        LookupTable.load(path, signed=True)
    with pytest.raises(FileNotFoundError):
        LookupTable.load(tmp_path / "missing.npy", signed=True)


# Matrix products


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


# Layers


@everywhere
@signs
@pytest.mark.parametrize(
    "options", [{}, {"stride": 2, "padding": 1, "groups": 2}, {"groups": 4, "dilation": (2, 1)}]
)
def test_convolution_with_the_exact_table_multiplies_quantised_numbers(
    variant: Variant, signed: bool, options: Any
) -> None:
    table = exact(signed)
    layer = TableConv2d(4, 8, 3, table=table, observer="minmax", impl=variant.impl, **options)
    layer.to(variant.device)
    x = torch.randn(2, 4, 9, 8, device=variant.device).requires_grad_()
    out = layer(x)
    x_grid, weight, (scale, zero), _ = layer.quantizer(x, layer.weight)
    assert torch.equal(x_grid, ((x / scale).round() + zero - zero) * scale)
    expected = nn.functional.conv2d(
        x_grid, weight, layer.bias, layer.stride, layer.padding, layer.dilation, layer.groups
    )  # pyright: ignore
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    grad = torch.randn_like(out)
    got = torch.autograd.grad(out, (x, layer.weight), grad)
    wanted = torch.autograd.grad(expected, (x, layer.weight), grad)
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    # 8 bits are close to the real thing.
    real = nn.functional.conv2d(
        x, layer.weight, layer.bias, layer.stride, layer.padding, layer.dilation, layer.groups
    )  # pyright: ignore
    assert (out - real).norm() < 0.03 * real.norm()


@everywhere
@signs
@pytest.mark.parametrize("bits", [(2, 2), (4, 4), (8, 3), (5, 8)])
def test_layers_quantise_the_input_and_the_weight_to_the_bits_of_the_table(
    variant: Variant, signed: bool, bits: tuple[int, int]
) -> None:
    values = [np.arange(1 << n) for n in bits]
    if signed:
        values = [np.where(v < len(v) // 2, v, v - len(v)) for v in values]
    table = LookupTable(np.multiply.outer(*values), signed=signed)
    layer = TableLinear(6, 5, table=table, observer="minmax", impl=variant.impl).to(variant.device)
    x = torch.randn(50, 6, device=variant.device)
    out = layer(x)
    x_grid, weight, *_ = layer.eval().quantizer(x, layer.weight)
    for real, grid, n in ((x, x_grid, bits[0]), (layer.weight, weight, bits[1])):
        step = (real.max() - real.min()) / ((1 << n) - 1)
        assert len(grid.unique()) <= 1 << n
        assert (real - grid).abs().max() <= 1.01 * step  # half of it by rounding; the zero point
    expected = nn.functional.linear(x_grid, weight, layer.bias)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


@everywhere
@signs
@pytest.mark.parametrize("shape", [(5,), (3, 5), (2, 3, 5), (0, 5)])
def test_linear_with_the_exact_table_multiplies_quantised_numbers(
    variant: Variant, signed: bool, shape: Any
) -> None:
    layer = TableLinear(5, 4, table=exact(signed), impl=variant.impl).to(variant.device)
    layer(torch.randn(20, 5, device=variant.device))  # it knows a range
    x = torch.randn(shape, device=variant.device)
    x_grid, weight, *_ = layer.eval().quantizer(x, layer.weight)
    expected = nn.functional.linear(x_grid, weight, layer.bias)
    torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-5)


@everywhere
@signs
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("options", [{}, {"stride": 2, "padding": 1, "groups": 2}])
def test_a_weight_may_have_a_scale_for_each_channel(
    variant: Variant, signed: bool, bits: int, options: Any
) -> None:
    values = np.arange(256)[:, None], np.arange(1 << bits)
    if signed:
        values = [np.where(v < v.size // 2, v, v - v.size) for v in values]
    a, b = values
    products = a * b + (a ^ b) % 3  # no exact ones
    table = LookupTable(products, signed=signed)
    layer = TableConv2d(4, 6, 3, table=table, observer="minmax", weight_scales="channel",
                        bias=False, impl=variant.impl, **options).to(variant.device)  # fmt: skip
    with torch.no_grad():
        layer.weight *= torch.tensor([1e-3, 1, 7, 0, 0.3, 50], device=variant.device).view(
            6, 1, 1, 1
        )
    x = torch.randn(2, 4, 7, 6, device=variant.device).requires_grad_()
    out = layer(x)

    # The definition, of integers in float64.
    lowest = -(1 << bits - 1) if signed else 0
    zero = lowest + (1 << bits - 1)
    w = layer.weight.detach()
    scale = w.abs().amax((1, 2, 3), keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    scale = scale / ((1 << bits - 1) - 1)
    qw = ((w / scale).round() + zero).clamp(lowest, lowest + (1 << bits) - 1)
    least, most = (x.detach().min().clamp(max=0), x.detach().max().clamp(min=0))
    of_x = (most - least) / 255
    first = -128 if signed else 0
    zero_x = (first - least / of_x).round().clamp(first, first + 255)
    qx = ((x.detach() / of_x).round() + zero_x).clamp(first, first + 255)
    o = {"stride": 1, "padding": 0, "groups": 1} | options
    p, G = o["padding"], o["groups"]
    padded = nn.functional.pad(qx, (p, p, p, p), value=zero_x.item())
    windows = padded.unfold(2, 3, o["stride"]).unfold(3, 3, o["stride"])
    windows = windows.reshape(2, G, 4 // G, *windows.shape[2:])[:, :, None]
    kernels = qw.view(1, G, 6 // G, 4 // G, 1, 1, 3, 3)
    look_up = torch.tensor(products, device=x.device, dtype=torch.float64)
    found = look_up[windows.long() % 256, kernels.long() % (1 << bits)]
    terms = found - zero * windows - zero_x * kernels + zero_x * zero
    exact = terms.double().sum((3, 6, 7)).flatten(1, 2) * (of_x * scale.view(-1, 1, 1)).double()
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-6)

    # The gradient is that of the product of the quantised numbers.
    x_grid, w_grid, *_ = layer.eval().quantizer(x, layer.weight)
    torch.testing.assert_close(w_grid, (qw - zero) * scale)
    straight = nn.functional.conv2d(
        x_grid, w_grid, None, layer.stride, layer.padding, layer.dilation, layer.groups
    )  # pyright: ignore
    grad = torch.randn_like(out)
    got = torch.autograd.grad(out, (x, layer.weight), grad)
    wanted = torch.autograd.grad(straight, (x, layer.weight), grad)
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4 * float(other.abs().max()))


def test_scales_of_a_weight_are_of_the_tensor_or_of_channels() -> None:
    with pytest.raises(ValueError, match=r"^weight_scales: expected 'tensor' or 'channel', got 8"):
        TableLinear(2, 1, table=exact(True), weight_scales=8)  # pyright: ignore
    layer = TableLinear(5, 3, table=exact(True), weight_scales="channel")
    x = torch.randn(7, 5)
    out = layer(x)
    x_grid, weight, *_ = layer.eval().quantizer(x, layer.weight)
    largest = layer.weight.abs().amax(1)
    assert torch.equal(weight.abs().amax(1), largest)
    expected = nn.functional.linear(x_grid, weight, layer.bias)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(copy.deepcopy(layer)(x), layer(x))


def test_products_are_the_tables_first_operand_the_input() -> None:
    products = np.zeros((256, 256), int)
    products[255, :] = 1000  # the largest input
    layer = TableLinear(1, 1, table=LookupTable(products, signed=False), bias=False)
    layer.weight.data.fill_(1.0)
    x = torch.tensor([[1.0], [0.0]])
    scale = (1 / 255) ** 2
    assert layer(x).flatten().tolist() == pytest.approx([1000 * scale, 0.0])


def test_observers_follow_what_they_see_in_training() -> None:
    batches = [torch.tensor([-1.0, 2.0]), torch.tensor([-3.0, 1.0])]
    minmax, average = Observer("minmax"), Observer("moving_average", 0.25)
    for batch in batches:
        minmax(batch)
        average(batch)
    assert (minmax.least.item(), minmax.most.item()) == (-3.0, 2.0)
    assert (average.least.item(), average.most.item()) == (-1.5, 1.75)
    layer = TableLinear(2, 1, table=exact(True), observer="minmax")
    for batch in batches:
        layer(batch)
    assert layer.quantizer.input.least == -3
    layer.eval()(torch.tensor([-9.0, 9.0]))
    assert layer.quantizer.input.least == -3
    other = TableLinear(2, 1, table=exact(True))
    other.load_state_dict(layer.state_dict())
    x = torch.randn(4, 2)
    assert torch.equal(other.eval()(x), layer(x))
    assert torch.equal(copy.deepcopy(layer)(x), layer(x))


def test_evaluation_without_a_known_range_is_refused() -> None:
    layer = TableLinear(2, 1, table=exact(True)).eval()
    with pytest.raises(RuntimeError, match=r"^input: its range is not known: in training mode"):
        layer(torch.zeros(1, 2))


@pytest.mark.parametrize("observer", ["minmax", "moving_average"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_batch_that_is_not_finite_does_not_change_the_range(observer: Any, value: float) -> None:
    layer = TableLinear(2, 1, table=exact(True), observer=observer)
    x = torch.randn(4, 2)
    layer(x)
    expected = layer.eval()(x)
    assert layer.train()(x.masked_fill(x == x.max(), value)).isfinite().all()
    assert torch.equal(layer.eval()(x), expected)


@pytest.mark.parametrize("gradient", ["ste", "difference"])
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activations_may_be_computed_again(gradient: str, use_reentrant: bool) -> None:
    layer = TableLinear(4, 3, table=random_table(True), gradient=gradient)
    x = torch.randn(5, 4, requires_grad=True)
    layer(x)
    layer.eval()
    expected = torch.autograd.grad(layer(x).sum(), x)[0]
    out: Any = checkpoint(layer, x, use_reentrant=use_reentrant)
    out.sum().backward()
    torch.testing.assert_close(x.grad, expected)


def layers(variant: Variant) -> list[tuple[nn.Module, Tensor]]:
    """Each layer, in evaluation, and an input of it."""
    table = random_table(True)
    tables = torch.randn(256), torch.randn(256, 256)
    by_u_and_v = torch.outer(*torch.randn(2, 256))
    made = []
    for layer, shape in (
        (TableLinear(5, 4, table=table, impl=variant.impl), (3, 5)),
        (TableConv2d(4, 6, 3, table=table, impl=variant.impl, padding=1, groups=2), (2, 4, 5, 6)),
        (TableLinear(5, 4, table=table, impl=variant.impl, gradient=tables), (3, 5)),
        (TableConv2d(2, 3, 3, table=table, impl=variant.impl, gradient=(by_u_and_v, "difference"),
                     padding=1), (2, 2, 5, 6)),
        (TableLinear(5, 4, table=table, impl=variant.impl, learn_scales=True), (3, 5)),
        (TableConv2d(4, 6, 3, table=table, impl=variant.impl, learn_scales=True, padding=1,
                     weight_scales="channel", gradient="difference"), (2, 4, 5, 6)),
        (TableConv2d(4, 8, 3, table=table, impl=variant.impl, stride=2, groups=4), (2, 4, 5, 6)),
    ):  # fmt: skip
        layer, x = layer.to(variant.device), torch.randn(shape, device=variant.device)
        layer(x)
        made.append((layer.eval(), x))
    return made


def gradients(layer: Any, x: Tensor) -> list[Tensor]:
    leaves = [x.clone().requires_grad_(), *layer.parameters()]
    return list(torch.autograd.grad(layer(leaves[0]).square().sum(), leaves))


@everywhere
def test_programs_of_layers_compute_and_learn_as_the_layers_do(
    variant: Variant, tmp_path: Path
) -> None:
    torch.compiler.reset()  # the same code is compiled again a few times only
    for layer, x in layers(variant):
        exported = torch.export.export(layer, (x,))
        torch.export.save(exported, tmp_path / "layer.pt2")
        for program in (
            exported.module(),
            torch.export.load(tmp_path / "layer.pt2").module(),
            torch.compile(layer, backend="aot_eager", fullgraph=True),
        ):
            assert torch.equal(program(x), layer(x))
            for got, wanted in zip(gradients(program, x), gradients(layer, x), strict=True):
                torch.testing.assert_close(got, wanted)


@everywhere
@pytest.mark.parametrize(
    "options", [{}, {"weight_scales": "channel"}, {"learn_scales": True, "observer": "mse"}]
)
def test_one_compiled_program_takes_batches_of_any_size(
    variant: Variant, options: dict[str, Any]
) -> None:
    torch.compiler.reset()
    layer = TableLinear(6, 4, table=exact(True), impl=variant.impl, **options).to(variant.device)
    layer(torch.randn(3, 6, device=variant.device))
    program = torch.compile(layer.eval(), backend="aot_eager", fullgraph=True)
    for size in (3, 5, 8, 1):
        x = 3 * torch.randn(size, 6, device=variant.device)  # some numbers are out of range
        assert torch.equal(program(x), layer(x))
        for got, wanted in zip(gradients(program, x), gradients(layer, x), strict=True):
            torch.testing.assert_close(got, wanted)


@everywhere
def test_programs_of_layers_with_no_range_are_refused(variant: Variant) -> None:
    if variant.device == "cuda":
        pytest.skip("there a failed assertion ends every later use of the device")
    torch.compiler.reset()
    layer, x = TableLinear(2, 1, table=exact(True), impl=variant.impl).eval(), torch.zeros(3, 2)
    program = torch.export.export(layer, (x,)).module()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for call in (program, compiled):
        with pytest.raises(RuntimeError, match="input: its range is not known: in training mode"):
            call(x)


@everywhere
@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
def test_transforms_of_layers_are_their_gradients(variant: Variant) -> None:
    for layer, x in layers(variant):
        expected = gradients(layer, x)
        parameters = {name: p.detach() for name, p in layer.named_parameters()}

        def loss(x: Tensor, parameters: Any, layer: nn.Module = layer) -> Tensor:
            return torch.func.functional_call(layer, parameters, (x,)).square().sum()

        got, of_parameters = torch.func.grad(loss, (0, 1))(x, parameters)
        for one, other in zip((got, *of_parameters.values()), expected, strict=True):
            # The same sums in another order.
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
        got = torch.func.vmap(torch.func.grad(loss), (0, None))(x[:, None], parameters)
        torch.testing.assert_close(got[:, 0], expected[0])
        torch.testing.assert_close(torch.func.vmap(layer)(x[:, None])[:, 0], layer(x))


@everywhere
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # by PyTorch itself
def test_transforms_that_layers_do_not_have_are_refused(variant: Variant) -> None:
    for layer, x in layers(variant):
        with pytest.raises(NotImplementedError, match="use reverse mode: backward"):
            torch.func.jvp(layer, (x,), (x,))
        layer.train()
        for transform, argument in ((torch.func.vmap, x[None]), (torch.func.grad, x)):
            with pytest.raises(NotImplementedError, match=r"^input: .* after layer\.eval\(\)$"):
                transform(lambda x, layer=layer: layer(x).sum())(argument)


@everywhere
@pytest.mark.parametrize("shape", [(0, 5), (2, 0, 5)])
def test_no_rows_have_a_gradient(variant: Variant, shape: tuple[int, ...]) -> None:
    layer, _ = layers(variant)[0]
    x = torch.ones(shape, device=variant.device, requires_grad=True)
    (gradient,) = torch.autograd.grad(layer.requires_grad_(False)(x).sum(), x)
    assert gradient.shape == shape


def test_a_layer_of_sums_that_could_overflow_is_refused() -> None:
    layer = TableLinear(3, 1, table=LookupTable(np.full((256, 256), 2**30), signed=True))
    with pytest.raises(ValueError, match=r"^input: a sum of 3 products of up to 1073741824 could"):
        layer(torch.ones(1, 3))


def test_numbers_outside_the_range_get_no_gradient() -> None:
    layer = TableLinear(1, 1, table=exact(True), observer="minmax")
    layer(torch.tensor([[-1.0], [1.0]]))
    x = torch.tensor([[0.5], [3.0]]).requires_grad_()
    layer.eval()(x).sum().backward()
    assert x.grad is not None
    assert x.grad[0].abs() > 0
    assert x.grad[1] == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"observer": "mean"},
            "observer: expected 'minmax', .* or 'mse', got 'mean'",
        ),
        ({"learn_scales": "no"}, "learn_scales: expected True or False, got 'no'"),
        ({"momentum": 0.0}, "momentum: expected more than 0, up to 1; got 0.0"),
        ({"impl": "fast"}, "impl: expected one of auto, .*; got 'fast' for approx_matmul"),
    ],
)
def test_wrong_option_is_refused_by_name(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        TableLinear(1, 1, table=exact(True), **options)


def test_learns_through_a_table() -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 1, 6, 6)
    labels = (x[:, 0, :3].sum((1, 2)) > x[:, 0, 3:].sum((1, 2))).long()
    table = exact(True)
    network = nn.Sequential(
        TableConv2d(1, 4, 3, table=table), nn.ReLU(), nn.Flatten(), TableLinear(64, 2, table=table)
    )
    optimizer = torch.optim.Adam(network.parameters(), 0.01)
    losses = []
    for _ in range(60):
        loss = nn.functional.cross_entropy(network(x), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]
