"""From decoded images to what networks take: resized to squares, and normalised.

B batch, H height, W width, S image size.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import functional as F
from torchvision.transforms.v2 import functional as T

# Mean and standard deviation of ImageNet's pixels, red, green, blue: published weights of backbones
# were trained with them.
PIXEL_MEAN = (123.675, 116.28, 103.53)
PIXEL_STD = (58.395, 57.12, 57.375)
DIGIT = 2**12


def resize(image: Tensor, image_size: int) -> Tensor:
    """Resizes (3, H, W) uint8 to (3, S, S): the whole image, whatever its aspect ratio."""
    return T.resize(image, [image_size, image_size], antialias=True)


def resize_all(images: Iterable[Tensor], image_size: int) -> Tensor:
    """Resizes images of any sizes as `resize` does, to (B, 3, S, S) uint8; of none, to (0,).

    On a GPU they are rounded together, since each kernel takes the host longer than the GPU.
    """
    resized = [
        _interpolate(image, image_size) if image.is_cuda else resize(image, image_size)
        for image in images
    ]
    if not resized:
        return torch.empty(0, dtype=torch.uint8)
    batch = torch.stack(resized)
    return batch.round_().to(torch.uint8) if batch.is_floating_point() else batch


def _interpolate(image: Tensor, image_size: int) -> Tensor:
    """Returns what `resize` rounds on a GPU."""
    size = [image_size, image_size]
    return F.interpolate(image[None].float(), size, mode="bilinear", antialias=True)[0]


@functools.lru_cache(2**14)
def find_nearest(length: int, count: int) -> Tensor:
    """Returns which of the pixels of a line torch takes to resize it to another length by
    ``nearest-exact``, (count,) int64. It rounds the ratio of the lengths to float32."""
    pixels = torch.arange(length)
    digits = torch.stack((pixels // DIGIT, pixels % DIGIT))  # float32 has not each large number
    high, low = F.interpolate(digits[None].float(), size=count, mode="nearest-exact")[0].long()
    return high * DIGIT + low


def normalise(images: Tensor) -> Tensor:
    """Normalises (B, 3, S, S) uint8 to float32 with ImageNet's mean and standard deviation."""
    mean, std = _mean_and_std(images.device)
    return images.float().sub_(mean).div_(std)


def denormalise(images: Tensor) -> Tensor:
    """Undoes `normalise`; returns (B, 3, S, S) uint8."""
    mean, std = _mean_and_std(images.device)
    return (images.float() * std + mean).round().clamp(0, 255).to(torch.uint8)


@functools.cache  # a copy to the GPU in every step would wait for the work queued there
def _mean_and_std(device: torch.device) -> tuple[Tensor, Tensor]:
    mean, std = (torch.tensor(v, device=device).view(3, 1, 1) for v in (PIXEL_MEAN, PIXEL_STD))
    return mean, std
