"""Gradients of layers with multipliers of integers: differences, and tables of derivatives."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hoconv import ApproxConv2d, ApproxLinear, approx
from hoconv.ops.approx.operator import MATMUL
from hoconv.tools.testing.variants import Variant, variants

everywhere = pytest.mark.parametrize("variant", variants([MATMUL]), indirect=True)
Bits = tuple[int, int]
WAYS = (
    "ste",
    "difference",
    "difference:window=3",
    "one-dimensional",
    "rank one",
    "two-dimensional",
)


def random_table(random: Any, bits: Bits, signed: bool) -> approx.LookupTable:
    products = random.integers(-(2**15), 2**15, [1 << n for n in bits])
    return approx.LookupTable(products, signed=signed)


def values(bits: int, signed: bool) -> list[int]:
    """All integers, the least first."""
    low = -(1 << bits >> 1) if signed else 0
    return list(range(low, low + (1 << bits)))


def slopes(table: approx.LookupTable, operand: int, window: int) -> np.ndarray:
    """The differences with respect to an operand, product by product."""
    products, sizes = table.products.numpy(), table.products.shape
    found = np.zeros(sizes)
    own, others = (values(table.bits[i], table.signed) for i in (operand, 1 - operand))
    for i, number in enumerate(own):
        first, last = own[max(i - window, 0)], own[min(i + window, len(own) - 1)]
        for other in others:
            at = [(n, other)[::-1] if operand else (n, other) for n in (number, first, last)]
            here, before, after = [(a % sizes[0], b % sizes[1]) for a, b in at]
            found[here] = (int(products[after]) - int(products[before])) / (last - first)
    return found


def draw(random: Any, way: str, table: approx.LookupTable, operand: int) -> tuple[Any, np.ndarray]:
    """A gradient as a user gives it, and its derivative of every pair."""
    shape = table.products.shape
    if way.startswith("difference"):
        return way, slopes(table, operand, 3 if way.endswith("=3") else 16)
    if way == "ste":
        other = np.asarray(values(table.bits[1 - operand], table.signed))
        by_index = other[np.argsort(other % len(other))]
    else:
        by_index = random.standard_normal(shape[1 - operand]).astype(np.float32)
    wide = np.broadcast_to(by_index[:, None] if operand else by_index, shape)
    if way == "ste":
        return way, wide
    if way == "one-dimensional":
        return torch.from_numpy(by_index), wide
    if way == "rank one":
        wide = np.multiply.outer(*(random.standard_normal(n) for n in shape))
    else:
        wide = random.standard_normal(shape)
    return wide, wide


@torch.no_grad()
def expected(
    grad: Tensor, layer: Any, x: Tensor, derivatives: Any, windows: Callable[[Tensor], Tensor]
) -> list[np.ndarray]:
    """The gradients of quantised operands: sums of derivatives, one after the other.

    `windows` gathers what is multiplied by each filter: (filters, rows, K), from numbers in x's
    place; `grad` is (filters, rows).
    """
    on_x, weight, (scale_x, zero_x), (scale_w, zero_w) = layer.quantizer(x, layer.weight)
    q_x = ((on_x / scale_x).round() + zero_x).double()
    where = windows(
        torch.arange(1, 1 + x.numel(), device=x.device).reshape(x.shape).double()
    ).long()
    flat = torch.cat([zero_x.reshape(1).double(), q_x.flatten()])  # 0 is the padding
    left = flat[where].cpu().numpy().astype(int)
    right = ((weight / scale_w).round() + zero_w).flatten(1).cpu().numpy().astype(int)
    rows, across = layer.multiplier.products.shape
    d_x, d_weight = np.zeros(1 + x.numel()), np.zeros(right.shape)
    sx, zx, sw, zw = (t.item() for t in (scale_x, zero_x, scale_w, zero_w))
    for o, (filter_, of_filter) in enumerate(zip(right, grad.cpu().double().numpy(), strict=True)):
        at = left[o] % rows, np.broadcast_to(filter_ % across, left[o].shape)
        np.add.at(d_x, where[o].cpu().numpy(), sw * (derivatives[0][at] - zw) * of_filter[:, None])
        d_weight[o] = (sx * (derivatives[1][at] - zx) * of_filter[:, None]).sum(0)
    return [d_x[1:].reshape(x.shape), d_weight.reshape(layer.weight.shape)]


def compare(layer: Any, x: Tensor, derivatives: Any, windows: Any) -> None:
    layer(x)  # it knows a range, which holds all of x
    layer.eval()
    x = x.clone().requires_grad_()
    out = layer(x)
    grad = torch.randn_like(out)
    found = torch.autograd.grad(out, (x, layer.weight), grad)
    by_filter = grad.movedim(-3 if x.dim() == 4 else -1, 0).flatten(1)
    wanted = expected(by_filter, layer, x, derivatives, windows)
    for got, exact in zip(found, wanted, strict=True):
        scale = max(1e-30, float(np.abs(exact).max(initial=0)))
        np.testing.assert_allclose(got.cpu().numpy(), exact, rtol=1e-4, atol=2e-5 * scale)


@everywhere
@settings(max_examples=40, deadline=None)
@given(
    bits=st.tuples(st.integers(2, 8), st.integers(2, 8)),
    signed=st.booleans(),
    ways=st.tuples(st.sampled_from(WAYS), st.sampled_from(WAYS)),
    sizes=st.tuples(st.integers(0, 9), st.integers(1, 20), st.integers(1, 12)),
    seed=st.integers(0, 2**31),
)
def test_gradients_of_a_linear_layer_are_sums_of_derivatives(
    variant: Variant, bits: Bits, signed: bool, ways: Any, sizes: Any, seed: int
) -> None:
    random, (M, K, N) = np.random.default_rng(seed), sizes
    torch.manual_seed(seed)
    table = random_table(random, bits, signed)
    gradient, derivatives = zip(*(draw(random, ways[i], table, i) for i in range(2)), strict=True)
    layer = ApproxLinear(K, N, multiplier=table, gradient=gradient, impl=variant.impl)
    layer.to(variant.device)(torch.tensor([[-4.0], [5.0]], device=variant.device).expand(2, K))
    x = torch.randn(M, K, device=variant.device)
    compare(layer, x, derivatives, lambda t: t.expand(N, M, K))


@everywhere
@pytest.mark.parametrize("ways", [*((way, way) for way in WAYS), ("ste", "two-dimensional")])
@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize(
    "options",
    [{}, {"stride": 2, "padding": (2, 1), "dilation": (1, 2)}, {"groups": 2, "padding": 1}],
)
def test_gradients_of_a_convolution_are_sums_of_derivatives(
    variant: Variant, ways: Any, signed: bool, options: Any
) -> None:
    random = np.random.default_rng(0)
    table = random_table(random, (6, 5), signed)
    gradient, derivatives = zip(*(draw(random, ways[i], table, i) for i in range(2)), strict=True)
    layer = ApproxConv2d(4, 6, 3, multiplier=table, gradient=gradient, impl=variant.impl, **options)
    layer.to(variant.device)

    def windows(t: Tensor) -> Tensor:
        geometry: Any = layer.dilation, layer.padding, layer.stride
        found = torch.nn.functional.unfold(t, 3, *geometry)
        found = found.unflatten(1, (layer.groups, -1)).permute(1, 0, 3, 2).flatten(1, 2)
        return found.repeat_interleave(6 // layer.groups, 0)

    compare(layer, torch.randn(2, 4, 7, 6, device=variant.device), derivatives, windows)


@everywhere
@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("window", [1, 5, 255])
def test_differences_of_exact_products_are_straight_through(
    variant: Variant, signed: bool, window: int
) -> None:
    table = approx.multiplier(torch.mul, bits=(8, 5), signed=signed)
    x = torch.randn(2, 3, 5, 4, device=variant.device)
    found = []
    for gradient in ("ste", f"difference:window={window}"):
        torch.manual_seed(0)
        layer = ApproxConv2d(3, 4, 3, padding=1, multiplier=table, gradient=gradient)
        leaf = x.clone().requires_grad_()
        out = layer.to(variant.device)(leaf)
        found.append(torch.autograd.grad(out.square().sum(), (leaf, layer.weight)))
    torch.testing.assert_close(*found)


class Ops(TorchDispatchMode):
    """Collects the names of the ops that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.name().split("::")[-1].partition(".")[0])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("product", "looked_up"),
    [
        (lambda a, b: (a >> 2 << 2) * (b >> 3), False),
        (lambda a, b: (a * b) >> 3 << 3, True),
    ],
)
def test_gradients_that_factorise_are_ordinary_products(product: Any, looked_up: bool) -> None:
    table = approx.multiplier(product, bits=6, signed=True)
    for layer, shape in (
        (ApproxLinear(4, 3, multiplier=table, gradient="difference:window=2"), (5, 4)),
        (ApproxConv2d(2, 3, 3, multiplier=table, gradient="difference:window=2"), (1, 2, 5, 5)),
    ):
        out = layer(torch.randn(shape, requires_grad=True))
        with Ops() as ops:
            out.sum().backward()
        assert ("approx_table_derivative" in ops.names) == looked_up
        assert bool(ops.names & {"bmm", "convolution_backward"}) != looked_up


