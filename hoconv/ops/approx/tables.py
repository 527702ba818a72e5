"""Look-up tables that define multipliers of integers, and the matrix product with a table.

B batch, M, N rows and columns of a matrix product, K what it sums over.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hoconv.dispatch.implementations import resolve
from hoconv.ops.approx.accumulators import AnyAccumulator, code_of
from hoconv.ops.approx.ops import OPS, has_depthwise_kernel, integer_matmul
from hoconv.ops.approx.reference import Pair, output_size
from hoconv.ops.approx.sources import table_files
from hoconv.ops.approx.sources.c_functions import CFunction
from hoconv.ops.approx.sources.table_files import Bits, Order

_SIDE = 256  # rows and columns of the table that kernels read: of all bytes


class LookupTable:
    """The product of every pair of integers of 2 to 8 bits.

    Args:
        products: (2^p, 2^q), integers that fit int32, for operands of p and of q bits.
            ``products[a % 2**p, b % 2**q]`` is a times b: a negative number's row is that of its
            bits in two's complement.
        signed: whether the operands are from -2^(p - 1) to 2^(p - 1) - 1, or from 0 to 2^p - 1.
        origin: where the products come from, which the text of the table says.
        figures: of the circuit, by name.

    Attributes:
        bits: (p, q).
        products, signed, origin, figures: as given.

    Raises:
        ValueError: another shape; a product that does not fit int32.
        TypeError: the products are not integers.
    """

    def __init__(
        self,
        products: Any,
        *,
        signed: bool,
        origin: str = "an array",
        figures: Mapping[str, float] | None = None,
    ) -> None:
        import numpy as np  # here, since torch works without NumPy

        array = np.asarray(products)
        self.bits = table_files.bits_of(array.shape)
        if not np.issubdtype(array.dtype, np.integer):
            raise TypeError(f"products: expected integers, got {array.dtype}")
        if array.min() < -(2**31) or array.max() >= 2**31:
            raise ValueError(
                f"products: expected numbers that fit int32, got {array.min()} to {array.max()}"
            )
        self.products = torch.from_numpy(np.array(array, np.int32, order="C"))
        self.signed = signed
        self.origin = origin
        self.figures = dict(figures or {})
        self.largest = int(np.abs(array.astype(np.int64)).max())
        # Kernels index with whole bytes, so that rows and columns repeat.
        repeats = [_SIDE // size for size in array.shape]
        self._of_bytes = self.products.repeat(repeats) if max(repeats) > 1 else self.products

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        signed: bool | None = None,
        bits: Bits | None = None,
        order: Order | None = None,
    ) -> LookupTable:
        """Reads a table from a file: what its contents do not say, the arguments must.

        Args:
            path: a ``.npy`` file; a ``.txt`` or ``.csv`` file, a line of integers for each first
                operand; or, of any other name, little-endian integers row by row, of 2 bytes
                (int16, or uint16 if the table is unsigned) or of 4 (int32).
            signed: as for :class:`LookupTable`.
            bits: p = q, or the pair (p, q), of a file that is not one row a line.
            order: of the rows and columns of a signed table: ``"index"``, 0 first and -1 last, as
                for :class:`LookupTable`; or ``"value"``, the least number first.

        Without `signed` or `order`, the reading is taken whose products resemble exact ones; of a
        signed table that resembles neither, that by index, unless it is text.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: the file does not hold such a table, or fits more than one reading; says
                what it holds.
        """
        products, signed, reading = table_files.read(path, bits, signed, order)
        try:
            return cls(products, signed=signed, origin=f"{os.fspath(path)}, {reading}")
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}: {error}") from error

    def __repr__(self) -> str:
        p, q = self.bits
        sign = "signed" if self.signed else "unsigned"
        return f"LookupTable({sign}, {p} x {q} bits, of {self.origin})"

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

    def for_op(self, device: torch.device) -> tuple[Tensor | None, str | None]:
        """Returns the multiplier as ops take it: a table, or the code of a function."""
        return self.on(device), None

    def on(self, device: torch.device) -> Tensor:
        """Returns the products of all pairs of bytes, which repeat those of fewer bits: (256, 256)
        int32, on a device, where they are kept."""
        if device.type == "meta":
            return torch.empty_like(self._of_bytes, device=device)
        if self._of_bytes.device != device:
            self._of_bytes = self._of_bytes.to(device)
        return self._of_bytes


# A multiplier of integers.
OfIntegers = LookupTable | CFunction


def table_matmul(
    a: Tensor, b: Tensor, table: OfIntegers, *, accumulator: AnyAccumulator = None,
    impl: str = "auto",
) -> Tensor:  # fmt: skip
    """The matrix product of integers whose products come from a table or from a function in C.

    Args:
        a: (B, M, K), the table's first operand: int8 if the table is signed, else uint8; int32 of a
            function; any strides. Of its numbers the operand's lowest bits count, as in hardware.
        b: (B, K, N), the second operand; dtype and device of a; any strides.
        table: the table of products, or the function.
        accumulator: what a sum is kept in, while products are added to 0 in ascending k: None, an
            exact number; ``"saturate:bits=n"``, a register of n bits, signed as the table is, that
            stays at its limit where an addition would pass it; ``"wrap:bits=n"``, one that keeps
            its lowest bits; or a ``.c`` file with an adder of two integers, as EvoApproxLib has
            them: ``uint32_t add16u_0NT(uint32_t A, uint32_t B)``. Of a
            product, and of what the adder returns, the n lowest bits count. n is from 2 to 32, or
            to 31 of an unsigned table.
        impl: ``"auto"``, ``"reference"``, ``"cpp"`` or ``"cuda"``.

    Returns:
        (B, M, N), int32; int64 of a function.

    Raises:
        ValueError: the shapes do not fit; an exact sum of K products could exceed int32; there is
            no such accumulator; an adder is of other numbers than the table's sign says; a function
            in C does not compile for the GPU that has a.
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
            kind = "a signed table" if table.signed else "an unsigned table"
            kind = "a function" if isinstance(table, CFunction) else kind
            raise TypeError(f"{name}: expected {table.dtype} for {kind}, got {t.dtype}")
    if b.device != a.device:
        raise ValueError(f"b: expected the device of a, {a.device}, got {b.device}")
    code = code_of(accumulator, table.signed)
    if code is None:
        table.check_sum("a", a.shape[2])
    ops = OPS[resolve("approx_matmul", impl, a.device.type)]
    out = integer_matmul(ops, a, b, *table.for_op(a.device), table.signed, code)
    return out if isinstance(table, CFunction) else out.int()


