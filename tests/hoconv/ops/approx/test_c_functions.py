"""Multipliers of 9 to 16 bits: functions in C without a table."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hoconv import ApproxConv2d, ApproxLinear, approx
from hoconv.approx import CFunction, multiplier, table_matmul
from hoconv.ops.approx import function_kernels
from hoconv.ops.approx.operator import MATMUL
from hoconv.tools.testing.variants import Variant, variants
from tests.hoconv.ops.approx.test_multiplier_files import Circuit

everywhere = pytest.mark.parametrize("variant", variants([MATMUL]), indirect=True)
signs = pytest.mark.parametrize("signed", [False, True])


def function(folder: Path, bits: Any = (12, 12), signed: bool = True, columns: int = 7) -> Any:
    """A circuit, and the multiplier of its source."""
    circuit = Circuit(columns, bits, signed)
    found = multiplier(circuit.write(folder, "narrow"))
    assert isinstance(found, CFunction)
    return circuit, found


def operands(circuit: Circuit, operand: int, *shape: int) -> Tensor:
    n = circuit.bits[operand]
    least = -(1 << n - 1) if circuit.signed else 0
    return torch.randint(least, least + (1 << n), shape, dtype=torch.int32)


def products(circuit: Circuit, a: Tensor, b: Tensor) -> Tensor:
    """Returns the circuit's products of operands whose shapes broadcast, int64."""
    return torch.from_numpy(circuit.products(a.long().numpy(), b.long().numpy()))


@pytest.mark.slow
@signs
@pytest.mark.parametrize(
    ("bits", "form"), [((12, 12), "gates"), ((16, 16), "narrow"), ((9, 16), "arrays")]
)
def test_products_are_the_circuits_on_many_pairs_and_all_corners(
    tmp_path: Path, bits: tuple[int, int], form: str, signed: bool
) -> None:
    circuit = Circuit(6, bits, signed)
    found = multiplier(circuit.write(tmp_path, form))
    assert isinstance(found, CFunction)
    assert (found.bits, found.signed, found.dtype) == (bits, signed, torch.int32)
    assert found.figures["WCE"] == circuit.wce
    corners = []
    for n in bits:
        powers = [0, *(1 << i for i in range(n)), *((1 << i) - 1 for i in range(n + 1))]
        values = np.unique(np.array(powers + [-p - 1 for p in powers], np.int64) % (1 << n))
        corners.append(np.where(signed & (values >= 1 << n - 1), values - (1 << n), values))
    grid = [torch.from_numpy(each.copy()) for each in np.meshgrid(*corners, indexing="ij")]
    random = [operands(circuit, operand, 10**6) for operand in range(2)]
    for a, b in (grid, random):
        assert torch.equal(approx.multiply(a.int(), b.int(), found), products(circuit, a, b))


@everywhere
@signs
@pytest.mark.parametrize("accumulator", [None, "saturate:bits=24", "wrap:bits=20"])
@pytest.mark.parametrize("bits", [(12, 12), (16, 16), (9, 5), (4, 11)])
def test_sums_of_products_are_the_circuits(
    variant: Variant, tmp_path: Path, bits: tuple[int, int], accumulator: Any, signed: bool
) -> None:
    circuit, found = function(tmp_path, bits, signed, 3)
    for B, M, K, N in ((2, 5, 9, 7), (1, 300, 4, 130), (3, 1, 0, 2), (2, 0, 3, 4), (1, 2, 3, 0)):
        a, b = operands(circuit, 0, B, M, K), operands(circuit, 1, B, K, N)
        expected = torch.zeros(B, M, N, dtype=torch.int64)
        least = -(1 << int(accumulator[-2:]) - 1) if accumulator and signed else 0
        for k in range(K):
            expected += products(circuit, a[:, :, k, None], b[:, k, None])
            if accumulator:
                size = 1 << int(accumulator[-2:])
                if "wrap" in accumulator:
                    expected = (expected - least) % size + least
                expected = expected.clamp(least, least + size - 1)
        left, right = (t.to(variant.device) for t in (a.mT.contiguous().mT, b))
        out = table_matmul(left, right, found, accumulator=accumulator, impl=variant.impl)
        assert torch.equal(out.cpu(), expected)
        with torch.inference_mode():
            out = table_matmul(left, right, found, accumulator=accumulator, impl=variant.impl)
        assert torch.equal(out.cpu(), expected)


