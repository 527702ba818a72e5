"""Registers and adders that sum products of integers.

A sum starts at 0, and products are added in ascending order of what is summed over. By default it
is exact. A register of few bits either wraps, or saturates: then each addition ends at the limit
that it would pass. An adder is a function in C.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from hoconv.ops.approx.sources.c_functions import library, load
from hoconv.ops.approx.sources.names import value_of

AnyAccumulator = str | os.PathLike[str] | None
KINDS = ("saturate", "wrap")
# An unsigned register of 32 bits would not fit the results, which are int32.
LEAST_BITS, MOST_BITS = 2, {True: 32, False: 31}


@dataclass(frozen=True)
class Register:
    """A register of few bits.

    Attributes:
        saturates: whether it stays at its limit where it would pass it; else it wraps.
        least, most: what it holds.
    """

    saturates: bool
    least: int
    most: int

    def keep(self, sums: Tensor) -> Tensor:
        """Changes sums, int64, to what the register has of them, after an addition; returns them.
        Of one that wraps also after all."""
        if self.saturates:
            return sums.clamp_(self.least, self.most)
        return sums.sub_(self.least).bitwise_and_(self.most - self.least).add_(self.least)

    def add(self, sums: Tensor, products: Tensor) -> None:
        """Adds products to sums, contiguous int64, in place."""
        self.keep(sums.add_(products))


@dataclass(frozen=True)
class Adder:
    """A function in C, as the code of a :class:`CFunction`."""

    code: str

    def add(self, sums: Tensor, products: Tensor) -> None:
        """Adds products to sums, contiguous int64, in place."""
        pointer = sums.data_ptr()
        library(self.code).hoconv_multiply(pointer, products.data_ptr(), pointer, sums.numel())


def code_of(accumulator: AnyAccumulator, signed: bool) -> str | None:
    """Returns an accumulator as ops take it: the name of a register, or the code of an adder, which
    a ``.c`` file has.

    Args:
        signed: whether the products are.

    Raises:
        ValueError: it is neither; the numbers of the adder are not those of the products.
        hoconv.jit.BuildError: there is no compiler.
    """
    if isinstance(accumulator, str | os.PathLike) and Path(accumulator).suffix == ".c":
        path = Path(accumulator).absolute()
        if not path.is_file():
            raise ValueError(f"accumulator: {path} is no file")
        return _load_adder(path, path.stat().st_mtime_ns, signed)
    parse(accumulator, signed)
    return accumulator  # pyright: ignore[reportReturnType]


@functools.lru_cache
def _load_adder(path: Path, _changed: int, signed: bool) -> str:
    """Returns the code of an adder, checked once for each time that its file changed."""
    function = load(path, None, None, "add")
    p, q = function.bits
    if function.signed != signed or p != q or p > MOST_BITS[signed]:
        sign = "signed" if signed else "unsigned"
        raise ValueError(
            f"accumulator: expected an adder of two {sign} numbers, as the products are, of up "
            f"to {MOST_BITS[signed]} bits; got {function!r}"
        )
    function.check()
    return function.code


def parse(text: Any, signed: bool) -> Register | Adder | None:
    """Returns what a text, as ops take it, says: ``"saturate:bits=16"``, ``"wrap:bits=20"``, or a
    code.

    Args:
        signed: whether the products are, and so the sums.

    Raises:
        ValueError: it is no such text.
    """
    if text is None:
        return None
    if isinstance(text, str) and "\n" in text:
        return Adder(text)
    most = MOST_BITS[signed]
    kind = text.partition(":")[0] if isinstance(text, str) else None
    bits = value_of(text, "bits", range(LEAST_BITS, most + 1), 0) if kind in KINDS else None
    if not bits:
        sign = "signed" if signed else "unsigned"
        raise ValueError(
            f"accumulator: expected None, 'saturate:bits=n' or 'wrap:bits=n', n from {LEAST_BITS} "
            f"to {most} of {sign} products, or a .c file; got {text!r}"
        )
    least = -(1 << bits - 1) if signed else 0
    return Register(kind == "saturate", least, least + (1 << bits) - 1)
