"""Multipliers that are functions in C: of two integers, as EvoApproxLib has them, or of two floats.

A source is compiled as C++, the language that all compilers of this project take. Its integers are
of any type: how many bits of them count is in the name, as ``mul8u_1JFF`` or ``mul8x4u_1AV``, or an
argument.
"""

from __future__ import annotations

import ctypes
import math
import re
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hoconv.jit import BuildError
from hoconv.ops.approx.sources.table_files import LEAST, MOST, integers

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_FUNCTION = re.compile(r"^[ \t]*([a-zA-Z][\w \t]*?)[ \t]+(\w+)\s*\(([^()]*)\)\s*\{", re.MULTILINE)
_STATIC = re.compile(r"\bstatic\b(?![^;=(]*\bconst)[^;=(]*[;=\[]")
# A figure of a comment: its name, number and unit.
_FIGURE = re.compile(
    r"^//[ \t]*(\w+%?)[ \t]*=[ \t]*([-+]?\d[\d.]*(?:[eE][-+]?\d+)?)[ \t]*(\S*)", re.MULTILINE
)
_UNITS = {"PDK45_PWR": ("mW",), "PDK45_AREA": ("um2", "um^2"), "PDK45_DELAY": ("ns",)}
_NAME = re.compile(r"mul(\d+)(?:x(\d+))?([us])(?![a-z0-9])", re.IGNORECASE)
_TYPES = {  # -> bits, and whether it is signed
    **{f"{'' if signed else 'u'}int{n}_t": (n, signed)
       for n in (8, 16, 32, 64) for signed in (True, False)},
    "signed char": (8, True), "unsigned char": (8, False), "short": (16, True),
    "unsigned short": (16, False), "int": (32, True), "unsigned int": (32, False),
    "unsigned": (32, False), "long": (64, True), "unsigned long": (64, False),
}  # fmt: skip
_CALL = """
extern "C" void hoconv_multiply(const {number}* a, const {number}* b, {number}* products,
                                int64_t count) {{
  for (int64_t i = 0; i < count; ++i)
    products[i] = static_cast<{number}>({name}({operands}));
}}
"""


@dataclass(frozen=True)
class CFunction:
    """A function of two integers, compiled.

    Attributes:
        path, name: of the source, and of the function in it.
        bits: of the operands.
        signed: whether they are.
        result_bits: of the type that it returns.
        figures: of the source's comments by their names there: errors such as ``MAE`` and ``WCE%``,
            power ``PDK45_PWR`` in mW, area ``PDK45_AREA`` in um2, delay ``PDK45_DELAY`` in ns.
    """

    path: Path
    name: str
    bits: tuple[int, int]
    signed: bool
    result_bits: int
    figures: Mapping[str, float]
    _multiply: Any

    def multiply(self, a: Any, b: Any) -> Any:
        """Returns the products of arrays of int64 of equal shapes.

        A product is the p + q lowest bits of what the function returns, in two's complement if the
        operands are signed: then the bits above may be the sign's, too.

        Raises:
            ValueError: it returns a number of more bits.
        """
        import numpy as np

        a, b = np.ascontiguousarray(a, np.int64), np.ascontiguousarray(b, np.int64)
        products = np.empty_like(a)
        self._multiply(*(t.ctypes.data for t in (a, b, products)), a.size)
        width = sum(self.bits)
        least = -(1 << width - 1) if self.signed else 0
        if self.signed and width < self.result_bits < 64:  # an unsigned type has the sign's bits
            extended = products >= (1 << self.result_bits) + least
            products = np.where(extended, products - (1 << self.result_bits), products)
        wide = (products < least) | (products >= 1 << width)
        if wide.any():
            i = wide.ravel().argmax()
            raise ValueError(
                f"{self.path}: {self.name} returns {products.flat[i]} for {a.flat[i]} and "
                f"{b.flat[i]}; expected {width} bits, as many as both operands have"
            )
        return np.where(
            self.signed & (products >= 1 << width - 1), products - (1 << width), products
        )

    def tabulate(self) -> Any:
        """Returns the products of all pairs of operands, by index: (2^p, 2^q).

        Raises:
            ValueError: other products in another order of calls, or other ones than the figures of
                the source say.
        """
        import numpy as np

        a, b = np.meshgrid(*(integers(n, self.signed) for n in self.bits), indexing="ij")
        products = self.multiply(a, b)
        again = self.multiply(a[::-1, ::-1], b[::-1, ::-1])[::-1, ::-1]
        if (differs := products != again).any():
            i = differs.ravel().argmax()
            raise ValueError(
                f"{self.path}: {self.name} returns {products.flat[i]} and then {again.flat[i]} for "
                f"{a.flat[i]} and {b.flat[i]}; expected a function of its operands alone"
            )
        worst = abs(products - a * b).max()
        if "WCE" in self.figures and self.figures["WCE"] != worst:
            raise ValueError(
                f"{self.path}: its comment says WCE = {self.figures['WCE']:.0f}, but with bits="
                f"{self.bits} and signed={self.signed} it is {worst}; correct what is wrong"
            )
        return products


