"""Which images come next, and the random numbers that change each."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.utils.data import Sampler

Draw = tuple[int, int]


class SeededSampler(Sampler[Draw]):
    """Every index once an epoch, in random order, each with the seed of its augmentation.

    The seeds are drawn here, in one process, so that a batch does not depend on how many workers
    fetch it.

    Args:
        length: of the data set.
        seed: of the order and of the seeds drawn; every epoch continues.
    """

    def __init__(self, length: int, seed: int) -> None:
        self.length = length
        self.generator = torch.Generator().manual_seed(seed)

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Draw]:
        order = torch.randperm(self.length, generator=self.generator)
        seeds = torch.randint(2**62, (self.length,), generator=self.generator)
        yield from zip(order.tolist(), seeds.tolist(), strict=True)
