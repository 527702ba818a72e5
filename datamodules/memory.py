"""Batches of data sets that are in memory, on the device that uses them where they fit.

N samples, B batch, C channels, H height, W width.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from datamodules.reading.ahead import ahead
from datamodules.sampling import EvenBatches, Shuffle

Batch = tuple[Tensor, Tensor]
T_co = TypeVar("T_co", covariant=True)


class InMemory(Protocol[T_co]):
    """A data set on one device, of which batches are selected there."""

    def columns(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Returns what the selection of samples needs, on the device of the data.

        Args:
            rows: of an order of :class:`Shuffle` or of :class:`SeededShuffle`, on the CPU. They are
                those of an epoch, so that a batch is not the place for work on the host.

        Returns:
            Tensors with an entry for each row.
        """
        ...

    def select(self, rows: Tensor, *columns: Tensor) -> T_co:
        """Returns the batch of rows; `columns` has their part of each column."""
        ...


def send(values: Tensor, device: torch.device) -> Tensor:
    """Returns values of the CPU on a device; to a GPU the copy is queued, and the host goes on."""
    if device.type == "cpu":
        return values
    return values.pin_memory().to(device, non_blocking=True)


class LabelledImages:
    """Images (N, C, H, W) uint8 and their labels (N,) int64, on one device.

    Args:
        pin: whether batches on the CPU are in page-locked memory, from which a copy to a GPU does
            not wait.
    """

    def __init__(self, images: Tensor, labels: Tensor, pin: bool = False) -> None:
        self.images = images
        self.labels = labels
        self.pin = pin

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def nbytes(self) -> int:
        """The bytes of images and labels."""
        return self.images.nbytes + self.labels.nbytes

    def to(self, device: torch.device) -> LabelledImages:
        """Returns the same images and labels on a device."""
        return LabelledImages(self.images.to(device), self.labels.to(device))

    def pinned(self) -> LabelledImages:
        """Returns the same images and labels, with batches in page-locked memory."""
        return LabelledImages(self.images, self.labels, pin=True)

    def columns(self, rows: Tensor) -> tuple[Tensor, ...]:
        return (send(rows, self.labels.device),)

    def select(self, rows: Tensor, *columns: Tensor) -> Batch:
        """Returns the images and labels of indices (B,) on the same device."""
        (indices,) = columns
        return self._select(self.images, indices), self._select(self.labels, indices)

    def _select(self, values: Tensor, indices: Tensor) -> Tensor:
        if values.device.type != "cpu":
            return values.index_select(0, indices)
        # By NumPy: PyTorch would wake threads, which takes longer than the copy.
        shape = (len(indices), *values.shape[1:])
        chosen = torch.empty(shape, dtype=values.dtype, pin_memory=self.pin)
        np.take(values.numpy(), indices.numpy(), axis=0, out=chosen.numpy())
        return chosen


class TrainingBatches(Generic[T_co]):
    """The training batches of an epoch, in the order of a :class:`Shuffle`.

    The order goes to the device once an epoch, and a batch is a selection there. An iteration is
    one epoch, and can resume in its middle. The state, which Lightning keeps in checkpoints, is the
    epoch and the number of its batches that were used: a batch counts as used when the next one is
    asked for.

    Args:
        data: where the batches are to be.
        sampler: whose epoch Lightning sets.
        batch_size: B; the last batch of an epoch may be smaller.
        prepare_on: the device on which threads are to prepare batches ahead, where that takes long;
            None where they are selected when they are asked for.
    """

    def __init__(
        self,
        data: InMemory[T_co],
        sampler: Shuffle,
        batch_size: int,
        prepare_on: torch.device | None = None,
    ) -> None:
        self.data = data
        self.prepare_on = prepare_on
        self.sampler = sampler
        self.batch_size = batch_size
        self._begin = 0  # how many batches the next iteration skips
        self._done = 0  # how many batches of this epoch were used
        # The columns of the next epoch, and what they were made from.
        self._ahead: tuple[Any, tuple[Tensor, ...]] = None, ()

    def __len__(self) -> int:
        return -(-len(self.sampler) // self.batch_size)

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.sampler.epoch, "batches": self._done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.sampler.set_epoch(state["epoch"])
        self._begin = state["batches"] % len(self)  # all: the next epoch begins

    def __iter__(self) -> Iterator[T_co]:
        self._done, self._begin = self._begin, 0
        sampler = self.sampler
        (made_from, columns), self._ahead = self._ahead, (None, ())
        if made_from != (self.data, sampler, vars(sampler)):
            columns = self._columns(sampler.epoch)
        length = len(columns[0])
        ends = range(self.batch_size, length + self.batch_size, self.batch_size)
        # One by one: a GPU would wait for its first batch until a whole epoch is divided.
        parts = (
            tuple(values[end - self.batch_size : end] for values in columns)
            for end in ends[self._done :]
        )
        for batch in _select(self.data, parts, self.prepare_on):
            if self._done == len(self) - 1:
                # The GPU is still busy with this epoch, and would wait at the start of the next.
                following = vars(sampler) | {"epoch": sampler.epoch + 1}
                self._ahead = (self.data, sampler, following), self._columns(sampler.epoch + 1)
            yield batch
            self._done += 1

    def _columns(self, epoch: int) -> tuple[Tensor, ...]:
        rows = self.sampler.order(epoch)
        return rows, *self.data.columns(rows)


class EvaluationBatches(Generic[T_co]):
    """Batches for evaluation: of :class:`EvenBatches`, in the order of the data.

    Args:
        data, prepare_on: as for :class:`TrainingBatches`.
        batches: this process's.
    """

    def __init__(
        self,
        data: InMemory[T_co],
        batches: EvenBatches,
        prepare_on: torch.device | None = None,
    ) -> None:
        self.data = data
        self.prepare_on = prepare_on
        rows = torch.cat(batches.batches)
        sizes = [len(indices) for indices in batches.batches]
        columns = rows, *data.columns(rows)
        self.batches = list(zip(*(values.split(sizes) for values in columns), strict=True))

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[T_co]:
        return _select(self.data, self.batches, self.prepare_on)


def _select(
    data: InMemory[T_co], parts: Iterable[tuple[Tensor, ...]], prepare_on: torch.device | None
) -> Iterator[T_co]:
    if prepare_on is None:
        return (data.select(*part) for part in parts)
    return ahead((functools.partial(data.select, *part) for part in parts), prepare_on)
