"""Labelled images of which each batch shows random crops.

N images, B batch, S image size.
"""

from __future__ import annotations

from torch import Tensor

from datamodules.coco.augmentation import Crops, crop_image, draw_crops
from datamodules.memory import Batch, LabelledImages, send


class AugmentedImages:
    """Images (N, 3, S, S), each a random crop of at least half the area, mirrored half the time.

    The rows of batches are those of a :class:`SeededShuffle`: the seed of a row determines its
    crop. The bits are the same on every device.
    """

    def __init__(self, data: LabelledImages) -> None:
        self.data = data
        self.image_size = data.images.shape[-1]
        device = data.images.device
        self._crops = None if device.type == "cpu" else Crops(self.image_size, device)

    def columns(self, rows: Tensor) -> tuple[Tensor, ...]:
        indices, seeds = rows.unbind(1)
        crops = draw_crops(seeds, self.image_size)
        return tuple(send(column, self.data.labels.device) for column in (indices, crops))

    def select(self, rows: Tensor, *columns: Tensor) -> Batch:
        """Returns crops (B, 3, S, S) uint8 and labels (B,), on the device of the data."""
        indices, boxes = columns
        if self._crops is not None:
            images = self._crops.images(self.data.images, indices, self._crops.lines(boxes))
            return images, self.data.labels.index_select(0, indices)
        images, labels = self.data.select(rows, indices)
        for image, box in zip(images, boxes, strict=True):
            image.copy_(crop_image(image, box))
        return images, labels
