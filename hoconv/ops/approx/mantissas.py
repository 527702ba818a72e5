"""Multipliers of floats by a table of the products of their mantissas: of any function, of files of
ApproxTrain, and of families that have a name.

A number is ±2^e · 1.m: signs and exponents are exact, and an approximate product is one of the
mantissas. With n bits of each there are 2^(2n) products.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hoconv.ops.approx.multipliers import Logarithmic, multiply_by_entries
from hoconv.ops.approx.sources.names import value_of

MOST = 11  # bits of a mantissa; the table has 16 MiB then
_ONE = 127 << 23  # the bits of 1.0
_AT_ONCE = 1 << 18  # products of a function; more would take much memory for its intermediate ones
Product = Callable[[Tensor, Tensor], Any]


class MantissaTable:
    """The product of every pair of mantissas of 1 to 11 bits, for products of float32.

    A product takes the n highest bits of the mantissas. Zeros, subnormal numbers, infinities, NaN
    and products out of range are as with the multipliers of ``hoconv.approx.MULTIPLIERS``.

    Args:
        products: (2^n, 2^n), float32: ``products[i, j]`` is the product of 1 + i / 2^n and
            1 + j / 2^n, from 0.25 to less than 8.
        origin: where the products come from, which the text of the table says.

    Attributes:
        bits: n.

    Raises:
        ValueError: another shape or number.
        TypeError: the products are no tensor of float32.
    """

    def __init__(self, products: Tensor, *, origin: str = "a tensor") -> None:
        if not isinstance(products, Tensor) or products.dtype != torch.float32:
            got = products.dtype if isinstance(products, Tensor) else type(products).__name__
            raise TypeError(f"products: expected a float32 tensor, got {got}")
        self.bits = max(products.shape, default=0).bit_length() - 1
        if not 1 <= self.bits <= MOST or products.shape != (1 << self.bits,) * 2:
            raise ValueError(
                f"products: expected shape (2^n, 2^n) of mantissas of 1 to {MOST} bits, got "
                f"{tuple(products.shape)}"
            )
        if not ((products >= 0.25) & (products < 8)).all():
            raise ValueError(
                f"products: expected numbers from 0.25 to less than 8, got "
                f"{products.min().item()} to {products.max().item()}"
            )
        with torch.inference_mode(False):  # calls outside it may keep them for a gradient
            self._entries = products.cpu().contiguous().view(torch.int32) - _ONE
        self.origin = origin

    def on(self, device: torch.device) -> Tensor:
        """Returns the bits of the products, less those of 1.0: (2^n, 2^n) int32, on a device, where
        they are kept."""
        if device.type == "meta":
            return torch.empty_like(self._entries, device=device)
        if self._entries.device != device:
            with torch.inference_mode(False):
                self._entries = self._entries.to(device)
        return self._entries

    def __repr__(self) -> str:
        return f"MantissaTable({self.bits} bits, of {self.origin})"


def of_function(product: Product, bits: Any, origin: str) -> MantissaTable:
    """Returns the table of a function of tensors of float32 that broadcast, from 1 to 2."""
    if type(bits) is not int or not 1 <= bits <= MOST:
        raise ValueError(f"mantissa_bits: expected a number from 1 to {MOST}, got {bits!r}")
    significands = 1 + torch.arange(1 << bits) / (1 << bits)
    some = significands[:, None].split(max(1, _AT_ONCE >> bits))
    parts = [product(rows, significands[None]) for rows in some]
    of_tensors = all(isinstance(part, Tensor) for part in parts)
    return MantissaTable(torch.cat(parts) if of_tensors else parts[0], origin=origin)


def check(table: MantissaTable, product: Product) -> None:
    """Checks on random numbers that a function takes no more bits of the mantissas than its table.

    Raises:
        ValueError: it does.
    """
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(0, 1 << 23, (2, 1 << 16), generator=generator)
    exponents = torch.randint(107, 147, bits.shape, generator=generator)  # 2^-20 to 2^20
    signs = torch.randint(-1, 1, bits.shape, generator=generator) << 31
    a, b = (signs | exponents << 23 | bits).int().view(torch.float32)
    found, expected = product(a, b), multiply_by_entries(table.on(a.device), a, b)
    if (differs := found != expected).any():
        i = differs.nonzero()[0, 0]
        raise ValueError(
            f"{table.origin}: the product of {a[i].item()} and {b[i].item()} is {found[i].item()}, "
            f"and with mantissas of {table.bits} bits {expected[i].item()}; give the mantissa_bits "
            "that the function takes"
        )


def load(path: Path, bits: int | None) -> MantissaTable:
    """Reads a table as ApproxTrain writes it: row by row, for each pair the highest bits of the
    product's mantissa, and the highest bit of all set where its exponent is one more.

    Args:
        bits: of a mantissa; by default the number at the end of the file's name, as in MBM_7.bin.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file holds no such table.
    """
    import numpy as np

    contents = path.read_bytes()
    bits = bits_in_name(path) if bits is None else bits
    if bits is None:
        raise ValueError(f"{path}: the name does not say how many bits; give mantissa_bits=")
    entries = 1 << 2 * bits
    if len(contents) == entries and bits <= 7:
        numbers = np.frombuffer(contents, np.uint8).astype(np.int64)
        carry, mantissa, width = numbers >> 7, numbers & 0x7F, bits
    elif len(contents) == 4 * entries and bits <= MOST:
        numbers = np.frombuffer(contents, "<u4").astype(np.int64)
        carry, mantissa, width = numbers >> 31, numbers & 0x7FFFFFFF, 23
    else:
        raise ValueError(
            f"{path}: expected {entries:,} products of mantissas of {bits} bits, of a byte each "
            f"for up to 7 bits or of 4 for up to {MOST}; it has {len(contents):,} bytes"
        )
    if (wide := mantissa >= 1 << width).any():
        raise ValueError(
            f"{path}: product {wide.argmax()} is {numbers[wide.argmax()]:#x}; expected a mantissa "
            f"of {width} bits and a carry"
        )
    products = (1 + mantissa / (1 << width)) * (1 << carry)
    shape = 1 << bits, 1 << bits
    return MantissaTable(
        torch.from_numpy(products.reshape(shape)).float(),
        origin=f"{path}, {len(contents) // entries} bytes a product",
    )


def bits_in_name(path: Path) -> int | None:
    """Returns the number at the end of the name of a table of ApproxTrain's, or None."""
    found = re.search(r"_(\d+)$", path.stem) if path.suffix == ".bin" else None
    return int(found[1]) if found else None


