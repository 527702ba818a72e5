"""The base of data sets of small labelled images, which are kept in memory as uint8.

A batch is one selection from them, and is normalised on the device that trains: a training step
takes the time of the model, not of the data.

N images, B batch, C channels, H height, W width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import pytorch_lightning as pl
from torch import Tensor

from datamodules.census import Counts
from datamodules.memory import Batch, EvaluationBatches, LabelledImages, TrainingBatches
from datamodules.placement import get_training_device, is_resident, require_known
from datamodules.sampling import EvenBatches, Shuffle, get_rank


class CacheError(OSError):
    """The cache of a data set cannot be written; says where, why, and what to do."""


class DataNotFoundError(FileNotFoundError):
    """The files of a data set are missing or damaged; says which, where, and what to do."""


class ImageDataModule(pl.LightningDataModule, ABC):
    """Images of one shape with one label each.

    Batches are ``(images, labels)``: (B, C, H, W) float32 with zero mean and unit variance over the
    training set, and (B,) int64.

    Args:
        batch_size: images a batch; the last batch of an epoch may be smaller.
        seed: of the order of the training images.
        device: where the images are: ``"cpu"``, ``"gpu"``, the one that trains; or ``"auto"``: the
            GPU that trains, if they take at most a tenth of its free memory.

    Raises:
        ValueError: an argument is out of range.
        DataDeviceError: by the loaders: `device` is ``"gpu"`` and the run has none.
    """

    image_shape: ClassVar[tuple[int, int, int]]  # (C, H, W)
    num_classes: ClassVar[int]
    pixel_mean: ClassVar[float]  # over the training set, in the units of the stored pixels
    pixel_std: ClassVar[float]
    pixel_max: ClassVar[int] = 255  # white, in the same units
    class_names: ClassVar[tuple[str, ...]]

    def __init__(self, batch_size: int, seed: int = 0, device: str = "auto") -> None:
        super().__init__()
        if batch_size < 1:
            raise ValueError(f"batch_size: expected at least 1, got {batch_size}")
        require_known(device)
        self.batch_size = batch_size
        self.seed = seed
        self.device = device
        self.splits: dict[str, LabelledImages] = {}

    @abstractmethod
    def load(self) -> dict[str, LabelledImages]:
        """Reads the data set; the splits are ``train``, ``val`` and ``test``."""

    def setup(self, stage: str) -> None:
        self.splits = self.splits or self.load()

    def census(self) -> dict[str, Counts]:
        """Returns what counts in each split, after `setup`."""
        of = {id(data): self._count(data) for data in self.splits.values()}
        return {name: of[id(self.splits[name])] for name in ("train", "val", "test")}

    def _count(self, data: LabelledImages) -> Counts:
        found = set(data.labels.unique().tolist())
        missing = [name for label, name in enumerate(self.class_names) if label not in found]
        return Counts(len(data), len(data), "image", missing, fix="add some")

    def train_dataloader(self) -> TrainingBatches[Batch]:
        data = self._place("train")
        sampler = Shuffle(len(data), self.seed, **get_rank(self.trainer))
        return TrainingBatches(data, sampler, self.batch_size)

    def val_dataloader(self) -> EvaluationBatches[Batch]:
        return self._evaluation("val")

    def test_dataloader(self) -> EvaluationBatches[Batch]:
        return self._evaluation("test")

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Batch:
        images, labels = batch
        return (images - self.pixel_mean).div_(self.pixel_std), labels  # float32, as a scalar is

    @classmethod
    def normalise_file(cls, images: Tensor) -> Tensor:
        """Normalises images of files, (B, C, H, W) uint8 up to 255, as those of the data set."""
        return (images.float() * (cls.pixel_max / 255) - cls.pixel_mean).div_(cls.pixel_std)

    def _evaluation(self, split: str) -> EvaluationBatches[Batch]:
        data = self._place(split)
        batches = EvenBatches(len(data), self.batch_size, **get_rank(self.trainer))
        return EvaluationBatches(data, batches)

    def _place(self, split: str) -> LabelledImages:
        """Moves a split to its device, and returns it."""
        data = self.splits[split]
        device = get_training_device(self.trainer)
        if is_resident(self.device, data.nbytes if data.labels.device != device else 0, device):
            data = self.splits[split] = data.to(device)
        return data.pinned() if device.type == "cuda" and data.labels.device.type == "cpu" else data
