"""Data of people's own in COCO's format."""

import json
from pathlib import Path
from typing import Any

import pytest
from pycocotools import mask as rle_format

from datamodules.coco import COCO
from datamodules.coco.annotations.objects import IGNORE
from datamodules.coco.augmentation import CROWD, NOTHING
from datamodules.images import DataNotFoundError
from datamodules.reading.skipped import SkippedWarning
from tests.own_data import CATEGORIES, HEIGHT, WIDTH, write_coco, write_picture


@pytest.fixture
def make(tmp_path: Path):
    def make(task: str = "segmentation", **arguments: Any) -> COCO:
        return COCO(tmp_path / "none", task, 8, 4, tmp_path / "cache", **arguments)

    return make


@pytest.fixture
def load(make):
    def load(*task: str, **arguments: Any) -> COCO:
        data = make(*task, **arguments)
        data.prepare_data()
        data.setup("fit")
        return data

    return load


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_coco(write_coco(tmp_path / "parts"), "val", 3)


def numbers(data: COCO, stage: str) -> list[int]:
    return data._sets[stage].numbers.tolist()


def edit(path: Path, **changes: Any) -> None:
    file = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in file.items() if value is not None}))


def test_classes_are_those_of_the_file(make, load, folder):
    assert make(folder=folder).num_classes == 3
    data = load(folder=folder)
    assert data.class_names == ("background", "bolt", "washer, small")
    assert data.num_categories == 2
    assert [len(data._sets[stage]) for stage in ("train", "val", "test")] == [8, 3, 3]
    labels = [item.labels for item in (data._sets["train"][i] for i in range(8))]
    assert [set(each.unique().tolist()) for each in labels] == 4 * [{0, 1}, {0, 2}]


def test_each_path_can_be_given(load, folder, tmp_path):
    (folder / "train").rename(tmp_path / "images")
    (folder / "annotations" / "instances_train.json").rename(tmp_path / "train.json")
    given = {"train_images": tmp_path / "images", "train_annotations": tmp_path / "train.json"}
    assert len(load(folder=folder, **given)._sets["train"]) == 8
    (folder / "val").rename(tmp_path / "more")
    (folder / "annotations" / "instances_val.json").rename(tmp_path / "val.json")
    given |= {"val_images": tmp_path / "more", "val_annotations": tmp_path / "val.json"}
    data = load(**given)
    assert len(data._sets["val"]) == 3
    assert data.num_classes == 3


@pytest.mark.parametrize("task", ["segmentation", "captions"])
def test_one_file_is_divided_by_the_seed_of_the_split_alone(load, tmp_path, task):
    folder = write_coco(tmp_path / "parts")
    options = {"folder": folder, "val_share": 0.25, "min_count": 1}
    data = load(task, **options)
    train, val = numbers(data, "train"), numbers(data, "val")
    assert sorted(train + val) == list(range(8))
    assert len(val) == 2
    assert numbers(load(task, **options, seed=3), "val") == val
    assert numbers(load(task, **options, split_seed=3), "val") != val
    assert sum(len(batch.images) for batch in data.train_dataloader()) == 6


def test_the_words_of_captions_that_validate_are_not_in_the_vocabulary(load, tmp_path):
    folder = write_coco(tmp_path / "parts")
    path = folder / "annotations" / "captions_train.json"
    captions = json.loads(path.read_text())["annotations"]
    edit(path, annotations=[c | {"caption": f"word{i}"} for i, c in enumerate(captions)])
    data = load("captions", folder=folder, val_share=0.25, min_count=1)
    assert data.vocabulary is not None
    assert set(data.vocabulary.words[4:]) == {f"word{i}" for i in numbers(data, "train")}


@pytest.mark.parametrize("categories", [None, [], CATEGORIES, "no list"])
def test_captions_need_no_categories(load, folder, categories):
    for split in ("train", "val"):
        edit(folder / "annotations" / f"captions_{split}.json", categories=categories)
    data = load("captions", folder=folder, min_count=1)
    assert data.class_names is None
    (batch,) = data.val_dataloader()
    assert [list(each) for each in batch.references] == [
        ["one bolt"], ["one washer, small"], ["one bolt"],
    ]  # fmt: skip


@pytest.mark.parametrize(
    "categories",
    [
        [{"id": 0, "name": "bolt"}, {"id": 7, "name": "screw"}],
        [{"id": 0, "name": "bolt"}, {"id": 8, "name": "washer, small"}],
        [*CATEGORIES, {"id": 9, "name": "screw"}],
    ],
)
def test_other_categories_to_validate_than_to_train_are_named(load, folder, categories):
    edit(folder / "annotations" / "instances_val.json", categories=categories)
    with pytest.raises(DataNotFoundError, match=r"different categories: id [789] is"):
        load(folder=folder)


