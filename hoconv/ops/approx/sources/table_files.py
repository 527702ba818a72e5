"""Reads tables of products from files, and tells how a file is to be read from its contents.

The products of an approximate multiplier resemble exact ones in the right reading only: in it,
their correlation with exact products is far above that in any other. Where an argument decides, the
products may be any.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Bits = int | Sequence[int]
Order = Literal["index", "value"]

LEAST, MOST = 2, 8  # bits of an operand
_RESEMBLES = 0.8  # the least correlation; exact products read wrongly have up to 0.5
_ALLOWED = "2^p rows of 2^q products of integers of 2 to 8 bits"


@dataclass(frozen=True)
class _Contents:
    """The contents of a file.

    Attributes:
        form: of the file, in words.
        products: the array, (2^p, 2^q), of a table that is signed, and of one that is not.
        order: of the rows and columns of a signed table, where the form of the file says it.
    """

    form: str
    products: Mapping[bool, Any]
    order: str | None


def bits_of(shape: Sequence[int]) -> tuple[int, int]:
    """Returns the bits of the operands of a table of this shape.

    Raises:
        ValueError: no table has it.
    """
    found = [size.bit_length() - 1 for size in shape]
    if len(found) != 2 or any(
        not LEAST <= n <= MOST or size != 1 << n for n, size in zip(found, shape, strict=True)
    ):
        raise ValueError(
            f"products: expected shape (2^p, 2^q) of operands of 2 to 8 bits, got {tuple(shape)}"
        )
    return found[0], found[1]


def pair_of_bits(bits: Bits, least: int = LEAST, most: int = MOST) -> tuple[int, int]:
    """Returns the bits of both operands, also of one number for both.

    Raises:
        ValueError: not one or two whole numbers from `least` to `most`.
    """
    pair: Any = (bits, bits) if isinstance(bits, int | str) else bits
    numbers = [n for n in pair if type(n) is int and least <= n <= most]
    if len(pair) != 2 or len(numbers) != 2:
        raise ValueError(f"bits: expected a number from {least} to {most}, or two; got {bits!r}")
    return numbers[0], numbers[1]


def read(
    path: str | os.PathLike[str], bits: Bits | None, signed: bool | None, order: Order | None
) -> tuple[Any, bool, str]:
    """Reads a table.

    Args: as of :meth:`hoconv.approx.LookupTable.load`.

    Returns:
        The products, rows and columns by index; whether they are signed; the reading, in words.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file holds no table, or fits more than one reading.
    """
    path = Path(path)
    if order not in (None, "index", "value"):
        raise ValueError(f"order: expected 'index' or 'value', got {order!r}")
    pair = None if bits is None else pair_of_bits(bits)
    if path.suffix == ".npy":
        contents = _read_npy(path, pair)
    elif path.suffix in (".txt", ".csv"):
        contents = _read_text(path, pair)
    else:
        contents = _read_binary(path, pair)
    signs = (False, True) if signed is None else (signed,)
    orders: tuple[str, ...] = ("index", "value") if order is None else (order,)
    # Unsigned numbers are their own indices.
    readings = [(s, o) for s in signs for o in (orders if s else orders[:1])]
    return _choose(path, contents, readings, signed)


def _choose(
    path: Path, contents: _Contents, readings: list[tuple[bool, str]], signed: bool | None
) -> tuple[Any, bool, str]:
    """Returns the products of the one reading that is possible."""
    arrays = {reading: _by_index(contents.products[reading[0]], *reading) for reading in readings}
    fitting = list(readings)
    if len(readings) > 1:
        fitting = [reading for reading in readings if _resembles(arrays[reading], reading[0])]
    if not fitting and signed and contents.order:
        fitting = [(signed, contents.order)]
    if len(fitting) != 1:
        said = "; ".join(_say(*reading) for reading in fitting or readings)
        why = "more than one reading" if fitting else "no reading by their likeness to exact ones"
        raise ValueError(f"{path}: its products fit {why}; choose by arguments: {said}")
    reading = fitting[0]
    sign, order = reading
    words = {"index": "by index, 0 first", "value": "by value, the least first"}
    return arrays[reading], sign, contents.form + (f", {words[order]}" if sign else "")


def _say(signed: bool, order: str) -> str:
    return f"signed={signed}" + (f", order={order!r}" if signed else "")


def _by_index(products: Any, signed: bool, order: str) -> Any:
    import numpy as np

    if not signed or order == "index":
        return products
    return np.roll(products, [size // 2 for size in products.shape], (0, 1))


def _resembles(products: Any, signed: bool) -> bool:
    """Returns whether products, by index, resemble exact ones."""
    import numpy as np

    if not np.issubdtype(products.dtype, np.integer) or products.min() == products.max():
        return False
    rows, columns = (integers(size.bit_length() - 1, signed) for size in products.shape)
    exact = np.multiply.outer(rows, columns)
    return bool(np.corrcoef(exact.ravel(), products.ravel())[0, 1] >= _RESEMBLES)


def integers(bits: int, signed: bool) -> Any:
    """Returns all integers of so many bits in the order of their index: (2^bits,) int64."""
    import numpy as np

    values = np.arange(1 << bits)
    return np.where(values >= len(values) // 2, values - len(values), values) if signed else values


def _read_npy(path: Path, bits: tuple[int, int] | None) -> _Contents:
    import numpy as np

    try:  # mapped, so that a forged header cannot make it allocate memory
        array = np.lib.format.open_memmap(path, mode="r")
    except OSError:
        raise
    except Exception as error:  # of NumPy's parser, which raises many kinds
        raise ValueError(f"{path}: not a readable .npy file ({error})") from error
    array = _shape(path, array, bits) if array.ndim == 1 or bits else array
    try:
        bits_of(array.shape)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return _Contents("NumPy array", {False: array, True: array}, "index")


def _read_text(path: Path, bits: tuple[int, int] | None) -> _Contents:
    import numpy as np

    try:
        lines = path.read_text().splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not a text ({error.reason} at byte {error.start})") from None
    rows: list[list[int]] = []
    first = 0
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].replace(",", " ").split()
        if not words:
            continue
        try:
            rows.append([int(word) for word in words])
        except ValueError:
            word = next(word for word in words if not word.removeprefix("-").isdecimal())
            raise ValueError(f"{path}, line {number}: expected integers, got {word!r}") from None
        first = first or number
        if len(rows[-1]) != len(rows[0]):
            raise ValueError(
                f"{path}, line {number}: expected {len(rows[0])} products as in line {first}, got "
                f"{len(rows[-1])}"
            )
    array = np.array(rows, np.int64) if rows else np.empty((0, 0), np.int64)
    if 1 in array.shape or bits:
        array = _shape(path, array, bits)
    try:
        bits_of(array.shape)
    except ValueError:
        raise ValueError(
            f"{path}: expected {_ALLOWED}; it has {array.shape[0]} rows of {array.shape[1]}"
        ) from None
    return _Contents("text", {False: array, True: array}, None)


def _read_binary(path: Path, bits: tuple[int, int] | None) -> _Contents:
    import numpy as np

    contents = path.read_bytes()
    pairs = [bits] if bits else [(n, n) for n in range(LEAST, MOST + 1)]
    kinds = {(size << sum(pair)): (pair, size) for pair in pairs for size in (2, 4)}
    if len(contents) not in kinds:
        expected = ", ".join(f"{size:,}" for size in sorted(kinds))
        raise ValueError(
            f"{path}: expected {_ALLOWED}, of 2 or 4 bytes each, which is one of {expected} bytes; "
            f"it has {len(contents):,}"
        )
    pair, size = kinds[len(contents)]
    dtypes = {True: f"<i{size}", False: "<u2" if size == 2 else "<i4"}
    products = {
        signed: np.frombuffer(contents, dtype).reshape([1 << n for n in pair])
        for signed, dtype in dtypes.items()
    }
    largest = max(int(abs(array.astype(np.int64)).max()) for array in products.values())
    # A table of 2 bytes a product, of p and p + 1 bits, is as long as one of 4 bytes of p bits; as
    # such its products are some 2^16 times as large.
    if not bits and size == 4 and largest >= 4 << sum(pair):
        raise ValueError(
            f"{path}: as a table of {pair[0]} x {pair[1]} bits it has products of up to "
            f"{largest:,}; give bits= of both operands"
        )
    return _Contents(f"integers of {size} bytes", products, "index")


def _shape(path: Path, array: Any, bits: tuple[int, int] | None) -> Any:
    """Returns the numbers of an array as those of operands of so many bits, or of as many both."""
    if not bits:
        half = (array.size.bit_length() - 1) // 2
        bits = half, half
    if array.size != 1 << sum(bits):
        raise ValueError(
            f"{path}: expected {_ALLOWED}; it has {array.size:,} products"
            + (f", not the {1 << sum(bits):,} of {bits[0]} and {bits[1]} bits" if bits else "")
        )
    if array.ndim == 2 and 1 not in array.shape and array.shape != (1 << bits[0], 1 << bits[1]):
        raise ValueError(
            f"{path}: expected {1 << bits[0]} rows of {1 << bits[1]} products for bits={bits}; it "
            f"has {array.shape[0]} rows of {array.shape[1]}"
        )
    return array.reshape([1 << n for n in bits])
