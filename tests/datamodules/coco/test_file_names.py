"""Which files are read: what a file name means, and where a folder holds the rest."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from datamodules.coco import COCO
from datamodules.coco.annotations.instances import Instances
from datamodules.images import DataNotFoundError
from datamodules.reading.skipped import SkippedWarning
from tests.datamodules.coco.files import rectangle
from tests.own_data import write_coco

SIDE = 12


def write(path: Path, *images: Any) -> None:
    """An annotation file of images with an object each; they are named, or said in full."""
    entries = [
        {"id": i}
        | (image if type(image) is dict else {"file_name": image, "width": SIDE, "height": SIDE})
        for i, image in enumerate(images)
    ]
    objects = [
        {"id": i, "image_id": i, "category_id": 1, "segmentation": rectangle(1, 1, 3, 4)}
        | {"bbox": [1, 1, 3, 4]}
        for i in range(len(images))
    ]
    contents = {"images": entries, "annotations": objects, "categories": [{"id": 1, "name": "a"}]}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(contents))


def draw(*paths: Path, side: int = SIDE) -> None:
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (side, side), (len(path.name), 0, 0)).save(path)


@pytest.fixture
def read(tmp_path: Path):
    """Returns what some names mean in a folder."""

    def read(folder: Path, *images: Any) -> Instances:
        write(tmp_path / "names.json", *images)
        return Instances(tmp_path / "names.json", tmp_path / "cache", folder=folder)

    return read


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("a b.png", "a b.png"),
        ("./a b.png", "a b.png"),
        ("line//1/c.png", "line/1/c.png"),
        ("line\\1\\c.png", "line/1/c.png"),
        (".\\a b.png", "a b.png"),
        ("a%20b.png", "a b.png"),
        ("images%5Ca+b.png", "a+b.png"),
        ("gr%C3%B6%C3%9Fe.png", "größe.png"),
        ("100%25.png", "100%25.png"),  # is there as it is
        ("train/a b.png", "a b.png"),
        ("images/train/line/1/c.png", "line/1/c.png"),
        ("C:\\work\\parts\\line\\1\\c.png", "line/1/c.png"),
        ("\\\\server\\share\\a b.png", "a b.png"),
        ("/home/ada/parts/train/a b.png", "a b.png"),
        ("file:///home/ada/a%20b.png", "a b.png"),
        ("https://example.com/a%20b.png", "a b.png"),
        ("https://example.com/x/line/1/c.png?size=full#top", "line/1/c.png"),
        ("s3://bucket/a b.png", "a b.png"),
        ("/data/local-files/?d=parts/a%20b.png", "a b.png"),
        ("/data/upload/7/0a1b2c3d-a b.png", "a b.png"),
        ("images\\0a1b2c3d-a b.png", "a b.png"),
        ("images\\deadbeef-d.png", "deadbeef-d.png"),
    ],
)
def test_a_name_that_means_one_file_is_read(read, tmp_path, name, file):
    folder = tmp_path / "parts" / "train"
    files = ("a b.png", "a+b.png", "größe.png", "100%25.png", "line/1/c.png", "deadbeef-d.png")
    draw(*(folder / each for each in (*files, "100%.png", "d.png")))
    found = read(folder, name)
    assert found.file_names.tolist() == [file]
    assert found.skipped == {}


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        # `train/1.png` is there, beside the folder of the images, and so is `val/1.png`.
        (["train/1.png"], "fits several files: 'train/1.png': 1.png, ../train/1.png"),
        (["/home/ada/train/1.png"], "fits several files"),
        (["x/sub/1.png"], "fits several files: 'x/sub/1.png': sub/1.png, 1.png"),
        (["x%20/%61.png"], "fits several files: 'x%20/%61.png': %61.png, a.png"),
        (["old/2.png", "new/2.png"], "other images come to the same file: 'old/2.png': 2.png"),
        (["2.png", "new\\2.png"], "other images come to the same file: 'new"),
    ],
)
def test_a_name_that_means_several_files_is_left_out(read, tmp_path, names, problem):
    folder = tmp_path / "parts" / "val"
    draw(*(folder / name for name in ("1.png", "2.png", "3.png", "a.png", "%61.png", "sub/1.png")))
    draw(tmp_path / "parts" / "train" / "1.png")
    found = read(folder, *names, "3.png")
    assert found.file_names.tolist() == (["2.png", "3.png"] if names[0] == "2.png" else ["3.png"])
    said = (
        "; ".join(
            f"{reason}: {entry}" for reason, entries in found.skipped.items() for entry in entries
        )
        .replace("images[0] (", "")
        .replace("images[1] (", "")
    )
    assert problem in said


def test_one_file_may_be_several_images_where_all_say_so(read, tmp_path):
    draw(tmp_path / "parts" / "1.png")
    found = read(tmp_path / "parts", "1.png", "./1.png")
    assert found.file_names.tolist() == ["1.png", "1.png"]


@pytest.mark.parametrize(
    "name",
    ["../secret.png", "a/../../secret.png", "..\\secret.png", "%2e%2e/secret.png",
     "https://example.com/../secret.png", "/tmp/../secret.png", "..%5Csecret.png",
     "0a1b2c3d-../secret.png", "parts/secret.png"],
)  # fmt: skip
def test_no_name_leads_out_of_the_folder(read, tmp_path, name):
    draw(tmp_path / "secret.png", tmp_path / "parts" / "secret.png", tmp_path / "parts/val/1.png")
    found = read(tmp_path / "parts" / "val", name, "1.png")
    for file in set(found.file_names.tolist()) - {"1.png"}:
        assert not (tmp_path / "parts" / "val" / file).exists()
        assert os.path.normpath(file) == file
        assert ".." not in file.split("/")


def test_the_first_path_that_was_tried_is_named(tmp_path):
    folder = write_coco(write_coco(tmp_path / "parts"), "val", 3)
    write(folder / "annotations/instances_train.json", "images\\x 1.png", "images\\x 2.png")
    data = COCO(tmp_path, "segmentation", 8, 4, tmp_path / "cache", folder=folder)
    with pytest.raises(DataNotFoundError) as caught:
        data.prepare_data()
    path = folder / "train" / "images\\x 1.png"
    message = str(caught.value)
    assert f"none of the 2 images that {folder}/annotations/instances_train.json" in message
    assert f"the first that was tried is {path}; data.train_images names" in message


def test_a_folder_that_may_not_be_read_is_named(tmp_path, monkeypatch):
    folder = write_coco(write_coco(tmp_path / "parts"), "val", 3)

    def refuse(path: Any) -> Any:
        if Path(path) == folder / "train" / "line 1":
            raise PermissionError(13, "Permission denied")
        return scandir(path)

    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", refuse)
    said = f"^{folder}/train/line 1 cannot be read .Permission denied.; data.train_images names"
    with pytest.raises(DataNotFoundError, match=said):
        load(tmp_path)


def test_a_name_of_two_lines_is_told_in_one(tmp_path):
    folder = write_coco(write_coco(tmp_path / "parts"), "val", 3)
    write(folder / "annotations/instances_train.json", "x\n1.png", "x\n2.png")
    with pytest.raises(DataNotFoundError, match=r"^[^\n]*/train/x\\n1.png; [^\n]*$"):
        load(tmp_path)


# Sizes


@pytest.mark.parametrize("unknown", [None, 0, -1, "-1", 0.0, "missing"])
def test_sizes_are_those_of_the_files_until_these_change(tmp_path, unknown):
    path = tmp_path / "parts" / "1.png"
    sizes = {} if unknown == "missing" else {"width": unknown, "height": unknown}
    write(tmp_path / "names.json", {"file_name": path.name} | sizes)

    def read_sizes() -> list[list[int]]:
        return Instances(
            tmp_path / "names.json", tmp_path / "cache", folder=path.parent
        ).sizes.tolist()

    draw(path)
    assert read_sizes() == [[SIDE, SIDE]]
    draw(path, side=SIDE + 3)
    assert read_sizes() == [[SIDE + 3, SIDE + 3]]
    path.unlink()
    with pytest.raises(DataNotFoundError, match=f"{path}.: .* its height or width, and the"):
        read_sizes()
    draw(path)
    assert read_sizes() == [[SIDE, SIDE]]


def test_a_file_is_found_anew_when_others_come_and_go(tmp_path):
    folder = tmp_path / "parts"
    write(tmp_path / "names.json", "x/1.png", "2.png")

    def read_names() -> list[str]:
        return Instances(
            tmp_path / "names.json", tmp_path / "cache", folder=folder
        ).file_names.tolist()

    draw(folder / "1.png", folder / "2.png")
    assert read_names() == ["1.png", "2.png"]
    draw(folder / "x" / "1.png")
    assert read_names() == ["x/1.png", "2.png"]
    (folder / "1.png").unlink()
    assert read_names() == ["x/1.png", "2.png"]


def test_one_side_that_is_stated_must_be_that_of_the_file(tmp_path):
    folder = write_coco(write_coco(tmp_path / "parts"), "val", 3)
    draw(folder / "train" / "1.png", folder / "train" / "2.png")
    wrong, right = {"file_name": "1.png", "width": 7}, {"file_name": "2.png", "width": SIDE}
    write(folder / "annotations/instances_val.json", right, wrong)
    given = {"val_images": folder / "train", "train_images": folder / "train"}
    given["train_annotations"] = folder / "annotations/instances_val.json"
    with pytest.warns(SkippedWarning, match="is 12 x 12, annotated as 7 x 12: 1.png"):
        load(tmp_path, **given)


# Layouts


def move(folder: Path, split: str, file: str, images: str) -> None:
    """Moves the files of a split from where `write_coco` puts them."""
    pictures = (folder / split).rename(folder / "moving")
    for path in (folder / images, folder / file):
        path.parent.mkdir(parents=True, exist_ok=True)
    pictures.rename(folder / images)
    (folder / f"annotations/instances_{split}.json").rename(folder / file)


def load(tmp_path: Path, **arguments: Any) -> COCO:
    arguments = {"folder": tmp_path / "parts"} | arguments
    data = COCO(tmp_path, "segmentation", 8, 4, tmp_path / "cache", **arguments)
    data.prepare_data()
    data.setup("fit")
    return data


@pytest.mark.parametrize(
    ("files", "names"),
    [
        (("annotations/instances_{}.json", "{}"), ("train2017", "val2017")),
        (("annotations/instances_{}.json", "images/{}"), ("train2014", "val2014")),
        (("annotations/instances_{}.json", "images/{}"), ("Train", "Validation")),
        (("annotations/{}.json", "{}"), ("train", "valid")),
        (("{}.json", "images/{}"), ("training", "validation")),
        (("{}.json", "{}/x"), ("train", "valid")),
        (("{}/labels.json", "{}/data"), ("train", "val")),
        (("{}/annotations/instances.json", "{}/images"), ("train", "val")),
    ],
)
def test_a_layout_is_found(tmp_path, files, names):
    folder = write_coco(write_coco(tmp_path / "parts"), "val", 3)
    for split, name in zip(("train", "val"), names):
        move(folder, split, *(path.format(name) for path in files))
    if files[1] == "{}/x":  # nothing tells that the pictures are there
        with pytest.raises(DataNotFoundError, match=r"first that was tried is .*/train/line"):
            load(tmp_path)
        return
    data = load(tmp_path)
    assert [len(data._sets[stage]) for stage in ("train", "val")] == [8, 3]
    assert data.skipped == {}


@pytest.mark.parametrize(
    ("file", "images"),
    [
        ("annotations/instances_default.json", "images/default"),
        ("annotations/instances_default.json", "images"),
        ("labels.json", "data"),
        ("_annotations.coco.json", "images"),
        ("annotations/all of it.json", "images"),
    ],
)
def test_one_file_for_all_images_is_found_where_they_are_divided(tmp_path, file, images):
    folder = write_coco(tmp_path / "parts")
    move(folder, "train", file, images)
    (folder / "annotations" / "captions_train.json").unlink()
    with pytest.raises(DataNotFoundError) as caught:
        load(tmp_path)
    assert f", but {file} is: data.val_share=0.2 divides its images" in str(caught.value)
    data = load(tmp_path, val_share=0.25)
    assert [len(data._sets[stage]) for stage in ("train", "val")] == [6, 2]


def test_what_was_looked_for_is_named(tmp_path):
    folder = write_coco(tmp_path / "parts")
    with pytest.raises(DataNotFoundError) as caught:
        load(tmp_path)
    message = str(caught.value)
    assert message.startswith(f"data.folder: {folder} holds no annotation file of val: none of ")
    assert "annotations/instances_{split}.json, annotations/{split}.json" in message
    assert "{split} being one of val, val2017" in message
    assert "\n" not in message
    with pytest.raises(DataNotFoundError, match=r"data.folder: there is no folder .*/nowhere; "):
        load(tmp_path, folder=tmp_path / "nowhere")


def test_several_layouts_are_named_unless_one_is_coco_s(tmp_path):
    folder = write_coco(write_coco(tmp_path / "parts"), "val", 3)
    file = (folder / "annotations/instances_val.json").read_text()
    (folder / "val" / "_annotations.coco.json").write_text(file)
    (folder / "annotations" / "val.json").write_text(file)
    assert len(load(tmp_path)._sets["val"]) == 3
    (folder / "annotations/instances_val.json").unlink()
    said = (
        r"several annotation files of val: annotations/val.json, val/_annotations.coco.json; data"
    )
    with pytest.raises(DataNotFoundError, match=said):
        load(tmp_path)
    given = folder / "annotations" / "val.json"
    assert len(load(tmp_path, val_annotations=given)._sets["val"]) == 3


# Text


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-32"])
def test_the_encodings_of_json_are_read(read, tmp_path, encoding):
    draw(tmp_path / "parts" / "größe.png")
    write(tmp_path / "file.json", "größe.png")
    text = (tmp_path / "file.json").read_text()
    (tmp_path / "file.json").write_text(text.replace('"id": 0', '"n": NaN, "id": 0'), encoding)
    found = Instances(tmp_path / "file.json", tmp_path / "cache", folder=tmp_path / "parts")
    assert found.file_names.tolist() == ["größe.png"]
    assert found.skipped == {}


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        ("größe".encode("latin-1"), "not text in UTF-8 or UTF-16 .byte 2."),
        (b"[{}]", 'it holds a list, and COCO.s format an object with "images" and "annotations"'),
        (
            b'{"version": 5, "shapes": []}',
            'it has no "images" but "version", "shapes", so it is not',
        ),
        (b"{}", 'it has no "images" but nothing, so it is not in COCO.s format'),
        (b'{"images": []}', '"images" is an empty list'),
        (b'{"images": {"a": 1}}', '"images" is {.a.: 1}, not a list'),
    ],
)
def test_a_file_in_another_format_is_told_by_what_it_holds(tmp_path, contents, message):
    (tmp_path / "file.json").write_bytes(contents)
    with pytest.raises(DataNotFoundError, match=f"^{tmp_path}/file.json: {message}"):
        Instances(tmp_path / "file.json", tmp_path / "cache")
