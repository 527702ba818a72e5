"""Ops that read their operands by axes: repeating, permuting, sums of products, maxima.

A row of a program is flat. An op of these kinds says how the features of its operands and of its
result lie along axes: it numbers all axes, and lists those of each operand and of the result, the
last of which varies fastest. The result is computed for every position along its own axes; along
the others the products of the operands are summed, or the largest is taken::

    einsum("hkv,hk->hv")    sizes (H, K, V); operands (0, 1, 2) and (0, 1); result (0, 2)
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hoconv.recurrent.ir.program import Op

Axes = tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """The axes of an op.

    Attributes:
        sizes: of all axes, by number.
        operands: the axes of each operand, in order.
        result: those of the result.
    """

    sizes: tuple[int, ...]
    operands: tuple[Axes, ...]
    result: Axes

    @property
    def attrs(self) -> tuple[int, ...]:
        """The attributes of an op: each list after its length."""
        lists = (self.sizes, self.result, *self.operands)
        return tuple(number for each in lists for number in (len(each), *each))

    @property
    def reduced(self) -> Axes:
        """The axes that the result does not have."""
        return tuple(axis for axis in range(len(self.sizes)) if axis not in self.result)

    @property
    def repeat(self) -> tuple[int, int] | None:
        """How an op repeats its operand without changing the order of its features: feature j of
        the result is feature j // apart % count of the operand, (apart, count); None if not so."""
        (own,), result = self.operands, self.result
        for stop in range(len(own), len(result) + 1):
            if result[stop - len(own) : stop] == own:
                return self.count(result[stop:]), self.count(own)
        return None

    def shape(self, axes: Axes) -> tuple[int, ...]:
        """The sizes along some axes."""
        return tuple(self.sizes[axis] for axis in axes)

    def count(self, axes: Axes) -> int:
        """The number of positions along some axes."""
        return math.prod(self.shape(axes))

    def strides(self, axes: Axes) -> dict[int, int]:
        """By each axis, how far apart its neighbours are among features that lie along `axes`."""
        return {axis: self.count(axes[i + 1 :]) for i, axis in enumerate(axes)}


def layout(op: Op) -> Layout:
    """The axes of an op of one of these kinds."""
    return read_layout(op.attrs)


@functools.lru_cache(4096)
def read_layout(attrs: Sequence[int | float]) -> Layout:
    """Reads the axes from the attributes of an op."""
    lists, rest = [], [int(number) for number in attrs]
    while rest:
        count = rest[0]
        lists.append(tuple(rest[1 : 1 + count]))
        rest = rest[1 + count :]
    sizes, result, *operands = lists
    return Layout(sizes, tuple(operands), result)


def evaluate(kind: str, axes: Layout, operands: Sequence[Tensor]) -> Tensor:
    """Computes an op on tensors whose last dimension is features; those before are broadcast."""
    spread = [t.unflatten(-1, axes.shape(own) or (1,)) for t, own in zip(operands, axes.operands)]
    spread = [t if own else t.squeeze(-1) for t, own in zip(spread, axes.operands)]
    kept = axes.shape(axes.result)
    if len(spread) > 1:
        letters = "abcdefghijklmnopqrstuvwxyz"
        parts = ["..." + "".join(letters[axis] for axis in own) for own in axes.operands]
        of_result = "..." + "".join(letters[axis] for axis in axes.result)
        found = torch.einsum(f"{','.join(parts)}->{of_result}", *spread)
        return found.reshape(*found.shape[: found.dim() - len(kept)], math.prod(kept))
    (t,), (own,) = spread, axes.operands
    if gone := [i - len(own) for i, axis in enumerate(own) if axis not in axes.result]:
        t = t.amax(gone) if kind == "largest" else t.sum(gone)
    left = [axis for axis in own if axis in axes.result]
    rows = t.shape[: t.dim() - len(left)]
    order = [len(rows) + left.index(axis) for axis in axes.result if axis in left]
    t = t.permute(*range(len(rows)), *order)
    t = t.reshape(*rows, *(axes.sizes[axis] if axis in left else 1 for axis in axes.result))
    return t.expand(*rows, *kept).reshape(*rows, math.prod(kept))
