"""The gradient of a product of integers that a user chooses, for each operand."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hoconv.ops.approx.sources.c_functions import CFunction
from hoconv.ops.approx.sources.names import value_of
from hoconv.ops.approx.table_gradients.tables import GradientTable, difference
from hoconv.ops.approx.tables import LookupTable

WINDOWS, WINDOW = range(1, 256), 16  # allowed, and the default
_FILES = (".npy", ".txt", ".csv")
Choice = tuple[str | GradientTable, str | GradientTable]


def choose(
    gradient: Any, multiplier: LookupTable | CFunction
) -> tuple[str | Choice, list[GradientTable | None]]:
    """Returns a choice with its tables made, and the table of each operand; None for ``"ste"``.

    Args:
        gradient: ``"ste"``, ``"difference"`` or ``"difference:window=w"``; or a pair, of these and
            of tables of one's own, which are arrays, tensors or files.

    Raises:
        ValueError: `gradient` is none of these; a table has another shape, or numbers that are
            not finite; the multiplier is a function and has no differences.
        TypeError: `gradient` is neither a string nor a sequence; a table is not of numbers.
    """
    if isinstance(gradient, str) and gradient == "ste":
        return gradient, [None, None]
    if isinstance(multiplier, CFunction):
        raise ValueError(
            f"gradient: expected 'ste' for {multiplier!r}, which is no table; got "
            f"{describe(gradient)}"
        )
    table = multiplier
    if isinstance(gradient, str):
        if _window(gradient) is not None:
            return gradient, [_find(gradient, table, operand) for operand in range(2)]
    elif isinstance(gradient, Sequence) and len(gradient) == 2:
        pair = [_make(each, table, operand) for operand, each in enumerate(gradient)]
        found = [_find(each, table, operand) for operand, each in enumerate(pair)]
        return (pair[0], pair[1]), found
    raise _refusal(gradient, ValueError if isinstance(gradient, Sequence) else TypeError)


def _refusal(got: Any, error: type[Exception]) -> Exception:
    return error(
        "gradient: expected 'ste', 'difference' or 'difference:window=w', w from "
        f"{WINDOWS[0]} to {WINDOWS[-1]}, or a pair of these and of tables, for a multiplier of "
        f"integers; got {describe(got)}"
    )


def describe(gradient: Any) -> str:
    """Returns a gradient in few words, for an error: of arrays and tensors the type."""
    if isinstance(gradient, Sequence) and not isinstance(gradient, str):
        many = 8  # a table, in lists
        pair = f"({', '.join(map(describe, gradient[:many]))})"
        return pair if len(gradient) <= many else type(gradient).__name__
    return type(gradient).__name__ if hasattr(gradient, "__array__") else repr(gradient)


def _window(text: str) -> int | None:
    if text.partition(":")[0] != "difference":
        return None
    return value_of(text, "window", WINDOWS, WINDOW)


def _make(given: Any, table: LookupTable, operand: int) -> str | GradientTable:
    """Returns the name or the table that one of a pair is."""
    if isinstance(given, GradientTable):  # of another layer, perhaps
        _check_shape(given.shape if given.shape[0] > 1 else given.shape[1:], table, operand)
        return given
    if isinstance(given, os.PathLike) or (isinstance(given, str) and given.endswith(_FILES)):
        return _own(_read(Path(given)), table, operand, os.fspath(given))
    if isinstance(given, str):
        if given == "ste" or _window(given) is not None:
            return given
        raise _refusal(given, ValueError)
    if isinstance(given, Tensor) or hasattr(given, "__array__"):
        return _own(torch.as_tensor(given), table, operand, "an array")
    raise _refusal(given, TypeError)


def _read(path: Path) -> Tensor:
    import numpy as np

    try:
        array = np.load(path) if path.suffix == ".npy" else _read_text(path)
        if array.dtype.kind not in "iuf":
            raise ValueError(f"expected real numbers, got {array.dtype}")
        return torch.from_numpy(np.array(array, np.float64))
    except (OSError, TypeError, ValueError) as error:
        raise ValueError(f"gradient: {path.absolute()} cannot be read ({error})") from None


def _read_text(path: Path) -> Any:
    import numpy as np

    lines = path.read_text().replace(",", " ").splitlines()
    return np.squeeze(np.loadtxt(lines, ndmin=2))


def _own(values: Tensor, table: LookupTable, operand: int, origin: str) -> GradientTable:
    """Returns the table that a user gives of the derivative with respect to an operand."""
    if values.dtype == torch.bool or values.is_complex():
        raise TypeError(f"gradient: expected a table of real numbers, got {values.dtype}")
    own_first = values.mT if operand and values.dim() == 2 else values
    _check_shape(tuple(own_first.shape), table, operand)
    if not values.float().isfinite().all():
        raise ValueError(f"gradient: expected finite numbers; {origin} has others")
    return GradientTable(own_first if values.dim() == 2 else values[None], origin)


def _check_shape(shape: tuple[int, ...], table: LookupTable, operand: int) -> None:
    """Checks the shape of a table whose rows are of the operand, or that has no rows."""
    whole = tuple(table.products.shape)
    own, other = whole[operand], whole[1 - operand]
    if shape not in ((own, other), (other,)):
        raise ValueError(
            f"gradient: expected a table of shape {whole}, or {(other,)} of the other operand "
            f"alone, for the {('first', 'second')[operand]} operand of {table!r}; got "
            f"{shape[::-1] if operand else shape}"
        )


def _find(choice: str | GradientTable, table: LookupTable, operand: int) -> GradientTable | None:
    """Returns the table of an operand's gradient."""
    if isinstance(choice, GradientTable):
        return choice
    window = _window(choice)
    return None if window is None else _difference(table, operand, window)


@functools.lru_cache(maxsize=16)  # the layers of a network share it
def _difference(table: LookupTable, operand: int, window: int) -> GradientTable:
    products = table.products.mT if operand else table.products
    derivatives = difference(products, table.signed, window)
    return GradientTable(derivatives, f"differences, window {window}")
