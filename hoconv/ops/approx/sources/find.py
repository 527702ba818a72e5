"""Multipliers by name, from a file or from a function."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hoconv.ops.approx import mantissas
from hoconv.ops.approx.mantissas import FAMILIES, MantissaTable, of_family
from hoconv.ops.approx.multipliers import MULTIPLIERS
from hoconv.ops.approx.sources import c_functions
from hoconv.ops.approx.sources.c_functions import MOST_OF_FUNCTIONS, CFunction
from hoconv.ops.approx.sources.table_files import MOST, Bits, Order, integers, pair_of_bits
from hoconv.ops.approx.tables import LookupTable

Found = LookupTable | CFunction | MantissaTable
AnyMultiplier = str | os.PathLike[str] | Found


def find(multiplier: AnyMultiplier) -> str | Found:
    """Returns a multiplier: one with a kernel of its own as its name, any other as its table or
    function. A file is read once, unless it changes.

    Raises:
        ValueError: no multiplier has this name; there is no such file, or it holds none.
    """
    if isinstance(multiplier, Found):
        return multiplier
    if isinstance(multiplier, str):
        if multiplier in MULTIPLIERS:
            return multiplier
        if multiplier.partition(":")[0] in FAMILIES:
            return of_family(multiplier)
    if isinstance(multiplier, str | os.PathLike) and Path(multiplier).suffix:
        try:
            status = os.stat(multiplier)
        except OSError as error:
            raise ValueError(
                f"multiplier: {os.path.abspath(multiplier)} cannot be read ({error.strerror})"
            ) from None
        return _read(os.path.abspath(multiplier), status.st_mtime_ns, status.st_size)
    names = ", ".join((*MULTIPLIERS, *FAMILIES))
    raise ValueError(
        f"multiplier: expected one of {names}, a family with its parameter, such as mbm:keep=9, or "
        f"a file; got {multiplier!r}"
    )


@functools.cache
def _read(path: str, *state: int) -> Found:
    return multiplier(path)


def multiplier(
    source: str | os.PathLike[str] | Callable[[Tensor, Tensor], Tensor],
    *,
    bits: Bits | None = None,
    signed: bool | None = None,
    order: Order | None = None,
    mantissa_bits: int | None = None,
) -> Found:
    """Returns the multiplier that a file or a function defines.

    Of integers, it is the table of all products:

    - a ``.c`` file with a function of two integers, as those of EvoApproxLib:
      ``uint16_t mul8u_1JFF(uint8_t A, uint8_t B)``. It is compiled and called for all pairs. Of 9
      to 16 bits, a :class:`hoconv.approx.CFunction`, which is called at every product;
    - a table in a file (:meth:`hoconv.approx.LookupTable.load`);
    - a Python function of integers a (2^p, 1) and b (1, 2^q), int64, that returns their products
      (2^p, 2^q). It is the definition, from which the table is made.

    Of floats, it is the table of the products of their mantissas, of which n bits count:

    - a ``.c`` file with a function of two floats, with `mantissa_bits`;
    - a table of ApproxTrain, ``*_n.bin``, or one of another name with `mantissa_bits`: row by row,
      of a byte each (the carry and up to 7 bits) or of 4 (the carry and 23 bits);
    - a Python function of float32 tensors that broadcast, with `mantissa_bits`.

    Args:
        source: a path or a function.
        bits: of integers, 2 to 8, or to 16 of a C function: one number, or a pair (p, q). Of a C
            function by default as its name says, else as its types are, of up to 8 bits.
        signed: whether integers are signed. Of a C function by default as its name says, else as
            its types are.
        order: of a table in a file, as for :meth:`hoconv.approx.LookupTable.load`.
        mantissa_bits: n, 1 to 11.

    Returns:
        The table or the function. The `figures` of one of integers are those of a C file's
        comments, as EvoApproxLib writes them: errors (``MAE``, ``WCE``, ...), ``PDK45_PWR`` in mW,
        ``PDK45_AREA`` in um2, ``PDK45_DELAY`` in ns.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the source has no such multiplier, or fits more than one; says the line.
        TypeError: a function does not return integers, or float32.
        hoconv.jit.BuildError: there is no compiler for a C file.
    """
    of_integers = {"bits": bits, "signed": signed, "order": order}
    given = [name for name, value in of_integers.items() if value is not None]
    if mantissa_bits is not None and given:
        raise ValueError(f"mantissa_bits: expected none with {' and '.join(given)}, which are of "
                         "integers")  # fmt: skip
    if callable(source):
        name = f"the function {getattr(source, '__name__', repr(source))}"
        if mantissa_bits is None:
            return _of_integers(source, name, bits, signed)
        return _of_floats(source, mantissa_bits, name)
    path = Path(source)
    if path.suffix == ".c":
        if mantissa_bits is None:
            return _of_c(path, bits, signed)
        return _of_floats(c_functions.load_float(path), mantissa_bits, f"{path}, compiled")
    if mantissa_bits is not None or (not given and mantissas.bits_in_name(path) is not None):
        if mantissa_bits is None and _holds_integers(path):
            raise ValueError(
                f"{path}: it may be a table of products of integers, or of mantissas, as its name "
                "says; give bits= or mantissa_bits="
            )
        return mantissas.load(path, mantissa_bits)
    return LookupTable.load(path, bits=bits, signed=signed, order=order)


def _holds_integers(path: Path) -> bool:
    """Returns whether a file can be read as a table of products of integers."""
    try:
        LookupTable.load(path)
    except ValueError:
        return False
    return True


def _of_floats(function: Callable[..., Any], bits: int, origin: str) -> MantissaTable:
    table = mantissas.of_function(function, bits, origin)
    mantissas.check(table, function)
    return table


def _of_c(path: Path, bits: Bits | None, signed: bool | None) -> LookupTable | CFunction:
    pair = None if bits is None else pair_of_bits(bits, most=MOST_OF_FUNCTIONS["mul"])
    function = c_functions.load(path, pair, signed)
    if max(function.bits) > MOST:
        function.check()
        return function
    return LookupTable(
        function.tabulate(), signed=function.signed, origin=function.origin,
        figures=function.figures,
    )  # fmt: skip


def _of_integers(
    function: Callable[..., Any], name: str, bits: Bits | None, signed: bool | None
) -> LookupTable:
    if bits is None or signed is None:
        raise ValueError(
            f"bits, signed: expected both for {name}, or mantissa_bits if it is one of floats"
        )
    a, b = (torch.from_numpy(integers(n, signed)) for n in pair_of_bits(bits))
    products = function(a[:, None], b[None])
    if not isinstance(products, Tensor) or products.is_floating_point():
        what = products.dtype if isinstance(products, Tensor) else type(products).__name__
        raise TypeError(f"source: expected a function that returns a tensor of integers; {name} "
                        f"returns {what}")  # fmt: skip
    return LookupTable(products.numpy(), signed=signed, origin=name)
