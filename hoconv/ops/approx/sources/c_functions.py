"""Multipliers and adders that are functions in C: of two integers, as EvoApproxLib has them, or of
two floats.

A source is compiled as C++, the language that all compilers of this project take. Its integers are
of any type: how many bits of them count is in the name, as ``mul8u_1JFF`` or ``mul8x4u_1AV``, or an
argument.
"""

from __future__ import annotations

import ctypes
import functools
import math
import re
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from hoconv.jit import BuildError
from hoconv.ops.approx.sources.table_files import LEAST, MOST, integers

Operation = Literal["mul", "add"]
MOST_OF_FUNCTIONS: dict[Operation, int] = {"mul": 16, "add": 32}  # bits of an operand

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_FUNCTION = re.compile(r"^[ \t]*([a-zA-Z][\w \t]*?)[ \t]+(\w+)\s*\(([^()]*)\)\s*\{", re.MULTILINE)
_STATIC = re.compile(r"\bstatic\b(?![^;=(]*\bconst)[^;=(]*[;=\[]")
# A cache, which EvoApproxLib's multipliers of parts fill in their first call.
_CACHE = re.compile(r"\bstatic\b[^;=(]*\*\s*\w+\s*=\s*(?:NULL|nullptr|0)\s*;")
# A figure of a comment: its name, number and unit.
_FIGURE = re.compile(
    r"^//[ \t]*(\w+%?)[ \t]*=[ \t]*([-+]?\d[\d.]*(?:[eE][-+]?\d+)?)[ \t]*(\S*)", re.MULTILINE
)
_UNITS = {"PDK45_PWR": ("mW",), "PDK45_AREA": ("um2", "um^2"), "PDK45_DELAY": ("ns",)}
_NAME = r"{}(\d+)(?:x(\d+))?(u|se?)(?![a-z0-9])"
_TYPES = {  # -> bits, and whether it is signed
    **{f"{'' if signed else 'u'}int{n}_t": (n, signed)
       for n in (8, 16, 32, 64) for signed in (True, False)},
    "signed char": (8, True), "unsigned char": (8, False), "short": (16, True),
    "unsigned short": (16, False), "int": (32, True), "unsigned int": (32, False),
    "unsigned": (32, False), "long": (64, True), "unsigned long": (64, False),
}  # fmt: skip
_OF_FLOATS = """
extern "C" void hoconv_multiply(const float* a, const float* b, float* products, int64_t count) {{
  for (int64_t i = 0; i < count; ++i) products[i] = {name}(a[i], b[i]);
}}
"""
# Of operands and products the lowest bits count. A GPU has loops of its own: function_kernels.py.
_OF_INTEGERS = """
static inline int64_t hoconv_lowest(uint64_t n, int bits, bool is_signed) {{
  const uint64_t above = n << (64 - bits);
  return is_signed ? static_cast<int64_t>(above) >> (64 - bits)
                   : static_cast<int64_t>(above >> (64 - bits));
}}
static inline int64_t hoconv_returned(int64_t a, int64_t b) {{
  return static_cast<int64_t>({name}({operands}));
}}
static inline int64_t hoconv_result(int64_t a, int64_t b) {{
  return hoconv_lowest(hoconv_returned(a, b), {width}, {signed});
}}
#ifndef __CUDACC__
{first}
extern "C" void hoconv_call(const int64_t* a, const int64_t* b, int64_t* results, int64_t count) {{
  for (int64_t i = 0; i < count; ++i) results[i] = hoconv_returned(a[i], b[i]);
}}
extern "C" void hoconv_multiply(const int64_t* a, const int64_t* b, int64_t* products,
                                int64_t count) {{
  for (int64_t i = 0; i < count; ++i) products[i] = hoconv_result(a[i], b[i]);
}}
extern "C" void hoconv_outer(const int64_t* a, int64_t rows, const int64_t* b, int64_t columns,
                             int64_t* products) {{
  for (int64_t m = 0; m < rows; ++m)
    for (int64_t n = 0; n < columns; ++n) products[m * columns + n] = hoconv_result(a[m], b[n]);
}}
#endif
"""
# Fills a cache before threads read it.
_FIRST = "static const int64_t hoconv_first = hoconv_returned(0, 0);"
_ARGUMENTS = {  # p: a pointer
    "hoconv_call": "pppi", "hoconv_multiply": "pppi", "hoconv_outer": "pipip",
}  # fmt: skip
_OPTIONS = ["-ffp-contract=off"]  # a product of floats is rounded, whatever the machine has
_CHECKED = 1 << 18  # pairs of operands of more than 8 bits that a function is called with


