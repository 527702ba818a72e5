"""Objects as the centres of their boxes: what a network is to find, its loss, and what it found.

Every shape is known beforehand, and nothing waits for a GPU, in the targets and the loss.

B batch, M boxes, K categories, S image size, h and w of the grid of locations.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.ops import batched_nms

from datamodules.coco.augmentation import CROWD
from models.metrics.mean import Mean

# Standard deviation of the weight of locations around a centre, as a share of the box, and the
# least one, in steps of the grid. The share is that of TTFNet (Liu et al., 2019,
# https://arxiv.org/abs/1909.00700).
SPREAD, LEAST_SPREAD = 0.54 / 6, 0.4
LEAST_WEIGHT = 0.05  # of a location that is to find the box
FOCUS, NEAR = 2, 4  # exponents of the focal loss of CenterNet
BOX_WEIGHT = 5.0  # of the loss of boxes, as TTFNet has it
MOST_FOUND = 100  # boxes of an image, as COCO counts them
OVERLAP = 0.6  # intersection over union from which two boxes of one category are one object
PEAK = 3  # locations: a centre is the most probable one of so many in each direction


class Targets(NamedTuple):
    """The targets of a network.

    Attributes:
        centres: (B, K, h, w), 1 at the centre of an object, falling to 0 around it.
        counted: (B, 1, h, w) bool, false where a crowd is: objects there are not told apart.
        boxes: (B, 4, h, w) left, top, right and bottom in pixels, of the object that a location is
            to find.
        weights: (B, h, w) how much its box counts; they add up to 1 for an object that is not
            hidden by another.
        count: scalar, how many objects there are.
    """

    centres: Tensor
    counted: Tensor
    boxes: Tensor
    weights: Tensor
    count: Tensor


def make_targets(
    boxes: Tensor, classes: Tensor, categories: int, grid: tuple[int, int], image_size: int
) -> Targets:
    """Makes the targets of a batch.

    Args:
        boxes: (B, M, 4) float32 and classes: (B, M) int64, of a `DetectionBatch`.
        categories: K.
        grid: h and w.
        image_size: S.
    """
    y, x = (_locations(count, image_size, boxes.device) for count in grid)
    step_y, step_x = image_size / grid[0], image_size / grid[1]
    left, top, right, bottom = boxes.unbind(-1)
    spread_x = ((right - left) / step_x * SPREAD).clamp(min=LEAST_SPREAD)
    spread_y = ((bottom - top) / step_y * SPREAD).clamp(min=LEAST_SPREAD)
    # (B, M, w) and (B, M, h): how far, in spreads, a location is from that of the centre.
    cell_x, cell_y = _cell(left + right, step_x, grid[1]), _cell(top + bottom, step_y, grid[0])
    far_x = (cell_x[..., None] - _index(x)) / spread_x[..., None]
    far_y = (cell_y[..., None] - _index(y)) / spread_y[..., None]
    near = torch.exp(-(far_y.square()[..., None] + far_x.square()[..., None, :]) / 2)
    near = near * (classes >= 0)[..., None, None]  # (B, M, h, w)

    batch, most = classes.shape
    flat = near.flatten(2)
    rows = classes.clamp(min=0)[..., None].expand_as(flat)
    centres = flat.new_zeros(batch, categories, flat.shape[2]).scatter_reduce(1, rows, flat, "amax")

    best, owner = flat.max(dim=1)  # (B, h * w)
    mine = (owner[:, None] == torch.arange(most, device=owner.device)[:, None]) * flat
    mine = mine * (best > LEAST_WEIGHT)[:, None]
    weights = (mine / mine.sum(2, keepdim=True).clamp(min=1)).sum(1)
    targets = boxes.gather(1, owner[..., None].expand(-1, -1, 4)).mT

    inside_x = (x >= left[..., None]) & (x <= right[..., None])
    inside_y = (y >= top[..., None]) & (y <= bottom[..., None])
    crowds = inside_y[..., None] & inside_x[..., None, :] & (classes == CROWD)[..., None, None]
    return Targets(
        centres.view(batch, categories, *grid),
        ~crowds.any(1, keepdim=True),
        targets.reshape(batch, 4, *grid),
        weights.view(batch, *grid),
        (classes >= 0).sum(),
    )


def loss(logits: Tensor, found: Tensor, targets: Targets, image_size: int) -> Mean:
    """Returns the loss of an object: CenterNet's focal loss of the centres, and 1 - GIoU of the
    boxes (Rezatofighi et al., 2019, https://arxiv.org/abs/1902.09630).

    Args:
        logits: (B, K, h, w) and found: (B, 4, h, w), of a `BoxDetector`.
        targets: of the same images.
        image_size: S.
    """
    logits = logits.float()
    probability = logits.sigmoid()
    # A centre counts where a crowd is, too: the object was told apart.
    present = (targets.centres == 1) * (1 - probability) ** FOCUS * F.logsigmoid(logits)
    absent = (
        (1 - targets.centres) ** NEAR * probability**FOCUS * F.logsigmoid(-logits) * targets.counted
    )
    boxes = to_boxes(found, image_size)
    overlap = _generalised_overlap(boxes, targets.boxes)
    of_boxes = (targets.weights * (1 - overlap)).sum()
    return Mean(BOX_WEIGHT * of_boxes - present.sum() - absent.sum(), targets.count)


def to_boxes(found: Tensor, image_size: int) -> Tensor:
    """Returns boxes (B, 4, h, w), left, top, right and bottom in pixels, that a network found."""
    height, width = found.shape[-2:]
    step_y, step_x = image_size / height, image_size / width
    right, down, log_width, log_height = found.float().unbind(1)
    centre_x = _locations(width, image_size, found.device) + right * step_x
    centre_y = _locations(height, image_size, found.device)[:, None] + down * step_y
    # Twice the image is enough for any box; without a bound the exponential is infinite at times.
    half_x = log_width.clamp(max=math.log(2 * width)).exp() * (step_x / 2)
    half_y = log_height.clamp(max=math.log(2 * height)).exp() * (step_y / 2)
    return torch.stack(
        (centre_x - half_x, centre_y - half_y, centre_x + half_x, centre_y + half_y), dim=1
    )


class Found(NamedTuple):
    """The objects found in an image, the most probable first.

    Attributes:
        boxes: (n, 4): left, top, right and bottom.
        scores: (n,) the probabilities.
        classes: (n,) int64.
    """

    boxes: Tensor
    scores: Tensor
    classes: Tensor


def find(logits: Tensor, found: Tensor, image_size: int) -> list[Found]:
    """Returns the objects in each image, at most `MOST_FOUND`, boxes in pixels inside it.

    Args:
        logits: (B, K, h, w) and found: (B, 4, h, w), of a `BoxDetector`.
        image_size: S.
    """
    scores = logits.float().sigmoid()
    peaks = scores == F.max_pool2d(scores, PEAK, stride=1, padding=PEAK // 2)
    scores = (scores * peaks).flatten(1)
    boxes = to_boxes(found, image_size).clamp(0, image_size).flatten(2).mT  # (B, h * w, 4)
    best, indices = scores.topk(min(MOST_FOUND, scores.shape[1]), dim=1)
    classes, places = indices // boxes.shape[1], indices % boxes.shape[1]
    objects = []
    for image in range(len(boxes)):
        chosen = boxes[image, places[image]]
        kept = batched_nms(chosen, best[image], classes[image], OVERLAP)
        kept = kept[best[image, kept] > 0]
        objects.append(Found(chosen[kept], best[image, kept], classes[image, kept]))
    return objects


def _locations(count: int, image_size: int, device: torch.device) -> Tensor:
    """Returns where the centres of locations are along one axis, in pixels."""
    return (torch.arange(count, device=device) + 0.5) * (image_size / count)


def _index(locations: Tensor) -> Tensor:
    return torch.arange(len(locations), device=locations.device)


def _cell(twice_the_centre: Tensor, step: float, count: int) -> Tensor:
    """Returns the index of the location at which each centre is."""
    return (twice_the_centre / (2 * step)).floor().clamp(0, count - 1)


def _generalised_overlap(one: Tensor, other: Tensor) -> Tensor:
    """Returns the GIoU of boxes (B, 4, h, w): left, top, right and bottom."""
    low, high = torch.maximum(one[:, :2], other[:, :2]), torch.minimum(one[:, 2:], other[:, 2:])
    both = _area((high - low).clamp(min=0))
    either = _area(one[:, 2:] - one[:, :2]) + _area(other[:, 2:] - other[:, :2]) - both
    around = _area(
        torch.maximum(one[:, 2:], other[:, 2:]) - torch.minimum(one[:, :2], other[:, :2])
    )
    return both / either.clamp(min=1e-6) - (around - either) / around.clamp(min=1e-6)


def _area(sizes: Tensor) -> Tensor:
    """Returns the products of widths and heights (B, 2, h, w). Unlike the gradient of `prod`, that
    of these does not wait for the GPU."""
    widths, heights = sizes.unbind(1)
    return widths * heights
