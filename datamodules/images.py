"""What data sets of small labelled images share: they stay in memory as uint8, batch by batch.

A batch is one indexing of a tensor, moved to the device as bytes and scaled there, so that the
measured steps are those of the model and not of the data.

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

from datamodules.sampling import Epochs, EvenBatches, Shuffle, TrainingLoader, loader_options, share

Batch = tuple[Tensor, Tensor]


class CacheError(OSError):
    """What was made of a data set cannot be kept; says where, why, and what to do."""


class DataNotFoundError(FileNotFoundError):
    """The files of a data set are missing or damaged; says which, where, and what to do."""


class LabelledImages(Dataset[Batch]):
    """Images (N, C, H, W) uint8 and their labels (N,) int64, fetched a batch at a time.

    Attributes:
        pinned: whether batches are made in page-locked memory.
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
        """The hook by which a DataLoader asks for a whole batch."""
        return self._chosen(self.images, indices), self._chosen(self.labels, indices)

    def _chosen(self, values: Tensor, indices: list[int]) -> Tensor:
        """By NumPy: PyTorch wakes threads for it, which takes longer than the copy."""
        shape = (len(indices), *values.shape[1:])
        chosen = torch.empty(shape, dtype=values.dtype, pin_memory=self.pinned)
        np.take(values.numpy(), indices, axis=0, out=chosen.numpy())
        return chosen


def _as_it_comes(batch: Any) -> Any:
    return batch


class ImageDataModule(pl.LightningDataModule, ABC):
    """Images of one shape with one label each.

    Batches are ``(images, labels)``: (B, C, H, W) float32 with zero mean and unit variance over the
    training set, and (B,) int64.

    Args:
        batch_size: images a batch; the last batch of an epoch holds what is left.
        num_workers: processes that fetch batches; 0 fetches them in the training process, which
            is the fastest for images in memory.
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
        sampler = Shuffle(len(data), self.seed, **share(self.trainer))
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
        batches = EvenBatches(len(data), self.batch_size, **share(self.trainer))
        return DataLoader(data, batch_sampler=batches, **self._options())

    def _split(self, name: str) -> LabelledImages:
        data = self.splits[name]
        # The loader would pin a batch of this process with threads that have to be woken, too.
        data.pinned = self.num_workers == 0 and self._options()["pin_memory"]
        return data

    def _options(self) -> dict[str, Any]:
        return loader_options(self.trainer, self.num_workers) | {"collate_fn": _as_it_comes}
