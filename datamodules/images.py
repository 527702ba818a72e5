"""The base of data sets of small labelled images, which are kept in memory as uint8.

A batch is made by one indexing of a tensor, moved to the device as bytes and normalised there: a
training step takes the time of the model, not of the data.

N images, B batch, C channels, H height, W width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import numpy as np
import pytorch_lightning as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from datamodules.sampling import (
    Epochs,
    EvenBatches,
    Shuffle,
    TrainingLoader,
    get_rank,
    loader_options,
)

Batch = tuple[Tensor, Tensor]


class CacheError(OSError):
    """The cache of a data set cannot be written; says where, why, and what to do."""


class DataNotFoundError(FileNotFoundError):
    """The files of a data set are missing or damaged; says which, where, and what to do."""


class LabelledImages(Dataset[Batch]):
    """Images (N, C, H, W) uint8 and their labels (N,) int64, fetched a batch at a time.

    Attributes:
        pinned: whether batches are allocated in page-locked memory.
    """

    pinned = False

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images = images
        self.labels = labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Batch:
        return self.images[index], self.labels[index]

    def __getitems__(self, indices: list[int]) -> Batch:
        """Returns a whole batch; DataLoader calls it, where it exists, instead of `__getitem__`."""
        return self._gather(self.images, indices), self._gather(self.labels, indices)

    def _gather(self, values: Tensor, indices: list[int]) -> Tensor:
        """Copies rows with NumPy: PyTorch would wake threads, which takes longer than the copy."""
        shape = (len(indices), *values.shape[1:])
        chosen = torch.empty(shape, dtype=values.dtype, pin_memory=self.pinned)
        np.take(values.numpy(), indices, axis=0, out=chosen.numpy())
        return chosen


def _do_not_collate(batch: Any) -> Any:
    return batch


class ImageDataModule(pl.LightningDataModule, ABC):
    """Images of one shape with one label each.

    Batches are ``(images, labels)``: (B, C, H, W) float32 with zero mean and unit variance over the
    training set, and (B,) int64.

    Args:
        batch_size: images a batch; the last batch of an epoch may be smaller.
        num_workers: processes that fetch batches; 0 fetches them in the training process, which
            is fastest for images in memory.
        seed: of the order of the training images.
    """

    image_shape: ClassVar[tuple[int, int, int]]  # (C, H, W)
    num_classes: ClassVar[int]
    pixel_mean: ClassVar[float]  # over the training set, in the units of the stored pixels
    pixel_std: ClassVar[float]

    def __init__(self, batch_size: int, num_workers: int = 0, seed: int = 0) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.seed = seed
        self.splits: dict[str, LabelledImages] = {}

    @abstractmethod
    def load(self) -> dict[str, LabelledImages]:
        """Reads the data set; the splits are ``train``, ``val`` and ``test``."""

    def setup(self, stage: str) -> None:
        self.splits = self.splits or self.load()

    def train_dataloader(self) -> DataLoader[Batch]:
        data = self._split("train")
        sampler = Shuffle(len(data), self.seed, **get_rank(self.trainer))
        batches = Epochs(sampler, self.batch_size, drop_last=False)
        return TrainingLoader(data, batch_sampler=batches, **self._options())

    def val_dataloader(self) -> DataLoader[Batch]:
        return self._evaluation("val")

    def test_dataloader(self) -> DataLoader[Batch]:
        return self._evaluation("test")

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Batch:
        images, labels = batch
        return images.float().sub_(self.pixel_mean).div_(self.pixel_std), labels

    def _evaluation(self, split: str) -> DataLoader[Batch]:
        data = self._split(split)
        batches = EvenBatches(len(data), self.batch_size, **get_rank(self.trainer))
        return DataLoader(data, batch_sampler=batches, **self._options())

    def _split(self, name: str) -> LabelledImages:
        data = self.splits[name]
        # Without workers a batch is allocated pinned; the loader would wake a thread to pin it.
        data.pinned = self.num_workers == 0 and self._options()["pin_memory"]
        return data

    def _options(self) -> dict[str, Any]:
        return loader_options(self.trainer, self.num_workers) | {"collate_fn": _do_not_collate}
