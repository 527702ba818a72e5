"""Reads the masks of objects from COCO's annotation files.

H height, W width.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from datamodules.coco.annotations import masks
from datamodules.coco.annotations.file import (
    ImageRecords,
    Skips,
    describe,
    load_packed,
    offsets,
    require_some,
)
from datamodules.coco.annotations.objects import IGNORE, Objects, read_categories, read_category
from datamodules.reading.skipped import DamagedError


class Instances(Objects):
    """An annotation file of instance masks. Category i has the class i + 1; class 0 is the
    background."""

    def __init__(self, path: Path, cache_dir: Path, *, folder: Path | None = None) -> None:
        super().__init__(path, load_packed(path, "instances", cache_dir, _pack_instances, folder))

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


def _pack_instances(
    file: dict[str, Any], images: ImageRecords, annotations: dict[int, list[Any]], skips: Skips
) -> dict[str, Any]:
    categories = read_categories(file)
    classes = {category: i for i, category in enumerate(categories, start=1)}
    counts: list[int] = []
    ends: list[np.ndarray] = []
    labels: list[np.ndarray] = []
    drawn = 0
    for number, image in images.items():
        instances = []
        for annotation in annotations[number]:
            try:
                instances.append(_pack_instance(annotation, image, classes))
            except DamagedError as error:
                skips[str(error)].append(describe(annotation, image))
        # The last is in front: crowds first, then from the largest to the smallest.
        instances.sort(key=lambda row: row[:3])
        runs = masks.compose([row[3:] for row in instances], image["height"] * image["width"])
        ends.append(runs[0])
        labels.append(runs[1])
        counts.append(len(runs[0]))
        drawn += len(instances)
    require_some("annotations", drawn, skips)
    return {
        "category_ids": list(categories),
        "categories": list(categories.values()),
        "run_offsets": offsets(counts),
        "run_ends": np.concatenate(ends),
        "run_labels": np.concatenate(labels),
    }


def _pack_instance(
    annotation: dict[str, Any], image: dict[str, Any], classes: dict[int, int]
) -> tuple[bool, int, int, bytes, int]:
    """Returns three values by which instances are sorted, then the mask and the label."""
    category, crowd = read_category(annotation, classes)
    size = image["height"], image["width"]
    mask = masks.encode(annotation.get("segmentation"), *size)
    label = IGNORE if crowd else classes[category]
    return not crowd, -masks.area(mask, size), annotation["id"], mask, label
