"""Files of COCO's format: what is an object, a crowd, or nothing."""

from __future__ import annotations

import io
import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from pycocotools import mask as rle_format
from torch import Tensor, nn

from datamodules.coco import COCO
from models.networks.attention_decoder import AttentionDecoder
from models.tasks.captioner import Captioner
from models.tasks.detector import Detector
from models.tasks.segmenter import Segmenter
from tests.datamodules.counted.run import Problem, attempt, main, run
from tests.support import set_to_reference
from training.callbacks.census import Census

SIZE, STEP = 16, 4  # of the images of batches, and of the grid of the detector
HEIGHT, WIDTH = 12, 20  # of the files
CATEGORIES = {3: "cat", 18: "dog"}


def rectangle(generator: np.random.Generator) -> list[float]:
    x, y = generator.uniform(-2, WIDTH - 4), generator.uniform(-2, HEIGHT - 4)
    return [float(v) for v in (x, y, *generator.uniform(3, 9, 2))]


def corners(box: list[float]) -> list[float]:
    x, y, width, height = box
    return [x, y, x + width, y, x + width, y + height, x, y + height]


def run_lengths(generator: np.random.Generator) -> dict[str, Any]:
    first, more = (int(n) for n in generator.integers(0, HEIGHT * WIDTH // 2, 2))
    counts: Any = [first, more, HEIGHT * WIDTH - first - more]
    plain: Any = {"size": [HEIGHT, WIDTH], "counts": counts}
    if generator.random() < 0.5:
        return plain
    encoded: Any = rle_format.frPyObjects(plain, HEIGHT, WIDTH)
    return {"size": [HEIGHT, WIDTH], "counts": encoded["counts"].decode()}


def segmentation(generator: np.random.Generator, plain: bool) -> Any:
    whole = corners(rectangle(generator))
    line = [2, 2, 5, 5, 8, 8]
    kinds = (
        [whole], [whole, line], run_lengths(generator), [[c + 40 for c in whole]], [line],
        [[1, 2, 3, 4]], [[3.1, 3.1, 3.3, 3.1, 3.3, 3.3]], [[2, 2, 9, 9, 9, 2, 2, 9]], [6 * [3]],
        {"size": [HEIGHT, WIDTH], "counts": [HEIGHT * WIDTH]}, {"size": [3, 3], "counts": [9]},
        {"size": [HEIGHT, WIDTH], "counts": "?"}, None, [], "mask", {}, [[]], [[1, "2"]],
        [[1, 1, math.nan, 4, 5, 9]], [corners([-1, -1, WIDTH + 2, HEIGHT + 2])],
    )  # fmt: skip
    return kinds[0 if plain else max(0, int(generator.integers(-6, len(kinds))))]


def box(generator: np.random.Generator, plain: bool) -> Any:
    whole = rectangle(generator)
    kinds = (
        whole, [WIDTH + 1, 1, 4, 4], [1, 1, 0, 4], [1, 1, -3, 4], [1, 1, 0.5, 0.5],
        [-3, 1, 3.01, 4], None, [1, 2, 3], [1, 2, 3, "4"], [1, 2, math.inf, 4], {},
        [0, 0, WIDTH, HEIGHT], [1, 1, 20, 0.01],
    )  # fmt: skip
    return kinds[0 if plain else max(0, int(generator.integers(-6, len(kinds))))]


def as_fractions(said: dict[str, Any]) -> None:
    said["bbox"], said["segmentation"] = [0.2, 0.3, 0.4, 0.5], [corners([0.2, 0.3, 0.4, 0.5])]


TEXTS = (
    "a cat",
    "a dog",
    "Ein Hund!",
    "",
    "  ",
    "...",
    "_",
    "\u200b",
    "😀",
    "漢字",
    None,
    3,
    "A dog's cat",
)


def write_split(
    generator: np.random.Generator, root: Path, split: str, task: str
) -> dict[str, Any]:
    plain, crowd = generator.random() < 0.3, generator.random()
    images, annotations = [], []
    for i in range(int(generator.choice([1, 2, 3, 4, 5]))):
        name = f"{i}.png"
        path = root / split / name
        path.parent.mkdir(exist_ok=True)
        if (how := generator.integers(8)) > 0:
            contents = io.BytesIO()
            Image.new("RGB", (WIDTH, HEIGHT), (40 * i, 90, 90)).save(contents, "PNG")
            path.write_bytes(contents.getvalue()[: None if how > 1 else 30])
        images.append({"id": 7 * i, "file_name": name, "height": HEIGHT, "width": WIDTH})
        for _ in range(int(generator.choice([0, 1, 2, 3, 4]))):
            said: dict[str, Any] = {"id": len(annotations), "image_id": 7 * i}
            if task == "captions":
                said["caption"] = TEXTS[generator.integers(len(TEXTS))]
            else:
                said |= {
                    "category_id": int(generator.choice([3, 3, 3, 18, 99])),
                    "segmentation": segmentation(generator, plain),
                    "bbox": box(generator, plain),
                }
                said |= (
                    {"iscrowd": 1} if crowd < 0.2 or generator.random() < 0.15
                    else ({}, {"iscrowd": 0}, {"iscrowd": None}, {"iscrowd": 2})[
                        generator.choice([0, 1, 1, 1, 2, 3])
                    ]
                )  # fmt: skip
                said |= ({}, {"area": 9}, {"area": 0}, {"area": None}, {"area": -1})[
                    generator.choice([0, 1, 1, 1, 2, 3, 4])
                ]
            annotations.append(said)
    if task != "captions" and (how := generator.random()) < 0.15:
        for said in annotations if how < 0.1 else annotations[:1]:
            as_fractions(said)
    categories = [{"id": i, "name": name} for i, name in CATEGORIES.items()]
    file = {"images": images, "annotations": annotations, "categories": categories}
    kind = "captions" if task == "captions" else "instances"
    (root / "annotations").mkdir(exist_ok=True)
    (root / "annotations" / f"{kind}_{split}.json").write_text(json.dumps(file))
    return file


def is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def mask_area(polygons: Any) -> float:
    """The pixels of a mask, as pycocotools draws it; 0 where nothing can be drawn."""
    if isinstance(polygons, dict):
        if polygons.get("size") != [HEIGHT, WIDTH] or polygons.get("counts") in (None, "?"):
            return 0
        counts: Any = polygons["counts"]
        drawn: Any = dict(polygons)
        if isinstance(counts, list):
            drawn = rle_format.frPyObjects(drawn, HEIGHT, WIDTH)
        return float(rle_format.decode(drawn).sum())
    if not isinstance(polygons, list) or not all(isinstance(p, list) for p in polygons):
        return 0
    if any(len(p) % 2 or not all(map(is_number, p)) for p in polygons):
        return 0
    if any(not -WIDTH <= c <= 2 * WIDTH for p in polygons for c in p[::2]):
        return 0
    if any(not -HEIGHT <= c <= 2 * HEIGHT for p in polygons for c in p[1::2]):
        return 0
    kept = [
        p for p in polygons
        if len(p) >= 6 and np.linalg.matrix_rank(np.reshape(p, (-1, 2)) - p[:2], tol=1e-4) == 2
    ]  # fmt: skip
    if not kept:
        return 0
    merged: Any = rle_format.merge(rle_format.frPyObjects(kept, HEIGHT, WIDTH))
    return float(rle_format.decode(merged).sum())


def is_box(said: dict[str, Any]) -> bool:
    found, area = said["bbox"], said.get("area")
    if not isinstance(found, list) or len(found) != 4 or not all(map(is_number, found)):
        return False
    x, y, width, height = found
    columns, rows = min(x + width, WIDTH) - max(x, 0), min(y + height, HEIGHT) - max(y, 0)
    return min(columns, rows, width, height) > 0 and columns * rows >= 1 and area != -1


def kinds_of(file: dict[str, Any], task: str, crowds: str) -> dict[int, Counter[str]]:
    """Returns how many objects and crowds are in each image, by its id."""
    found = {image["id"]: Counter[str]() for image in file["images"]}
    for said in file["annotations"]:
        drawn = mask_area(said["segmentation"]) > 0 if task == "segmentation" else is_box(said)
        if drawn and said["category_id"] in CATEGORIES and said.get("iscrowd") in (None, 0, 1):
            crowd = said.get("iscrowd") == 1 and crowds == "ignore"
            found[said["image_id"]]["crowd" if crowd else "object"] += 1
    return found


def all_fractions(file: dict[str, Any], task: str) -> bool:
    numbers: list[float] = []
    for said in file["annotations"]:
        values = [said["bbox"]] if task == "detection" else said["segmentation"]
        for value in values if isinstance(values, list) else []:
            numbers += (
                [v for v in value if type(v) in (int, float)] if isinstance(value, list) else []
            )
    return bool(numbers) and all(abs(number) <= 1 for number in numbers)


class Boxes(nn.Module):
    """Finds objects of two categories by the colours of squares."""

    def __init__(self, weights: None) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 6, STEP, stride=STEP)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        found = self.layer(images)
        return found[:, :2], found[:, 2:]


def train(generator: np.random.Generator, root: Path) -> None:
    """Makes the files of a task and trains on them."""
    task = str(generator.choice(["segmentation", "detection", "captions"]))
    crowds = str(generator.choice(["ignore", "ignore", "objects"]))
    share = 0.5 if generator.random() < 0.2 else None
    splits = ("train",) if share is not None else ("train", "val")
    files = {split: write_split(generator, root, split, task) for split in splits}
    data = COCO(
        root, task, SIZE, 2, root / "cache", folder=root, val_share=share, min_count=1,
        crowds=crowds, cache_images=bool(generator.random() < 0.5),
    )  # fmt: skip
    fractions = [task != "captions" and all_fractions(file, task) for file in files.values()]
    try:
        attempt(data.prepare_data)
    except Problem as problem:
        assert any(fractions) or "fractions" not in str(problem)  # noqa: PT017
        raise
    assert not any(fractions)
    attempt(data.setup, "fit")
    if task == "captions":
        network = set_to_reference(AttentionDecoder(width=4, hidden_size=8, depth=2))
        model: Any = Captioner(lambda weights: network, 0.1, 0.0, beam_width=1, max_length=3)
        scores = run("fit", model, data, Census())
        assert {"val/loss", "val/bleu4", "val/cider_d"} == scores.keys()
        assert math.isfinite(scores["val/loss"])
        assert math.isfinite(scores["val/bleu4"])
        return
    kinds = {split: kinds_of(file, task, crowds) for split, file in files.items()}
    counts = data.census()
    for name in ("train", "val"):
        of_image = kinds[name if name in kinds else "train"]
        ids = data._sets[name].images.annotations.ids[data._sets[name].numbers.numpy()]
        expected: Counter[str] = sum((of_image[int(i)] for i in ids), Counter())
        assert counts[name].counted == expected["object"], (name, counts[name], expected)
        assert counts[name].others["ignored crowd{s}"] == expected["crowd"]
    if task == "segmentation":
        model = Segmenter(lambda weights: nn.Conv2d(3, 3, 1), 3, 0.1, 0.0)
        labels = torch.cat([batch.labels.flatten() for batch in data.val_dataloader()])
        finite = {
            "val/loss": bool((labels != 255).any()),
            **dict.fromkeys(
                ("val/mean_iou", "val/pixel_accuracy"), bool(((labels > 0) & (labels < 255)).any())
            ),
        }
    else:
        model = Detector(lambda weights: Boxes(weights), 2, 0.1, 0.0)
        finite = dict.fromkeys(("val/loss", "val/ap"), counts["val"].counted > 0)
    scores = run("validate", model, data)
    assert {name: math.isfinite(scores[name]) for name in finite} == finite
    try:
        run("fit", model, data, Census())
    except Problem as problem:
        assert not (counts["train"].counted and counts["val"].counted)
        assert "nothing counts" in str(problem)  # noqa: PT017
        raise
    assert counts["train"].counted > 0
    assert counts["val"].counted > 0


if __name__ == "__main__":
    main(train)
