"""Instance masks: checks, encodes and draws COCO's polygons and run lengths.

pycocotools trusts its input: some values make it read or write outside its memory, others it takes
for a box. They are refused here before it sees them. Masks are drawn here too, not by its decoder.

The run lengths of a mask count zeros and ones in turn, zeros first, column by column. COCO writes
them as text: the first three as they are, each later one as its difference to the one two before.
A number is in two's complement, `BITS` bits a character, the lowest first. The code of a character
is its bits plus `FIRST_CODE`, and plus `MORE` in all but the last character of a number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from pycocotools import mask as rle_format

from datamodules.reading.skipped import DamagedError

FIRST_CODE = ord("0")
BITS = 5
MORE, SIGN = 2**BITS, 2 ** (BITS - 1)  # more characters follow; the number is negative
MAX_CHARACTERS = 6  # of a number: 30 bits; a difference of runs of up to 2^27 pixels has 29
LINE_WIDTH = 1e-6  # pixels: points that are as near to a line are on it, but for rounding
# Pixels in the outlines of all polygons of a mask. pycocotools sorts them, and allocates
# OUTLINE_BYTES for each, at most 320 MiB here.
MAX_OUTLINE = 2**22
OUTLINE_BYTES, MERGED_BYTES = 80, 4  # it allocates for a pixel of the outline, and of the image


def encode(segmentation: Any, height: int, width: int) -> bytes:
    """Returns the run lengths, as text, of a mask of polygons or of run lengths.

    Args:
        segmentation: any value, as the annotation file has it.
        height, width: of the image; their product is at most 2^27.

    Raises:
        DamagedError: the value is not a mask of such an image.
    """
    if not segmentation:
        raise DamagedError("there is no mask")
    if isinstance(segmentation, list):
        return _encode_polygons(segmentation, height, width)
    if not isinstance(segmentation, dict):
        raise DamagedError("the mask is neither polygons nor run lengths")
    if segmentation.get("size") != [height, width]:
        raise DamagedError("the mask is not of the image's size")
    counts = segmentation.get("counts")
    if isinstance(counts, str):
        text = counts.encode(errors="replace")
        _require_sum(decode_runs(text).tolist(), height * width)
        return text
    if not isinstance(counts, list) or not set(map(type, counts)) <= {int}:
        raise DamagedError("the mask's run lengths are neither text nor a list of integers")
    _require_sum(counts, height * width)
    mask: Any = {"size": [height, width], "counts": counts}
    return rle_format.frPyObjects(mask, height, width)["counts"]


def decode_runs(text: bytes) -> np.ndarray:
    """Returns the run lengths in a text, (R,) int64; they may be negative and have any sum.

    Raises:
        DamagedError: the text does not hold run lengths.
    """
    codes = np.frombuffer(text, np.uint8).astype(np.int64) - FIRST_CODE
    ends = np.flatnonzero(codes < MORE)
    if not len(codes) or codes[-1] >= MORE or codes.min() < 0 or codes.max() >= 2 * MORE:
        raise DamagedError("the mask's run lengths are cut off or not in COCO's format")
    starts = np.concatenate(([0], ends[:-1] + 1))
    characters = ends - starts + 1
    if characters.max() > MAX_CHARACTERS:
        raise DamagedError("the mask's run lengths do not add up to the image")
    shifts = BITS * (np.arange(len(codes)) - np.repeat(starts, characters))
    values = np.add.reduceat(codes % MORE << shifts, starts)
    values -= (codes[ends] // SIGN) << BITS * characters
    values[1::2] = values[1::2].cumsum()
    values[2::2] = values[2::2].cumsum()
    return values


def area(text: bytes, size: tuple[int, int]) -> int:
    """Returns how many pixels are in a mask that `encode` returned for an image of that size."""
    mask: Any = {"size": size, "counts": text}
    return int(rle_format.area(mask))


class Composed(NamedTuple):
    """Masks drawn for an image, column by column.

    Attributes:
        ends: where each run of equal labels ends, (R,) int32, ascending up to the pixels.
        labels: of the runs, (R,) uint8.
        seen: how many pixels of each mask are behind no other, (M,) int64.
    """

    ends: np.ndarray
    labels: np.ndarray
    seen: np.ndarray


def compose(masks: Sequence[tuple[bytes, int]], pixels: int) -> Composed:
    """Draws masks that `encode` returned for an image, the last in front, on a background of 0.

    It takes as long for a large image as for a small one with the same outlines.

    Args:
        masks: each with its label, 1 to 255.
        pixels: of the image.
    """
    bounds = [decode_runs(text).cumsum() for text, _ in masks]
    ends = np.unique(np.concatenate([[pixels], *bounds]))
    starts = np.concatenate(([0], ends[:-1]))
    front = np.zeros(len(ends), np.int64)  # which mask, from 1 on
    for number, of_mask in enumerate(bounds, start=1):
        front[np.searchsorted(of_mask, starts, side="right") % 2 == 1] = number
    seen = np.zeros(len(masks) + 1, np.int64)
    np.add.at(seen, front, ends - starts)
    labels = np.array([0, *(label for _, label in masks)], np.uint8)[front]
    last = np.append(labels[1:] != labels[:-1], True)
    return Composed(ends[last].astype(np.int32), labels[last], seen[1:])


def _require_sum(lengths: list[int], pixels: int) -> None:
    if min(lengths, default=-1) < 0 or sum(lengths) != pixels:
        raise DamagedError("the mask's run lengths do not add up to the image")


def _encode_polygons(polygons: list[Any], height: int, width: int) -> bytes:
    for polygon in polygons:
        if (
            not isinstance(polygon, list)
            or not set(map(type, polygon)) <= {int, float}
            or len(polygon) % 2
        ):
            raise DamagedError("a polygon is not a list of x and y")
    bounds = np.array((width, height))
    outline = 0
    drawn: list[Any] = []
    for polygon in polygons:
        if len(polygon) < 6:
            continue
        try:
            points = np.array(polygon, float).reshape(-1, 2)
        except OverflowError:  # an integer that is too large for a float
            points = np.array(np.nan)
        if not ((points >= -bounds) & (points <= 2 * bounds)).all():  # NaN fails too
            raise DamagedError("a polygon is far outside the image")
        if _on_a_line(points):
            continue
        drawn.append(polygon)
        steps = np.abs(np.diff(points, axis=0, append=points[:1])).max(1)
        outline += int(steps.sum()) + len(steps)
    if not drawn:
        raise DamagedError("no polygon has three points that are on no line")
    if outline > MAX_OUTLINE:
        raise DamagedError(f"the mask's outline is longer than {MAX_OUTLINE:,} pixels")
    # Raises MemoryError where there is too little; pycocotools does not check its allocations.
    np.empty(OUTLINE_BYTES * outline + MERGED_BYTES * height * width, np.uint8)
    mask: Any = rle_format.merge(rle_format.frPyObjects(drawn, height, width))
    return mask["counts"]


def _on_a_line(points: np.ndarray) -> bool:
    """Returns whether points (n, 2) enclose nothing; a polygon that crosses itself does."""
    x, y = (points - points[0]).T
    far = np.argmax(np.hypot(x, y))
    length = np.hypot(x[far], y[far])
    return bool((np.abs(x[far] * y - y[far] * x) <= LINE_WIDTH * length).all())
