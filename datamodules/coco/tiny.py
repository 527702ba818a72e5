"""COCO in small: generated pictures of coloured shapes, in COCO's format, nothing to download."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from datamodules.coco import shapes
from datamodules.coco.cache import entry
from datamodules.coco.datamodule import COCO


class COCOTiny(COCO):
    """512 pictures to train and 128 to validate, 64 x 64: circles, squares and triangles in four
    colours and two sizes, some with a crowd, some empty; five captions each.

    Made in the cache the first time, and the same everywhere.

    Args:
        cache_dir: holds the pictures, too.
        arguments: of :class:`COCO`.
    """

    num_classes = len(shapes.CATEGORIES) + 1

    def __init__(self, cache_dir: str | Path, **arguments: Any) -> None:
        super().__init__(data_dir=cache_dir, cache_dir=cache_dir, **arguments)

    def prepare_data(self) -> None:
        self._generate()
        super().prepare_data()

    def setup(self, stage: str) -> None:
        self._generate()
        super().setup(stage)

    def _generate(self) -> None:
        source = {"version": shapes.VERSION}
        self.root = entry(self.cache_dir, "coco_tiny", source, shapes.write).folder / "coco"