@everywhere
def test_the_lowest_bits_of_integers_count(variant: Variant, tmp_path: Path) -> None:
    for signed in (False, True):
        circuit, found = function(tmp_path, (10, 12), signed, 0)
        a, b = operands(circuit, 0, 2, 3, 6, 5), operands(circuit, 1, 4, 3, 3, 3)
        wide = [
            t + (1 << n) * torch.randint(-(2**18), 2**18, t.shape, dtype=torch.int32)
            for t, n in ((a, 10), (b, 12))
        ]
        left, right = (t.to(variant.device) for t in wide)
        out = approx.conv2d(left, right, found, padding=1, impl=variant.impl).cpu()
        exact = F.conv2d(a.double(), b.double(), padding=1).long()
        assert torch.equal(out, exact)
        out = approx.multiply(left[0, 0, 0, 0], right, found, impl=variant.impl).cpu()
        assert torch.equal(out, a[0, 0, 0, 0].long() * b)
        with pytest.raises(TypeError, match=r"^b: expected torch\.int32 for a function, got torc"):
            table_matmul(a[0], a[0].mT.long(), found)


@everywhere
def test_products_of_floats_in_a_function_are_rounded(variant: Variant, tmp_path: Path) -> None:
    path = tmp_path / "mul12s.c"
    path.write_text("""
int mul12s(int a, int b) {
  volatile float same = b / 7.0f;  // which the compiler does not know
  const float x = a / 3.0f, y = b / 7.0f;
  return (x * y - x * same) * 4096;
}
""")
    found = multiplier(path)
    a, b = (torch.randint(-2048, 2048, (999,), dtype=torch.int32) for _ in range(2))
    out = approx.multiply(a.to(variant.device), b.to(variant.device), found, impl=variant.impl)
    assert torch.equal(out.cpu(), torch.zeros_like(out.cpu()))


@everywhere
@signs
@pytest.mark.parametrize("scales", ["tensor", "channel"])
def test_layers_of_exact_products_compute_with_numbers_of_their_bits(
    variant: Variant, tmp_path: Path, signed: bool, scales: Any
) -> None:
    _, exact = function(tmp_path, (16, 12), signed, 0)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, groups=1), nn.Flatten(), nn.Linear(72, 5))
    model = model.to(variant.device)
    x = torch.randn(4, 3, 3, 3, device=variant.device)
    expected = model(x)
    done = approx.convert(model, exact, weight_scales=scales, impl=variant.impl)
    assert len(done.replaced) == 2
    assert "CFunction(" in str(done)
    out = model(x)
    torch.testing.assert_close(out, expected, rtol=1e-3, atol=2e-3)
    assert not torch.equal(out, expected)
    out.square().sum().backward()  # straight-through
    found = [p.grad for p in model.parameters()]
    plain = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Flatten(), nn.Linear(72, 5))
    plain = plain.to(variant.device)
    plain.load_state_dict(model.state_dict(), strict=False)
    plain(x).square().sum().backward()
    for got, p in zip(found, plain.parameters(), strict=True):
        torch.testing.assert_close(got, p.grad, rtol=1e-2, atol=1e-2)


ADDER = """
uint64_t add{bits}{sign}_T(uint64_t a, uint64_t b) {{  // no carry leaves the lowest 3 bits
  const uint64_t low = (a | b) & 7, high = (a & ~7ull) + (b & ~7ull);
  return (high | low) & {mask}ull;
}}
"""


def adder(folder: Path, bits: int, signed: bool) -> Path:
    path = folder / f"add{bits}{'se' if signed else 'u'}_T.c"
    path.write_text(ADDER.format(bits=bits, sign="se" if signed else "u", mask=(1 << bits + 1) - 1))
    return path


