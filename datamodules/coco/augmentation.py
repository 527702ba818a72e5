"""Random changes of training images: of one image, and of a whole batch on its device.

What changes is drawn on the host from the seeds of the items, for an epoch at once: 512 crops take
1.3 ms of a processor. PyTorch's generator, seeded for each item, takes 0.7 ms for one. Both ways to
change images take the same draws.

N images of the data set, n draws, B batch, S image size.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional as T

from datamodules.reading.pixels import find_nearest

AREAS = (0.5, 1.0)  # of a crop, as a share of the image
RATIOS = (3 / 4, 4 / 3)  # width / height of a crop
TRIES = 10  # how many shapes of a crop are drawn; the first that is inside the image is taken
VISIBLE = 0.25  # the least share of an object's box that is inside a crop
NOTHING, CROWD = -1, -2  # classes of boxes that are not an object's
FACTORS = (0.8, 1.2)  # of brightness and of contrast
GREY = (0.2989, 0.587, 0.114)  # shares of red, green and blue, as torchvision has them
# torchvision resizes uint8 with weights of so many bits, and rounds after each of the two axes.
WEIGHT_BITS = 14


def draw_uniform(seeds: Tensor, count: int) -> np.ndarray:
    """Returns numbers in [0, 1), (n, count) float64, that depend on the seeds (n,) int64 alone.

    They are those of SplitMix64 (Steele et al., 2014, https://doi.org/10.1145/2660193.2660195).
    """
    bits = seeds.numpy().astype(np.uint64)[:, None]
    bits = bits + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        bits = (bits ^ (bits >> np.uint64(shift))) * np.uint64(factor)
    bits ^= bits >> np.uint64(31)
    return (bits >> np.uint64(11)) * 2.0**-53


# Crops


def draw_crops(seeds: Tensor, image_size: int) -> Tensor:
    """Draws crops of images (S, S), which are to be resized to (S, S), from seeds (n,) int64.

    The distribution is that of torchvision's RandomResizedCrop: the area is uniform in `AREAS`, and
    the logarithm of the aspect ratio in that of `RATIOS`. Half of the crops are mirrored.

    Returns:
        (n, 5) int64: top, left, height and width in pixels, and 1 where the crop is mirrored.
    """
    drawn = draw_uniform(seeds, 2 * TRIES + 3)
    areas = image_size**2 * _scale(drawn[:, :TRIES], *AREAS)
    ratios = np.exp(_scale(drawn[:, TRIES : 2 * TRIES], *map(math.log, RATIOS)))
    shapes = np.rint(np.sqrt(np.stack((areas / ratios, areas * ratios), axis=2))).astype(np.int64)
    inside = np.all((shapes > 0) & (shapes <= image_size), axis=2)
    first = np.take_along_axis(shapes, inside.argmax(axis=1)[:, None, None], axis=1)[:, 0]
    sizes = np.where(np.any(inside, axis=1)[:, None], first, image_size)  # or else the whole image
    starts = (drawn[:, -3:-1] * (image_size - sizes + 1)).astype(np.int64)
    mirrored = drawn[:, -1:] < 0.5
    return torch.from_numpy(np.concatenate((starts, sizes, mirrored), axis=1))


def _scale(uniform: np.ndarray, low: float, high: float) -> np.ndarray:
    return low + (high - low) * uniform


def crop_image(image: Tensor, box: Tensor) -> Tensor:
    """Crops an image (3, S, S) uint8 to a box (5,) of `draw_crops`."""
    *inside, mirrored = box.tolist()
    image = T.resized_crop(image, *inside, size=list(image.shape[1:]), antialias=True)
    return T.horizontal_flip(image) if mirrored else image


def crop_labels(labels: Tensor, box: Tensor) -> Tensor:
    """Crops labels (S, S) uint8 to a box (5,) of `draw_crops`."""
    *inside, mirrored = box.tolist()
    nearest = InterpolationMode.NEAREST_EXACT
    size = list(labels.shape)
    labels = T.resized_crop(labels[None], *inside, size=size, interpolation=nearest)[0]
    return T.horizontal_flip(labels) if mirrored else labels


def crop_boxes(objects: Tensor, classes: Tensor, crops: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Moves the boxes of images to where they are in crops of them.

    A box of which less than `VISIBLE` is inside the crop is left out, unless it is of a crowd.

    Args:
        objects: (B, M, 4): left, top, right and bottom in pixels.
        classes: (B, M) int64, negative where there is no object: `NOTHING` or `CROWD`.
        crops: (B, 5) of `draw_crops`.
        size: S of the images, and of the crops.

    Returns:
        Boxes (B, M, 4) inside the crops, and their classes.
    """
    top, left, height, width, mirrored = crops.to(objects.dtype)[:, None].unbind(-1)
    x = ((objects[..., 0::2] - left[..., None]) * (size / width)[..., None]).clamp(0, size)
    y = ((objects[..., 1::2] - top[..., None]) * (size / height)[..., None]).clamp(0, size)
    x = torch.where(mirrored[..., None] > 0, size - x.flip(-1), x)
    moved = torch.stack((x[..., 0], y[..., 0], x[..., 1], y[..., 1]), dim=-1)
    before = (objects[..., 2:] - objects[..., :2]).prod(-1) * (size**2 / (width * height))
    seen = (moved[..., 2:] - moved[..., :2]).prod(-1)
    gone = torch.where(classes == CROWD, seen <= 0, (seen < VISIBLE * before) | (seen <= 0))
    return moved, classes.masked_fill(gone, NOTHING)


class Lines(NamedTuple):
    """Of each row and column of a crop the two lines of the image between which it lies, and the
    nearest one, y and x (B, 3, S); and the weights of the two, (B, 2, S)."""

    y: Tensor
    x: Tensor
    weights_y: Tensor
    weights_x: Tensor


class Crops:
    """Crops images of a data set, by indexing and in integers: the bits are those of `crop_image`.

    Where a processor has no vector instructions torchvision resizes in float32 instead, and pixels
    of `crop_image` differ from these by at most 1 of 255.

    Args:
        image_size: S.
        device: of the images.
    """

    def __init__(self, image_size: int, device: torch.device) -> None:
        self._channels = torch.arange(3, device=device).view(3, 1, 1, 1, 1)
        taps, weights = (table.to(device) for table in _tabulate(image_size))
        # Mirrored ones follow, of which only the columns of an image make use.
        self._taps = torch.cat((taps, taps.flip(-1)))
        self._weights = torch.cat((weights, weights.flip(-1)))
        self._mirror = torch.tensor((0, len(taps)), device=device)

    def lines(self, boxes: Tensor) -> Lines:
        """Returns which lines of the images make crops to boxes (B, 5) of `draw_crops`."""
        starts, sizes, mirrored = boxes.split((2, 2, 1), dim=1)
        entries = sizes + mirrored * self._mirror  # (B, 2): of rows and of columns
        y, x = (self._taps[entries] + starts[:, :, None, None]).unbind(1)
        return Lines(y, x, *self._weights[entries].unbind(1))

    def images(self, images: Tensor, numbers: Tensor, lines: Lines) -> Tensor:
        """Returns crops (B, 3, S, S) of those of numbers (B,) among images (N, 3, S, S) uint8."""
        # (B, 3, 2, 2, S, S): of each pixel the two rows and, in each row, the two columns.
        taps = images[
            numbers.view(-1, 1, 1, 1, 1, 1),
            self._channels,
            lines.y[:, None, :2, None, :, None],
            lines.x[:, None, None, :2, None, :],
        ]
        rows = _interpolate(taps, lines.weights_x[:, None, None, :, None, :], dim=3)
        return _interpolate(rows, lines.weights_y[:, None, :, :, None], dim=2).to(torch.uint8)

    def labels(self, labels: Tensor, numbers: Tensor, lines: Lines) -> Tensor:
        """Returns crops (B, S, S) of those of numbers (B,) among labels (N, S, S) uint8."""
        return labels[numbers[:, None, None], lines.y[:, 2, :, None], lines.x[:, 2, None, :]]


def _interpolate(taps: Tensor, weights: Tensor, dim: int) -> Tensor:
    (low, high), (weight_low, weight_high) = taps.unbind(dim), weights.unbind(dim)
    half = 1 << (WEIGHT_BITS - 1)
    return (low * weight_low).add_(high * weight_high).add_(half) >> WEIGHT_BITS


def _tabulate(image_size: int) -> tuple[Tensor, Tensor]:
    """Returns how lines of S pixels are interpolated from lines of 0, 1, ..., S.

    Returns:
        (S + 1, 3, S) int64: the two pixels between which each of the S lies, and the nearest one.
        (S + 1, 2, S) int32: the weights of the two, in units of 2^-WEIGHT_BITS.
    """
    lengths = torch.arange(image_size + 1)[:, None]
    # Where the centre of each pixel falls, counted in pixels from the centre of the first.
    centres = lengths.double() / image_size * (torch.arange(image_size) + 0.5) - 0.5
    last = (lengths - 1).clamp(min=0)
    low = centres.floor().clamp(min=0).minimum(last)
    high = (low + 1).minimum(last)
    share = (centres - low).clamp(min=0) * (high > low)
    weights = torch.stack((1 - share, share), dim=1) * (1 << WEIGHT_BITS)
    # A line of no pixels is never asked for.
    nearest = torch.stack([find_nearest(max(1, n), image_size) for n in range(image_size + 1)])
    taps = torch.stack((low, high, nearest), dim=1).long()
    return taps, (weights + 0.5).floor().int()


# Colours


def draw_colours(seeds: Tensor) -> Tensor:
    """Draws a change of brightness and one of contrast, in random order, from seeds (n,) int64.

    The distribution is that of torchvision's ColorJitter, with factors uniform in `FACTORS`.

    Returns:
        (n, 2, 2) float32: the factor of the first change, and 1 where it is one of contrast, 0
        where it is one of brightness; then those of the second.
    """
    drawn = draw_uniform(seeds, 3)
    contrast_first = drawn[:, 2:] < 0.5
    kinds = np.concatenate((contrast_first, ~contrast_first), axis=1)
    factors = _scale(drawn[:, :2], *FACTORS)
    return torch.from_numpy(np.stack((factors, kinds), axis=2).astype(np.float32))


def colour(image: Tensor, changes: Tensor) -> Tensor:
    """Changes an image (3, S, S) uint8 as changes (2, 2) of `draw_colours` say."""
    for factor, contrast in changes.tolist():
        image = T.adjust_contrast(image, factor) if contrast else T.adjust_brightness(image, factor)
    return image


def colour_batch(images: Tensor, changes: Tensor) -> Tensor:
    """Changes images (B, 3, S, S) uint8 as changes (B, 2, 2) of `draw_colours` say.

    Either change mixes an image with one colour: contrast with its mean grey, brightness with
    black. Pixels differ from those of `colour` by at most 1 of 255, where sums are rounded in
    another order: less than 0.1 % of them in images of 64 x 64.
    """
    values = images.float()
    for change in changes.unbind(1):
        factor, contrast = change[:, :, None, None, None].unbind(1)
        red, green, blue = (values[:, c : c + 1] for c in range(3))
        grey = (red * GREY[0]).add_(green, alpha=GREY[1]).add_(blue, alpha=GREY[2]).floor_()
        mean = grey.mean(dim=(1, 2, 3), keepdim=True)
        values = (values * factor).add_(mean * ((1 - factor) * contrast)).clamp_(0, 255).floor_()
    return values.to(torch.uint8)
