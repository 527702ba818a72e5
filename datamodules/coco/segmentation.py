"""Images with the class of every pixel. B batch, S image size."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from datamodules.census import Counts
from datamodules.coco import augmentation
from datamodules.coco.pixels import Images, LabelMaps
from datamodules.reading.threads import FileSet


class SegmentationBatch(NamedTuple):
    """Images (B, 3, S, S), and the class of every pixel (B, S, S).

    Class 0 is the background; pixels of class 255 count in no loss and no metric.
    """

    images: Tensor
    labels: Tensor


class SegmentationSet(FileSet[SegmentationBatch]):
    """Images that can be decoded; one without instances is all background.

    An item is an image (3, S, S) and its labels (S, S), both uint8. With `augment`, an item that is
    asked for as (index, seed) is a random crop of at least half the area, mirrored half the time;
    the seed determines both.

    Args:
        numbers: of the images, in the annotation file, (N,) int64.
    """

    def __init__(
        self,
        images: Images,
        label_maps: LabelMaps,
        numbers: np.ndarray,
        *,
        augment: bool = False,
    ) -> None:
        self.images = images
        self.label_maps = label_maps
        self.augment = augment
        self.numbers = torch.from_numpy(numbers)

    def __len__(self) -> int:
        return len(self.numbers)

    def census(self) -> Counts:
        """Returns what counts in the images."""
        return self.label_maps.instances.census(self.numbers.numpy(), self.images.image_size)

    def __getitem__(self, item: int | tuple[int, int]) -> SegmentationBatch:
        index, seed = item if isinstance(item, tuple) else (item, None)
        number = int(self.numbers[index])
        image, labels = self.images[number], self.label_maps[number]
        if seed is not None and self.augment:
            (box,) = augmentation.draw_crops(torch.tensor([seed]), self.images.image_size)
            image = augmentation.crop_image(image, box)
            labels = augmentation.crop_labels(labels, box)
        return SegmentationBatch(image, labels)