def test_tables_are_read_from_files(tmp_path: Path) -> None:
    table = approx.multiplier(torch.mul, bits=(3, 4), signed=True)
    random = np.random.default_rng(0)
    arrays = random.standard_normal((8, 16)), random.standard_normal(8)
    np.save(tmp_path / "first.npy", arrays[0])
    np.save(tmp_path / "second.npy", arrays[1])
    np.savetxt(tmp_path / "first.csv", arrays[0], delimiter=", ")
    np.savetxt(tmp_path / "second.txt", arrays[1])
    x, found = torch.randn(6, 5), []
    layer = ApproxLinear(5, 4, multiplier=table)
    for gradient in (
        arrays,
        (tmp_path / "first.npy", str(tmp_path / "second.npy")),
        [str(tmp_path / "first.csv"), tmp_path / "second.txt"],
    ):
        layer.gradient = gradient
        leaf = x.clone().requires_grad_()
        found.append(torch.autograd.grad(layer(leaf).square().sum(), (leaf, layer.weight)))
    for others in found[1:]:
        torch.testing.assert_close(others, found[0])
    assert "first.csv" in repr(layer)


def test_a_gradient_may_become_another_and_is_copied_with_its_layer() -> None:
    table = approx.multiplier(lambda a, b: (a * b) >> 4 << 4, bits=5, signed=False)

    def gradient(layer: Any) -> Tensor:
        x = torch.linspace(0, 1, 5)[None].requires_grad_()
        return torch.autograd.grad(layer(x).sum(), x)[0]

    layer = ApproxLinear(5, 3, multiplier=table, gradient=("difference:window=2", torch.ones(32)))
    of_difference = gradient(layer)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(gradient(other), of_difference)
    layer.gradient = "ste"
    assert not torch.equal(gradient(layer), of_difference)
    layer.gradient = "difference:window=2"
    assert torch.equal(gradient(layer), of_difference)


