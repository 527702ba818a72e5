"""Multipliers by name, from a file or from a function."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hoconv.ops.approx import c_functions
from hoconv.ops.approx.multipliers import MULTIPLIERS
from hoconv.ops.approx.table_files import MOST, Bits, Order, integers, pair_of_bits
from hoconv.ops.approx.tables import LookupTable

AnyMultiplier = str | os.PathLike[str] | LookupTable


def find(multiplier: AnyMultiplier) -> str | LookupTable:
    """Returns a multiplier of floats as its name, and one of integers as its table; a file is read
    once, unless it changes.

    Raises:
        ValueError: no multiplier has this name; what the file holds is none.
    """
    if isinstance(multiplier, LookupTable) or multiplier in MULTIPLIERS:
        return multiplier  # pyright: ignore[reportReturnType]
    if isinstance(multiplier, str | os.PathLike) and Path(multiplier).suffix:
        status = os.stat(multiplier)
        return _read(os.path.abspath(multiplier), status.st_mtime_ns, status.st_size)
    raise ValueError(
        f"multiplier: expected one of {', '.join(MULTIPLIERS)}, or a file of one; got "
        f"{multiplier!r}"
    )


@functools.cache
def _read(path: str, *state: int) -> LookupTable:
    return multiplier(path)


def multiplier(
    source: str | os.PathLike[str] | Callable[[Tensor, Tensor], Tensor],
    *,
    bits: Bits | None = None,
    signed: bool | None = None,
    order: Order | None = None,
) -> LookupTable:
    """Returns the multiplier of integers that a file or a function defines.

    Args:
        source: a path or a function. A ``.c`` file has a function of two integers, as those of
            EvoApproxLib: ``uint16_t mul8u_1JFF(uint8_t A, uint8_t B)``; it is compiled and called
            for all pairs. Any other file is a table (:meth:`hoconv.approx.LookupTable.load`). A
            Python function takes integers a (2^p, 1) and b (1, 2^q), int64, and returns their
            products (2^p, 2^q): its definition is the reference, from which the table is made.
        bits: of the operands, 2 to 8: one number, or a pair (p, q). Of a C function by default as
            its name says, else as its types are.
        signed: whether operands are signed. Of a C function by default as its name says, else as
            its types are.
        order: of a table in a file, as for :meth:`hoconv.approx.LookupTable.load`.

    Returns:
        The table of all products. Its `figures` are those of a C file's comments, as EvoApproxLib
        writes them: errors (``MAE``, ``WCE``, ...), ``PDK45_PWR`` in mW, ``PDK45_AREA`` in um2,
        ``PDK45_DELAY`` in ns.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the source has no such multiplier, or fits more than one; says the line.
        TypeError: the function does not return integers.
        hoconv.jit.BuildError: there is no compiler for a C file.
    """
    pair = None if bits is None else pair_of_bits(bits)
    if callable(source):
        return _of_function(source, pair, signed)
    path = Path(source)
    if path.suffix != ".c":
        return LookupTable.load(path, signed=signed, bits=pair, order=order)
    function = c_functions.load(path, pair, signed)
    if max(function.bits) > MOST:
        raise ValueError(
            f"{path}: {function.name} has operands of {function.bits[0]} and {function.bits[1]} "
            f"bits; expected at most {MOST}, of which a table of all products is made"
        )
    return LookupTable(
        function.tabulate(), signed=function.signed, origin=f"{path}, compiled",
        figures=function.figures,
    )  # fmt: skip


def _of_function(
    function: Callable[..., Any], bits: tuple[int, int] | None, signed: bool | None
) -> LookupTable:
    name = getattr(function, "__name__", repr(function))
    if bits is None or signed is None:
        raise ValueError(f"bits, signed: expected both for the function {name}")
    a, b = (torch.from_numpy(integers(n, signed)) for n in bits)
    products = function(a[:, None], b[None])
    if not isinstance(products, Tensor) or products.is_floating_point():
        what = products.dtype if isinstance(products, Tensor) else type(products).__name__
        raise TypeError(f"source: expected a function that returns a tensor of integers; {name} "
                        f"returns {what}")  # fmt: skip
    return LookupTable(products.numpy(), signed=signed, origin=f"the function {name}")
