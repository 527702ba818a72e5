"""Reads the boxes of objects from COCO's annotation files.

N images, A annotations, H height, W width.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from datamodules.coco.annotations.file import (
    ImageRecords,
    Skips,
    describe,
    offsets,
    require_some,
)
from datamodules.coco.annotations.objects import Objects, read_categories, read_category
from datamodules.reading.skipped import DamagedError

# The distance of the locations at which a detector finds an object, by default; it tells apart
# smaller ones only where they are alone.
LEAST_SIDE = 4


class ImageBoxes(NamedTuple):
    """The objects of an image, as its annotation file has them.

    Attributes:
        image: the id of the image.
        size: H and W.
        boxes: (A, 4) float64: left, top, width and height in pixels.
        classes: (A,) int64, indices into the file's categories.
        areas: (A,) float64: of the objects, which their boxes enclose, in pixels.
        crowds: (A,) bool: whether a box encloses several objects, which were not told apart.
    """

    image: int
    size: tuple[int, int]
    boxes: np.ndarray
    classes: np.ndarray
    areas: np.ndarray
    crowds: np.ndarray


class Boxes(Objects):
    """An annotation file of boxes. Category i has the class i; there is none for the background."""

    def __init__(
        self, path: Path, cache_dir: Path, crowds: str = "ignore", *, folder: Path | None = None
    ) -> None:
        super().__init__(path, "boxes", cache_dir, _pack_boxes, _coordinates, crowds, folder)

    @property
    def most(self) -> int:
        """The largest number of boxes of an image."""
        return int(np.diff(self.packed["image_offsets"]).max())

    def of_image(self, index: int) -> ImageBoxes:
        found = self.annotations_of(index)
        part = slice(found.start, found.stop)
        height, width = self.sizes[index].tolist()
        return ImageBoxes(
            int(self.ids[index]),
            (height, width),
            *(self.packed[name][part] for name in ("boxes", "classes", "areas", "crowds")),
        )

    def find_faint(self, image_size: int) -> dict[str, np.ndarray]:
        sizes = self.sizes[self.images_of_annotations()][:, ::-1]
        least = (self.packed["boxes"][:, 2:] * image_size / sizes).min(axis=1, initial=np.inf)
        where = f"less than {LEAST_SIDE} pixels wide or high at {image_size} x {image_size}"
        return {f"object{{s}} {where}": least < LEAST_SIDE}


def _coordinates(annotation: dict[str, Any]) -> Iterator[Any]:
    box = annotation.get("bbox")
    yield from box if isinstance(box, list) else ()


def _pack_boxes(
    file: dict[str, Any], images: ImageRecords, annotations: dict[int, list[Any]], skips: Skips
) -> dict[str, Any]:
    categories = read_categories(file)
    classes = {category: i for i, category in enumerate(categories)}
    rows: list[tuple[list[float], int, float, bool]] = []
    counts: list[int] = []
    for number, image in images.items():
        before = len(rows)
        for annotation in sorted(annotations[number], key=lambda a: a["id"]):
            try:
                rows.append(_pack_box(annotation, image, classes))
            except DamagedError as error:
                skips[str(error)].append(describe(annotation, image))
        counts.append(len(rows) - before)
    require_some("annotations", len(rows), skips)
    boxes, labels, areas, crowds = zip(*rows)
    return {
        "category_ids": list(categories),
        "categories": list(categories.values()),
        "image_offsets": offsets(counts),
        "boxes": np.array(boxes, np.float64),
        "classes": np.array(labels, np.int64),
        "areas": np.array(areas, np.float64),
        "crowds": np.array(crowds, bool),
    }


def _pack_box(
    annotation: dict[str, Any], image: dict[str, Any], classes: dict[int, int]
) -> tuple[list[float], int, float, bool]:
    """Returns the box, its class, the area of the object, and whether it is a crowd."""
    category, crowd = read_category(annotation, classes)
    box = annotation.get("bbox")
    if not isinstance(box, list) or len(box) != 4 or not all(map(_is_number, box)):
        raise DamagedError("the box is not a list of x, y, width and height")
    x, y, width, height = box
    if width <= 0 or height <= 0:
        raise DamagedError("the width or height of the box is not positive")
    inside_x = min(x + width, image["width"]) - max(x, 0)
    inside_y = min(y + height, image["height"]) - max(y, 0)
    if inside_x <= 0 or inside_y <= 0:
        raise DamagedError("the box is outside the image")
    if inside_x * inside_y < 1:
        raise DamagedError("the box covers less than a pixel of the image")
    area = annotation.get("area")
    if area is None or area == 0:  # some programs write it for what they do not compute
        area = width * height
    if not _is_number(area) or area < 0:
        raise DamagedError("the area is not a number from 0 on")
    return box, classes[category], area, crowd


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 2**31  # NaN is not
