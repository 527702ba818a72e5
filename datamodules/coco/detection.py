"""Images with the boxes of their objects. B batch, M boxes, S image size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from datamodules.census import Counts
from datamodules.coco import augmentation
from datamodules.coco.annotations.boxes import Boxes, ImageBoxes
from datamodules.coco.augmentation import CROWD, NOTHING
from datamodules.coco.pixels import Images
from datamodules.reading.threads import FileSet


class Truth:
    """The annotations of each image of a batch, in the pixels of the files.

    It is no sequence to what walks through a batch for its tensors, as Lightning does in every
    step.
    """

    def __init__(self, boxes: Boxes, numbers: Sequence[int]) -> None:
        self._boxes = boxes
        self._numbers = numbers

    def of_images(self) -> list[ImageBoxes]:
        return [self._boxes.of_image(number) for number in self._numbers]


class DetectionBatch(NamedTuple):
    """Images with boxes; M is the same in all batches, so that their shapes are.

    Attributes:
        images: (B, 3, S, S).
        boxes: (B, M, 4) float32: left, top, right and bottom in pixels of the image (S, S).
        classes: (B, M) int64: a category; `CROWD` for a box where no category counts; or `NOTHING`
            for no box.
        truth: for an evaluation.
    """

    images: Tensor
    boxes: Tensor
    classes: Tensor
    truth: Truth


class DetectionItem(NamedTuple):
    image: Tensor
    boxes: Tensor
    classes: Tensor
    number: int


class DetectionSet(FileSet[DetectionItem]):
    """Images that can be decoded, with or without objects.

    With `augment`, an item that is asked for as (index, seed) is a random crop of at least half the
    area, mirrored half the time; the seed determines both.

    Args:
        numbers: of the images, in the annotation file, (N,) int64.

    Attributes:
        boxes, classes: of all items, as in a :class:`DetectionBatch`.
    """

    def __init__(
        self, images: Images, annotated: Boxes, numbers: np.ndarray, *, augment: bool = False
    ) -> None:
        self.images = images
        self.annotated = annotated
        self.augment = augment
        self.numbers = torch.from_numpy(numbers)
        self.boxes, self.classes = _pad(annotated, numbers, images.image_size)

    def __len__(self) -> int:
        return len(self.numbers)

    def census(self) -> Counts:
        """Returns what counts in the images."""
        return self.annotated.census(self.numbers.numpy(), self.images.image_size)

    def __getitem__(self, item: int | tuple[int, int]) -> DetectionItem:
        index, seed = item if isinstance(item, tuple) else (item, None)
        number = int(self.numbers[index])
        image, boxes, classes = self.images[number], self.boxes[index], self.classes[index]
        if seed is not None and self.augment:
            size = self.images.image_size
            crops = augmentation.draw_crops(torch.tensor([seed]), size)
            image = augmentation.crop_image(image, crops[0])
            (boxes,), (classes,) = augmentation.crop_boxes(boxes[None], classes[None], crops, size)
        return DetectionItem(image, boxes, classes, number)

    def collate(self, items: Sequence[DetectionItem]) -> DetectionBatch:
        """Makes a batch of items."""
        return DetectionBatch(
            images=torch.stack([item.image for item in items]),
            boxes=torch.stack([item.boxes for item in items]),
            classes=torch.stack([item.classes for item in items]),
            truth=Truth(self.annotated, [item.number for item in items]),
        )


def _pad(annotated: Boxes, numbers: np.ndarray, image_size: int) -> tuple[Tensor, Tensor]:
    """Returns the boxes (N, M, 4) and classes (N, M) of images resized to (S, S)."""
    most = max(1, annotated.most)
    boxes = np.zeros((len(numbers), most, 4), np.float32)
    classes = np.full((len(numbers), most), NOTHING)
    for row, number in enumerate(numbers.tolist()):
        found = annotated.of_image(number)
        height, width = found.size
        x, y, w, h = found.boxes.T
        corners = np.stack((x / width, y / height, (x + w) / width, (y + h) / height), axis=1)
        boxes[row, : len(corners)] = image_size * corners.clip(0, 1)
        classes[row, : len(corners)] = np.where(found.crowds, CROWD, found.classes)
    return torch.from_numpy(boxes), torch.from_numpy(classes)