@dataclass(frozen=True, eq=False)
class CFunction:
    """A multiplier of integers of up to 16 bits, or an adder: a function in C, compiled.

    Numbers of more bits count by their lowest ones. A product has p + q bits, and a sum as many as
    an operand: the lowest ones of what the function returns, in two's complement if the operands
    are signed.

    Attributes:
        operation: ``"mul"`` or ``"add"``.
        path, name: of the source, and of the function in it.
        bits: of the operands, (p, q).
        signed: whether they are.
        result_bits: of the type that it returns.
        figures: of the source's comments by their names there: errors such as ``MAE`` and ``WCE%``,
            power ``PDK45_PWR`` in mW, area ``PDK45_AREA`` in um2, delay ``PDK45_DELAY`` in ns.
        code: the source with the calls of the function, in C++.
    """

    operation: Operation
    path: Path
    name: str
    bits: tuple[int, int]
    signed: bool
    result_bits: int
    figures: Mapping[str, float]
    code: str = field(repr=False)

    def __repr__(self) -> str:
        p, q = self.bits
        sign = "signed" if self.signed else "unsigned"
        return f"CFunction({sign}, {p} x {q} bits, of {self.origin})"

    @property
    def origin(self) -> str:
        return f"{self.path}, compiled"

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the operands."""
        return torch.int32

    def check_sum(self, name: str, K: int) -> None:
        """Checks that a sum of K products can be exact: int64 holds any."""

    def for_op(self, device: torch.device) -> tuple[Tensor | None, str | None]:
        """Returns the multiplier as ops take it: a table, or the code of a function."""
        return None, self.code

    def call(self, a: Any, b: Any) -> Any:
        """Returns what the function does for arrays of int64 of equal shapes: products of p + q
        bits, or sums of one more bit than an operand.

        Raises:
            ValueError: it returns a number of more bits.
        """
        import numpy as np

        a, b = np.ascontiguousarray(a, np.int64), np.ascontiguousarray(b, np.int64)
        products = np.empty_like(a)
        call = library(self.code).hoconv_call
        call(*(t.ctypes.data for t in (a, b, products)), a.size)
        multiplies = self.operation == "mul"
        width = sum(self.bits) if multiplies else self.bits[0] + 1
        least = -(1 << width - 1) if self.signed else 0
        if self.signed and width < self.result_bits < 64:  # an unsigned type has the sign's bits
            extended = products >= (1 << self.result_bits) + least
            products = np.where(extended, products - (1 << self.result_bits), products)
        wide = (products < least) | (products >= 1 << width)
        if wide.any():
            i = wide.ravel().argmax()
            as_many = "as many as both operands have" if multiplies else "one more than an operand"
            raise ValueError(
                f"{self.path}: {self.name} returns {products.flat[i]} for {a.flat[i]} and "
                f"{b.flat[i]}; expected {width} bits, {as_many}"
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
        return self._results(a, b)

    def check(self) -> None:
        """Checks a function without a table by a part of all pairs of operands: by all pairs of
        extreme ones, and by random ones.

        Raises: as :meth:`tabulate`.
        """
        import numpy as np

        random, drawn = np.random.default_rng(0), []
        for n in self.bits:
            least = -(1 << n - 1) if self.signed else 0
            most = least + (1 << n) - 1
            extreme = np.array([least, least + 1, most // 2, 0, 1, 2, most - 1, most])
            drawn.append((extreme, random.integers(least, most + 1, _CHECKED)))
        corners = np.meshgrid(*(extreme for extreme, _ in drawn), indexing="ij")
        a, b = (
            np.concatenate([corner.ravel(), some])[None]
            for corner, (_, some) in zip(corners, drawn, strict=True)
        )
        self._results(a, b)

    def _results(self, a: Any, b: Any) -> Any:
        """Returns the products, or the sums, of arrays of operands, and checks them: of all pairs,
        or of a single row of some."""
        results = self.call(a, b)
        again = self.call(a[::-1, ::-1], b[::-1, ::-1])[::-1, ::-1]
        if (differs := results != again).any():
            i = differs.ravel().argmax()
            raise ValueError(
                f"{self.path}: {self.name} returns {results.flat[i]} and then {again.flat[i]} for "
                f"{a.flat[i]} and {b.flat[i]}; expected a function of its operands alone"
            )
        exact = a * b if self.operation == "mul" else a + b
        errors = abs(results - exact)
        if self._wraps():  # its figures are those of sums that an operand's bits hold
            half = 1 << self.bits[0] - 1
            errors = abs((results + half) % (2 * half) - half - exact)
            errors = errors[(-half <= exact) & (exact < half)]
        worst, said = errors.max(), self.figures.get("WCE")
        whole = len(a) > 1
        if said is not None and (said != worst if whole else said < worst):
            raise ValueError(
                f"{self.path}: its comment says WCE = {said:.0f}, but with bits={self.bits} and "
                f"signed={self.signed} it is {worst}{'' if whole else ' at least'}; correct what "
                "is wrong"
            )
        return results

    def _wraps(self) -> bool:
        """Returns whether sums have as many bits as an operand. EvoApproxLib names such adders
        ``add8s``; those whose sums have one bit more are ``add8se``."""
        said = _search_name((self.name, self.path.stem), self.operation)
        return self.operation == "add" and said is not None and said[3] in "sS"


def load(
    path: Path, bits: tuple[int, int] | None, signed: bool | None, operation: Operation = "mul"
) -> CFunction:
    """Reads and compiles the function of two integers of a source: the only one, or that with the
    name of the file.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it has no such function or one that keeps state; it does not compile; its bits
            or its sign are not known; a figure of power, area or delay is in another unit. Says the
            line.
        hoconv.jit.BuildError: there is no compiler.
    """
    text, bare = _read(path, _CACHE)
    function = _find(path, bare, _TYPES, "integers")
    name, types = function[2], _types(function)
    where = f"{path}, line {_line(bare, function)}"
    names = name, path.stem
    bits, signed = _operands(where, names, types, bits, signed, operation)
    # Of an unsigned type are an operand's bits, in two's complement if it is signed: as many as the
    # name says, of which those of a narrower operand are the lowest.
    named = _named_bits(names, operation) or bits
    masks = [
        -1 if _TYPES[each][1] else (1 << max(pair)) - 1
        for each, *pair in zip(types, bits, named, strict=True)
    ]
    is_signed = "true" if signed else "false"
    operands = ", ".join(
        f"static_cast<{each}>(hoconv_lowest({operand}, {n}, {is_signed}) & {mask})"
        for each, operand, n, mask in zip(types, "ab", bits, masks, strict=True)
    )
    width = sum(bits) if operation == "mul" else bits[0]
    first = _FIRST if has_cache(bare) else ""
    call = _OF_INTEGERS.format(
        name=name, operands=operands, width=width, signed=is_signed, first=first
    )
    code = _compile(path, text, call)
    figures = _figures(path, text)
    result_bits, _ = _TYPES.get(function[1].split("static")[-1].strip(), (64, True))
    return CFunction(operation, path, name, bits, signed, result_bits, figures, code)


def load_float(path: Path) -> Callable[[Tensor, Tensor], Tensor]:
    """Reads and compiles the function of two floats of a source: it takes tensors that broadcast.

    Raises: as :func:`load`.
    """
    text, code = _read(path)
    function = _find(path, code, ("float",), "floats")
    multiply = library(_compile(path, text, _OF_FLOATS.format(name=function[2]))).hoconv_multiply

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


def has_cache(code: str) -> bool:
    """Returns whether a code keeps what its first call computes."""
    return _CACHE.search(_bare(code)) is not None


def _bare(text: str) -> str:
    """Returns a source without its comments, of as many lines."""
    return _COMMENT.sub(_blank, text)


def _blank(match: re.Match[str]) -> str:
    """Returns spaces, and as many lines."""
    return re.sub(r"[^\n]", " ", match[0])


def _read(path: Path, allowed: re.Pattern[str] | None = None) -> tuple[str, str]:
    """Returns a source, and the same without its comments.

    Args:
        allowed: the static variables that it may have.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: expected UTF-8 ({error.reason} at byte {error.start})") from None
    code = _bare(text)
    if static := _STATIC.search(allowed.sub(_blank, code) if allowed else code):
        raise ValueError(
            f"{path}, line {_line(code, static)}: a static variable, {static[0].strip()[:40]!r}; "
            "expected a function of its operands alone"
        )
    return text, code


