"""Multipliers that files and functions define: C in the ways EvoApproxLib writes it, and Python."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hoconv.approx import LookupTable, multiplier, table_matmul
from hoconv.ops.approx.operator import MATMUL
from hoconv.tools.testing.variants import Variant, variants

everywhere = pytest.mark.parametrize("variant", variants([MATMUL]), indirect=True)


def integers(source: Any, **options: Any) -> LookupTable:
    """The multiplier of integers of a source."""
    found = multiplier(source, **options)
    assert isinstance(found, LookupTable)
    return found


COMMENT = """/***
* A circuit for tests: an array multiplier without the partial products of its lowest columns.
***/
// MAE% = {mae_percent:.2f} %
// MAE = {mae:.0f}
// WCE = {wce}
// EP% = 50.00 %
// MSE = 27.5e2
// PDK45_PWR = 0.{columns}25 mW
// PDK45_AREA = 683.{columns} um2
// PDK45_DELAY = 1.35 ns
#include <stdint.h>
#include <stdlib.h>

"""


class Circuit:
    """An array multiplier of p and q bits that drops the partial products of weights below
    2^columns: its source, products and errors.

    The partial product of bits i and j has the weight 2^(i + j), negative where one of them, but
    not both, is the sign of a signed operand.
    """

    def __init__(self, columns: int, bits: tuple[int, int] = (8, 8), signed: bool = False) -> None:
        p, q = bits
        self.columns, self.bits, self.signed = columns, bits, signed
        every = [(i, j) for i in range(p) for j in range(q)]
        dropped = [2 ** (i + j) for i, j in every if i + j < columns]
        assert not signed or columns < min(bits)  # no sign is among the dropped
        self.wce, self.mae = sum(dropped), sum(dropped) / 4
        self.weights = {
            (i, j): (-1 if signed and (i == p - 1) != (j == q - 1) else 1) * 2 ** (i + j)
            for i, j in every
            if i + j >= columns
        }

    def products(self, a: Any, b: Any) -> Any:
        return sum(w * (a >> i & 1) * (b >> j & 1) for (i, j), w in self.weights.items())

    def table(self) -> np.ndarray:
        """All products, by index."""
        return self.products(np.arange(1 << self.bits[0])[:, None], np.arange(1 << self.bits[1]))

    def write(self, folder: Path, form: str, name: str = "") -> Path:
        """Writes the source in one of the forms of the library."""
        p, q = self.bits
        size = f"{p}" if p == q else f"{p}x{q}"
        name = name or f"mul{size}{'s' if self.signed else 'u'}_T{self.columns}"
        comment = COMMENT.format(
            mae=self.mae, wce=self.wce, columns=self.columns,
            mae_percent=100 * self.mae / 2 ** sum(self.bits),
        )  # fmt: skip
        path = folder / f"{name}.c"
        path.write_text(comment + getattr(self, form)(name))
        return path

    def gates(self, name: str, first: str = "A", second: str = "B") -> str:
        """64-bit numbers, and a variable for each gate."""
        places = list(self.weights)
        gates = [f"dout_{i}_{j}" for i, j in places]
        names = {(i, j): f"(({first} >> {i})&1)&(({second} >> {j})&1)" for i, j in places}
        lines = [f"   {g}={names[place]};" for g, place in zip(gates, places, strict=True)]
        terms = [f"({w})*(int64_t){g}" for g, w in zip(gates, self.weights.values(), strict=True)]
        return (
            f"uint64_t {name}(const uint64_t {first},const uint64_t {second})\n{{\n"
            f"   uint64_t O, {', '.join(gates)};   int avg=0;\n\n" + "\n".join(lines)
            + f"\n   O={' + '.join(terms)};\n   return O;\n}}\n"
        )  # fmt: skip

    def swapped_gates(self, name: str) -> str:
        return self.gates(name, "B", "A")

    def narrow(self, name: str) -> str:
        """Types as narrow as the operands, and the product bit by bit."""
        p, q = self.bits
        u = "" if self.signed else "u"
        width = next(n for n in (8, 16, 32) if n >= max(p, q))
        lines = [
            f"  P += (({w}) * (((A>>{i})&1) & ((B>>{j})&1)));" for (i, j), w in self.weights.items()
        ]
        bits = [f"  R |= ((uint32_t)((P >> {n}) & 1)) << {n};" for n in range(p + q)]
        return (
            f"{u}int{2 * width}_t {name}({u}int{width}_t A, {u}int{width}_t B)\n{{\n"
            "  int64_t P = 0;\n  uint32_t R = 0;\n" + "\n".join(lines + bits)
            + "\n  return R;\n}\n"
        )  # fmt: skip

    def arrays(self, name: str) -> str:
        """Arrays of wires, of 64-bit numbers a and b."""
        p, q = self.bits
        wires = [f"  wa[{i}] = (a >> {i}) & 0x01;" for i in range(p)]
        wires += [f"  wb[{j}] = (b >> {j}) & 0x01;" for j in range(q)]
        sums = [f"  y += ({w}) * (wa[{i}] & wb[{j}]);" for (i, j), w in self.weights.items()]
        body = "\n".join(wires + sums)
        return (
            f"uint64_t {name}(uint64_t a, uint64_t b) {{\n  int wa[{p}];\n  int wb[{q}];\n"
            f"  int64_t y = 0;\n{body}\n  return y & 0x{(1 << p + q) - 1:x};\n}}\n"
        )

    def helpers(self, name: str) -> str:
        """A function of another name that the last one calls."""
        return self.narrow("helper") + self.narrow(name)


TEN = [
    (form, signed, columns)
    for signed in (False, True)
    for form, columns in (
        ("gates", 3), ("swapped_gates", 5), ("narrow", 7), ("arrays", 2), ("helpers", 6)
    )
]  # fmt: skip


@everywhere
@pytest.mark.parametrize(("form", "signed", "columns"), TEN)
def test_the_table_of_a_c_file_is_its_function_on_all_pairs(
    variant: Variant, tmp_path: Path, form: str, signed: bool, columns: int
) -> None:
    circuit = Circuit(columns, signed=signed)
    table = integers(circuit.write(tmp_path, form))
    assert (table.bits, table.signed) == ((8, 8), signed)
    every = torch.arange(256).to(torch.uint8).view(table.dtype).to(variant.device)
    products = table_matmul(every[None, :, None], every[None, None], table, impl=variant.impl)
    assert (products[0].cpu().numpy() == circuit.table()).all()


@pytest.mark.parametrize("form", ["gates", "arrays", "narrow"])
@pytest.mark.parametrize(
    ("bits", "signed"), [((7, 7), False), ((8, 4), False), ((8, 2), False), ((5, 5), True)]
)
def test_names_say_how_many_bits_count(
    tmp_path: Path, form: str, bits: tuple[int, int], signed: bool
) -> None:
    circuit = Circuit(3, bits, signed)
    table = integers(circuit.write(tmp_path, form))
    assert (table.bits, table.signed) == (bits, signed)
    assert (table.products.numpy() == circuit.table()).all()


def test_types_and_arguments_say_what_names_do_not(tmp_path: Path) -> None:
    circuit = Circuit(4, signed=True)
    table = integers(circuit.write(tmp_path, "narrow", "mine"))
    assert (table.bits, table.signed) == ((8, 8), True)
    path = circuit.write(tmp_path, "gates", "other")
    with pytest.raises(ValueError, match=r"other\.c, line 15: uint64_t and uint64_t do not say"):
        multiplier(path)
    read = integers(path, bits=8, signed=True)
    assert torch.equal(read.products, table.products)


def test_figures_of_the_comments_are_read(tmp_path: Path) -> None:
    table = integers(Circuit(3).write(tmp_path, "gates"))
    assert table.figures == {
        "MAE%": 0.01, "MAE": 4, "WCE": 17, "EP%": 50, "MSE": 2750, "PDK45_PWR": 0.325,
        "PDK45_AREA": 683.3, "PDK45_DELAY": 1.35,
    }  # fmt: skip
    assert "mul8u_T3.c, compiled" in repr(table)


def test_a_figure_in_another_unit_is_refused(tmp_path: Path) -> None:
    path = Circuit(3).write(tmp_path, "gates")
    path.write_text(path.read_text().replace("0.325 mW", "325 uW"))
    with pytest.raises(ValueError, match=r"T3\.c, line 9: PDK45_PWR = 325 uW; expected it in mW"):
        multiplier(path)
    path.write_text(path.read_text().replace("325 uW", "-0.325 mW"))
    with pytest.raises(ValueError, match=r"line 9: PDK45_PWR = -0.325; expected at least 0"):
        multiplier(path)


SIGNATURE = "uint16_t mul8u_T(uint8_t A, uint8_t B) "


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("", r"mul8u_T\.c: expected one function of two integers, or one .*; it has none$"),
        ("int a(int b) {}\nint c(int d) {}", r"expected one function .*; it has a\(int\), c\(int"),
        (SIGNATURE + "{\n  return A * C;\n}", r"mul8u_T\.c, line 2: does not compile as C\+\+: "),
        (SIGNATURE + "{ return A * B; ", r"mul8u_T\.c, line \d: does not compile as C\+\+: a fun"),
        ('#include "own.h"\n' + SIGNATURE + "{ return 0; }", r", line 1: does not .* own\.h"),
        ("\n\n" + SIGNATURE + "{\n  static int n;\n  return n++;\n}",
         r"mul8u_T\.c, line 4: a static variable, 'static int n;'; expected a function of its"),
        (SIGNATURE + "{ static int n[2] = {0};\n return n[A&1]++; }", r"mul8u_T\.c, line 1: a st"),
        ("int n;\n" + SIGNATURE + "{ return A * B + n++ % 2; }",
         r"mul8u_T\.c: mul8u_T returns 0 and then 1 for 0 and 0; expected a function of its op"),
        ("uint32_t mul8u_T(uint8_t A, uint8_t B) { return A * B * 2; }",
         r"mul8u_T returns 65790 for 129 and 255; expected 16 bits, as many as both operands have"),
        ("// WCE = 3\n" + SIGNATURE + "{ return A * B; }",
         r"its comment says WCE = 3, but with bits=\(8, 8\) and signed=False it is 0; correct"),
        ("int mul8u_T(int8_t A, int8_t B) { return A * B; }",
         r"line 1: unsigned numbers of 8 and 8 bits do not fit int8_t and int8_t; give signed=T"),
        ("int mul12u(uint8_t A, uint8_t B) { return A * B; }",
         r"expected operands of 2 to 16 bits that uint8_t and uint8_t hold, got 12 and 12 bits$"),
    ],
)  # fmt: skip
def test_wrong_sources_are_refused_in_one_line(tmp_path: Path, source: str, message: str) -> None:
    path = tmp_path / "mul8u_T.c"
    path.write_text(source)
    with pytest.raises(ValueError, match=message) as refused:
        multiplier(path)
    assert "\n" not in str(refused.value)
    assert str(path) in str(refused.value)


def test_an_unsigned_type_has_the_bits_of_a_signed_operand(tmp_path: Path) -> None:
    path = tmp_path / "mul4s_T.c"
    path.write_text("#include <stdint.h>\nuint64_t mul4s_T(uint64_t A, uint64_t B) { return A; }")
    assert integers(path).products[:, 0].tolist() == list(range(16))


def test_constants_are_no_state(tmp_path: Path) -> None:
    path = tmp_path / "mul8u_T.c"
    path.write_text(
        "/* static int n; */\nstatic const int factor[1] = {1};\n"
        "static int twice(int x) { return 2 * x; }\n"
        + SIGNATURE + "{\n  static const int two = 2;\n  return twice(A * B) / two * factor[0];\n}"
    )  # fmt: skip
    products = np.multiply.outer(np.arange(256), np.arange(256))
    assert (integers(path).products.numpy() == products).all()


# Functions in Python


def test_a_function_of_integers_is_the_definition(tmp_path: Path) -> None:
    def without_low_bits(a: Tensor, b: Tensor) -> Tensor:
        return (a >> 1 << 1) * (b >> 1 << 1)

    for bits, signed in ((4, True), ((8, 3), False)):
        table = integers(without_low_bits, bits=bits, signed=signed)
        p, q = (bits, bits) if isinstance(bits, int) else bits
        assert (table.bits, table.signed) == ((p, q), signed)
        a = torch.arange(1 << p) - (1 << p >> 1 if signed else 0)
        b = torch.arange(1 << q) - (1 << q >> 1 if signed else 0)
        expected = without_low_bits(a[:, None], b[None])
        assert torch.equal(table.products[a % (1 << p)][:, b % (1 << q)].long(), expected)
    assert "the function without_low_bits" in repr(table)


@pytest.mark.parametrize(
    ("function", "options", "error", "message"),
    [
        (torch.mul, {}, ValueError, "^bits, signed: expected both for the function mul"),
        (torch.mul, {"bits": 8}, ValueError, "^bits, signed: expected both for the function mul"),
        (torch.true_divide, {"bits": 4, "signed": False}, TypeError, "returns torch.float32$"),
        (lambda a, b: 3, {"bits": 4, "signed": True}, TypeError, "<lambda> returns int$"),
        (lambda a, b: a, {"bits": 4, "signed": True}, ValueError, r"shape .*, got \(16, 1\)$"),
        (
            torch.mul,
            {"bits": 9, "signed": True},
            ValueError,
            "^bits: expected a number from 2 to 8",
        ),
    ],
)
def test_wrong_functions_are_refused(
    function: Any, options: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        multiplier(function, **options)


def test_files_of_tables_are_read(tmp_path: Path) -> None:
    path = tmp_path / "table.txt"
    np.savetxt(path, np.multiply.outer(np.arange(-4, 4), np.arange(-4, 4)), "%d")
    table, same = integers(path), LookupTable.load(path)
    assert table.signed
    assert torch.equal(table.products, same.products)
    with pytest.raises(FileNotFoundError):
        multiplier(tmp_path / "missing.c")


@pytest.mark.parametrize(("name", "bits"), [("mul16s_a", 8), ("mul8s_a", 4), ("MUL8S_a", 8)])
def test_a_narrow_operand_of_an_unsigned_type_keeps_its_sign(
    tmp_path: Path, name: str, bits: int
) -> None:
    width = 16 if "16" in name else 8
    path = tmp_path / f"{name}.c"
    path.write_text(
        f"#include <stdint.h>\nuint32_t {name}(uint{width}_t A, uint{width}_t B) "
        f"{{ return (int{width}_t)A * (int{width}_t)B; }}\n"
    )
    table = integers(path, bits=bits)
    values = torch.arange(1 << bits).float()
    values = torch.where(values >= 1 << bits - 1, values - (1 << bits), values)
    assert table.signed
    assert torch.equal(table.products, torch.outer(values, values).int())


@pytest.mark.parametrize("p", range(2, 8))
def test_a_binary_file_of_two_widths_is_not_taken_for_one_of_wider_products(
    tmp_path: Path, p: int
) -> None:
    products = np.multiply.outer(np.arange(1 << p), np.arange(2 << p))
    path = tmp_path / "products.bin"
    products.astype("<u2").tofile(path)
    with pytest.raises(ValueError, match="give bits= of both operands"):
        multiplier(path)
    table = integers(path, bits=(p, p + 1), signed=False)
    assert np.array_equal(table.products.numpy(), products)


def test_a_name_of_mantissas_is_not_enough_for_a_table_of_integers(tmp_path: Path) -> None:
    path = tmp_path / "mul8u_8.bin"
    products = np.multiply.outer(np.arange(256), np.arange(256))
    products.astype("<i4").tofile(path)
    with pytest.raises(ValueError, match="give bits= or mantissa_bits="):
        multiplier(path)
    assert np.array_equal(integers(path, bits=8).products.numpy(), products)