def added(terms: Tensor, bits: int, signed: bool) -> Tensor:
    """Adds terms (K, ...) one after the other as that function does."""
    total, size = torch.zeros(terms.shape[1:], dtype=torch.int64), 1 << bits
    for term in terms:
        a, b = total % size, term % size
        total = ((a | b) & 7) | ((a - a % 8 + b - b % 8) % size)
    return torch.where(total >= size // 2, total - size, total) if signed else total


@everywhere
@signs
@pytest.mark.parametrize("bits", [9, 16, 31])
def test_an_adder_adds_products_of_tables_and_of_functions(
    variant: Variant, tmp_path: Path, bits: int, signed: bool
) -> None:
    circuit, wide = function(tmp_path, (12, 10), signed, 0)
    values = np.random.default_rng(0).integers(-900 if signed else 0, 900, (256, 256))
    table = approx.LookupTable(values, signed=signed)
    path = adder(tmp_path, bits, signed)
    for B, M, K, N in ((2, 5, 9, 7), (1, 200, 4, 130), (1, 1, 0, 2)):
        a, b = operands(circuit, 0, B, M, K), operands(circuit, 1, B, K, N)
        for found in (wide, table):
            left, right = a.to(found.dtype), b.to(found.dtype)
            if found is wide:
                terms = products(circuit, a[..., None], b[:, None])
            else:
                index = (left.long() % 256)[..., None], (right.long() % 256)[:, None]
                terms = table.products[index].long()
            out = table_matmul(
                left.to(variant.device), right.to(variant.device), found, accumulator=path,
                impl=variant.impl,
            )  # fmt: skip
            assert torch.equal(out.cpu().long(), added(terms.movedim(2, 0), bits, signed))


@everywhere
def test_layers_and_models_take_an_adder(variant: Variant, tmp_path: Path) -> None:
    path = adder(tmp_path, 18, True)
    values = np.arange(256).astype(np.int8).astype(int)
    table = approx.LookupTable(np.multiply.outer(values, values), signed=True)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 5)).to(variant.device)
    x = torch.randn(2, 3, 4, 4, device=variant.device)
    exact = model(x)
    model = approx.convert(model, table, accumulator=path, impl=variant.impl).model
    out = model(x)
    torch.testing.assert_close(out, exact, rtol=0.1, atol=0.1)
    without = copy.deepcopy(model).eval()
    without[0].quantizer.accumulator = without[2].quantizer.accumulator = None  # pyright: ignore
    assert not torch.equal(without(x), model.eval()(x))
    model.train()
    out.sum().backward()
    expected = model.eval()(x)
    for same in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(same(x), expected)
    assert torch.equal(torch.export.export(model, (x,)).module()(x), expected)


def test_sums_of_as_many_bits_as_an_operand_wrap(tmp_path: Path) -> None:
    """EvoApproxLib calls such adders add8s, and counts the errors of sums that fit."""
    path = tmp_path / "add8s_T.c"
    path.write_text(
        "// WCE = 1\nuint64_t add8s_T(uint64_t a, uint64_t b) { return (a + b) & 254; }"
    )
    numbers = np.arange(256).astype(np.int8).astype(int)
    table = approx.LookupTable(np.multiply.outer(numbers, numbers), signed=True)
    a = torch.full((1, 1, 3), 9, dtype=torch.int8)
    found = table_matmul(a, a.mT.contiguous(), table, accumulator=path)  # 81 + 81 + 81
    assert found.item() == (((80 + 81) & 254) + 81 & 254) - 256


@pytest.mark.parametrize(
    ("name", "source", "message"),
    [
        ("add16u.c", "int add16u(unsigned a, unsigned b) { return a + b; }",
         r"^accumulator: expected an adder of two signed numbers, as the products are, of up to"),
        ("add33se.c", "int64_t add33se(int64_t a, int64_t b) { return a + b; }",
         r"expected operands of 2 to 32 bits that int64_t and int64_t hold, got 33 and 33 bits$"),
        ("sum.c", "int64_t sum(int64_t a, int64_t b) { return a + b; }",
         r"int64_t and int64_t do not say which bits count; name the function as in add8u or add1"),
        ("add9se.c", "// WCE = 2\nint add9se(int a, int b) { return (a | b) & 1023; }",
         r"comment says WCE = 2, but with bits=\(9, 9\) and signed=True it is \d+ at least; corr"),
        ("add9s.c", "// WCE = 2\nuint64_t add9s(uint64_t a, uint64_t b) { return (a | b) & 511; }",
         r"comment says WCE = 2, but with bits=\(9, 9\) and signed=True it is \d+ at least; corr"),
        ("add9se.c", "int add9se(int a, int b) { return 4 * (a + b); }",
         r"expected 10 bits, one more than an operand$"),
        ("none.c", None, r"^accumulator: .*none\.c is no file$"),
    ],
)  # fmt: skip
def test_wrong_adders_are_refused_in_one_line(
    tmp_path: Path, name: str, source: str | None, message: str
) -> None:
    path = tmp_path / name
    if source is not None:
        path.write_text(source)
    table = approx.LookupTable(np.ones((4, 4), int), signed=True)
    with pytest.raises(ValueError, match=message) as refused:
        approx.TableLinear(2, 3, table=table, accumulator=path)
    assert "\n" not in str(refused.value)


