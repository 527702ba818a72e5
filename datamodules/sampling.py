"""Which samples come next: for a seed and an epoch always the same, for any number of processes.

So a run that was stopped goes on with the batch that it would have seen, and needs to remember
nothing but where it was.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from torch import Generator
from torch.utils.data import DataLoader, Sampler

Draw = tuple[int, int]


class Shuffle(Sampler[Any]):
    """Every index once an epoch, in random order.

    Args:
        length: of the data set.
        seed: of the order, together with the epoch.
        rank, world_size: of `world_size` processes this one gets every `world_size`-th index, from
            `rank` on, so that a batch of each makes a batch of all; a few indices come twice where
            the length is not divisible.

    Attributes:
        epoch: which one comes next; Lightning calls `set_epoch`.
        start: how many indices the next iteration leaves out.
    """

    def __init__(self, length: int, seed: int, rank: int = 0, world_size: int = 1) -> None:
        self.length = length
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self.epoch = 0
        self.start = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return math.ceil(self.length / self.world_size)

    def __iter__(self) -> Iterator[Any]:
        (state,) = np.random.SeedSequence((self.seed, self.epoch)).generate_state(1, np.uint64)
        items = self._items(torch.Generator().manual_seed(int(state)))
        padded = itertools.islice(itertools.cycle(items), len(self) * self.world_size)
        first = self.rank + self.start * self.world_size
        yield from itertools.islice(padded, first, None, self.world_size)

    def _items(self, generator: Generator) -> list[Any]:
        return torch.randperm(self.length, generator=generator).tolist()


class Draws(Shuffle):
    """As :class:`Shuffle`, each index with the seed of its augmentation.

    The seeds are drawn here, in one process, so that a batch does not depend on how many workers
    fetch it.
    """

    def _items(self, generator: Generator) -> list[Draw]:
        order = super()._items(generator)
        seeds = torch.randint(2**62, (self.length,), generator=generator)
        return list(zip(order, seeds.tolist(), strict=True))


class EvenBatches(Sampler[list[int]]):
    """Every index exactly once, in order, in batches of nearly the same size.

    Every process gets as many batches: where models exchange something in each, none waits for
    others that are done.

    Args:
        length: of the data set.
        batch_size: the most indices a batch.
        rank, world_size: this process gets every `world_size`-th batch, from `rank` on.
    """

    def __init__(self, length: int, batch_size: int, rank: int = 0, world_size: int = 1) -> None:
        count = world_size * math.ceil(length / (batch_size * world_size))
        self.batches = torch.arange(length).tensor_split(count)[rank::world_size]

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        return (batch.tolist() for batch in self.batches)


class TrainingLoader(DataLoader):
    """A DataLoader whose sampler is a :class:`Shuffle`, and that goes on where it was.

    Its state, which Lightning keeps in checkpoints, counts the batches that are done with: the next
    one has been asked for.
    """

    sampler: Shuffle  # pyright: ignore[reportIncompatibleVariableOverride]
    _begin = 0  # of the next iteration, in batches
    _done = 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.sampler.epoch, "batches": self._done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.sampler.set_epoch(state["epoch"])
        self._begin = state["batches"]

    def __iter__(self) -> Iterator[Any]:
        self._done, self._begin = self._begin, 0
        self.sampler.start = self._done * (self.batch_size or 1)
        for batch in super().__iter__():
            yield batch
            self._done += 1


def share(trainer: pl.Trainer | None) -> dict[str, int]:
    """Which of how many processes this is, as arguments of the samplers."""
    if trainer is None:
        return {}
    return {"rank": trainer.global_rank, "world_size": trainer.world_size}


def loader_options(trainer: pl.Trainer | None, num_workers: int) -> dict[str, Any]:
    """What the loaders of all data sets have in common."""
    return {
        "num_workers": num_workers,
        "persistent_workers": num_workers > 0,
        "pin_memory": trainer is not None and trainer.strategy.root_device.type == "cuda",
        # Workers are seeded from it, and the global generator is left alone.
        "generator": torch.Generator().manual_seed(0),
    }
