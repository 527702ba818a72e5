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

    def __init__(self, path: Path, cache_dir: Path) -> None:
        super().__init__(path, load_packed(path, "instances", cache_dir, _pack_instances))

    def label_map(self, index: int) -> np.ndarray:
        """Returns the class of every pixel of an image, (H, W) uint8.

        Where instances overlap, the smaller is in front. A pixel that only a crowd region covers is
        IGNORE: some pixels of the region show objects of its category, and some do not.
        """
        labels = np.zeros(self.sizes[index], np.uint8)
        for annotation in self.annotations_of(index):
            first, end = self.packed["mask_offsets"][annotation : annotation + 2]
            text = self.packed["masks"][first:end].tobytes()
            labels[masks.draw(text, labels.shape)] = self.packed["labels"][annotation]
        return labels


def _pack_instances(
    file: dict[str, Any], images: ImageRecords, annotations: dict[int, list[Any]], skips: Skips
) -> dict[str, Any]:
    categories = read_categories(file)
    classes = {category: i for i, category in enumerate(categories, start=1)}
    texts: list[bytes] = []
    labels: list[int] = []
    counts: list[int] = []
    for number, image in images.items():
        instances = []
        for annotation in annotations[number]:
            try:
                instances.append(_pack_instance(annotation, image, classes))
            except DamagedError as error:
                skips[str(error)].append(describe(annotation, image))
        # `label_map` draws the last in front: crowds first, then from the largest to the smallest.
        instances.sort(key=lambda row: row[:3])
        labels += [row[3] for row in instances]
        texts += [row[4] for row in instances]
        counts.append(len(instances))
    require_some("annotations", texts, skips)
    return {
        "category_ids": list(categories),
        "categories": list(categories.values()),
        "image_offsets": offsets(counts),
        "labels": np.array(labels, np.uint8),
        "mask_offsets": offsets(map(len, texts)),
        "masks": np.frombuffer(b"".join(texts), np.uint8),
    }


def _pack_instance(
    annotation: dict[str, Any], image: dict[str, Any], classes: dict[int, int]
) -> tuple[bool, int, int, int, bytes]:
    """Returns three values by which instances are sorted, then the label and the mask."""
    category, crowd = read_category(annotation, classes)
    size = image["height"], image["width"]
    mask = masks.encode(annotation.get("segmentation"), *size)
    label = IGNORE if crowd else classes[category]
    return not crowd, -masks.area(mask, size), annotation["id"], label, mask
