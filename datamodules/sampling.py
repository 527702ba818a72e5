"""Samplers and a loader whose order depends on the seed and the epoch alone.

A resumed run therefore continues with the batch that came next, and its checkpoint holds only the
epoch and the number of batches. torchdata's StatefulDataLoader does not serve: its state is that of
one process and its workers, while a checkpoint holds one state for all processes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import joblib
import numpy as np
import pytorch_lightning as pl
import torch
from torch import Generator, Tensor
from torch.utils.data import BatchSampler, DataLoader, Sampler

# Processes that fetch batches for a CPU that trains: with two, steps of COCO's models wait for 2 %
# of their time (docs/results/loading_cpu.json).
CPU_WORKERS = 2
MOST_WORKERS = 16  # each takes memory, and starts before the first step


class Shuffle(Sampler[Any]):
    """Every index once an epoch, in random order.

    Args:
        length: of the data set.
        seed: determines the order, together with the epoch.
        rank, world_size: this process gets every `world_size`-th index, from `rank` on, so that the
            batches of all processes together are one large batch. A few indices come twice where
            `world_size` does not divide the length.

    Attributes:
        epoch: the next one; Lightning calls `set_epoch`.
    """

    def __init__(self, length: int, seed: int, rank: int = 0, world_size: int = 1) -> None:
        self.length = length
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return math.ceil(self.length / self.world_size)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.as_items(self.order(self.epoch)))

    def order(self, epoch: int) -> Tensor:
        """Returns this process's indices in an epoch: int64, a row for each."""
        (state,) = np.random.SeedSequence((self.seed, epoch)).generate_state(1, np.uint64)
        rows = self._rows(torch.Generator().manual_seed(int(state)))
        if self.world_size == 1:
            return rows
        padded = torch.arange(self.rank, len(self) * self.world_size, self.world_size)
        return rows[padded % self.length]

    def as_items(self, rows: Tensor) -> list[Any]:
        """Returns rows of an order as what a data set is asked for."""
        return rows.tolist()

    def _rows(self, generator: Generator) -> Tensor:
        return torch.randperm(self.length, generator=generator)


class SeededShuffle(Shuffle):
    """A :class:`Shuffle` of pairs: an index, and a random seed for the augmentation of that item.

    The seeds are drawn here, in one process, so that a batch does not depend on how many workers
    fetch it. A row of an order holds both, (N, 2).
    """

    def as_items(self, rows: Tensor) -> list[tuple[int, int]]:
        return [(index, seed) for index, seed in rows.tolist()]

    def _rows(self, generator: Generator) -> Tensor:
        order = super()._rows(generator)
        seeds = torch.randint(2**62, (self.length,), generator=generator)
        return torch.stack((order, seeds), dim=1)


class EvenBatches(Sampler[list[int]]):
    """Every index exactly once, in order, in batches of nearly the same size.

    All processes get the same number of batches: in a model whose processes communicate in every
    batch, none waits for another that has finished.

    Args:
        length: of the data set.
        batch_size: the largest number of indices in a batch.
        rank, world_size: this process gets every `world_size`-th batch, from `rank` on.
    """

    def __init__(self, length: int, batch_size: int, rank: int = 0, world_size: int = 1) -> None:
        count = world_size * math.ceil(length / (batch_size * world_size))
        self.batches = torch.arange(length).tensor_split(count)[rank::world_size]

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        return (batch.tolist() for batch in self.batches)


class Epochs(BatchSampler):
    """Batches of a :class:`Shuffle`, epoch after epoch without end; `len` is that of one epoch.

    Attributes:
        begin: how many batches the next iteration skips in its first epoch.
    """

    sampler: Shuffle
    begin = 0

    def __iter__(self) -> Iterator[list[Any]]:
        begin, self.begin = self.begin, 0
        for epoch in itertools.count(self.sampler.epoch):
            for rows in self.sampler.order(epoch).split(self.batch_size)[begin:]:
                yield self.sampler.as_items(rows)
            begin = 0


class TrainingLoader(DataLoader):
    """A DataLoader over :class:`Epochs` that can resume in the middle of an epoch.

    An iteration is one epoch; towards its end workers already fetch batches of the next one. The
    state, which Lightning keeps in checkpoints, is the epoch and the number of its batches that
    were used: a batch counts as used when the next one is asked for.
    """

    batch_sampler: Epochs  # pyright: ignore[reportIncompatibleVariableOverride]
    _begin = 0  # how many batches the next iteration skips
    _done = 0  # how many batches of this epoch were used
    _batches: Iterator[Any]  # of this epoch and the following ones
    _next: tuple[int, int] | None = None  # epoch and batch that `_batches` yields next

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.batch_sampler.sampler.epoch, "batches": self._done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.batch_sampler.sampler.set_epoch(state["epoch"])
        self._begin = state["batches"] % len(self)  # all: the next epoch begins

    def __iter__(self) -> Iterator[Any]:
        epoch = self.batch_sampler.sampler.epoch
        self._done, self._begin = self._begin, 0
        if self._next != (epoch, self._done):
            self.batch_sampler.begin = self._done
            self._batches = super().__iter__()
        for number in range(self._done + 1, len(self) + 1):
            batch = next(self._batches)
            self._next = (epoch, number) if number < len(self) else (epoch + 1, 0)
            yield batch
            self._done += 1


def get_rank(trainer: pl.Trainer | None) -> dict[str, int]:
    """Returns the samplers' arguments `rank` and `world_size` for this process."""
    if trainer is None:
        return {}
    return {"rank": trainer.global_rank, "world_size": trainer.world_size}


class Workers(NamedTuple):
    """The number of processes that fetch batches, and the reason for it."""

    count: int
    why: str


def choose_workers(num_workers: int | None, trainer: pl.Trainer | None) -> Workers:
    """Returns `num_workers`; for None, as many as this machine can use beside what trains."""
    if num_workers is not None:
        return Workers(num_workers, "data.num_workers")
    cores = joblib.cpu_count()
    if trainer is None or trainer.strategy.root_device.type == "cpu":
        return Workers(min(CPU_WORKERS, cores), "a CPU that trains needs its cores")
    share = max(1, cores // trainer.num_devices)
    return Workers(min(MOST_WORKERS, share), f"{share} cores for each GPU, at most {MOST_WORKERS}")


def loader_options(trainer: pl.Trainer | None, num_workers: int | None) -> dict[str, Any]:
    """Returns the arguments that the loaders of all data sets have in common."""
    count, _ = choose_workers(num_workers, trainer)
    return {
        "num_workers": count,
        "persistent_workers": count > 0,
        "pin_memory": trainer is not None and trainer.strategy.root_device.type == "cuda",
        # The workers' seeds come from it, so that the global generator is left alone.
        "generator": torch.Generator().manual_seed(0),
    }