@pytest.mark.parametrize(
    "name", ["../train/line 1/part 0.png", "/../train/line 1/part 0.png", "line 1/", "."]
)
def test_a_file_name_does_not_leave_the_folder(load, folder, name):
    path = folder / "annotations" / "instances_train.json"
    images = json.loads(path.read_text())["images"]
    images[0]["file_name"] = name
    edit(path, images=images)
    with pytest.warns(SkippedWarning) as warned:
        data = load(folder=folder)
    assert "1 skipped, the image has no valid file name" in " ".join(str(w.message) for w in warned)
    assert len(data._sets["train"]) == 7


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"val_share": 0}, "val_share: expected a number between 0 and 1, got 0"),
        ({"val_share": 0.5, "val_images": "more"}, "val_share: expected null where val_images"),
    ],
)
def test_arguments_that_cannot_be_are_named(make, arguments, message):
    with pytest.raises(ValueError, match=message):
        make(folder="parts", **arguments)


def test_a_share_that_leaves_nothing_is_named(load, tmp_path):
    folder = write_coco(tmp_path / "parts", count=2)
    with pytest.raises(DataNotFoundError, match=r"data.val_share: 0.1 of the 2 images"):
        load(folder=folder, val_share=0.1)


def test_all_that_is_left_out_is_named_where_two_folders_have_one_name(load, folder, tmp_path):
    for split in ("train", "val"):
        (tmp_path / split / "images").parent.mkdir()
        (folder / split).rename(tmp_path / split / "images")
        (tmp_path / split / "images" / "line 1" / f"part {split == 'val':d}.png").unlink()
    given = {f"{split}_images": tmp_path / split / "images" for split in ("train", "val")}
    with pytest.warns(SkippedWarning, match="images: 1 skipped, the file is missing"):
        data = load(folder=folder, **given)
    assert data.skipped == {
        "images": {"the file is missing": ["line 1/part 0.png", "line 1/part 1.png"]}
    }


@pytest.mark.parametrize("task", ["segmentation", "detection"])
def test_what_other_tools_write_is_read(load, tmp_path, task):
    """Ids with gaps and from 0, categories in another order to validate, names that are not ASCII,
    crowds of both kinds of run lengths, and an image of which nothing is said."""
    names, pixels = [f"größe/名 {i}.png" for i in range(4)], WIDTH * HEIGHT
    categories = [{"id": 90, "name": "螺"}, {"id": 0, "name": "Öse"}]
    plain: Any = {"size": [HEIGHT, WIDTH], "counts": [0, 5 * HEIGHT, pixels - 5 * HEIGHT]}
    compressed: Any = rle_format.frPyObjects(plain, HEIGHT, WIDTH)
    compressed["counts"] = compressed["counts"].decode()
    corners = [20, 2, 26, 2, 26, 12, 20, 12]
    objects = [
        {"category_id": 0, "segmentation": [corners], "bbox": [20, 2, 6, 10]},
        {"category_id": 90, "segmentation": plain, "bbox": [0, 0, 5, HEIGHT], "iscrowd": 1},
        {"category_id": 90, "segmentation": compressed, "bbox": [0, 0, 5, HEIGHT], "iscrowd": True},
    ]
    for split, order in (("train", 1), ("val", -1)):
        for name in names:
            write_picture(tmp_path / "parts" / split / name, None, None)
        (tmp_path / "parts" / "annotations").mkdir(exist_ok=True)
        contents = {
            "images": [
                {"id": i, "file_name": name, "height": HEIGHT, "width": WIDTH}
                for i, name in enumerate(names)
            ],
            "annotations": [{"id": i, "image_id": i} | said for i, said in enumerate(objects)],
            "categories": categories[::order],
        }
        path = tmp_path / "parts" / "annotations" / f"instances_{split}.json"
        path.write_text(json.dumps(contents))
    data = load(task, folder=tmp_path / "parts")
    assert data.skipped == {}
    assert data.class_names is not None
    assert data.class_names[-2:] == ("Öse", "螺")
    assert data.category_ids == [0, 90]
    (batch,) = data.val_dataloader()
    if task == "segmentation":
        assert [set(each.unique().tolist()) for each in batch.labels] == [
            {0, 1}, {0, IGNORE}, {0, IGNORE}, {0},
        ]  # fmt: skip
    else:
        assert batch.classes.tolist() == [[0], [CROWD], [CROWD], [NOTHING]]
