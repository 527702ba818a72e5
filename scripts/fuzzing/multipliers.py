"""The specification of the approximate multipliers on the bits of float32, in NumPy, and sums in
the documented order.

    exponent(a) or exponent(b) == 255      -> IEEE's a * b
    exponent(a) or exponent(b) == 0        -> +0
    t = 23 - keep; KM = the highest `keep` bits of a mantissa; SET = 1 << t, or 0 where t is 0
    M = ((man(a) & KM) | SET) + ((man(b) & KM) | SET);  c = M >> 23;  F = M & 0x7fffff
    R = F + ((0xA0000 >> c) & KM)
    e = ea + eb - 127 + c
    c = 1:               m = F where R >= 2^23, else R
    c = 0, R >= 2^23:    m = (R - 2^23) >> 1, e + 1
    else:                m = R
    m &= KM;  e <= 0 -> +0;  e >= 255 -> infinite, with the sign

Mitchell's has no correction and no SET.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[Any]  # float32; float64 for sums that PyTorch adds in an order of its own
CHUNK = 1024  # consecutive k that have a sum of their own
# Name -> mantissa bits kept, and whether there is a correction.
KEPT = {
    "mitchell32": (23, False), "mitchell16": (7, False), "mbm32": (23, True), "mbm16": (7, True),
    "mbm14": (5, True), "mbm12": (3, True), "mbm10": (1, True),
    # By a table of the products of mantissas.
    "mbm:keep=2": (2, True), "mbm:keep=9": (9, True), "mitchell:keep=11": (11, False),
}  # fmt: skip
NAMES = ("exact", *KEPT)


def product(name: str, a: Floats, b: Floats) -> Floats:
    """Multiplies elementwise, with broadcasting."""
    with np.errstate(all="ignore"):
        ieee = np.multiply(a, b, dtype=np.float32)
        if name == "exact":
            return ieee
        keep, corrected = KEPT[name]
        t = 23 - keep
        km = (0x7FFFFF >> t) << t
        set_ = (1 << t) if t and corrected else 0
        bits_a, bits_b = (np.asarray(v).view(np.uint32).astype(np.int64) for v in (a, b))
        exponent_a, exponent_b = (bits_a >> 23) & 255, (bits_b >> 23) & 255
        m = (((bits_a & 0x7FFFFF) & km) | set_) + (((bits_b & 0x7FFFFF) & km) | set_)
        c, f = m >> 23, m & 0x7FFFFF
        r = f + ((0xA0000 >> c) & km) if corrected else f
        e = exponent_a + exponent_b - 127 + c
        passed = r >= 1 << 23
        mantissa = np.where(passed, np.where(c == 1, f, (r - (1 << 23)) >> 1), r) & km
        e = e + (passed & (c == 0))
        sign = (bits_a ^ bits_b) & (1 << 31)
        bits = sign | (np.clip(e, 0, 255) << 23) | mantissa
        bits = np.where(e >= 255, sign | (255 << 23), bits)
        bits = np.where((e <= 0) | (exponent_a == 0) | (exponent_b == 0), 0, bits)
        out = bits.astype(np.uint32).view(np.float32)
        return np.where((exponent_a == 255) | (exponent_b == 255), ieee, out)


def slope(name: str, a: Floats, b: Floats) -> Floats:
    """Computes the analytic derivative with respect to a.

    It is sign(b) 2^e(b) (1 + carry); b where a or b is infinite or NaN; 0 where b is zero or
    subnormal. For the exact product it is b.
    """
    a, b = np.broadcast_arrays(a, b)
    if name == "exact":
        return b
    with np.errstate(all="ignore"):
        keep, corrected = KEPT[name]
        t = 23 - keep
        km = (0x7FFFFF >> t) << t
        set_ = (1 << t) if t and corrected else 0
        bits_a, bits_b = (np.array(v, order="C").view(np.uint32).astype(np.int64) for v in (a, b))
        m = (((bits_a & 0x7FFFFF) & km) | set_) + (((bits_b & 0x7FFFFF) & km) | set_)
        power = (bits_b & ~0x7FFFFF).astype(np.uint32).view(np.float32)
        out = np.where(m >> 23 == 1, np.float32(2) * power, power).astype(np.float32)
        exponent_a, exponent_b = (bits_a >> 23) & 255, (bits_b >> 23) & 255
        out = np.where(exponent_b == 0, np.float32(0), out)
        return np.where((exponent_a == 255) | (exponent_b == 255), b, out)


def ordered_sum(terms: Iterable[tuple[Floats, NDArray | None]], shape: tuple[int, ...]) -> Floats:
    """Adds terms in float32: chunks of 1,024 terms from +0, then the sums of the chunks.

    Args:
        terms: in the order of k, each with a mask of where it exists, or None for everywhere. Where
            a term does not exist it counts as a k and adds nothing.
        shape: of the sum.
    """
    total: Floats | None = None
    partial = np.zeros(shape, np.float32)
    with np.errstate(all="ignore"):
        for k, (term, there) in enumerate(terms):
            if k and k % CHUNK == 0:
                total = partial if total is None else total + partial
                partial = np.zeros(shape, np.float32)
            added = partial + term
            partial = added if there is None else np.where(there, added, partial)
        return partial if total is None else total + partial