def load(path: Path, bits: tuple[int, int] | None, signed: bool | None) -> CFunction:
    """Reads and compiles the function of two integers of a source: the only one, or that with the
    name of the file.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it has no such function or one that keeps state; it does not compile; its bits
            or its sign are not known; a figure of power, area or delay is in another unit. Says the
            line.
        hoconv.jit.BuildError: there is no compiler.
    """
    text, code = _read(path)
    function = _find(path, code, _TYPES, "integers")
    name, types = function[2], _types(function)
    where = f"{path}, line {_line(code, function)}"
    bits, signed = _operands(where, (name, path.stem), types, bits, signed)
    # Of an unsigned type are an operand's bits, in two's complement if it is signed: as many as the
    # name says, of which those of a narrower operand are the lowest.
    named = _named_bits((name, path.stem)) or bits
    masks = [
        -1 if _TYPES[each][1] else (1 << max(pair)) - 1
        for each, *pair in zip(types, bits, named, strict=True)
    ]
    operands = ", ".join(
        f"static_cast<{each}>({operand}[i] & {mask})"
        for each, operand, mask in zip(types, "ab", masks, strict=True)
    )
    multiply = _compile(path, text, number="int64_t", name=name, operands=operands)
    figures = _figures(path, text)
    result_bits, _ = _TYPES.get(function[1].split("static")[-1].strip(), (64, True))
    return CFunction(path, name, bits, signed, result_bits, figures, multiply)


def load_float(path: Path) -> Callable[[Tensor, Tensor], Tensor]:
    """Reads and compiles the function of two floats of a source: it takes tensors that broadcast.

    Raises: as :func:`load`.
    """
    text, code = _read(path)
    function = _find(path, code, ("float",), "floats")
    multiply = _compile(path, text, number="float", name=function[2], operands="a[i], b[i]")

    def product(a: Tensor, b: Tensor) -> Tensor:
        a, b = (t.float().contiguous() for t in torch.broadcast_tensors(a, b))
        products = torch.empty_like(a)
        multiply(a.data_ptr(), b.data_ptr(), products.data_ptr(), a.numel())
        return products

    return product


def _figures(path: Path, text: str) -> dict[str, float]:
    """Returns the figures in the comments of a source."""
    found = {}
    for figure in _FIGURE.finditer(text):
        name, number, unit = figure.groups()
        if unit and unit not in _UNITS.get(name, (unit,)):
            raise ValueError(
                f"{path}, line {_line(text, figure)}: {name} = {number} {unit}; expected it in "
                f"{_UNITS[name][0]}"
            )
        found[name] = float(number)
        if name in _UNITS and not 0 <= found[name] < math.inf:
            raise ValueError(
                f"{path}, line {_line(text, figure)}: {name} = {number}; expected at least 0"
            )
    return found