def test_second_derivatives_are_refused() -> None:
    table = approx.multiplier(torch.mul, bits=5, signed=True)
    layer = ApproxLinear(3, 2, multiplier=table, gradient="difference")
    x = torch.randn(4, 3, requires_grad=True)
    (first,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="has no second derivative"):
        first.sum().backward()


@pytest.mark.parametrize(
    ("gradient", "error", "message"),
    [
        ("approx", ValueError, "expected 'ste', 'difference' or .* from 1 to 255, .*got 'approx'"),
        ("difference:window=0", ValueError, "expected .*; got 'difference:window=0'"),
        ("difference:width=4", ValueError, "expected .*; got 'difference:width=4'"),
        ("difference:window=256", ValueError, "expected .*; got 'difference:window=256'"),
        (("ste", "analytic"), ValueError, "expected .*; got 'analytic'"),
        (("ste",) * 3, ValueError, r"expected .*; got \('ste', 'ste', 'ste'\)"),
        (torch.zeros(8, 16), TypeError, "expected .* a pair .* and of tables, .*; got Tensor"),
        ((torch.zeros(9), "ste", 1), ValueError, r"expected .*; got \(Tensor, 'ste', 1\)$"),
        ((np.full(16, 1e300), "ste"), ValueError, "expected finite numbers; an array has others"),
        (("ste", 3), TypeError, "expected .*; got 3"),
        ((torch.zeros(16, 8), "ste"), ValueError,
         r"expected a table of shape \(8, 16\), or \(16,\) of the other operand alone, for the "
         r"first operand of LookupTable\(.*\); got \(16, 8\)$"),
        (("ste", np.zeros(16)), ValueError, r"expected .* or \(8,\) .* the second .*; got \(16,\)"),
        (("ste", np.zeros((16, 8))), ValueError, r"expected .* for the second .*; got \(16, 8\)"),
        ((np.full(16, np.nan), "ste"), ValueError, "expected finite numbers; an array has others"),
        ((np.zeros(16, bool), "ste"), TypeError, "expected a table of real numbers, got .*bool"),
        (("missing.npy", "ste"), ValueError, r".*missing\.npy cannot be read"),
        (([[1.0] * 16] * 9, "ste"), TypeError, r"expected .*; got list$"),
    ],
)  # fmt: skip
def test_what_is_no_gradient_of_integers_is_refused(
    gradient: Any, error: Any, message: str
) -> None:
    table = approx.multiplier(torch.mul, bits=(3, 4), signed=True)
    with pytest.raises(error, match=f"^gradient: {message}"):
        ApproxLinear(2, 2, multiplier=table, gradient=gradient)


@pytest.mark.parametrize("dtype", ["complex64", "bool", "<U3"])
def test_a_file_has_real_numbers(dtype: str, tmp_path: Path) -> None:
    path = tmp_path / "table.npy"
    np.save(path, np.zeros(16).astype(dtype))
    table = approx.multiplier(torch.mul, bits=(3, 4), signed=True)
    with pytest.raises(ValueError, match=r"cannot be read .*expected real numbers"):
        ApproxLinear(2, 2, multiplier=table, gradient=(str(path), "ste"))


def test_differences_of_floats_are_refused() -> None:
    for gradient, shown in (("difference", "'difference'"),
                            (("ste", torch.zeros(8)), r"\('ste', Tensor\)")):  # fmt: skip
        message = rf"^gradient: expected one of approx, ste, analytic, or .* floats; got {shown}$"
        with pytest.raises(ValueError, match=message):
            ApproxLinear(2, 2, multiplier="mbm:keep=7", gradient=gradient)