def _compile(path: Path, text: str, call: str) -> str:
    """Compiles a source with the functions that call it; returns both."""
    code = f'#include <stdint.h>\n#line 1 "{path.name}"\n{text}\n{call}'
    try:
        library(code)
    except BuildError as error:
        said = re.search(rf"{re.escape(path.name)}:(\d+):(?:\d+:)?.*?error: (.*)", str(error))
        if not said:
            raise
        raise ValueError(f"{path}, line {said[1]}: does not compile as C++: {said[2]}") from error
    return code


@functools.cache
def library(code: str) -> Any:
    """Returns the functions of a code, compiled.

    Raises:
        hoconv.jit.BuildError: there is no compiler, or it failed.
    """
    from hoconv.jit import generated  # here, since most programs compile nothing

    loaded = ctypes.CDLL(str(generated.compile_cpp("multiplier", code, _OPTIONS)))
    for name, arguments in _ARGUMENTS.items():
        if hasattr(loaded, name):
            function = getattr(loaded, name)
            kinds = {"p": ctypes.c_void_p, "i": ctypes.c_int64}
            function.argtypes, function.restype = [kinds[each] for each in arguments], None
    return loaded


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
    signed: bool | None, operation: Operation,
) -> tuple[tuple[int, int], bool]:  # fmt: skip
    """Returns the bits of the operands and whether they are signed: by the arguments, else by the
    first name that says so, else by types that have no more bits than an operand of a table."""
    (width, type_signed), (other, other_signed) = (_TYPES[each] for each in types)
    said = _search_name(names, operation)
    if said:
        bits = bits or _named_bits(names, operation)
        signed = said[3][0] in "sS" if signed is None else signed
    elif max(width, other) <= MOST and type_signed == other_signed:
        bits = bits or (width, other)
        signed = type_signed if signed is None else signed
    if bits is None or signed is None:
        raise ValueError(
            f"{where}: {' and '.join(types)} do not say which bits count; name the function as in "
            f"{operation}8u or {operation}12s"
            + (", or give bits= and signed=" if operation == "mul" else "")
        )
    most = MOST_OF_FUNCTIONS[operation]
    if not all(LEAST <= n <= min(most, _TYPES[t][0]) for n, t in zip(bits, types, strict=True)):
        raise ValueError(
            f"{where}: expected operands of {LEAST} to {most} bits that {' and '.join(types)} "
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


def _search_name(names: tuple[str, ...], operation: Operation) -> re.Match[str] | None:
    """Returns what the first of these names that says so says of bits and sign."""
    pattern = re.compile(_NAME.format(operation), re.IGNORECASE)
    return next(filter(None, map(pattern.search, names)), None)


def _named_bits(names: tuple[str, ...], operation: Operation) -> tuple[int, int] | None:
    said = _search_name(names, operation)
    return (int(said[1]), int(said[2] or said[1])) if said else None


def _line(code: str, match: re.Match[str]) -> int:
    """Returns the number of the line of a match's first word."""
    return code.count("\n", 0, match.start() + len(match[0]) - len(match[0].lstrip())) + 1
