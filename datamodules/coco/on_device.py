"""Data sets of COCO on one device; batches are selected and changed there.

The batches are those that a loader gives of the same :class:`SegmentationSet`,
:class:`DetectionSet`, :class:`CaptionSet` or :class:`DenoisingSet`. The host draws the changes and
finds the rows for an epoch at once; for a batch of pixels that are kept on the device it queues 18
kernels for segmentation and 29 for captions, and waits for none.

B batch, S image size, T tokens.
"""

from __future__ import annotations

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
from datamodules.coco.denoising import DenoisingBatch, DenoisingSet
from datamodules.coco.detection import DetectionBatch, DetectionSet, Truth
from datamodules.coco.pixels import Images, LabelMaps
from datamodules.coco.segmentation import SegmentationBatch, SegmentationSet
from datamodules.coco.sources import Decoded, Drawn, Kept, Source
from datamodules.memory import send
from datamodules.placement import is_decoded, is_resident


class DeviceSegmentation:
    """A :class:`SegmentationSet` on a device; see :class:`InMemory`.

    Args:
        data: of which items are selected.
        device: on which.
        images, labels: where their pixels come from.
    """

    def __init__(
        self, data: SegmentationSet, device: torch.device, images: Source, labels: Source
    ) -> None:
        self.data = data
        self.device = device
        self.images = images
        self.labels = labels
        self._crops = Crops(data.images.image_size, device)

    def __len__(self) -> int:
        return len(self.data)

    def columns(self, rows: Tensor) -> tuple[Tensor, ...]:
        indices, seeds = _split(rows)
        columns = [self.data.numbers[indices]]
        if self.data.augment and seeds is not None:
            columns.append(draw_crops(seeds, self.data.images.image_size))
        return tuple(send(column, self.device) for column in columns)

    def select(self, rows: Tensor, *columns: Tensor) -> SegmentationBatch:
        """Returns images (B, 3, S, S) and labels (B, S, S), both uint8, on the device."""
        numbers, *boxes = columns
        indices, _ = _split(rows)
        fetched = self.data.numbers[indices], numbers
        images, labels = self.images.fetch(*fetched), self.labels.fetch(*fetched)
        if boxes:
            lines = self._crops.lines(*boxes)
            return SegmentationBatch(
                self._crops.images(*images, lines), self._crops.labels(*labels, lines)
            )
        return SegmentationBatch(_take(*images), _take(*labels))


class DeviceDetection:
    """A :class:`DetectionSet` on a device; see :class:`InMemory`.

    Args:
        data: of which items are selected.
        device: on which.
        images: where their pixels come from.
    """

    def __init__(self, data: DetectionSet, device: torch.device, images: Source) -> None:
        self.data = data
        self.device = device
        self.images = images
        self._boxes, self._classes = (values.to(device) for values in (data.boxes, data.classes))
        self._crops = Crops(data.images.image_size, device)

    def __len__(self) -> int:
        return len(self.data)

    def columns(self, rows: Tensor) -> tuple[Tensor, ...]:
        indices, seeds = _split(rows)
        columns = [indices, self.data.numbers[indices]]
        if self.data.augment and seeds is not None:
            columns.append(draw_crops(seeds, self.data.images.image_size))
        return tuple(send(column, self.device) for column in columns)

    def select(self, rows: Tensor, *columns: Tensor) -> DetectionBatch:
        """Returns images (B, 3, S, S) uint8 with their boxes, on the device."""
        indices, numbers, *crops = columns
        items, _ = _split(rows)
        boxes, classes = self._boxes[indices], self._classes[indices]
        host_numbers = self.data.numbers[items]
        images = self.images.fetch(host_numbers, numbers)
        truth = Truth(self.data.annotated, host_numbers.tolist())
        if crops:
            changed = crop_boxes(boxes, classes, crops[0], self.data.images.image_size)
            images = self._crops.images(*images, self._crops.lines(*crops))
            return DetectionBatch(images, *changed, truth)
        return DetectionBatch(_take(*images), boxes, classes, truth)


class DeviceCaptions:
    """A :class:`CaptionSet` on a device; see :class:`InMemory`.

    The lengths of a batch are on the device too. The host has a copy of them, from which it knows
    T without waiting.

    Args:
        data: of which items are selected.
        device: on which.
        images: where their pixels come from.
    """

    def __init__(self, data: CaptionSet, device: torch.device, images: Source) -> None:
        self.data = data
        self.device = device
        self.images = images
        tokens, self._host_lengths = pad([data.tokens(index) for index in range(len(data))])
        self._tokens, self._lengths = tokens.to(device), self._host_lengths.to(device)
        references = {int(number): data.captions.of_image(int(number)) for number in data.numbers}
        self._references = [references[int(number)] for number in data.numbers]

    def __len__(self) -> int:
        return len(self.data)

    def columns(self, rows: Tensor) -> tuple[Tensor, ...]:
        indices, seeds = _split(rows)
        columns = [indices, self.data.numbers[indices]]
        if self.data.augment and seeds is not None:
            columns.append(draw_colours(seeds))
        return tuple(send(column, self.device) for column in columns)

    def select(self, rows: Tensor, *columns: Tensor) -> CaptionBatch:
        """Returns images (B, 3, S, S) uint8 with their captions, on the device."""
        indices, numbers, *changes = columns
        items, _ = _split(rows)
        images = _take(*self.images.fetch(self.data.numbers[items], numbers))
        longest = int(self._host_lengths[items].amax())
        return CaptionBatch(
            images=colour_batch(images, *changes) if changes else images,
            tokens=self._tokens[:, : round_length(longest)].index_select(0, indices),
            lengths=self._lengths.index_select(0, indices),
            references=References([self._references[item] for item in items.tolist()]),
        )


