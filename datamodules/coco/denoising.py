"""Images, each with the seed of the noise that a model is to remove. B batch, S image size."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from datamodules.census import Counts
from datamodules.coco import augmentation
from datamodules.coco.pixels import Images
from datamodules.reading.threads import FileSet


class DenoisingBatch(NamedTuple):
    """Images without noise (B, 3, S, S), and the seed of the noise of each (B,) int64."""

    images: Tensor
    seeds: Tensor


class DenoisingSet(FileSet[DenoisingBatch]):
    """Images that can be decoded.

    An item is an image (3, S, S) uint8 and a seed. An item that is asked for as (index, seed) has
    that one, and with `augment` it is a random crop of at least half the area, mirrored half the
    time, which the seed determines too. Else the seed is the number of the image, so that the noise
    to validate on is always the same.

    Args:
        numbers: of the images, in the annotation file, (N,) int64.
    """

    def __init__(self, images: Images, numbers: np.ndarray, *, augment: bool = False) -> None:
        self.images = images
        self.augment = augment
        self.numbers = torch.from_numpy(numbers)

    def __len__(self) -> int:
        return len(self.numbers)

    def census(self) -> Counts:
        """Returns how many images there are: all count."""
        return Counts(len(self), len(self), "image")

    def __getitem__(self, item: int | tuple[int, int]) -> DenoisingBatch:
        index, seed = item if isinstance(item, tuple) else (item, None)
        number = int(self.numbers[index])
        image = self.images[number]
        if seed is None:
            return DenoisingBatch(image, torch.tensor(number))
        if self.augment:
            (box,) = augmentation.draw_crops(torch.tensor([seed]), self.images.image_size)
            image = augmentation.crop_image(image, box)
        return DenoisingBatch(image, torch.tensor(seed))
