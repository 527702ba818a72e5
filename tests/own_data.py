"""Data of people's own, as they would have it: made by the tests that read it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

WIDTH, HEIGHT = 36, 24  # of a picture of COCO's format: no square
CATEGORIES = [{"id": 0, "name": "bolt"}, {"id": 7, "name": "washer, small"}]
COLOURS = {"bolt": (220, 60, 60), "washer, small": (60, 60, 220)}


def write_picture(path: Path, box: tuple[int, int, int, int] | None, colour: Any) -> None:
    """A grey PNG with a coloured rectangle at (x, y, width, height)."""
    generator = np.random.default_rng(len(path.name))
    pixels = generator.normal(120, 8, (HEIGHT, WIDTH, 3))
    if box is not None:
        x, y, width, height = box
        pixels[y : y + height, x : x + width] = colour
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(path)


def write_coco(folder: Path, split: str = "train", count: int = 8) -> Path:
    """Pictures in a folder inside ``folder/<split>``, with the mask, box and caption of an object
    each, in COCO's format; returns `folder`."""
    generator = np.random.default_rng(len(split))
    images, instances, captions = [], [], []
    for i in range(count):
        number, category = 40 + 3 * i, CATEGORIES[i % len(CATEGORIES)]
        x, y = int(generator.integers(2, 16)), int(generator.integers(2, 10))
        box = (x, y, 14, 10)
        name = f"line 1/part {i}.png"
        write_picture(folder / split / name, box, COLOURS[category["name"]])
        images.append({"id": number, "file_name": name, "height": HEIGHT, "width": WIDTH})
        corners = [x, y, x + 14, y, x + 14, y + 10, x, y + 10]
        instances.append(
            {"id": i + 1, "image_id": number, "category_id": category["id"], "iscrowd": 0,
             "segmentation": [corners], "area": 140, "bbox": list(box)}
        )  # fmt: skip
        captions.append({"id": i + 1, "image_id": number, "caption": f"one {category['name']}"})
    (folder / "annotations").mkdir(exist_ok=True)
    for kind, contents in (
        ("instances", {"annotations": instances, "categories": CATEGORIES}),
        ("captions", {"annotations": captions, "categories": []}),
    ):
        path = folder / "annotations" / f"{kind}_{split}.json"
        path.write_text(json.dumps({"images": images, **contents}))
    return folder


def write_classes(folder: Path, count: int = 6) -> Path:
    """``folder/<class>/*.png`` of two classes; returns `folder`."""
    for name, colour in COLOURS.items():
        for i in range(count):
            write_picture(folder / name / f"{i}.png", (4, 4, 20, 12), colour)
    return folder
