"""Tables of the derivative of a product of integers with respect to one of its operands.

p, q bits of the operand and of the other one; F the product.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hoconv.ops.approx.sources.table_files import integers

_SIDE = 256  # rows and columns of what kernels read: of all bytes
_ROUNDING = 2.0**-21  # of the largest derivative: what is rounded to float32 may be off by as much


class GradientTable:
    """The derivative of a product of integers with respect to one operand.

    Args:
        derivatives: (2^p, 2^q), ``derivatives[own % 2**p, other % 2**q]``; or (1, 2^q), of the
            other operand alone.
        origin: where they come from, which the text of the table says.

    Attributes:
        terms: float32, in one of three forms: (1, 256), v of the other operand; (2, 256), u of the
            operand and v of the other one, whose product is the derivative; or (256, 256), any
            derivative. Rows and columns of fewer bits repeat. The first two need only ordinary
            products of matrices and convolutions, and are taken where the table allows them.
    """

    def __init__(self, derivatives: Tensor, origin: str) -> None:
        self.shape = tuple(derivatives.shape)
        self.origin = origin
        self.terms = _factorise(derivatives.detach().cpu().double())

    def on(self, device: torch.device) -> Tensor:
        """Returns the terms on a device, where they are kept."""
        if device.type == "meta":
            return torch.empty_like(self.terms, device=device)
        if self.terms.device != device:
            self.terms = self.terms.to(device)
        return self.terms

    def __repr__(self) -> str:
        return f"GradientTable({' x '.join(map(str, self.shape))}, of {self.origin})"


def _factorise(table: Tensor) -> Tensor:
    """Returns the terms of a table, the fewest that give it."""
    wide = table.repeat(1, _SIDE // table.shape[1])
    largest = table.abs().max()
    if (table - table[:1]).abs().max() <= _ROUNDING * largest:
        return wide[:1].float()
    row, column = divmod(int(table.abs().argmax()), table.shape[1])
    u, v = table[:, column] / table[row, column], table[row]
    if (torch.outer(u, v) - table).abs().max() <= _ROUNDING * largest:
        return torch.stack([u.repeat(_SIDE // len(u)), wide[row]]).float()
    return wide.repeat(_SIDE // len(wide), 1).float()


def difference(products: Tensor, signed: bool, window: int) -> Tensor:
    """Returns the mean slope of products in a window around the first operand.

    With lo to hi the range of the operand, a' = min(a + window, hi) and a'' = max(a - window, lo),
    it is (F(a', b) - F(a'', b)) / (a' - a''): the mean of all unit steps of F in the window.

    Args:
        products: (2^p, 2^q), rows and columns by index, as of
            :class:`hoconv.approx.LookupTable`.

    Returns:
        (2^p, 2^q), float64.
    """
    size = products.shape[0]
    a = torch.from_numpy(integers(size.bit_length() - 1, signed))
    after, before = (a + window).clamp(max=a.max()), (a - window).clamp(min=a.min())
    steps = products[after % size].double() - products[before % size].double()
    return steps / (after - before)[:, None]
