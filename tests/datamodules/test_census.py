"""The line about each set of a data module."""

from typing import Any

import torch

from datamodules.census import Counts, describe, printable
from datamodules.digits import Digits


def lines(data: Any) -> list[str]:
    return [describe(name, counts) for name, counts in data.census().items()]


def test_a_line_names_a_few_classes_and_shows_what_a_terminal_cannot():
    names = [f"class {i}" for i in range(17)]
    counts = Counts(1, 1234, "object", names, {"crowd{s}": 1, "image{s} without an object": 0})
    assert describe("val", counts) == (
        "val: 1 image, 1,234 objects, 1 crowd; classes without an object: class 0, class 1, "
        "class 2, class 3, class 4 and 12 more"
    )
    assert printable("größe\n\udcff\x1b[31m") == "größe\\n\\udcff\\x1b[31m"


def test_labelled_images_are_counted_by_class():
    data = Digits(64)
    data.setup("fit")
    assert lines(data) == ["train: 1,257 images", "val: 180 images", "test: 360 images"]
    data.splits["val"].labels = torch.full((180,), 3)
    assert lines(data)[1] == ("val: 180 images; classes without an image: 0, 1, 2, 4, 5 and 4 more")
