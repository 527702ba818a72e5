"""Boxes of annotation files, and images with them."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from datamodules.coco.annotations.boxes import Boxes
from datamodules.coco.augmentation import CROWD, NOTHING, crop_boxes, crop_labels, draw_crops
from tests.datamodules.coco.files import Split, rectangle


def annotate(split: Split, image: int, box: list[float], **values) -> None:
    split.instance(image, rectangle(1, 1, 2, 2), values.pop("category", 3))
    split.instances[-1] |= {"bbox": box} | values


def read(split: Split, tmp_path: Path) -> Boxes:
    split.write()
    return Boxes(split.file("instances"), tmp_path / "cache")


def test_boxes_are_as_the_file_has_them(split, tmp_path):
    first, second = split.image(), split.image()  # ids fall
    annotate(split, first, [1.5, 2, 3.25, 4], area=7.5, category=18)
    annotate(split, first, [0, 0, 10, 8], iscrowd=1, area=60)
    annotate(split, second, [-2, 1, 4, 3])
    del split.instances[-1]["area"], split.instances[-1]["segmentation"]
    boxes = read(split, tmp_path)
    assert (boxes.category_ids, boxes.categories, boxes.most) == ([3, 18], ["cat", "dog"], 2)
    below, above = boxes.of_image(0), boxes.of_image(1)
    assert (above.image, above.size) == (first, (8, 10))
    assert above.boxes.tolist() == [[1.5, 2, 3.25, 4], [0, 0, 10, 8]]
    assert above.classes.tolist() == [1, 0]
    assert above.areas.tolist() == [7.5, 60]
    assert above.crowds.tolist() == [False, True]
    assert below.image == second
    assert below.areas.tolist() == [12]  # the box's


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"bbox": None}, "the box is not a list of x, y, width and height"),
        ({"bbox": [1, 2, 3]}, "the box is not a list of x, y, width and height"),
        ({"bbox": [1, 2, 3, float("nan")]}, "the box is not a list of x, y, width and height"),
        ({"bbox": [1, 2, 3, 10**400]}, "the box is not a list of x, y, width and height"),
        ({"area": 10**400}, "the area is not a number from 0 on"),
        ({"bbox": [1, 2, 3, True]}, "the box is not a list of x, y, width and height"),
        ({"bbox": [1, 2, 0, 4]}, "the width or height of the box is not positive"),
        ({"bbox": [1, 2, 3, -4]}, "the width or height of the box is not positive"),
        ({"bbox": [10, 2, 3, 4]}, "the box is outside the image"),
        ({"bbox": [-3, 2, 3, 4]}, "the box is outside the image"),
        ({"bbox": [1, 2, 0.9, 0.9]}, "the box covers less than a pixel of the image"),
        ({"bbox": [-3, 2, 3.1, 4]}, "the box covers less than a pixel of the image"),
        ({"area": -1}, "the area is not a number from 0 on"),
        ({"area": "large"}, "the area is not a number from 0 on"),
        ({"iscrowd": 2}, "iscrowd is neither 0 nor 1"),
        ({"category_id": 0}, "the category is not one of the file's"),
    ],
)
def test_a_damaged_box_is_left_out_by_name(split, tmp_path, values, reason):
    image = split.image()
    annotate(split, image, [1, 2, 3, 4])
    annotate(split, image, [1, 1, 2, 2])
    split.instances[-1] |= values
    boxes = read(split, tmp_path)
    assert boxes.of_image(0).boxes.tolist() == [[1, 2, 3, 4]]
    ((found, (name,)),) = boxes.skipped.items()
    assert found == reason
    assert name.startswith(f"annotation {split.instances[-1]['id']} of ")


def test_null_is_as_what_is_missing(split, tmp_path):
    annotate(split, split.image(), [1, 2, 3, 4])
    split.instances[-1] |= {"iscrowd": None, "area": None}
    annotate(split, split.images[0]["id"], [1, 2, 5, 2], area=0)  # as it writes what it lacks
    boxes = read(split, tmp_path)
    assert boxes.skipped == {}
    assert boxes.of_image(0).areas.tolist() == [12, 10]
    assert boxes.of_image(0).crowds.tolist() == [False, False]


def test_a_batch_has_the_boxes_of_the_squares(both, load):
    for split in both.values():
        split.clear()
        image = split.image(height=4, width=16)  # becomes 8 x 8
        annotate(split, image, [4, 1, 8, 2], category=18)
        annotate(split, image, [12, 0, 8, 4], iscrowd=1)  # beyond the border
        split.image()
        split.write()
    (batch,) = load("detection").val_dataloader()
    assert batch.boxes.tolist() == [2 * [4 * [0.0]], [[2, 2, 6, 6], [6, 0, 8, 8]]]
    assert batch.classes.tolist() == [[NOTHING, NOTHING], [1, CROWD]]
    empty, said = batch.truth.of_images()
    assert len(empty.boxes) == 0
    assert said.boxes.tolist() == [[4, 1, 8, 2], [12, 0, 8, 4]]


boxes_inside = st.tuples(*4 * [st.integers(0, 31)]).map(
    lambda b: (min(b[0], b[2]), min(b[1], b[3]), max(b[0], b[2]) + 1, max(b[1], b[3]) + 1)
)


@given(seed=st.integers(0, 2**31), box=boxes_inside)
def test_a_box_stays_around_its_pixels(seed, box):
    """The crop is as large as the image or half as large in area, so that a pixel of the labels
    that are resampled is at most one away."""
    left, top, right, bottom = box
    labels = torch.zeros(32, 32, dtype=torch.uint8)
    labels[top:bottom, left:right] = 1
    crops = draw_crops(torch.tensor([seed]), 32)
    moved, classes = crop_boxes(
        torch.tensor([[box]]).float(), torch.zeros(1, 1, dtype=torch.int64), crops, 32
    )
    rows, columns = np.nonzero(crop_labels(labels, crops[0]).numpy())
    if classes.item() == NOTHING:
        y, x, height, width = crops[0, :4].tolist()
        inside = max(0, min(right, x + width) - max(left, x)) * max(
            0, min(bottom, y + height) - max(top, y)
        )
        assert inside < 0.25 * (right - left) * (bottom - top)
    elif len(rows):
        found = (columns.min(), rows.min(), columns.max() + 1, rows.max() + 1)
        assert moved[0, 0].tolist() == pytest.approx(found, abs=1)


def test_a_crowd_is_kept_where_any_of_it_is_seen():
    crops = torch.tensor([[0, 0, 16, 16, 0]])
    boxes = torch.tensor([[[15.0, 0, 32, 32], [15, 0, 32, 32], [16, 0, 32, 32]]])
    moved, classes = crop_boxes(boxes, torch.tensor([[CROWD, 1, CROWD]]), crops, 32)
    assert classes.tolist() == [[CROWD, NOTHING, NOTHING]]
    assert moved[0, 0].tolist() == [30, 0, 32, 32]