CACHED = """
#include <stdint.h>
#include <stdlib.h>
static uint16_t part(uint8_t a, uint8_t b) {
  for (volatile int n = 0; n < 300; n++) {}  // so that other threads come while the cache is filled
  return (a & 0xFE) * b;
}
uint32_t mul16u_C(uint16_t a, uint16_t b) {
  static uint16_t * cache = NULL;
  int empty = cache == NULL;
  if(!cache) cache = (uint16_t *)malloc(256 * 256 * sizeof(uint16_t));
  if(empty)
    for(int i = 0; i < 256; i++)
      for(int j = 0; j < 256; j++) cache[i * 256 + j] = part(i, j);
  return cache[(a & 0xFF) * 256 + (b & 0xFF)] + ((uint32_t)cache[(a >> 8) * 256 + (b & 0xFF)] << 8)
    + ((uint32_t)cache[(a & 0xFF) * 256 + (b >> 8)] << 8)
    + ((uint32_t)cache[(a >> 8) * 256 + (b >> 8)] << 16);
}
"""


FIRST_CALLS = """
import sys, torch
from hoconv.ops.approx import function_products
code, a, b, wanted = torch.load(sys.argv[1])
torch.set_num_threads(8)
assert torch.equal(function_products.matmul(a, b, None, code, False), wanted)
"""


def test_a_cache_is_no_state_but_not_for_the_threads_of_a_gpu(tmp_path: Path) -> None:
    """As EvoApproxLib's multipliers of 16 bits have, which consist of smaller ones. In a process
    that has the code alone, the first calls are those of several threads at once."""
    path = tmp_path / "mul16u_C.c"
    path.write_text(CACHED)
    found = multiplier(path)
    assert isinstance(found, CFunction)
    a = torch.randint(0, 1 << 16, (1, 64, 3), dtype=torch.int32)
    b = torch.randint(
        0, 1 << 16, (1, 3, 4096), dtype=torch.int32
    )  # so wide that a thread has 4 rows
    wanted = ((a & 0xFEFE).long()[..., None] * b.long()[:, None]).sum(2)
    assert torch.equal(table_matmul(a, b, found), wanted)
    torch.save((found.code, a, b, wanted), tmp_path / "call.pt")
    done = subprocess.run([sys.executable, "-c", FIRST_CALLS, tmp_path / "call.pt"], check=False)
    assert done.returncode == 0
    with pytest.raises(ValueError, match=r"fills a cache in its first call.*move the tensors"):
        function_kernels.source(found.code)


def test_a_layer_is_copied_saved_exported_and_costs_what_its_file_says(tmp_path: Path) -> None:
    circuit, _ = function(tmp_path)
    path = tmp_path / f"mul12s_T{circuit.columns}.c"
    layer = ApproxLinear(6, 4, multiplier=path, impl="cpp")
    x = torch.randn(3, 6)
    layer(x)
    out = layer.eval()(x)
    for same in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(same(x), out)
    program = torch.export.export(layer, (x,)).module()
    assert torch.equal(program(x), out)
    assert torch.equal(torch.compile(layer, fullgraph=True, backend="aot_eager")(x), out)
    found = approx.cost(layer, x[:1])
    assert found.energy == pytest.approx(24 * 0.725 * 1.35)
    assert "CFunction(signed, 12 x 12 bits, of" in repr(layer)


@pytest.mark.parametrize("gradient", ["difference", ("ste", "difference:window=4"), "approx"])
def test_other_gradients_are_refused(tmp_path: Path, gradient: Any) -> None:
    _, found = function(tmp_path)
    with pytest.raises(ValueError, match=r"^gradient: expected 'ste' for CFunction\(signed, 12 x"):
        ApproxConv2d(2, 3, 3, multiplier=found, gradient=gradient)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("// WCE = 3\nint64_t mul12s_T(int64_t a, int64_t b) { return a * b - 8; }",
         r"comment says WCE = 3, but with bits=\(12, 12\) and signed=True it is 8 at least; corr"),
        ("int n;\nuint32_t mul12s_T(uint16_t a, uint16_t b) { return a * b + n++ % 3; }",
         r"mul12s_T returns -?\d+ and then -?\d+ for -?\d+ and -?\d+; expected a function of its"),
        ("uint64_t mul12u(uint16_t a, uint16_t b) { return (uint64_t)a * b * 2; }",
         r"expected 24 bits, as many as both operands have"),
        ("int64_t mul17s(int64_t a, int64_t b) { return a * b; }",
         r"expected operands of 2 to 16 bits that int64_t and int64_t hold, got 17 and 17 bits$"),
        ("int32_t product(int16_t a, int16_t b) { return a * b; }",
         r"int16_t and int16_t do not say which bits count; name the function as in mul8u or"),
    ],
)  # fmt: skip
def test_wrong_functions_are_refused_in_one_line(tmp_path: Path, source: str, message: str) -> None:
    path = tmp_path / "product.c"
    path.write_text(source)
    with pytest.raises(ValueError, match=message) as refused:
        multiplier(path)
    assert "\n" not in str(refused.value)
    assert str(path) in str(refused.value)
