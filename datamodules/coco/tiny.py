"""A small stand-in for COCO: generated pictures of shapes in its format, nothing to download."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from datamodules.coco import shapes
from datamodules.coco.datamodule import COCO
from datamodules.coco.files import Files
from datamodules.reading.cache import find_or_make


class COCOTiny(COCO):
    """512 pictures to train and 128 to validate, 64 x 64: circles, squares and triangles in four
    colours and two sizes, some with a crowd, some empty; five captions each.

    The pictures are drawn on first use, and are the same on every machine.

    Args:
        cache_dir: as of :class:`COCO`; the pictures are kept there too.
        arguments: of :class:`COCO`.
    """

    published_categories = len(shapes.CATEGORIES)

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
        entry = find_or_make(self.splits.cache_dir, "coco_tiny", source, shapes.write)
        self.splits.files = Files(entry.folder / "coco", str(shapes.YEAR))
