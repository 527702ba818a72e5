"""Data sets of COCO of which the pixels are on one device; batches are selected and changed there.

The batches are those that a loader gives of the same :class:`SegmentationSet`,
:class:`DetectionSet` or :class:`CaptionSet`. The host draws the changes and finds the rows for an
epoch at once; for a batch it queues 18 kernels for segmentation and 29 for captions, and waits for
none.

N images of the annotation file, B batch, S image size, T tokens.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from datamodules.coco.augmentation import (
    Crops,
    colour_batch,
    crop_boxes,
    draw_colours,
    draw_crops,
)
from datamodules.coco.captions import CaptionBatch, CaptionSet, References, pad, round_length
from datamodules.coco.detection import DetectionBatch, DetectionSet, Truth
from datamodules.coco.pixels import Images, LabelMaps
from datamodules.coco.segmentation import SegmentationBatch, SegmentationSet
from datamodules.memory import send
from datamodules.placement import is_resident

COPIED_BYTES = 2**26  # at once, by `move`


def move(kept: np.ndarray, device: torch.device) -> Tensor:
    """Copies an array, which may be a file that is mapped, to a device, part by part."""
    moved = torch.empty(kept.shape, dtype=torch.uint8, device=device)
    rows = max(1, COPIED_BYTES // kept[0].nbytes)
    for first in range(0, len(kept), rows):
        moved[first : first + rows] = torch.from_numpy(kept[first : first + rows].copy())
    return moved


class ResidentSegmentation:
    """A :class:`SegmentationSet` on the device of its pixels; see :class:`InMemory`.

    Args:
        data: of which items are selected.
        images: (N, 3, S, S) uint8.
        labels: (N, S, S) uint8, on the same device.
    """

    def __init__(self, data: SegmentationSet, images: Tensor, labels: Tensor) -> None:
        self.data = data
        self.images = images
        self.labels = labels
        self._crops = Crops(images.shape[-1], images.device)

    def __len__(self) -> int:
        return len(self.data)

    def columns(self, rows: Tensor) -> tuple[Tensor, ...]:
        indices, seeds = _split(rows)
        columns = [self.data.numbers[indices]]
        if self.data.augment and seeds is not None:
            columns.append(draw_crops(seeds, self.images.shape[-1]))
        return tuple(send(column, self.images.device) for column in columns)

    def select(self, rows: Tensor, *columns: Tensor) -> SegmentationBatch:
        """Returns images (B, 3, S, S) and labels (B, S, S), both uint8, on the device."""
        numbers, *boxes = columns
        if boxes:
            lines = self._crops.lines(*boxes)
            return SegmentationBatch(
                self._crops.images(self.images, numbers, lines),
                self._crops.labels(self.labels, numbers, lines),
            )
        return SegmentationBatch(
            self.images.index_select(0, numbers), self.labels.index_select(0, numbers)
        )


class ResidentDetection:
    """A :class:`DetectionSet` on the device of its images; see :class:`InMemory`.

    Args:
        data: of which items are selected.
        images: (N, 3, S, S) uint8.
    """

    def __init__(self, data: DetectionSet, images: Tensor) -> None:
        self.data = data
        self.images = images
        self._boxes, self._classes = (
            values.to(images.device) for values in (data.boxes, data.classes)
        )
        self._crops = Crops(images.shape[-1], images.device)

    def __len__(self) -> int:
        return len(self.data)

    def columns(self, rows: Tensor) -> tuple[Tensor, ...]:
        indices, seeds = _split(rows)
        columns = [indices, self.data.numbers[indices]]
        if self.data.augment and seeds is not None:
            columns.append(draw_crops(seeds, self.images.shape[-1]))
        return tuple(send(column, self.images.device) for column in columns)

    def select(self, rows: Tensor, *columns: Tensor) -> DetectionBatch:
        """Returns images (B, 3, S, S) uint8 with their boxes, on the device."""
        indices, numbers, *crops = columns
        items, _ = _split(rows)
        boxes, classes = self._boxes[indices], self._classes[indices]
        if crops:
            images = self._crops.images(self.images, numbers, self._crops.lines(*crops))
            boxes, classes = crop_boxes(boxes, classes, crops[0], self.images.shape[-1])
        else:
            images = self.images.index_select(0, numbers)
        truth = Truth(self.data.annotated, self.data.numbers[items].tolist())
        return DetectionBatch(images, boxes, classes, truth)


class ResidentCaptions:
    """A :class:`CaptionSet` on the device of its images; see :class:`InMemory`.

    The lengths of a batch are on the device too. The host has a copy of them, from which it knows
    T without waiting.

    Args:
        data: of which items are selected.
        images: (N, 3, S, S) uint8.
    """

    def __init__(self, data: CaptionSet, images: Tensor) -> None:
        self.data = data
        self.images = images
        tokens, self._host_lengths = pad([data.tokens(index) for index in range(len(data))])
        self._tokens, self._lengths = tokens.to(images.device), self._host_lengths.to(images.device)
        references = {int(number): data.captions.of_image(int(number)) for number in data.numbers}
        self._references = [references[int(number)] for number in data.numbers]

    def __len__(self) -> int:
        return len(self.data)

    def columns(self, rows: Tensor) -> tuple[Tensor, ...]:
        indices, seeds = _split(rows)
        columns = [indices, self.data.numbers[indices]]
        if self.data.augment and seeds is not None:
            columns.append(draw_colours(seeds))
        return tuple(send(column, self.images.device) for column in columns)

    def select(self, rows: Tensor, *columns: Tensor) -> CaptionBatch:
        """Returns images (B, 3, S, S) uint8 with their captions, on the device."""
        indices, numbers, *changes = columns
        items, _ = _split(rows)
        images = self.images.index_select(0, numbers)
        longest = int(self._host_lengths[items].amax())
        return CaptionBatch(
            images=colour_batch(images, *changes) if changes else images,
            tokens=self._tokens[:, : round_length(longest)].index_select(0, indices),
            lengths=self._lengths.index_select(0, indices),
            references=References([self._references[item] for item in items.tolist()]),
        )


TaskSet = SegmentationSet | DetectionSet | CaptionSet
Resident = ResidentSegmentation | ResidentDetection | ResidentCaptions


class Residents:
    """The data sets of a run that are on its GPU. Those of the same files share the pixels.

    Args:
        device: the argument of the data module, one of `DEVICES`.
    """

    def __init__(self, device: str) -> None:
        self.device = device
        self._pixels: dict[tuple[Images | LabelMaps, torch.device], Tensor] = {}
        self._made: dict[tuple[TaskSet, torch.device], Resident] = {}

    def find(self, data: TaskSet, device: torch.device) -> Resident | None:
        """Returns a data set on the device that trains, and moves it there once; None where it is
        to stay on the host."""
        stores: list[Images | LabelMaps] = [data.images]
        if isinstance(data, SegmentationSet):
            stores.append(data.label_maps)
        nbytes = sum(s.kept.nbytes for s in stores if (s, device) not in self._pixels)
        if not is_resident(self.device, nbytes, device):
            return None
        if (data, device) not in self._made:
            self._made[data, device] = _make(data, *(self._move(s, device) for s in stores))
        return self._made[data, device]

    def _move(self, store: Images | LabelMaps, device: torch.device) -> Tensor:
        if (store, device) not in self._pixels:
            self._pixels[store, device] = move(store.kept, device)
        return self._pixels[store, device]


def _make(data: TaskSet, *pixels: Tensor) -> Resident:
    if isinstance(data, SegmentationSet):
        return ResidentSegmentation(data, *pixels)
    if isinstance(data, DetectionSet):
        return ResidentDetection(data, *pixels)
    return ResidentCaptions(data, *pixels)


def _split(rows: Tensor) -> tuple[Tensor, Tensor | None]:
    """Returns the indices of rows, and their seeds where they have some."""
    if rows.ndim == 1:
        return rows, None
    indices, seeds = rows.unbind(1)
    return indices, seeds