def _read(path: Path) -> tuple[str, str]:
    """Returns a source, and the same without its comments."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: expected UTF-8 ({error.reason} at byte {error.start})") from None
    code = _COMMENT.sub(lambda comment: re.sub(r"[^\n]", " ", comment[0]), text)
    if static := _STATIC.search(code):
        raise ValueError(
            f"{path}, line {_line(code, static)}: a static variable, {static[0].strip()[:40]!r}; "
            "expected a function of its operands alone"
        )
    return text, code


def _compile(path: Path, text: str, **call: str) -> Any:
    """Compiles a source, and returns the function of pointers and a count that calls it."""
    from hoconv.jit import generated  # here, since most programs compile nothing

    source = f'#include <stdint.h>\n#line 1 "{path.name}"\n{text}\n{_CALL.format(**call)}'
    try:
        library = ctypes.CDLL(str(generated.compile_cpp("multiplier", source)))
    except BuildError as error:
        said = re.search(rf"{re.escape(path.name)}:(\d+):(?:\d+:)?.*?error: (.*)", str(error))
        if not said:
            raise
        raise ValueError(f"{path}, line {said[1]}: does not compile as C++: {said[2]}") from error
    multiply = library.hoconv_multiply
    multiply.argtypes, multiply.restype = [ctypes.c_void_p] * 3 + [ctypes.c_int64], None
    return multiply


def _find(path: Path, code: str, types: Container[str], what: str) -> re.Match[str]:
    """Returns the function of two numbers of these types."""
    functions = list(_FUNCTION.finditer(code))
    fitting = [f for f in functions if len(_types(f)) == 2 and all(t in types for t in _types(f))]
    named = [f for f in fitting if f[2] == path.stem]
    if len(fitting) == 1 or named:
        return (named or fitting)[0]
    found = ", ".join(f"{f[2]}({', '.join(_types(f))})" for f in functions) or "none"
    raise ValueError(
        f"{path}: expected one function of two {what}, or one with the name of the file; it has "
        f"{found}"
    )


def _types(function: re.Match[str]) -> list[str]:
    """Returns the types of a function's parameters."""
    return [
        " ".join(word for word in parameter.split()[:-1] if word != "const")
        for parameter in function[3].split(",")
    ]


def _operands(
    where: str, names: tuple[str, ...], types: list[str], bits: tuple[int, int] | None,
    signed: bool | None,
) -> tuple[tuple[int, int], bool]:  # fmt: skip
    """Returns the bits of the operands and whether they are signed: by the arguments, else by the
    first name that says so, else by types that have no more bits than an operand may have."""
    (width, type_signed), (other, other_signed) = (_TYPES[each] for each in types)
    said = _search_name(names)
    if said:
        bits = bits or _named_bits(names)
        signed = said[3] in "sS" if signed is None else signed
    elif max(width, other) <= MOST and type_signed == other_signed:
        bits = bits or (width, other)
        signed = type_signed if signed is None else signed
    if bits is None or signed is None:
        raise ValueError(
            f"{where}: {' and '.join(types)} do not say which bits count; name the function as in "
            "mul8u or mul12s, or give bits= and signed="
        )
    if not all(LEAST <= n <= min(MOST, _TYPES[t][0]) for n, t in zip(bits, types, strict=True)):
        raise ValueError(
            f"{where}: expected operands of {LEAST} to {MOST} bits that {' and '.join(types)} "
            f"hold, got {bits[0]} and {bits[1]} bits"
        )
    if (
        not signed
        and (type_signed, other_signed) == (True, True)
        and (bits[0] == width or bits[1] == other)
    ):
        raise ValueError(
            f"{where}: unsigned numbers of {bits[0]} and {bits[1]} bits do not fit "
            f"{' and '.join(types)}; give signed=True, or correct the name"
        )
    return bits, signed


def _search_name(names: tuple[str, ...]) -> re.Match[str] | None:
    """Returns what the first of these names that says so says of bits and sign."""
    return next(filter(None, map(_NAME.search, names)), None)


def _named_bits(names: tuple[str, ...]) -> tuple[int, int] | None:
    said = _search_name(names)
    return (int(said[1]), int(said[2] or said[1])) if said else None


def _line(code: str, match: re.Match[str]) -> int:
    """Returns the number of the line of a match's first word."""
    return code.count("\n", 0, match.start() + len(match[0]) - len(match[0].lstrip())) + 1
