"""Random decisions, numbers and layouts, all determined by the key of a case."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

# Sizes that kernels are likely to get wrong: 0, 1, odd and prime ones, around vector lengths.
TINY = (1, 1, 2, 2, 3)
LENGTHS = (
    0, 0, 1, 1, 2, 3, 4, 5, 7, 8, 9, 11, 13, 15, 16, 17, 23, 31, 32, 33, 47, 63, 64, 65, 97, 130,
)  # fmt: skip
SPECIAL = (0.0, -0.0, float("nan"), float("inf"), -float("inf"), 1e-40, -1e-42)
_FAR = 10**12  # a stride beyond any memory


class Draw:
    """Random choices that depend on a key only: they are the same on every machine.

    Args:
        key: what the choices are for: seed, operator, number of the case.
        device: of the tensors.

    Attributes:
        tiny: whether sizes are so small that a whole Jacobian can be computed.
        plain_layouts: whether elements share no memory and every stride is used. PyTorch's forward
            mode needs that, because it gives a tangent the layout of its tensor.
        without_gaps: whether a tensor fills its memory. PyTorch cannot load an exported program
            that holds other tensors on a GPU.
    """

    def __init__(self, *key: Any, device: str = "cpu") -> None:
        self._random = random.Random("/".join(map(str, key)))
        self.device = device
        self.tiny = False
        self.plain_layouts = False
        self.without_gaps = False

    def choice(self, values: Sequence[T]) -> T:
        return self._random.choice(values)

    def weighted(self, weights: Mapping[T, float]) -> T:
        """Draws a key of a dictionary whose values are weights."""
        return self._random.choices([*weights], [*weights.values()])[0]

    def chance(self, probability: float) -> bool:
        return self._random.random() < probability

    def integer(self, least: int, most: int) -> int:
        return self._random.randint(least, most)

    def length(self, most: int = 130) -> int:
        """Draws the length of a dimension along which a kernel runs."""
        return self.choice([n for n in (TINY if self.tiny else LENGTHS) if n <= most])

    def batch(self) -> int:
        return self.choice((1, 2)) if self.tiny else self.choice((0, 1, 1, 2, 2, 3, 5))

    def groups(self, most: int = 3) -> tuple[int, int]:
        """Draws a number of groups, and a multiple of it, the number of channels; at times 0."""
        groups = self.choice((1, 1, 1, 2, most))
        each = self.choice((1, 2)) if self.tiny else self.choice((0, 1, 1, 2, 3, 4, 5, 9))
        return groups, groups * each

    def subset(self, count: int) -> list[int]:
        """Draws some of the numbers below `count`, at times none or all."""
        return [i for i in range(count) if self.chance(0.6)]

    def generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self._random.getrandbits(62))

    def values(self, *shape: int, special: bool = False) -> Tensor:
        """Draws normal float64 numbers, at times of many magnitudes, partly zero, or constant."""
        values = torch.randn(shape, generator=self.generator(), dtype=torch.float64)
        kind = self._random.random()
        if kind < 0.1:
            values *= torch.randn(shape, generator=self.generator(), dtype=torch.float64).exp2()
        elif kind < 0.2:
            zero = torch.rand(shape, generator=self.generator(), dtype=torch.float64) < 0.5
            values = torch.where(zero, 0.0 * values, values)  # keeps their signs
        elif kind < 0.23:
            values = torch.full(shape, self.choice((0.0, -0.0, 1.0, -1.5)), dtype=torch.float64)
        if special and values.numel():
            for _ in range(self.integer(1, 3)):
                position = self.integer(0, values.numel() - 1)
                values.view(-1)[position] = self.choice(SPECIAL)
        return values

    def tensor(
        self, *shape: int, dtype: torch.dtype, scale: float = 1.0, special: bool = False
    ) -> Tensor:
        """Draws random numbers in a random layout."""
        values = self.values(*shape, special=special) * scale
        return self.layout(values.to(self.device, dtype))

    def layout(self, values: Tensor) -> Tensor:
        """Gives the numbers random strides; the last two layouts repeat some of the numbers."""
        plain = (
            _contiguous, _contiguous, _permuted, _channels_last, _between_others, _between_others,
            _behind_others,
        )  # fmt: skip
        others = (
            () if self.plain_layouts else (_strange_where_one, _negated, _expanded, _overlapping)
        )
        laid_out = self.choice((*plain, *others))(self, values)
        return laid_out.clone() if self.without_gaps else laid_out


def _contiguous(draw: Draw, t: Tensor) -> Tensor:
    return t.contiguous()


def _permuted(draw: Draw, t: Tensor) -> Tensor:
    order = list(range(t.dim()))
    draw._random.shuffle(order)
    back = sorted(range(t.dim()), key=order.__getitem__)
    return t.permute(order).contiguous().permute(back)


def _channels_last(draw: Draw, t: Tensor) -> Tensor:
    if t.dim() == 4:
        return t.to(memory_format=torch.channels_last)
    return t.mT.contiguous().mT if t.dim() > 1 else t


def _others(t: Tensor, shape: Sequence[int]) -> Tensor:
    """Makes the memory around a tensor, of numbers that show in a result if they are read."""
    return t.new_full(shape, float("nan") if t.is_floating_point() else 77)


def _between_others(draw: Draw, t: Tensor) -> Tensor:
    steps = [draw.choice((1, 1, 2, 3)) for _ in t.shape]
    first = [draw.choice((0, 0, 1, 2)) for _ in t.shape]
    whole = _others(t, [n * s + f + 1 for n, s, f in zip(t.shape, steps, first, strict=True)])
    where = tuple(slice(f, f + n * s, s) for n, s, f in zip(t.shape, steps, first, strict=True))
    view = whole[where] if t.dim() else whole.reshape(-1)[0]
    view.copy_(t)
    return view


def _behind_others(draw: Draw, t: Tensor) -> Tensor:
    """At an address that is not aligned for vector instructions."""
    before = draw.integer(1, 5)
    whole = _others(t, [t.numel() + before])
    view = whole[before:].view(t.shape)
    view.copy_(t)
    return view


def _strange_where_one(draw: Draw, t: Tensor) -> Tensor:
    """With any strides where they have no meaning: of one element, or of an empty tensor."""
    t = t.contiguous()
    anywhere = (0, 1, 3, _FAR)
    strides = [
        draw.choice(anywhere) if n == 1 or t.numel() == 0 else s
        for n, s in zip(t.shape, t.stride(), strict=True)
    ]
    return t.as_strided(t.shape, strides)


def _negated(draw: Draw, t: Tensor) -> Tensor:
    """With PyTorch's negative bit, which the imaginary part of a conjugate has."""
    return torch.ops.aten._neg_view(-t) if t.is_floating_point() else t


def _expanded(draw: Draw, t: Tensor) -> Tensor:
    dimensions = [i for i, n in enumerate(t.shape) if n > 1 and draw.chance(0.5)]
    shape = t.shape
    for i in dimensions:
        t = t.narrow(i, 0, 1)
    return t.expand(shape)


def _overlapping(draw: Draw, t: Tensor) -> Tensor:
    """Windows of one row of numbers."""
    strides = [draw.choice((0, 1, 1, 2)) for _ in t.shape]
    reach = sum((n - 1) * s for n, s in zip(t.shape, strides, strict=True)) + 1 if t.numel() else 0
    flat = t.reshape(-1)
    if reach > flat.numel():
        return t.contiguous()
    return flat.contiguous().as_strided(t.shape, strides)
