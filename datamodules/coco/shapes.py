"""Draws random pictures of coloured shapes, as a data set in COCO's own format.

It is for trying things out: it has what COCO has (polygons, crowd regions as run lengths, images
without annotations, five captions an image) and needs no download.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from pycocotools import mask as rle_format

VERSION = 1  # of the pictures; raise it when they change
SIZE = 64  # pixels, height and width
YEAR = 2017  # in the names of files
SPLITS = {f"train{YEAR}": 512, f"val{YEAR}": 128}  # images
CATEGORIES = {1: "circle", 4: "square", 9: "triangle"}  # the ids have gaps, as COCO's have
COLOURS = {
    "red": (205, 45, 45),
    "green": (45, 160, 60),
    "blue": (45, 80, 205),
    "yellow": (225, 200, 50),
}
RADII = {"small": 8, "large": 13}  # pixels
CORNER_REACH = 1.2  # times the radius: a square or triangle covers less than a circle around it
CELLS = {(0, 0): "top left", (0, 1): "top right", (1, 0): "bottom left", (1, 1): "bottom right"}
EMPTY_EVERY = 16  # every 16th image is empty
CROWD_EVERY = 8  # every 8th has a crowd of small circles in a corner
CROWD_SIZE, CROWD_RADIUS = 9, 3  # circles, pixels
NOISE = 6.0  # standard deviation, of 255


@dataclass(frozen=True)
class Shape:
    category: int
    colour: str
    size: str
    cell: tuple[int, int]

    def __str__(self) -> str:
        return f"{self.size} {self.colour} {CATEGORIES[self.category]}"


def write(folder: Path) -> None:
    """Writes the folder ``coco`` in COCO's published layout, with the same contents every time."""
    generator = np.random.default_rng(0)
    number = 0
    for split, count in SPLITS.items():
        images: list[dict[str, Any]] = []
        instances: list[dict[str, Any]] = []
        captions: list[dict[str, Any]] = []
        (folder / "coco" / split).mkdir(parents=True)
        for i in range(count):
            number += 1
            image = {"id": number, "file_name": f"{number:012}.jpg", "height": SIZE, "width": SIZE}
            shapes = [] if i % EMPTY_EVERY == 0 else _choose_shapes(generator)
            crowded = i % CROWD_EVERY == 1
            pixels = _draw_background(generator)
            for annotation in _draw(pixels, shapes, crowded, generator):
                identity = {"id": len(instances) + 1, "image_id": number}
                instances.append(identity | annotation)
            for text in describe(shapes):
                captions.append({"id": len(captions) + 1, "image_id": number, "caption": text})
            pixels = (pixels + generator.normal(0, NOISE, pixels.shape)).clip(0, 255)
            path = folder / "coco" / split / str(image["file_name"])
            Image.fromarray(pixels.astype(np.uint8)).save(path, quality=95)
            images.append(image)
        categories = [{"id": i, "name": name} for i, name in CATEGORIES.items()]
        (folder / "coco" / "annotations").mkdir(exist_ok=True)
        for kind, contents in (
            ("instances", {"annotations": instances, "categories": categories}),
            ("captions", {"annotations": captions}),
        ):
            path = folder / "coco" / "annotations" / f"{kind}_{split}.json"
            path.write_text(json.dumps({"images": images, **contents}))


def describe(shapes: list[Shape]) -> list[str]:
    """Returns five captions, from left to right and top to bottom; they leave the crowd out."""
    if not shapes:
        return [
            "an empty picture",
            "there is nothing in the picture",
            "an empty picture with no shapes",
            "a picture of nothing",
            "no shapes at all",
        ]
    listed = " and ".join(f"a {shape}" for shape in shapes)
    placed = " and ".join(f"a {shape} in the {CELLS[shape.cell]}" for shape in shapes)
    short = " and ".join(f"a {shape.colour} {CATEGORIES[shape.category]}" for shape in shapes)
    return [
        f"{listed}",
        f"there is {listed}",
        f"a picture of {listed}",
        f"{placed}",
        f"{short}",
    ]


