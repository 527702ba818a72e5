"""Batches of data sets that are in memory, on the device that uses them where they fit.

N samples, B batch, C channels, H height, W width.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from datamodules.sampling import EvenBatches, Shuffle

Batch = tuple[Tensor, Tensor]


class LabelledImages:
    """Images (N, C, H, W) uint8 and their labels (N,) int64, on one device."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images = images
        self.labels = labels

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def nbytes(self) -> int:
        """The bytes of images and labels."""
        return self.images.nbytes + self.labels.nbytes

    def to(self, device: torch.device) -> LabelledImages:
        """Returns the same images and labels on a device."""
        return LabelledImages(self.images.to(device), self.labels.to(device))

    def select(self, indices: Tensor, pin: bool = False) -> Batch:
        """Returns the images and labels of indices (B,) on the same device.

        Args:
            pin: whether they are in page-locked memory, from which a copy to a GPU does not wait.
        """
        return _select(self.images, indices, pin), _select(self.labels, indices, pin)


def _select(values: Tensor, indices: Tensor, pin: bool) -> Tensor:
    if values.device.type != "cpu":
        return values.index_select(0, indices)
    # By NumPy: PyTorch would wake threads, which takes longer than the copy.
    chosen = torch.empty((len(indices), *values.shape[1:]), dtype=values.dtype, pin_memory=pin)
    np.take(values.numpy(), indices.numpy(), axis=0, out=chosen.numpy())
    return chosen


class TrainingBatches:
    """The training batches of an epoch, in the order of a :class:`Shuffle`.

    The order goes to the device once an epoch, and a batch is one selection there. An iteration is
    one epoch, and can resume in its middle. The state, which Lightning keeps in checkpoints, is the
    epoch and the number of its batches that were used: a batch counts as used when the next one is
    asked for.

    Args:
        data: where the batches are to be.
        sampler: whose epoch Lightning sets.
        batch_size: B; the last batch of an epoch may be smaller.
        pin: as for :meth:`LabelledImages.select`.
    """

    def __init__(self, data: LabelledImages, sampler: Shuffle, batch_size: int, pin: bool) -> None:
        self.data = data
        self.sampler = sampler
        self.batch_size = batch_size
        self.pin = pin
        self._begin = 0  # how many batches the next iteration skips
        self._done = 0  # how many batches of this epoch were used

    def __len__(self) -> int:
        return -(-len(self.sampler) // self.batch_size)

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.sampler.epoch, "batches": self._done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.sampler.set_epoch(state["epoch"])
        self._begin = state["batches"]

    def __iter__(self) -> Iterator[Batch]:
        self._done, self._begin = self._begin, 0
        order = torch.tensor(list(self.sampler), device=self.data.labels.device)
        for indices in order.split(self.batch_size)[self._done :]:
            yield self.data.select(indices, self.pin)
            self._done += 1


class EvaluationBatches:
    """Batches for evaluation: of :class:`EvenBatches`, in the order of the data.

    Args:
        data, pin: as for :class:`TrainingBatches`.
        batches: this process's.
    """

    def __init__(self, data: LabelledImages, batches: EvenBatches, pin: bool) -> None:
        self.data = data
        self.pin = pin
        self.batches = [indices.to(data.labels.device) for indices in batches.batches]

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Batch]:
        return (self.data.select(indices, self.pin) for indices in self.batches)
