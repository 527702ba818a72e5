"""Scores boxes against those of an annotation file, with pycocotools' own evaluation."""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from datamodules.coco.annotations.boxes import ImageBoxes

# The first values of COCOeval: AP is the mean over intersections over union from 0.5 to 0.95.
NAMES = ("ap", "ap50", "ap75", "ap_small", "ap_medium", "ap_large")


class ScoredBoxes(NamedTuple):
    """The boxes found in an image.

    Attributes:
        boxes: (n, 4): left, top, width and height, in pixels of its file.
        scores: (n,).
        classes: (n,) int.
    """

    boxes: np.ndarray
    scores: np.ndarray
    classes: np.ndarray


def average_precision(
    truth: Sequence[ImageBoxes], found: Sequence[ScoredBoxes]
) -> dict[str, float]:
    """Returns COCO's average precision of boxes (https://cocodataset.org/#detection-eval).

    Args:
        truth: of each image; an image that comes again, with the same id, counts once.
        found: of the same images in the same order.

    Returns:
        The `NAMES`, each from 0 to 1; NaN where no object counts: there is none of that size, or
        all are crowds.
    """
    if not any((~said.crowds).any() for said in truth):
        return dict.fromkeys(NAMES, math.nan)
    images = {said.image: (said, scored) for said, scored in zip(truth, found, strict=True)}
    expected = _dataset([(said, said.boxes, said.classes) for said, _ in images.values()])
    for annotation, area, crowd in zip(
        expected["annotations"],
        np.concatenate([said.areas for said, _ in images.values()]).tolist(),
        np.concatenate([said.crowds for said, _ in images.values()]).tolist(),
        strict=True,
    ):
        annotation |= {"area": area, "iscrowd": int(crowd)}
    results = _dataset([(said, scored.boxes, scored.classes) for said, scored in images.values()])
    scores = np.concatenate([scored.scores for _, scored in images.values()]).tolist()
    for annotation, score in zip(results["annotations"], scores, strict=True):
        annotation["score"] = score
    results["categories"] = expected["categories"]
    with contextlib.redirect_stdout(io.StringIO()):  # it prints tables
        evaluation = COCOeval(_index(expected), _index(results), "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    values = zip(NAMES, evaluation.stats[: len(NAMES)].tolist())
    return {name: value if value >= 0 else math.nan for name, value in values}


def _dataset(images: list[tuple[ImageBoxes, np.ndarray, np.ndarray]]) -> dict[str, Any]:
    """Returns images and annotations in COCO's format."""
    annotations = [
        {"image_id": said.image, "category_id": category, "bbox": box, "area": box[2] * box[3],
         "iscrowd": 0}
        for said, boxes, classes in images
        for box, category in zip(boxes.tolist(), classes.tolist(), strict=True)
    ]  # fmt: skip
    for number, annotation in enumerate(annotations, start=1):  # 0 would be no match
        annotation["id"] = number
    return {
        "images": [
            {"id": said.image, "height": said.size[0], "width": said.size[1]}
            for said, _, _ in images
        ],
        "categories": [{"id": i} for i in sorted({a["category_id"] for a in annotations})],
        "annotations": annotations,
    }


def _index(dataset: dict[str, Any]) -> COCO:
    indexed: Any = COCO()
    indexed.dataset = dataset
    indexed.createIndex()
    return indexed
