"""Reads the masks of objects from COCO's annotation files.

H height, W width.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from datamodules.coco.annotations import masks
from datamodules.coco.annotations.file import (
    ImageRecords,
    Skips,
    describe,
    offsets,
    require_some,
)
from datamodules.coco.annotations.objects import IGNORE, Objects, read_categories, read_category
from datamodules.reading.skipped import DamagedError


class Instances(Objects):
    """An annotation file of instance masks. Category i has the class i + 1; class 0 is the
    background."""

    def __init__(
        self, path: Path, cache_dir: Path, crowds: str = "ignore", *, folder: Path | None = None
    ) -> None:
        super().__init__(
            path, "instances", cache_dir, _pack_instances, _coordinates, crowds, folder
        )

    def find_faint(self, image_size: int) -> dict[str, np.ndarray]:
        seen = self.packed["seen"]
        pixels = self.sizes[self.images_of_annotations()].astype(np.int64).prod(axis=1)
        tiny = (seen > 0) & (seen * image_size**2 < pixels)
        return {
            "object{s} behind others": seen == 0,
            f"object{{s}} smaller than a pixel at {image_size} x {image_size}": tiny,
        }

    def label_runs(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the classes of an image's pixels as runs, column by column: where each ends,
        (R,) int32, ascending up to H W, and its class, (R,) uint8.

        Where instances overlap, the smaller is in front. A pixel that only a crowd region covers is
        IGNORE: some pixels of the region show objects of its category, and some do not.
        """
        first, end = self.packed["run_offsets"][index : index + 2]
        return self.packed["run_ends"][first:end], self.packed["run_labels"][first:end]

    def label_map(self, index: int) -> np.ndarray:
        """Returns the class of every pixel of an image, (H, W) uint8; see `label_runs`."""
        ends, labels = self.label_runs(index)
        return np.repeat(labels, np.diff(ends, prepend=0)).reshape(self.sizes[index], order="F")


def _coordinates(annotation: dict[str, Any]) -> Iterator[Any]:
    polygons = annotation.get("segmentation")
    for polygon in polygons if isinstance(polygons, list) else ():
        yield from polygon if isinstance(polygon, list) else ()


def _pack_instances(
    file: dict[str, Any], images: ImageRecords, annotations: dict[int, list[Any]], skips: Skips
) -> dict[str, Any]:
    categories = read_categories(file)
    classes = {category: i for i, category in enumerate(categories, start=1)}
    found: list[_Instance] = []
    counts: list[int] = []
    composed: list[masks.Composed] = []
    for number, image in images.items():
        instances: list[_Instance] = []
        for annotation in annotations[number]:
            try:
                instances.append(_pack_instance(annotation, image, classes))
            except DamagedError as error:
                skips[str(error)].append(describe(annotation, image))
        # The last is in front: crowds first, then from the largest to the smallest.
        instances.sort(key=lambda each: (not each.crowd, -each.area, each.id))
        layers = [(each.mask, IGNORE if each.crowd else each.label) for each in instances]
        composed.append(masks.compose(layers, image["height"] * image["width"]))
        found += instances
        counts.append(len(instances))
    require_some("annotations", len(found), skips)
    ends, labels, seen = zip(*composed)
    return {
        "category_ids": list(categories),
        "categories": list(categories.values()),
        "image_offsets": offsets(counts),
        "classes": np.array([each.label - 1 for each in found], np.int64),
        "crowds": np.array([each.crowd for each in found], bool),
        "seen": np.concatenate(seen),
        "run_offsets": offsets(map(len, ends)),
        "run_ends": np.concatenate(ends),
        "run_labels": np.concatenate(labels),
    }


class _Instance(NamedTuple):
    id: int
    label: int
    crowd: bool
    mask: bytes
    area: int


def _pack_instance(
    annotation: dict[str, Any], image: dict[str, Any], classes: dict[int, int]
) -> _Instance:
    category, crowd = read_category(annotation, classes)
    size = image["height"], image["width"]
    mask = masks.encode(annotation.get("segmentation"), *size)
    area = masks.area(mask, size)
    if not area:
        raise DamagedError("the mask covers no pixel of the image")
    return _Instance(annotation["id"], classes[category], crowd, mask, area)
