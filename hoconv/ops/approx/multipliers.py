"""The definition of every multiplier, on tensors, which is the ground truth; and their names.

``csrc/approx/multipliers.h`` has the same definitions in C++: a new multiplier with a kernel of its
own is one entry here and one there. Any other is a table of the products of its mantissas.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

_MANTISSA = 0x7FFFFF
_CORRECTION = 0xA0000  # 2^-4 + 2^-6, in units of the mantissa's last bit, 2^-23
_SIGN = -(2**31)


class Multiplier(Protocol):
    """A product of two float32 tensors, elementwise, with broadcasting."""

    def multiply(self, a: Tensor, b: Tensor) -> Tensor:
        """The product."""
        ...

    def derivative(self, a: Tensor, b: Tensor) -> Tensor:
        """The derivative of the product with respect to `a`, where there is one.

        That with respect to `b` is ``derivative(b, a)``, since every multiplier is symmetric.
        """
        ...


@dataclass(frozen=True)
class Exact:
    """IEEE multiplication."""

    def multiply(self, a: Tensor, b: Tensor) -> Tensor:
        return a * b

    def derivative(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.broadcast_tensors(a, b)[1]


@dataclass(frozen=True)
class Logarithmic:
    """Mitchell's multiplication, and the minimally biased one (MBM) that is based on it.

    The mantissas are added instead of multiplied, which is Mitchell's approximation of the
    logarithm. MBM adds a constant that makes the mean error almost zero. From Saadat, Bokhari and
    Parameswaran, Minimally Biased Multipliers for Approximate Integer and Floating-Point
    Multiplication, IEEE TCAD 2018.

    A product is +0 if an operand is zero or subnormal, or if it would be below the normal numbers.
    It is infinite if it would be above them. With an infinite or NaN operand it is IEEE's.

    Attributes:
        keep: how many mantissa bits the operands and the product keep, from the highest; 1 to 23.
        corrected: whether it is MBM. Where the operands' bits are cut off, MBM also sets the lowest
            bit that they keep.
    """

    keep: int
    corrected: bool

    def multiply(self, a: Tensor, b: Tensor) -> Tensor:
        bits_a, bits_b = _bits(a), _bits(b)
        total = self._mantissa(bits_a) + self._mantissa(bits_b)
        carry, fraction = total >> 23, total & _MANTISSA
        correction = torch.bitwise_right_shift(_CORRECTION, carry) & self._kept
        corrected = fraction + correction if self.corrected else fraction
        overflow = corrected > _MANTISSA
        halved = (corrected - _MANTISSA - 1) >> 1
        mantissa = torch.where(overflow, torch.where(carry == 1, fraction, halved), corrected)
        more = carry + (overflow & (carry == 0)).int()
        return _compose(a, b, more, mantissa & self._kept)

    def derivative(self, a: Tensor, b: Tensor) -> Tensor:
        """sign(b) 2^e(b) (1 + carry): the slope of a sum of mantissas, doubled where it carries.

        The formula is used at a = 0 too, where the product has no derivative, so that a parameter
        that starts at zero learns.
        """
        bits_a, bits_b = _bits(a), _bits(b)
        exponent_b = _exponent(bits_b)
        carry = (self._mantissa(bits_a) + self._mantissa(bits_b)) >> 23
        power = (bits_b & ~_MANTISSA).view(torch.float32)
        slope = torch.where(exponent_b == 0, 0.0, torch.where(carry == 1, 2 * power, power))
        return torch.where((_exponent(bits_a) == 255) | (exponent_b == 255), b, slope)

    @property
    def _kept(self) -> int:
        return _MANTISSA >> (23 - self.keep) << (23 - self.keep)

    def _mantissa(self, bits: Tensor) -> Tensor:
        lowest = 1 << (23 - self.keep) if self.corrected and self.keep < 23 else 0
        return (bits & self._kept) | lowest


MULTIPLIERS: Mapping[str, Multiplier] = {
    "exact": Exact(),
    "mitchell32": Logarithmic(23, corrected=False),
    "mitchell16": Logarithmic(7, corrected=False),
    "mbm32": Logarithmic(23, corrected=True),
    "mbm16": Logarithmic(7, corrected=True),
    "mbm14": Logarithmic(5, corrected=True),
    "mbm12": Logarithmic(3, corrected=True),
    "mbm10": Logarithmic(1, corrected=True),
}


def multiply_by_entries(entries: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """The product of float32 tensors whose mantissas' products are in a table.

    Zeros, subnormal numbers, infinities and NaN, and products out of range are as of
    :class:`Logarithmic`.

    Args:
        entries: (2^n, 2^n) int32: the bits of the product of 1.i and 1.j, less those of 1.0.
    """
    unused = 23 - (entries.shape[0].bit_length() - 1)
    entry = entries[(_bits(a) & _MANTISSA) >> unused, (_bits(b) & _MANTISSA) >> unused]
    return _compose(a, b, entry >> 23, entry & _MANTISSA)


def _compose(a: Tensor, b: Tensor, more: Tensor, mantissa: Tensor) -> Tensor:
    """Returns the product of a and b that has this mantissa, and the sum of their exponents plus
    `more`."""
    bits_a, bits_b = _bits(a), _bits(b)
    exponent_a, exponent_b = _exponent(bits_a), _exponent(bits_b)
    exponent = exponent_a + exponent_b - 127 + more
    sign = (bits_a ^ bits_b) & _SIGN
    finite = sign | exponent.clamp(1, 254) << 23 | mantissa
    product = torch.where(exponent >= 255, sign | 255 << 23, finite)
    zero = (exponent_a == 0) | (exponent_b == 0) | (exponent <= 0)
    product = torch.where(zero, 0, product).view(torch.float32)
    return torch.where((exponent_a == 255) | (exponent_b == 255), a * b, product)


def _bits(t: Tensor) -> Tensor:
    return t.resolve_neg().view(torch.int32)


def _exponent(bits: Tensor) -> Tensor:
    return bits >> 23 & 0xFF
