from pathlib import Path
from typing import Any

import pytest

from datamodules.coco import COCO
from tests.datamodules.coco.files import Split, TwoCategories, rectangle


@pytest.fixture
def split(tmp_path: Path) -> Split:
    """An empty training split."""
    return Split(tmp_path / "data")


@pytest.fixture
def both(tmp_path: Path) -> dict[str, Split]:
    """Six images to train and three to validate: two instances and two captions each."""
    splits = {"train": Split(tmp_path / "data"), "val": Split(tmp_path / "data", "val2017")}
    for name, count in (("train", 6), ("val", 3)):
        for i in range(count):
            image = splits[name].image()
            splits[name].instance(image, rectangle(1, 1, 3 + i, 4), category=3)
            splits[name].instance(image, rectangle(5, 2, 2, 2), category=18)
            splits[name].caption(image, f"A cat, number {i}!")
            splits[name].caption(image, "a cat and a small dog")
        splits[name].write()
    return splits


@pytest.fixture
def load(tmp_path: Path):
    """Makes a prepared data module over the files in `tmp_path`."""

    def load(task: str = "segmentation", **arguments: Any) -> COCO:
        options = {"image_size": 8, "batch_size": 4, "cache_dir": tmp_path / "cache"} | arguments
        data = TwoCategories(tmp_path / "data", task, **options)
        data.prepare_data()
        data.setup("fit")
        return data

    return load
