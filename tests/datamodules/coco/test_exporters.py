"""Data in COCO's format as tools write it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from datamodules.coco import COCO
from datamodules.coco.annotations.objects import IGNORE
from datamodules.images import DataNotFoundError
from tests.datamodules.coco.exporters import (
    CLASSES,
    EXPORTERS,
    PICTURES,
    WITH_CAPTIONS,
    WITH_CROWDS,
    WITHOUT_SPLITS,
    Picture,
)

SIZE = 8


@pytest.fixture
def load(tmp_path: Path):
    def load(task: str, folder: Path, **arguments: Any) -> COCO:
        arguments |= {"cache_dir": tmp_path / "cache", "folder": folder}
        data = COCO(tmp_path / "none", task, SIZE, 4, min_count=1, **arguments)
        data.prepare_data()
        data.setup("fit")
        return data

    return load


def read_pictures(data: COCO, stage: str) -> dict[Picture, int]:
    """The pictures of a stage, told by the colour of their pixels, and their numbers."""
    images = data._sets[stage].images
    colours = {picture.colour: picture for picture in PICTURES}
    return {
        colours[tuple(images[number][:, 0, 0].tolist())]: number
        for number in data._sets[stage].numbers.tolist()
    }


def label_map(picture: Picture, crowds: bool) -> np.ndarray:
    labels = np.zeros((picture.height, picture.width), np.uint8)
    for name, (x, y, width, height) in picture.objects:
        labels[y : y + height, x : x + width] = IGNORE if crowds else 1 + CLASSES.index(name)
    return labels


@pytest.mark.parametrize("task", ["segmentation", "detection", "captions"])
@pytest.mark.parametrize("export", EXPORTERS, ids=lambda export: export.__name__)
def test_what_a_tool_exports_is_read_or_said(load, tmp_path, export, task):
    export(tmp_path / "parts")
    share = {"val_share": 0.4} if export in WITHOUT_SPLITS else {}
    if task == "captions" and export not in WITH_CAPTIONS:
        said = r"^[^\n]*(there is no caption|no annotation file of train)[^\n]*$"
        with pytest.raises(DataNotFoundError, match=said):
            load(task, tmp_path / "parts", **share)
        return
    data = load(task, tmp_path / "parts", **share)
    assert data.skipped == {}
    if task != "captions":
        assert data.class_names is not None
        assert data.class_names[-2:] == CLASSES
    stages = {stage: read_pictures(data, stage) for stage in ("train", "val")}
    found = stages["train"] | stages["val"]
    assert found.keys() == set(PICTURES)
    for stage, pictures in stages.items():
        split = "train" if share else stage
        assert share or {picture.split for picture in pictures} == {stage}
        for picture, number in pictures.items():
            if task == "captions":
                assert data.splits.captions(split).of_image(number) == list(picture.captions)
            elif task == "segmentation":
                read = data.splits.instances(split).label_map(number)
                assert np.array_equal(read, label_map(picture, export in WITH_CROWDS))
            else:
                boxes = data.splits.boxes(split).of_image(number)
                said = [(CLASSES[i], tuple(b)) for i, b in zip(boxes.classes, boxes.boxes.tolist())]
                assert said == list(picture.objects)
                assert boxes.size == (picture.height, picture.width)
                assert boxes.crowds.tolist() == len(said) * [export in WITH_CROWDS]