def table_multiply(a: Tensor, b: Tensor, table: OfIntegers, impl: str) -> Tensor:
    """Returns the products of integers a and b of shapes that broadcast, int32 or int64."""
    if isinstance(table, CFunction):
        a, b = (t.contiguous() for t in torch.broadcast_tensors(a, b))
        return OPS[impl].function_multiply(a, b, table.code)
    a, b = (t.int() & (_SIDE - 1) for t in (a, b))
    return table.on(a.device)[a, b]


def table_conv2d(
    x: Tensor, weight: Tensor, windows: Sequence[Pair], groups: int, table: OfIntegers, impl: str
) -> Tensor:
    """The convolution of integers x (B, C, H, W) with weight (O, C / G, R, S), int32 or int64.

    Args:
        windows: stride, padding with zeros, dilation.
    """
    B, O = x.shape[0], weight.shape[0]  # noqa: E741
    if isinstance(table, LookupTable) and has_depthwise_kernel(impl, weight, None):
        table.check_sum("a", weight[0].numel())
        entries = table.on(x.device)
        return OPS[impl].table_depthwise(x, weight, entries, *windows, table.signed)
    size = output_size(x.shape, weight.shape, *windows)
    a = OPS[impl].windows(x, None, weight.shape[2:], *windows, groups).mT  # (G, B * L, K)
    b = weight.reshape(groups, O // groups, -1).mT
    out = table_matmul(a, b, table, impl=impl)
    return out.unflatten(1, (B, math.prod(size))).permute(1, 0, 3, 2).reshape(B, O, *size)
