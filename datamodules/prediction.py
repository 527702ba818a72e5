"""Images for a trained model to predict from, such as those of a folder.

B batch, C channels, S image size.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import pytorch_lightning as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torchvision.transforms.v2.functional import rgb_to_grayscale

from datamodules.images import DataNotFoundError
from datamodules.memory import EvaluationBatches
from datamodules.placement import get_training_device
from datamodules.reading.decoding import (
    FORMATS,
    UnreadableImageError,
    decode,
    decode_on,
    decodes_on,
)
from datamodules.reading.files import SUFFIXES, find_images
from datamodules.reading.pixels import normalise, resize_all
from datamodules.reading.skipped import report
from datamodules.reading.threads import FileSet
from datamodules.sampling import EvenBatches, loader_options


class PredictionBatch(NamedTuple):
    """Images and the files that they come from.

    Attributes:
        images: (B, C, S, S).
        sizes: H and W of each image before it was resized.
        names: of the files, relative to the folder.
        ids: of the images in the annotation file; their names where there is none.
        skipped: (reason, name) of each file that cannot be read; not counted in B.
    """

    images: Tensor
    sizes: list[tuple[int, int]]
    names: list[str]
    ids: Sequence[int | str]
    skipped: list[tuple[str, str]]


class PredictionSet(FileSet[PredictionBatch]):
    """Images by their index; an item is a batch of one, or of none where it cannot be read."""

    def __len__(self) -> int:
        raise NotImplementedError

    def __getitem__(self, index: int) -> PredictionBatch:
        return self.read_on(torch.device("cpu"), [index])

    def read_on(self, device: torch.device, indices: Sequence[int]) -> PredictionBatch:
        """Returns a batch of several images on a device, where they are decoded if it can."""
        raise NotImplementedError


class FolderSet(PredictionSet):
    """The image files of a folder, or one."""

    def __init__(self, source: Path, image_shape: tuple[int, int, int]) -> None:
        self.folder, self.names = _find(source)
        self.image_shape = image_shape

    def __len__(self) -> int:
        return len(self.names)

    def read_on(self, device: torch.device, indices: Sequence[int]) -> PredictionBatch:
        channels, _, image_size = self.image_shape
        sizes: list[tuple[int, int]] = []
        names: list[str] = []
        skipped: list[tuple[str, str]] = []

        def readable() -> Iterator[Tensor]:
            chosen = [self.names[index] for index in indices]
            paths = (self.folder / name for name in chosen)
            for name, image in zip(chosen, decode_on(device, paths, upright=True), strict=True):
                if isinstance(image, UnreadableImageError):
                    skipped.append((str(image), name))
                    continue
                sizes.append((image.shape[1], image.shape[2]))
                names.append(name)
                yield rgb_to_grayscale(image) if channels == 1 else image

        images = resize_all(readable(), image_size)
        return PredictionBatch(
            images.view(len(names), *self.image_shape), sizes, names, names, skipped
        )


class DecodedThere:
    """The images of a set in batches that a device decodes; see :class:`InMemory`."""

    def __init__(self, data: PredictionSet, device: torch.device) -> None:
        self.data = data
        self.device = device

    def columns(self, rows: Tensor) -> tuple[Tensor, ...]:
        return ()

    def select(self, rows: Tensor, *columns: Tensor) -> PredictionBatch:
        return self.data.read_on(self.device, rows.tolist())


def batches_of(
    data: PredictionSet, batch_size: int, gpu: torch.device | None, **options: Any
) -> DataLoader | EvaluationBatches[PredictionBatch]:
    """Returns the batches of a set, in order.

    Args:
        batch_size: the largest B.
        gpu: the one that is to decode; None for a loader.
        options: of that loader.
    """
    if gpu is not None and len(data):
        batches = EvenBatches(len(data), batch_size)
        return EvaluationBatches(DecodedThere(data, gpu), batches, prepare_on=gpu)
    return DataLoader(data, batch_size=batch_size, collate_fn=join, **options)


def join(items: Sequence[PredictionBatch]) -> PredictionBatch:
    images, *lists = zip(*items)
    return PredictionBatch(torch.cat(images), *(list(chain(*parts)) for parts in lists))


class ImageFolder(pl.LightningDataModule):
    """All images in a folder and its subfolders, or one, resized and normalised.

    Args:
        source: a folder of JPEG, PNG, GIF or WebP files, or one of them. They are turned upright as
            their EXIF says.
        image_shape: (C, S, S); C is 3, or 1 for grey.
        batch_size: images a batch.
        num_workers: processes that decode; None: as many as this machine can use.
        normalise: from (B, C, S, S) uint8 to float32; as :class:`COCO` does by default.
        class_names: what a writer of predictions calls the classes.

    Attributes:
        skipped: reason -> names of the files that cannot be read; a warning at the end counts them.

    Raises:
        DataNotFoundError: there is no `source`, or it holds no images.
    """

    def __init__(
        self,
        source: str | Path,
        image_shape: tuple[int, int, int],
        batch_size: int,
        num_workers: int | None = 0,
        normalise: Callable[[Tensor], Tensor] = normalise,
        class_names: Sequence[str] | None = None,
    ) -> None:
        super().__init__()
        self.images = FolderSet(Path(source), image_shape)
        self.batch_size = batch_size
        self.normalise = normalise
        self.class_names = class_names
        self.num_workers = num_workers
        self.skipped: dict[str, list[str]] = {}

    def predict_dataloader(self) -> DataLoader | EvaluationBatches[PredictionBatch]:
        device = get_training_device(self.trainer)
        gpu = device if decodes_on(device) else None
        options = loader_options(self.trainer, self.num_workers)
        return batches_of(self.images, self.batch_size, gpu, **options)

    def read(self, name: str) -> Tensor:
        """Returns an image as it is in its file, upright, (3, H, W) uint8."""
        return decode(self.images.folder / name, upright=True)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> PredictionBatch:
        for reason, name in batch.skipped:
            self.skipped.setdefault(reason, []).append(name)
        return batch._replace(images=self.normalise(batch.images))

    def teardown(self, stage: str) -> None:
        report(str(self.images.folder), self.skipped)


def _find(source: Path) -> tuple[Path, list[str]]:
    """Returns a folder, and the names of the images in it, or of the one that `source` is."""
    if source.is_file() and source.suffix.lower() in SUFFIXES:
        return source.parent, [source.name]
    formats = ", ".join(FORMATS)
    if source.is_dir():
        if names := sorted(str(path.relative_to(source)) for path in find_images(source)):
            return source, names
        raise DataNotFoundError(f"input: there are no images ({formats}) in {source.resolve()}")
    if source.exists():
        raise DataNotFoundError(f"input: {source.resolve()} is no image ({formats}) and no folder")
    beside = [path.name for path in source.absolute().parent.glob("*")]
    close = difflib.get_close_matches(source.name, beside, 1)
    raise DataNotFoundError(
        f"input: there is no {source.absolute()}"
        + (f"; did you mean {source.with_name(close[0])}?" if close else "")
    )
