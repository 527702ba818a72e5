"""Instance masks: COCO's polygons and run lengths, checked and drawn.

pycocotools trusts its input. What it would read or write outside its memory, or take for a box, is
found here before it gets there, and it decodes nothing.

A mask's runs are the lengths of its runs of zeros and ones in turn, zeros first, column by column.
As text each is the difference to the last but one (of the first three, itself) in two's complement,
5 bits a character from the lowest on, `MORE` in all but the last, 48 added.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from pycocotools import mask as rle_format

from datamodules.coco.skipped import DamagedError

MORE, SIGN = 32, 16
MAX_CHARACTERS = 6  # of a run: 30 bits, where images have 27
# In pixels, of all polygons of a mask: pycocotools takes 80 bytes for each without asking whether
# there are as many, and sorts what it makes of them.
MAX_OUTLINE = 2**22
OUTLINE_BYTES, MERGED_BYTES = 80, 4  # what it takes for each, and for a pixel of the image


def compressed(segmentation: Any, height: int, width: int) -> bytes:
    """The text of the runs of a polygon or RLE mask.

    Args:
        segmentation: as it stands in the annotation file: any value.
        height, width: of the image, whose product is at most 2^27.

    Raises:
        DamagedError: it is no mask of such an image.
    """
    if not segmentation:
        raise DamagedError("there is no mask")
    if isinstance(segmentation, list):
        return _of_polygons(segmentation, height, width)
    if not isinstance(segmentation, dict):
        raise DamagedError("the mask is neither polygons nor run lengths")
    if segmentation.get("size") != [height, width]:
        raise DamagedError("the mask is not of the image's size")
    counts = segmentation.get("counts")
    if isinstance(counts, str):
        text = counts.encode(errors="replace")
        _require_whole(runs(text).tolist(), height * width)
        return text
    if not isinstance(counts, list) or not set(map(type, counts)) <= {int}:
        raise DamagedError("the mask's run lengths are neither text nor a list of integers")
    _require_whole(counts, height * width)
    mask: Any = {"size": [height, width], "counts": counts}
    return rle_format.frPyObjects(mask, height, width)["counts"]


def runs(text: bytes) -> np.ndarray:
    """(R,) int64: the runs of a mask from their text; they may be negative and of any sum.

    Raises:
        DamagedError: the text is none of runs.
    """
    codes = np.frombuffer(text, np.uint8).astype(np.int64) - 48
    ends = np.flatnonzero(codes < MORE)
    if not len(codes) or codes[-1] >= MORE or codes.min() < 0 or codes.max() >= 2 * MORE:
        raise DamagedError("the mask's run lengths are cut off or no such text")
    starts = np.concatenate(([0], ends[:-1] + 1))
    characters = ends - starts + 1
    if characters.max() > MAX_CHARACTERS:
        raise DamagedError("the mask's run lengths do not add up to the image")
    shifts = 5 * (np.arange(len(codes)) - np.repeat(starts, characters))
    values = np.add.reduceat(codes % MORE << shifts, starts)
    values -= (codes[ends] // SIGN) << 5 * characters
    values[1::2] = values[1::2].cumsum()
    values[2::2] = values[2::2].cumsum()
    return values


def area(text: bytes, size: tuple[int, int]) -> int:
    """How many pixels a mask has that `compressed` returned for an image of that size."""
    mask: Any = {"size": size, "counts": text}
    return int(rle_format.area(mask))


def drawn(text: bytes, size: tuple[int, ...]) -> np.ndarray:
    """(H, W) bool: the pixels of a mask that `compressed` returned for an image of that size."""
    lengths = runs(text)
    pixels = np.repeat(np.arange(len(lengths)) % 2 == 1, lengths)
    return pixels.reshape(size, order="F")


def _require_whole(lengths: list[int], pixels: int) -> None:
    if min(lengths, default=-1) < 0 or sum(lengths) != pixels:
        raise DamagedError("the mask's run lengths do not add up to the image")


def _of_polygons(polygons: list[Any], height: int, width: int) -> bytes:
    for polygon in polygons:
        if (
            not isinstance(polygon, list)
            or not set(map(type, polygon)) <= {int, float}
            or len(polygon) % 2
        ):
            raise DamagedError("a polygon is no list of x and y")
    polygons = [polygon for polygon in polygons if len(polygon) >= 6]
    if not polygons:
        raise DamagedError("no polygon has three points")
    bounds = np.array((width, height))
    outline = 0
    for polygon in polygons:
        try:
            points = np.array(polygon, float).reshape(-1, 2)
        except OverflowError:  # an integer that no float holds
            points = np.array(np.nan)
        if not ((points >= -bounds) & (points <= 2 * bounds)).all():  # nor are NaNs
            raise DamagedError("a polygon is far outside the image")
        steps = np.abs(np.diff(points, axis=0, append=points[:1])).max(1)
        outline += int(steps.sum()) + len(steps)
    if outline > MAX_OUTLINE:
        raise DamagedError(f"the mask's outline is longer than {MAX_OUTLINE:,} pixels")
    np.empty(OUTLINE_BYTES * outline + MERGED_BYTES * height * width, np.uint8)  # or MemoryError
    mask: Any = rle_format.merge(rle_format.frPyObjects(polygons, height, width))
    return mask["counts"]
