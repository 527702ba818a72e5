"""Small data sets in COCO's format, written by the tests that read them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from datamodules.coco import COCO

CATEGORIES = {3: "cat", 18: "dog"}  # ids with gaps, as COCO's: classes 1 and 2


class TwoCategories(COCO):
    published_categories = 2


def rectangle(x: float, y: float, width: float, height: float) -> list[list[float]]:
    """A polygon."""
    return [[x, y, x + width, y, x + width, y + height, x, y + height]]


def write_jpeg(pixels: Tensor, path: Path) -> None:
    """(3, H, W), or (1, H, W) as greyscale."""
    array = pixels.squeeze(0) if len(pixels) == 1 else pixels.permute(1, 2, 0)
    Image.fromarray(array.numpy()).save(path, quality=95)


@dataclass
class Split:
    """The files of one split; `write` makes them."""

    root: Path
    name: str = "train2017"
    images: list[dict[str, Any]] = field(default_factory=list)
    instances: list[dict[str, Any]] = field(default_factory=list)
    captions: list[dict[str, Any]] = field(default_factory=list)

    @property
    def folder(self) -> Path:
        return self.root / "coco" / self.name

    def file(self, kind: str) -> Path:
        return self.root / "coco" / "annotations" / f"{kind}_{self.name}.json"

    def clear(self) -> None:
        for said in (self.images, self.instances, self.captions):
            said.clear()

    def image(self, pixels: Tensor | None = None, height: int = 8, width: int = 10) -> int:
        """Adds a JPEG, random where no `pixels` (3 or 1, H, W) are given; returns its id."""
        if pixels is None:
            generator = torch.Generator().manual_seed(len(self.images))
            pixels = torch.randint(256, (3, height, width), generator=generator).to(torch.uint8)
        number = 100 - len(self.images)  # in the file, ids are in no order
        name = f"{number:012}.jpg"
        self.folder.mkdir(parents=True, exist_ok=True)
        write_jpeg(pixels, self.folder / name)
        height, width = pixels.shape[1:]
        self.images.append({"id": number, "file_name": name, "height": height, "width": width})
        return number

    def instance(self, image: int, segmentation: Any, category: int = 3, crowd: int = 0) -> int:
        number = 1000 + len(self.instances)
        self.instances.append(
            {
                "id": number,
                "image_id": image,
                "category_id": category,
                "segmentation": segmentation,
                "iscrowd": crowd,
                "area": 4.0,
                "bbox": [0, 0, 2, 2],
            }
        )
        return number

    def caption(self, image: int, text: str) -> int:
        number = 5000 + len(self.captions)
        self.captions.append({"id": number, "image_id": image, "caption": text})
        return number

    def write(self) -> None:
        categories = [{"id": i, "name": name} for i, name in CATEGORIES.items()]
        contents = {
            "instances": {"annotations": self.instances, "categories": categories},
            "captions": {"annotations": self.captions},
        }
        for kind, rest in contents.items():
            self.file(kind).parent.mkdir(parents=True, exist_ok=True)
            self.file(kind).write_text(json.dumps({"images": self.images, **rest}))
