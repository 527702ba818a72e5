"""Brings what exporters write to COCO's way of saying it, once, when a file is read.

| in COCO                                  | also read                                    |
| ---------------------------------------- | -------------------------------------------- |
| ids, sizes, iscrowd: whole numbers       | the same as text, "7", or as floats, 7.0     |
| width and height of an image             | missing, null, 0 or -1: those of its file    |
| file_name of an image                    | its coco_url, where it has no file_name      |
| id of an annotation; nothing refers to it | missing or no whole number: it gets a number |
| segmentation: polygons, x and y in turn  | one polygon alone; points as pairs           |

`datamodules.coco.annotations.names` says which file a file name means, and `read_categories` what
a category is.
"""

from __future__ import annotations

import re
from typing import Any

WHOLE_NUMBERS = {
    "images": ("id", "width", "height"),
    "annotations": ("id", "image_id", "category_id", "iscrowd"),
    "categories": ("id",),
}
UNKNOWN_SIZES = (None, 0, -1)
INTEGER = re.compile(r"\s*([+-]?[0-9]{1,18})(?:\.0*)?\s*")
MAX_EXACT = 2**53  # from there on, one float stands for several whole numbers
POLYGON_POINTS = 3  # at least


def normalise(file: dict[str, Any]) -> None:
    """Changes the entries of a file in place; what has no one meaning stays as it is."""
    for part, keys in WHOLE_NUMBERS.items():
        for entry in _entries(file, part):
            for key in keys:
                if isinstance(value := entry.get(key), (float, str)):
                    entry[key] = _as_integer(value)
    for image in _entries(file, "images"):
        if image.get("file_name") in (None, "") and "coco_url" in image:
            image["file_name"] = image["coco_url"]
        for key in ("width", "height"):
            if type(value := image.get(key)) is not bool and value in UNKNOWN_SIZES:
                image[key] = None
    annotations = _entries(file, "annotations")
    last = max((a["id"] for a in annotations if type(a.get("id")) is int), default=0)
    for annotation in annotations:
        if type(annotation.get("id")) is not int:
            annotation["id"] = last = last + 1
        if type(segmentation := annotation.get("segmentation")) is list and segmentation:
            annotation["segmentation"] = _as_polygons(segmentation)


def _entries(file: dict[str, Any], part: str) -> list[dict[str, Any]]:
    entries = file.get(part)
    return [e for e in entries if isinstance(e, dict)] if isinstance(entries, list) else []


def _as_integer(value: float | str) -> Any:
    if isinstance(value, str):
        found = INTEGER.fullmatch(value)
        return int(found[1]) if found else value
    return int(value) if float(value).is_integer() and abs(value) < MAX_EXACT else value


def _as_polygons(segmentation: list[Any]) -> list[Any]:
    if _are_numbers(segmentation):
        return [segmentation]
    if len(segmentation) >= POLYGON_POINTS and _are_points(segmentation):
        return [_flatten(segmentation)]
    return [_flatten(part) if _are_points(part) else part for part in segmentation]


def _flatten(points: list[list[Any]]) -> list[Any]:
    return [value for point in points for value in point]


def _are_points(value: Any) -> bool:
    return (
        type(value) is list
        and type(value[0] if value else None) is list
        and all(type(point) is list and len(point) == 2 and _are_numbers(point) for point in value)
    )


def _are_numbers(values: list[Any]) -> bool:
    return type(values[0]) in (int, float) and set(map(type, values)) <= {int, float}
