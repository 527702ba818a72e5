"""Look-up tables that define multipliers of 8-bit integers, and the matrix product with a table.

B batch, M, N rows and columns of a matrix product, K what it sums over.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hoconv.dispatch.implementations import resolve
from hoconv.ops.approx.ops import OPS

_ENTRIES = 256 * 256
# Bytes of a file -> whether the table is signed -> the dtype of the file's numbers.
_RAW = {_ENTRIES * 2: {True: "<i2", False: "<u2"}, _ENTRIES * 4: {True: "<i4", False: "<i4"}}


class LookupTable:
    """The product of every pair of 8-bit integers.

    Args:
        products: (256, 256), integers that fit int32. ``products[a % 256, b % 256]`` is a times b:
            a negative number's row is that of its byte in two's complement.
        signed: whether the operands are int8, from -128 to 127, or uint8, from 0 to 255.

    Raises:
        ValueError: another shape; a product that does not fit int32.
        TypeError: the products are not integers.
    """

    def __init__(self, products: Any, *, signed: bool) -> None:
        import numpy as np  # here, since torch works without NumPy

        array = np.asarray(products)
        if array.shape != (256, 256):
            raise ValueError(f"products: expected shape (256, 256), got {array.shape}")
        if not np.issubdtype(array.dtype, np.integer):
            raise TypeError(f"products: expected integers, got {array.dtype}")
        if array.min() < -(2**31) or array.max() >= 2**31:
            raise ValueError(
                f"products: expected numbers that fit int32, got {array.min()} to {array.max()}"
            )
        self.products = torch.from_numpy(np.array(array, np.int32, order="C"))
        self.signed = signed
        self.largest = int(np.abs(array.astype(np.int64)).max())

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, signed: bool) -> LookupTable:
        """Reads a table from a file.

        Args:
            path: a ``.npy`` file of shape (256, 256), or flat. Any other file holds 65,536
                little-endian numbers in the order ``256 * (a % 256) + b % 256``: of 2 bytes (int16,
                or uint16 if the table is unsigned) or of 4 (int32).
            signed: as for :class:`LookupTable`; the file does not say it.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: the file does not hold such a table; says what it holds.
        """
        import numpy as np

        path = Path(path)
        if path.suffix == ".npy":
            try:  # mapped, so that a forged header cannot make it allocate memory
                array = np.lib.format.open_memmap(path, mode="r")
            except OSError:
                raise
            except Exception as error:  # of NumPy's parser, which raises many kinds
                raise ValueError(f"{path}: not a readable .npy file ({error})") from error
        else:
            contents = path.read_bytes()
            if len(contents) not in _RAW:
                raise ValueError(
                    f"{path}: expected 65,536 integers of 2 or 4 bytes, which is 131,072 or "
                    f"262,144 bytes; it has {len(contents):,}"
                )
            array = np.frombuffer(contents, _RAW[len(contents)][signed])
        if array.size == _ENTRIES:
            array = array.reshape(256, 256)
        try:
            return cls(array, signed=signed)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}: {error}") from error

    def check_sum(self, name: str, K: int) -> None:
        """Checks that a sum of K products of the argument `name` fits int32.

        Raises:
            ValueError: it could exceed int32.
        """
        if K * self.largest >= 2**31:
            raise ValueError(
                f"{name}: a sum of {K} products of up to {self.largest} could exceed int32; "
                f"split it"
            )

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the operands."""
        return torch.int8 if self.signed else torch.uint8

    def on(self, device: torch.device) -> Tensor:
        """Returns the products, (256, 256) int32, on a device, and keeps them there."""
        if device.type == "meta":
            return torch.empty_like(self.products, device=device)
        if self.products.device != device:
            self.products = self.products.to(device)
        return self.products


def table_matmul(a: Tensor, b: Tensor, table: LookupTable, *, impl: str = "auto") -> Tensor:
    """The matrix product of 8-bit integers whose products come from a table; sums are exact.

    Args:
        a: (B, M, K), the table's first operand: int8 if the table is signed, else uint8; any
            strides.
        b: (B, K, N), the second operand; dtype and device of a; any strides.
        table: the table of products.
        impl: ``"auto"``, ``"reference"``, ``"cpp"`` or ``"cuda"``.

    Returns:
        (B, M, N), int32.

    Raises:
        ValueError: the shapes do not fit, or a sum of K products could exceed int32.
        TypeError: a dtype is not the table's.
        hoconv.dispatch.implementations.ImplementationError: `impl` names one that cannot run here.
    """
    if a.dim() != 3 or b.dim() != 3 or (a.shape[0], a.shape[2]) != tuple(b.shape[:2]):
        raise ValueError(
            f"b: expected (B, K, N) for a of shape (B, M, K), got {tuple(b.shape)} for "
            f"{tuple(a.shape)}"
        )
    for name, t in (("a", a), ("b", b)):
        if t.dtype != table.dtype:
            kind = "a signed" if table.signed else "an unsigned"
            raise TypeError(f"{name}: expected {table.dtype} for {kind} table, got {t.dtype}")
    if b.device != a.device:
        raise ValueError(f"b: expected the device of a, {a.device}, got {b.device}")
    table.check_sum("a", a.shape[2])
    name = resolve("approx_matmul", impl, a.device.type)
    return OPS[name].table_matmul(a, b, table.on(a.device))
