"""Data in COCO's format as a LightningDataModule: images with the class of every pixel, with boxes,
with captions, or with seeds of noise.

B batch, S image size.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytorch_lightning as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from datamodules.census import Counts
from datamodules.coco.annotations.captions import Captions
from datamodules.coco.annotations.objects import CROWDS
from datamodules.coco.captions import CaptionSet, Vocabulary
from datamodules.coco.denoising import DenoisingSet
from datamodules.coco.detection import DetectionSet
from datamodules.coco.files import KINDS, Files, FolderFiles
from datamodules.coco.on_device import DeviceSet, DeviceSets, TaskSet
from datamodules.coco.pixels import Images, SplitSet
from datamodules.coco.segmentation import SegmentationSet
from datamodules.coco.splits import Splits, divide
from datamodules.memory import EvaluationBatches, TrainingBatches
from datamodules.placement import get_training_device, require_known
from datamodules.prediction import PredictionBatch, batches_of
from datamodules.reading.decoding import decode
from datamodules.reading.pixels import denormalise, normalise
from datamodules.reading.skipped import Skipped, report
from datamodules.sampling import (
    Epochs,
    EvenBatches,
    SeededShuffle,
    TrainingLoader,
    choose_workers,
    get_rank,
    loader_options,
)

TASKS = tuple(KINDS)
YEARS = (2014, 2017)


class COCO(pl.LightningDataModule):
    """MS COCO (Lin et al., 2014, https://arxiv.org/abs/1405.0312), or other data in its format.

    It reads ``{train,val}/*`` and ``annotations/{instances,captions}_{train,val}.json`` in
    `folder`, or what other tools write there, or MS COCO in its published layout,
    ``{train,val}<year>/*.jpg`` and ``annotations/{instances,captions}_{train,val}<year>.json`` in
    ``data_dir/coco``. It writes nothing there. The images of val both validate and test: COCO's
    test annotations are not public. An image is resized to a square as a whole, nothing is cut off.

    Batches are :class:`SegmentationBatch`, :class:`DetectionBatch`, :class:`CaptionBatch` or
    :class:`DenoisingBatch`, images float32, normalised with ImageNet's mean and standard deviation.
    Predictions are made for the images of val, in a :class:`PredictionBatch`. A damaged image or
    annotation is left out: a warning counts them and names the first, `skipped` names them all.

    Args:
        data_dir: holds the folder ``coco``.
        task: ``segmentation``, ``detection``, ``captions`` or ``denoise``.
        image_size: S, pixels.
        batch_size: images a batch.
        cache_dir: keeps what is derived from the data: packed annotations, the names of damaged
            images, and with `cache_images` the pixels.
        cache_images: whether decoded images and label maps are kept on disk, so that training does
            not wait for decoding: 4 S^2 bytes an image, 25 GB for S = 224.
        year: of MS COCO, 2014 or 2017.
        folder: of another data set; None for MS COCO.
        train_images, val_images: folders of images, in place of those above.
        train_annotations, val_annotations: annotation files, in place of those above.
        val_share: the share of the training images that validate instead, where there is nothing
            else to validate on; None where there is.
        split_seed: chooses these; not the seed of the run, so that every run has the same.
        augment: whether training images are changed at random.
        test_split: ``val``, or ``train`` to test how well the training images were learnt.
        min_count: how often a word must occur in the training captions to be in the vocabulary.
        crowds: what becomes of annotations that say ``iscrowd: 1``: ``"ignore"``, they count in no
            loss and no score, as COCO defines; or ``"objects"``, where a file means no crowd.
        num_workers: processes that fetch batches of images that are not on the GPU; the batches do
            not depend on it. None: as many as this machine can use.
        seed: of the order of the training images and of their augmentation.
        device: where images and label maps are read and changed during training: ``"cpu"``, by a
            loader, one by one; ``"gpu"``, the one that trains, which decodes them, or with
            `cache_images` has them in its memory; or ``"auto"``: the GPU that trains, if it can
            decode, or with `cache_images` if those of a split take at most a tenth of its free
            memory. With `cache_images` the batches are the same, but for captions' colours, which
            differ by at most 1 of 255. What a GPU decodes and resizes differs more.

    Attributes:
        skipped: name of a file or folder -> reason -> names of what is left out of it.
        vocabulary: of the training captions; None for other tasks.
        num_categories: of the training annotations. The property reads the file where that is not
            MS COCO's.
        num_classes: of pixels: the categories and the background.

    Raises:
        ValueError: an argument is out of range.
        DataNotFoundError: in `prepare_data` and `setup`: a file is missing, damaged or empty, its
            categories are not those of COCO, or val has others than train.
        CacheError: in the same methods: the cache cannot be written.
        DataDeviceError: by the loaders: `device` is ``"gpu"`` and the run has none, or none that
            decodes.
    """

    published_categories: ClassVar[int] = 80

    def __init__(
        self,
        data_dir: str | Path,
        task: str,
        image_size: int,
        batch_size: int,
        cache_dir: str | Path,
        cache_images: bool = False,
        year: int = 2017,
        folder: str | Path | None = None,
        train_images: str | Path | None = None,
        val_images: str | Path | None = None,
        train_annotations: str | Path | None = None,
        val_annotations: str | Path | None = None,
        val_share: float | None = None,
        split_seed: int = 0,
        augment: bool = True,
        test_split: str = "val",
        min_count: int = 5,
        crowds: str = "ignore",
        num_workers: int | None = 0,
        seed: int = 0,
        device: str = "auto",
    ) -> None:
        super().__init__()
        if task not in TASKS:
            raise ValueError(
                f"task: expected one of {TASKS}, got {task!r}; the model chooses it: "
                "model=segmentation, model=detection, model=captions or model=denoise"
            )
        for name, value, allowed in (
            ("year", year, YEARS),
            ("test_split", test_split, ("val", "train")),
            ("crowds", crowds, CROWDS),
        ):
            if value not in allowed:
                raise ValueError(f"{name}: expected one of {allowed}, got {value!r}")
        for name, value in (("image_size", image_size), ("batch_size", batch_size)):
            if value < 1:
                raise ValueError(f"{name}: expected at least 1, got {value}")
        if val_share is not None and not 0 < val_share < 1:
            raise ValueError(f"val_share: expected a number between 0 and 1, got {val_share}")
        given = {
            "train_images": train_images,
            "val_images": val_images,
            "train_annotations": train_annotations,
            "val_annotations": val_annotations,
        }
        given = {name: path for name, path in given.items() if path is not None}
        if val_share is not None and (twice := [name for name in given if name.startswith("val")]):
            raise ValueError(
                f"val_share: expected null where {twice[0]} is set, got {val_share}: images of "
                "train validate, or those of val"
            )
        require_known(device)
        files = (
            Files(Path(data_dir).resolve() / "coco", str(year), given)
            if folder is None
            else FolderFiles(Path(folder).resolve(), given, whole=val_share is not None)
        )
        published = folder is None and not given
        self.splits = Splits(
            files,
            task,
            image_size,
            Path(cache_dir).resolve(),
            keep=cache_images,
            divided=val_share is not None,
            crowds=crowds,
            expected_categories=self.published_categories if published else None,
        )
        self.val_share = val_share
        self.split_seed = split_seed
        self.task = task
        self.batch_size = batch_size
        self.cache_images = cache_images
        self.augment = augment
        self.test_split = test_split
        self.min_count = min_count
        self.num_workers = num_workers
        self.seed = seed
        self.device = device
        self.skipped: dict[str, dict[str, list[str]]] = {}
        self.vocabulary: Vocabulary | None = None
        self._sets: dict[str, TaskSet] = {}
        self._on_device = DeviceSets(device, cache_images)

    @property
    def num_categories(self) -> int:
        return self.splits.num_categories

    @property
    def num_classes(self) -> int:
        return self.num_categories + 1

    @property
    def class_names(self) -> tuple[str, ...] | None:
        """By class; None where there are none, for the tasks ``captions`` and ``denoise``."""
        if self.task in ("captions", "denoise"):
            return None
        background = ("background",) if self.task == "segmentation" else ()
        return (*background, *self.splits.objects("train").categories)

    @property
    def category_ids(self) -> list[int]:
        """Those of the annotation file of train, in the order of the classes."""
        return self.splits.objects("train").category_ids

    def prepare_data(self) -> None:
        """Fills the cache, in one process only; `setup` then finds the entries in every process."""
        for split in self.splits.names:
            self.splits.images(split)
            if self.task == "segmentation":
                self.splits.label_maps(split)

    def setup(self, stage: str) -> None:
        if self._sets:
            return
        images = {split: self.splits.images(split) for split in self.splits.names}
        for of_split in images.values():
            read = of_split.annotations
            self._report(read.path.name, read.skipped)
            self._report(of_split.folder.name, of_split.skipped)
            if isinstance(read, Captions):
                self._report(read.path.name, {"the image has no caption": read.images_without()})
        if self.val_share is None:
            parts = {split: (split, of_split.usable) for split, of_split in images.items()}
        else:
            divided = divide(images["train"], self.val_share, self.split_seed)
            parts = {part: ("train", numbers) for part, numbers in divided.items()}
        if self.task == "captions":
            split, numbers = parts["train"]
            self.vocabulary = Vocabulary.of(
                self.splits.captions(split).texts(numbers), self.min_count
            )
        for stage, part in (("train", "train"), ("val", "val"), ("test", self.test_split)):
            split, numbers = parts[part]
            self._sets[stage] = self._make_set(split, images[split], numbers, stage == "train")

    def census(self) -> dict[str, Counts]:
        """Returns what counts in each set, after `setup`."""
        counts = {stage: self._sets[stage].census() for stage in ("train", "val")}
        return counts | {"test": counts[self.test_split]}

    def _make_set(self, split: str, images: Images, numbers: np.ndarray, train: bool) -> TaskSet:
        augment = self.augment and train
        if self.task == "segmentation":
            return SegmentationSet(images, self.splits.label_maps(split), numbers, augment=augment)
        if self.task == "detection":
            return DetectionSet(images, self.splits.boxes(split), numbers, augment=augment)
        if self.task == "denoise":
            return DenoisingSet(images, numbers, augment=augment)
        assert self.vocabulary is not None
        return CaptionSet(
            images,
            self.splits.captions(split),
            self.vocabulary,
            numbers,
            per_image=not train,
            augment=augment,
        )

    def train_dataloader(self) -> TrainingLoader | TrainingBatches[Any]:
        data = self._sets["train"]
        sampler = SeededShuffle(len(data), self.seed, **get_rank(self.trainer))
        if (on_device := self._find_on_device(data)) is not None:
            return TrainingBatches(on_device, sampler, self.batch_size, self._find_decoder())
        batches = Epochs(sampler, self.batch_size, drop_last=False)
        return TrainingLoader(data, batch_sampler=batches, **self._options(data))

    def val_dataloader(self) -> DataLoader | EvaluationBatches[Any]:
        return self._evaluation("val")

    def test_dataloader(self) -> DataLoader | EvaluationBatches[Any]:
        return self._evaluation("test")

    def fetching(self, trainer: pl.Trainer) -> tuple[str, str]:
        """Returns where the batches of a trainer come from, and why; for the start-up table."""
        device = trainer.strategy.root_device
        count, why = choose_workers(self.num_workers, trainer)
        if self._on_device.decodes(device, count):
            few = f"{count} processes would decode fewer"
            return "files, decoded by the GPU", "data.device" if self.device == "gpu" else few
        how = "the cache" if self.cache_images else "decoded files"
        where = f"{count} processes" if count else "the process that trains"
        if self.cache_images and device.type == "cuda" and self.device != "cpu":
            where = "GPU memory" if self.device == "gpu" else f"GPU memory if it fits, or {where}"
        return f"{how}, in {where}", why

    def predict_dataloader(self) -> DataLoader | EvaluationBatches[PredictionBatch]:
        data, rank = self._sets["val"], get_rank(self.trainer)
        numbers = np.unique(data.numbers)[rank.get("rank", 0) :: rank.get("world_size", 1)]
        split = SplitSet(data.images, numbers)
        options = loader_options(self.trainer, self.num_workers)
        return batches_of(split, self.batch_size, self._find_decoder(), **options)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch._replace(images=normalise(batch.images))

    def pixels(self, images: Tensor) -> Tensor:
        """Undoes the normalisation of images; returns (B, 3, S, S) uint8."""
        return denormalise(images)

    def read(self, name: str) -> Tensor:
        """Returns an image that predictions are made for as it is in its file, (3, H, W) uint8."""
        return decode(self._sets["val"].images.folder / name)

    def _report(self, what: str, skipped: Skipped) -> None:
        if skipped := {reason: names for reason, names in skipped.items() if names}:
            known = self.skipped.setdefault(what, {})  # the folders of both splits may have a name
            for reason, names in skipped.items():
                known.setdefault(reason, []).extend(names)
            report(what, skipped)

    def _evaluation(self, stage: str) -> DataLoader | EvaluationBatches[Any]:
        data = self._sets[stage]
        batches = EvenBatches(len(data), self.batch_size, **get_rank(self.trainer))
        if (on_device := self._find_on_device(data)) is not None:
            return EvaluationBatches(on_device, batches, self._find_decoder())
        return DataLoader(data, batch_sampler=batches, **self._options(data))

    def _find_on_device(self, data: TaskSet) -> DeviceSet | None:
        """Returns data on the GPU that trains; None where a loader is to give it."""
        return self._on_device.find(data, *self._find_device_and_workers())

    def _find_decoder(self) -> torch.device | None:
        """Returns the GPU that decodes files; None where they are kept, or a loader reads them."""
        device, num_workers = self._find_device_and_workers()
        return device if self._on_device.decodes(device, num_workers) else None

    def _find_device_and_workers(self) -> tuple[torch.device, int]:
        """Returns the device that trains, and how many processes can fetch batches."""
        count, _ = choose_workers(self.num_workers, self.trainer)
        return get_training_device(self.trainer), count

    def _options(self, data: TaskSet) -> dict[str, Any]:
        options = loader_options(self.trainer, self.num_workers)
        if isinstance(data, SegmentationSet | DenoisingSet):
            return options
        return options | {"collate_fn": data.collate}