# Families of multipliers: a name, a parameter, and the table of a value of it. Significands are
# from 1 to 2 and have no more bits than the table counts, so that float32 holds their products.


def _mbm(keep: int) -> tuple[Product, int]:
    return Logarithmic(keep, corrected=True).multiply, keep


def _mitchell(keep: int) -> tuple[Product, int]:
    return Logarithmic(keep, corrected=False).multiply, keep


def _lmul(keep: int) -> tuple[Product, int]:
    """The bits of both numbers are added, and 2^-l to the mantissas: l is keep for up to 3 bits, 3
    for 4, and else 4. Luo and Sun, Addition is All You Need for Energy-efficient Language Models,
    arXiv 2410.00907."""
    offset = 1 << (23 - (keep if keep <= 3 else 3 if keep == 4 else 4))

    def product(a: Tensor, b: Tensor) -> Tensor:
        return (a.view(torch.int32) + b.view(torch.int32) - _ONE + offset).view(torch.float32)

    return product, keep


def _drum(k: int) -> tuple[Product, int]:
    """The exact product of the k highest bits, from the leading one on, the last of them set.
    Hashemi, Bahar and Reda, DRUM: A Dynamic Range Unbiased Multiplier, ICCAD 2015."""
    last = 2.0 ** (1 - k)

    def product(a: Tensor, b: Tensor) -> Tensor:
        a, b = ((t / (2 * last)).floor() * (2 * last) + last for t in (a, b))
        return a * b

    return product, k - 1


def _truncated(keep: int) -> tuple[Product, int]:
    """The exact product of operands whose lower bits are cut off."""
    return torch.mul, keep


def _rounded(keep: int) -> tuple[Product, int]:
    """The exact product of operands that are rounded to the nearest, ties away from zero."""

    def product(a: Tensor, b: Tensor) -> Tensor:
        a, b = ((t * 2**keep + 0.5).floor() / 2**keep for t in (a, b))
        return a * b

    return product, keep + 1


# Name -> parameter, its values, the default, and the family.
FAMILIES: dict[str, tuple[str, range, int, Callable[[int], tuple[Product, int]]]] = {
    "mbm": ("keep", range(1, MOST + 1), 7, _mbm),
    "mitchell": ("keep", range(1, MOST + 1), 7, _mitchell),
    "lmul": ("keep", range(1, MOST + 1), 7, _lmul),
    "drum": ("k", range(2, MOST + 2), 6, _drum),
    "truncated": ("keep", range(1, MOST + 1), 7, _truncated),
    "rounded": ("keep", range(1, MOST), 7, _rounded),
}


@functools.cache
def of_family(text: str) -> MantissaTable:
    """Returns the multiplier of a family: ``"drum"``, or ``"drum:k=4"``.

    Raises:
        ValueError: the family has no such parameter or value.
    """
    name = text.partition(":")[0]
    parameter, allowed, default, family = FAMILIES[name]
    value = value_of(text, parameter, allowed, default)
    if value is None:
        raise ValueError(
            f"multiplier: expected {name} or {name}:{parameter}=n, n from {allowed[0]} to "
            f"{allowed[-1]}; got {text!r}"
        )
    product, bits = family(value)
    return of_function(product, bits, f"{name}:{parameter}={value}")
