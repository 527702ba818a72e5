"""Look-up tables for tests."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from hoconv.approx import LookupTable


def integers(signed: bool) -> np.ndarray:
    """All 8-bit integers, in the order of their bytes."""
    return np.arange(256).astype(np.uint8).astype(np.int8 if signed else np.uint8).astype(np.int64)


def exact(signed: bool) -> LookupTable:
    values = integers(signed)
    return LookupTable(values[:, None] * values, signed=signed)


def random_table(signed: bool, least: int = -(2**15), most: int = 2**15 - 1) -> LookupTable:
    products = np.random.default_rng(0).integers(least, most + 1, (256, 256))
    products.flat[[0, -1]] = least, most
    return LookupTable(products, signed=signed)


def narrow(p: int, q: int, signed: bool) -> LookupTable:
    """A random table of operands of p and q bits."""
    products = np.random.default_rng(p * q).integers(-(2**15), 2**15, (1 << p, 1 << q))
    return LookupTable(products, signed=signed)


def operands(table: LookupTable, *shape: int) -> Tensor:
    return torch.randint(0, 256, shape).to(torch.uint8).view(table.dtype)
