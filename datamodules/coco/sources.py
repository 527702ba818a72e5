"""The sources of the pixels of data sets on a device: its memory, or the files.

N images of the annotation file, B batch, H height, W width, S image size, R runs of a label map.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from datamodules.coco.pixels import Images, LabelMaps

COPIED_BYTES = 2**26  # at once, by `move`


class Source(Protocol):
    """Images or label maps on a device, by their index in the annotation file."""

    def fetch(self, numbers: Tensor, on_device: Tensor) -> tuple[Tensor, Tensor]:
        """Returns pixels among which those of a batch are, (n, ...) uint8, and at which indices.

        Args:
            numbers: of the batch, (B,) int64, on the CPU.
            on_device: the same on the device.
        """
        ...


class Kept:
    """Pixels that are in the memory of the device, (N, ...) uint8."""

    def __init__(self, pixels: Tensor) -> None:
        self._pixels = pixels

    @classmethod
    def of(cls, kept: np.ndarray, device: torch.device) -> Kept:
        """Copies an array, which may be a file that is mapped, part by part."""
        pixels = torch.empty(kept.shape, dtype=torch.uint8, device=device)
        rows = max(1, COPIED_BYTES // kept[0].nbytes)
        for first in range(0, len(kept), rows):
            pixels[first : first + rows] = torch.from_numpy(kept[first : first + rows].copy())
        return cls(pixels)

    def fetch(self, numbers: Tensor, on_device: Tensor) -> tuple[Tensor, Tensor]:
        return self._pixels, on_device


class Decoded:
    """Images that are decoded and resized there, (B, 3, S, S), each time that they are needed."""

    def __init__(self, images: Images, device: torch.device) -> None:
        self._images = images
        self._device = device

    def fetch(self, numbers: Tensor, on_device: Tensor) -> tuple[Tensor, Tensor]:
        decoded = self._images.read_on(self._device, numbers.tolist())
        return decoded, torch.arange(len(numbers), device=self._device)


class Drawn:
    """Label maps that are drawn there, (B, S, S), each time that they are needed."""

    def __init__(self, label_maps: LabelMaps, device: torch.device) -> None:
        self._label_maps = label_maps
        self._device = device

    def fetch(self, numbers: Tensor, on_device: Tensor) -> tuple[Tensor, Tensor]:
        drawn = self._label_maps.draw_on(self._device, numbers.tolist())
        return drawn, torch.arange(len(numbers), device=self._device)
