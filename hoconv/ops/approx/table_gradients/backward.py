"""The gradients of products of quantised numbers by a table of integers.

A real number is scale * (q - zero), q an integer. Where D is the derivative of the product of two
integers with respect to the first one, that of the product of two real numbers is

    scale of the other * (D(q of its own, q of the other) - zero of the other)

With D(i, j) = u(i) v(j) the sum of such derivatives times gradients is a sum of exact gradients of
products, which PyTorch computes: those of cuBLAS and cuDNN, on a GPU. With any other D it is looked
up. Without D the gradient is straight-through: that of the exact product of the real numbers.

B batch, C channels of the input, O of the output, G groups, L pixels of the output, R x S the
kernel; M, N rows and columns of a matrix product, K what it sums over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

from hoconv.ops.approx.reference import Pair, columns

# Computes `approx_table_derivative`, which reference.py defines.
Lookup = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Operand:
    """Real numbers on a grid of integers, and the terms of their gradient, a
    :class:`GradientTable`'s; None if it is straight-through."""

    real: Tensor
    scale: Tensor
    zero: Tensor
    terms: Tensor | None

    @property
    def mT(self) -> Operand:
        return replace(self, real=self.real.mT)

    @property
    def index(self) -> Tensor:
        """The bytes of the integers, as int32."""
        return integers_of(self.real, self.scale, self.zero) & 255

    @property
    def is_looked_up(self) -> bool:
        return self.terms is not None and self.terms.shape[0] > 2


def integers_of(real: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """Returns the integers of real numbers on a grid, int32."""
    return (real / scale).round().int() + zero


def _factorised(
    own: Operand, other: Operand, exact: Callable[[Tensor], Tensor], of_ones: Callable[[], Tensor]
) -> Tensor:
    """Computes a gradient by ``exact(numbers)``, that of the exact product with such numbers in
    place of the other operand, and by ``of_ones()``, the same with ones, which takes less."""
    if own.terms is None:
        return exact(other.real)
    *u, v = own.terms.unbind()
    derivatives = v[other.index]
    if not u:
        return exact(other.scale * (derivatives - other.zero))
    product = u[0][own.index] * exact(other.scale * derivatives)
    return product - other.scale * other.zero * of_ones()


def of_left(grad: Tensor, a: Operand, b: Operand, lookup: Lookup) -> Tensor:
    """The gradient of a (B, M, K) in its product with b (B, K, N), given that of the product."""

    def of_ones() -> Tensor:
        return grad.sum(2, keepdim=True)

    if not a.is_looked_up:
        return _factorised(a, b, lambda right: grad @ right.mT, of_ones)
    assert a.terms is not None
    left, right = (operand.index.to(torch.uint8) for operand in (a, b))
    total = lookup(grad.contiguous(), left, right, a.terms)
    return b.scale * (total - b.zero * of_ones())


def of_matmul(
    grad: Tensor, a: Operand, b: Operand, needed: Sequence[bool], lookup: Lookup
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of a (B, M, K) and b (B, K, N)."""
    d_a = of_left(grad, a, b, lookup) if needed[0] else None
    d_b = of_left(grad.mT, b.mT, a.mT, lookup).mT if needed[1] else None
    return d_a, d_b


def of_conv2d(
    grad: Tensor, x: Operand, weight: Operand, windows: Sequence[Pair], groups: int,
    needed: Sequence[bool], lookup: Lookup,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """The gradients of x (B, C, H, W) and of the weight (O, C / G, R, S); `windows` are stride,
    padding and dilation."""
    stride, padding, dilation = windows

    def exact(grad: Tensor, x: Tensor, weight: Tensor, padding: Pair, operand: int) -> Tensor:
        return torch.ops.aten.convolution_backward(
            grad, x, weight, None, stride, padding, dilation, False, [0, 0], groups,
            [operand == 0, operand == 1, False],
        )[operand]  # fmt: skip

    d_x = d_weight = None
    # PyTorch refuses convolutions of an empty batch of torch.func.vmap, as in the Jacobian of an
    # empty output. Matrix products of windows have no such limit.
    transformed = is_functorch_wrapped_tensor(grad)
    if needed[0] and (x.is_looked_up or transformed):
        d_x = _input_by_windows(grad, x, weight, windows, groups, lookup)
    elif needed[0]:

        def ones_of_weight() -> Tensor:
            # Of all filters of a group, and for all its channels, the same.
            summed = grad.unflatten(1, (groups, -1)).sum(2)
            first = x.real.unflatten(1, (groups, -1))[:, :, 0]
            ones = weight.real.new_ones(groups, 1, *weight.real.shape[2:])
            found = exact(summed, first, ones, padding, 0)
            return found.repeat_interleave(weight.real.shape[1], 1)

        d_x = _factorised(x, weight, lambda w: exact(grad, x.real, w, padding, 0), ones_of_weight)
    if needed[1] and (weight.is_looked_up or transformed):
        d_weight = _weight_by_windows(grad, x, weight, windows, groups, lookup)
    elif needed[1]:
        if weight.terms is not None:  # the derivative by a zero of the padding may be any number
            rows, across = padding
            x = replace(x, real=F.pad(x.real, (across, across, rows, rows)))
            padding = (0, 0)
        d_weight = _factorised(
            weight, x, lambda t: exact(grad, t, weight.real, padding, 1),
            lambda: grad.sum((0, 2, 3)).view(-1, 1, 1, 1),
        )  # fmt: skip
    return d_x, d_weight


def _input_by_windows(
    grad: Tensor, x: Operand, weight: Operand, windows: Sequence[Pair], groups: int, lookup: Lookup
) -> Tensor:
    """The convolution is a matrix product of unfolded windows (B * G, L, K) with filters
    (B * G, K, O / G)."""
    stride, padding, dilation = windows
    B, kernel = grad.shape[0], weight.real.shape
    d_columns = of_left(
        grad.flatten(2).unflatten(1, (groups, -1)).flatten(0, 1).mT,
        replace(x, real=columns(x.real, kernel, *windows, groups=groups).mT),
        replace(
            weight, real=weight.real.reshape(groups, kernel[0] // groups, -1).repeat(B, 1, 1).mT
        ),
        lookup,
    )
    d_columns = d_columns.mT.unflatten(0, (B, groups)).flatten(1, 2)  # (B, G * K, L)
    return F.fold(d_columns, x.real.shape[2:], kernel[2:], dilation, padding, stride)


def _weight_by_windows(
    grad: Tensor, x: Operand, weight: Operand, windows: Sequence[Pair], groups: int, lookup: Lookup
) -> Tensor:
    """The convolution is a matrix product of filters (G, O / G, K) with all windows
    (G, K, B * L)."""
    kernel = weight.real.shape
    unfolded = columns(x.real, kernel, *windows, groups=groups)
    unfolded = unfolded.unflatten(0, (x.real.shape[0], groups)).permute(1, 2, 0, 3).flatten(2)
    d_filters = of_left(
        grad.flatten(2).unflatten(1, (groups, -1)).permute(1, 2, 0, 3).flatten(2),
        replace(weight, real=weight.real.reshape(groups, kernel[0] // groups, -1)),
        replace(x, real=unfolded),
        lookup,
    )
    return d_filters.reshape(kernel)