class DeviceDenoising:
    """A :class:`DenoisingSet` on a device; see :class:`InMemory`.

    Args:
        data: of which items are selected.
        device: on which.
        images: where their pixels come from.
    """

    def __init__(self, data: DenoisingSet, device: torch.device, images: Source) -> None:
        self.data = data
        self.device = device
        self.images = images
        self._crops = Crops(data.images.image_size, device)

    def __len__(self) -> int:
        return len(self.data)

    def columns(self, rows: Tensor) -> tuple[Tensor, ...]:
        indices, seeds = _split(rows)
        numbers = self.data.numbers[indices]
        columns = [numbers, numbers if seeds is None else seeds.contiguous()]
        if self.data.augment and seeds is not None:
            columns.append(draw_crops(seeds, self.data.images.image_size))
        return tuple(send(column, self.device) for column in columns)

    def select(self, rows: Tensor, *columns: Tensor) -> DenoisingBatch:
        """Returns images (B, 3, S, S) uint8 with their seeds, on the device."""
        numbers, seeds, *boxes = columns
        indices, _ = _split(rows)
        images = self.images.fetch(self.data.numbers[indices], numbers)
        if boxes:
            cropped = self._crops.images(*images, self._crops.lines(*boxes))
            return DenoisingBatch(cropped, seeds)
        return DenoisingBatch(_take(*images), seeds)


TaskSet = SegmentationSet | DetectionSet | CaptionSet | DenoisingSet
DeviceSet = DeviceSegmentation | DeviceDetection | DeviceCaptions | DeviceDenoising


class DeviceSets:
    """The data sets of a run that are on its GPU. Those of the same files share the pixels.

    Args:
        device: the argument of the data module, one of `DEVICES`.
        kept: whether images are kept decoded, so that their pixels may be in the GPU's memory.
    """

    def __init__(self, device: str, kept: bool) -> None:
        self.device = device
        self.kept = kept
        self._sources: dict[tuple[Images | LabelMaps, torch.device], Source] = {}
        self._made: dict[tuple[TaskSet, torch.device], DeviceSet] = {}

    def decodes(self, device: torch.device, num_workers: int) -> bool:
        """Returns whether the device that trains is to decode files, instead of so many
        processes."""
        return not self.kept and is_decoded(self.device, device, num_workers)

    def find(self, data: TaskSet, device: torch.device, num_workers: int) -> DeviceSet | None:
        """Returns a data set on the device that trains, where it is made once; None where it is to
        stay on the host, of which so many processes can fetch it."""
        stores: list[Images | LabelMaps] = [data.images]
        if isinstance(data, SegmentationSet):
            stores.append(data.label_maps)
        if self.kept:
            new = (s for s in stores if (s, device) not in self._sources)
            if not is_resident(self.device, sum(s.kept.nbytes for s in new), device):
                return None
        elif not self.decodes(device, num_workers):
            return None
        if (data, device) not in self._made:
            sources = [self._find_source(store, device) for store in stores]
            self._made[data, device] = _make(data, device, *sources)
        return self._made[data, device]

    def _find_source(self, store: Images | LabelMaps, device: torch.device) -> Source:
        if (store, device) not in self._sources:
            self._sources[store, device] = self._make_source(store, device)
        return self._sources[store, device]

    def _make_source(self, store: Images | LabelMaps, device: torch.device) -> Source:
        if self.kept:
            return Kept.of(store.kept, device)
        return Decoded(store, device) if isinstance(store, Images) else Drawn(store, device)


def _make(data: TaskSet, device: torch.device, *sources: Source) -> DeviceSet:
    if isinstance(data, SegmentationSet):
        return DeviceSegmentation(data, device, *sources)
    if isinstance(data, DetectionSet):
        return DeviceDetection(data, device, *sources)
    if isinstance(data, DenoisingSet):
        return DeviceDenoising(data, device, *sources)
    return DeviceCaptions(data, device, *sources)


def _take(pixels: Tensor, places: Tensor) -> Tensor:
    return pixels.index_select(0, places)


def _split(rows: Tensor) -> tuple[Tensor, Tensor | None]:
    """Returns the indices of rows, and their seeds where they have some."""
    if rows.ndim == 1:
        return rows, None
    indices, seeds = rows.unbind(1)
    return indices, seeds