def _choose_shapes(generator: np.random.Generator) -> list[Shape]:
    """Returns one to three shapes in different cells; the last cell is left to a crowd."""
    cells = list(CELLS)[:-1]
    chosen = sorted(generator.permutation(len(cells))[: generator.integers(1, 4)])
    return [
        Shape(
            int(generator.choice(list(CATEGORIES))),
            str(generator.choice(list(COLOURS))),
            str(generator.choice(list(RADII))),
            cells[i],
        )
        for i in chosen
    ]


def _draw_background(generator: np.random.Generator) -> np.ndarray:
    """Returns (H, W, 3) float: a grey that changes from one side to the other."""
    ramp = np.linspace(0, generator.uniform(-40, 40), SIZE)
    grey = generator.uniform(90, 170) + (ramp[:, None] if generator.random() < 0.5 else ramp)
    return np.broadcast_to(np.reshape(grey, (-1, grey.shape[-1], 1)), (SIZE, SIZE, 3)).copy()


def _draw(
    pixels: np.ndarray, shapes: list[Shape], crowded: bool, generator: np.random.Generator
) -> list[dict[str, Any]]:
    """Draws into `pixels`; returns the annotations, still without ids."""
    annotations = []
    for shape in shapes:
        radius = RADII[shape.size]
        room = SIZE // 4 - radius  # of the centre in its cell; corners may reach over the border
        x, y = (
            SIZE // 2 * cell + SIZE // 4 + generator.uniform(-room, room)
            for cell in reversed(shape.cell)
        )
        polygon = _make_polygon(CATEGORIES[shape.category], x, y, radius)
        mask = _draw_mask([polygon])
        pixels[mask] = COLOURS[shape.colour]
        annotations.append(_make_annotation(shape.category, [polygon], mask, crowd=False))
    if crowded:
        region = np.zeros((SIZE, SIZE), bool)
        margin = CROWD_RADIUS + 1
        for _ in range(CROWD_SIZE):
            x, y = generator.uniform(SIZE / 2 + margin, SIZE - margin, 2)
            mask = _draw_mask([_make_polygon("circle", x, y, CROWD_RADIUS)])
            pixels[mask] = COLOURS[str(generator.choice(list(COLOURS)))]
            region |= mask
        x, y, width, height = _find_box(region)
        region[y : y + height, x : x + width] = True
        counts = {"size": [SIZE, SIZE], "counts": _encode_run_lengths(region)}
        annotations.append(_make_annotation(1, counts, region, crowd=True))
    return annotations


def _make_polygon(name: str, x: float, y: float, radius: float) -> list[float]:
    """Returns x and y of each corner in turn, in pixels."""
    corners, turn = {"circle": (24, 0.0), "square": (4, 0.125), "triangle": (3, 0.75)}[name]
    reach = radius * (1 if name == "circle" else CORNER_REACH)
    points = []
    for corner in range(corners):
        angle = math.tau * (corner / corners + turn)
        points += [x + reach * math.cos(angle), y + reach * math.sin(angle)]
    return [round(p, 2) for p in points]


def _draw_mask(polygons: Any) -> np.ndarray:
    encoded = rle_format.merge(rle_format.frPyObjects(polygons, SIZE, SIZE))
    return rle_format.decode(encoded).astype(bool)


def _encode_run_lengths(mask: np.ndarray) -> list[int]:
    """Returns run lengths column by column, zeros first, as COCO writes its crowd regions."""
    flat = mask.T.ravel()
    bounds = [0, *(np.flatnonzero(flat[1:] != flat[:-1]) + 1).tolist(), flat.size]
    lengths = np.diff(bounds).tolist()
    return [0, *lengths] if flat[0] else lengths


def _make_annotation(
    category: int, segmentation: Any, mask: np.ndarray, crowd: bool
) -> dict[str, Any]:
    return {
        "category_id": category,
        "segmentation": segmentation,
        "area": int(mask.sum()),
        "bbox": _find_box(mask),
        "iscrowd": int(crowd),
    }


def _find_box(mask: np.ndarray) -> list[int]:
    """Returns x, y, width and height."""
    rows, columns = (np.flatnonzero(mask.any(axis=axis)) for axis in (1, 0))
    x, y = int(columns[0]), int(rows[0])
    return [x, y, int(columns[-1]) - x + 1, int(rows[-1]) - y + 1]
