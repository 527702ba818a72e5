"""A folder of classes as data for a classifier."""

import os
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from datamodules.augmented import AugmentedImages
from datamodules.census import describe
from datamodules.coco.augmentation import Crops
from datamodules.folder import ClassFolder
from datamodules.images import DataNotFoundError
from datamodules.reading.skipped import SkippedWarning
from tests.own_data import COLOURS, write_classes

NAMES = tuple(COLOURS)


@pytest.fixture
def load(tmp_path: Path):
    def load(folder: Path, **arguments: Any) -> ClassFolder:
        options = {"image_size": 8, "batch_size": 4, "cache_dir": tmp_path / "cache"} | arguments
        data = ClassFolder(folder, **options)
        data.prepare_data()
        data.setup("fit")
        return data

    return load


def pictures(data: ClassFolder, split: str) -> set[tuple[bytes, int]]:
    part = data.splits[split]
    return {(i.numpy().tobytes(), int(n)) for i, n in zip(part.images, part.labels)}


def write_numbers(folder: Path, counts: dict[str, int]) -> Path:
    """Grey images of 8 x 8, each of another brightness."""
    grey = 0
    for name, count in counts.items():
        (folder / name).mkdir(parents=True)
        for i in range(count):
            Image.new("RGB", (8, 8), (grey, grey, grey)).save(folder / name / f"{i}.png")
            grey += 1
    return folder


def test_images_have_the_labels_of_their_folders(tmp_path, load):
    for split in ("train", "val", "test"):
        write_classes(tmp_path / split, 3)
    data = load(tmp_path)
    assert data.class_names == NAMES
    assert (data.num_classes, data.image_shape) == (2, (3, 8, 8))
    for split in ("train", "val", "test"):
        images, labels = data.splits[split].images, data.splits[split].labels
        assert labels.tolist() == [0, 0, 0, 1, 1, 1]
        reddest = images.float().mean((2, 3)).argmax(1)
        assert reddest.tolist() == [0, 0, 0, 2, 2, 2]
    (batch,) = load(tmp_path, batch_size=6).val_dataloader()
    images, _ = data.on_after_batch_transfer(batch, 0)
    green = (batch[0][:, 1].float() - 116.28) / 57.12
    torch.testing.assert_close(images[:, 1], green)


def test_one_folder_is_divided_by_the_seed_of_the_split_alone(tmp_path, load):
    folder = write_numbers(tmp_path / "photos", {"a": 20, "b": 10})
    data = load(folder, val_share=0.2)
    train, val = pictures(data, "train"), pictures(data, "val")
    assert len(train) == 24
    assert sorted(label for _, label in val) == [0, 0, 0, 0, 1, 1]
    assert not train & val
    assert pictures(load(folder, val_share=0.2, seed=7), "val") == val
    assert pictures(load(folder, val_share=0.2, split_seed=7), "val") != val


def test_what_cannot_be_read_is_left_out_and_no_label_moves(tmp_path, load):
    folder = write_numbers(tmp_path / "photos", {"a": 4, "b": 4})
    (folder / "a" / "2.png").write_bytes(b"")
    (folder / "b" / "note.jpg").write_text("no image")
    for _ in range(2):  # the second time from the cache
        with pytest.warns(SkippedWarning) as warned:
            data = load(folder, val_share=0.5)
        assert {"a/2.png", "b/note.jpg"} == {
            str(each.message).rsplit(": ", 1)[1] for each in warned
        }
        found = pictures(data, "train") | pictures(data, "val")
        assert sorted((bytes[0], label) for bytes, label in found) == [
            (0, 0), (1, 0), (3, 0), (4, 1), (5, 1), (6, 1), (7, 1),
        ]  # fmt: skip


def test_a_changed_picture_is_read_again(tmp_path, load):
    folder = write_numbers(tmp_path / "photos", {"a": 4, "b": 4})
    load(folder, val_share=0.5)
    Image.new("RGB", (8, 8), (200, 200, 200)).save(folder / "a" / "0.png", compress_level=0)
    data = load(folder, val_share=0.5)
    assert 200 in {i[0] for part in ("train", "val") for i, _ in pictures(data, part)}


def test_photographs_are_turned_upright(tmp_path, load):
    folder = tmp_path / "photos"
    image = Image.new("RGB", (16, 8))
    image.paste((255, 255, 255), (0, 0, 8, 8))  # white on the left
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned clockwise: the left becomes the top
    for name in ("a", "b"):
        (folder / name).mkdir(parents=True)
        for i in range(2):
            image.save(folder / name / f"{i}.jpg", exif=exif, quality=95)
    image = load(folder, val_share=0.5).splits["train"].images[0]
    assert image[:, :3].float().mean() > 240
    assert image[:, 5:].float().mean() < 15


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"folder": None}, "folder: .*set data.folder"),
        ({"image_size": 0}, "image_size: expected at least 1"),
        ({"val_share": 1.0}, "val_share: expected a number between 0 and 1, got 1.0"),
        ({"batch_size": 0}, "batch_size: expected at least 1"),
    ],
)
def test_arguments_out_of_range_are_named(tmp_path, load, arguments, message):
    with pytest.raises(ValueError, match=message):
        load(**{"folder": tmp_path} | arguments)


def test_a_class_that_training_has_not_is_named(tmp_path, load):
    write_classes(tmp_path / "train", 2)
    write_classes(tmp_path / "val", 2)
    (tmp_path / "val" / NAMES[1]).rename(tmp_path / "val" / "screw")
    with pytest.raises(DataNotFoundError, match=r"val/screw is a class that .*train has not"):
        load(tmp_path)


def test_folders_without_images_are_named(tmp_path, load):
    with pytest.raises(DataNotFoundError, match=r"there is no folder of a class"):
        load(tmp_path / "photos", val_share=0.2)
    for name in NAMES:
        (tmp_path / "photos" / name).mkdir(parents=True)
    with pytest.raises(DataNotFoundError, match=r"there are no images"):
        load(tmp_path / "photos", val_share=0.2)
    write_classes(tmp_path / "photos", 1)
    with pytest.raises(DataNotFoundError, match=r"data.val_share: 0.2 .* leaves none to validate"):
        load(tmp_path / "photos", val_share=0.2)


def test_a_class_without_an_image_to_train_on_is_named(tmp_path, load):
    for split in ("train", "val"):
        write_numbers(tmp_path / split, {"a": 2, "b": 2})
    (tmp_path / "train" / "c").mkdir()
    with pytest.raises(DataNotFoundError, match=r"no images .* to train on in .*train/c, the"):
        load(tmp_path)
    (tmp_path / "train" / "c").rmdir()
    (tmp_path / "val" / "a").rename(tmp_path / "gone")  # to validate, none is needed
    assert load(tmp_path).splits["val"].labels.tolist() == [1, 1]


@pytest.mark.filterwarnings("ignore::datamodules.reading.skipped.SkippedWarning")
def test_a_class_of_which_no_image_can_be_read_is_named(tmp_path, load):
    folder = write_numbers(tmp_path / "photos", {"a": 4, "b": 4})
    for path in (folder / "b").iterdir():
        path.write_text("no image")
    with pytest.raises(DataNotFoundError, match=r"no images .* to train on in .*photos/b, the"):
        load(folder, val_share=0.25)


def test_folders_that_are_not_those_of_classes_are_named(tmp_path, load):
    for split in ("train", "val"):
        write_numbers(tmp_path / split, {"a": 3})
    with pytest.raises(DataNotFoundError, match=r"train has the folder of one class, a; a class"):
        ClassFolder(tmp_path, 8, 4, tmp_path / "cache").num_classes  # noqa: B018
    with pytest.raises(DataNotFoundError, match=r"train has the folder of one class, a; a class"):
        load(tmp_path)
    with pytest.raises(DataNotFoundError, match=r"data.val_share: expected null where there are"):
        load(tmp_path, val_share=0.5)


def test_pictures_beside_the_folders_of_classes_are_named(tmp_path, load):
    write_classes(tmp_path / "train", 2)
    write_classes(tmp_path / "val", 1)
    (tmp_path / "train" / "loose.png").write_bytes(b"")
    with pytest.warns(
        SkippedWarning, match=r"1 skipped, no folder of a class has them: loose\.png"
    ):
        load(tmp_path)


def test_what_is_hidden_is_no_picture(tmp_path, load):
    folder = write_numbers(tmp_path / "photos", {"a": 2, "b": 2})
    systems = (
        ".ipynb_checkpoints", "@eaDir", "__MACOSX", "lost+found", "#recycle", "$RECYCLE.BIN",
        "System Volume Information", ".git",
    )  # fmt: skip
    for name in systems:  # as a class, in a class, and as Synology keeps thumbnails
        for inside in (folder, folder / "a", folder / "a" / "0.png.d"):
            write_numbers(inside, {name: 2})
        write_numbers(folder / "b" / name, {"1.png": 2})
    for name in ("._0.png", ".DS_Store", "Thumbs.db", "desktop.ini"):
        (folder / "a" / name).write_bytes(b"")
    data = load(folder, val_share=0.5)
    assert [len(data.splits[split]) for split in ("train", "val")] == [2, 2]
    assert data.class_names == ("a", "b")


def test_links_that_lead_nowhere_are_named(tmp_path, load):
    folder = write_numbers(tmp_path / "photos", {"a": 2, "b": 2})
    (folder / "a" / "gone.png").symlink_to("nowhere")
    (folder / "a" / "itself.png").symlink_to("itself.png")
    (folder / "c").symlink_to("c")
    (folder / "a" / "loop").symlink_to(folder)
    with pytest.warns(SkippedWarning, match=r"skipped, the file is missing: a/(gone|itself)\.png"):
        data = load(folder, val_share=0.5)
    assert data.class_names == ("a", "b")


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_what_cannot_be_read_is_named(tmp_path, load):
    folder = write_numbers(tmp_path / "photos", {"a": 3, "b": 3})
    inside = folder / "a" / "inside"
    inside.mkdir()
    for path in (inside, folder):
        path.chmod(0)
        with pytest.raises(DataNotFoundError, match=r"cannot be read \(Permission denied\); make"):
            load(folder, val_share=0.3)
        path.chmod(0o700)
    (folder / "a" / "0.png").chmod(0)
    with pytest.warns(SkippedWarning, match=r"1 skipped, .*\(Permission denied\): a/0\.png"):
        load(folder, val_share=0.3)


def test_names_that_a_terminal_cannot_show_are_escaped(tmp_path, load):
    folder = write_numbers(tmp_path / "photos", {"a": 2, os.fsdecode(b"\xff"): 2, "b\n": 2})
    (folder / os.fsdecode(b"\xff") / os.fsdecode(b"\xfe.png")).write_bytes(b"")
    with pytest.warns(SkippedWarning, match=r"the file is empty: \\udcff/\\udcfe\.png"):
        data = load(folder, val_share=0.5)
    data.splits["val"].labels.zero_()
    said = describe("val", data.census()["val"])
    assert said == r"val: 3 images; classes without an image: b\n, \udcff"


def test_every_class_keeps_an_image_to_train_on(tmp_path, load):
    folder = write_numbers(tmp_path / "photos", {"a": 1, "b": 3})
    data = load(folder, val_share=0.9)
    assert data.splits["train"].labels.tolist() == [0, 1]
    assert describe("val", data.census()["val"]) == "val: 2 images; classes without an image: a"


@pytest.mark.parametrize("name", ["x.bmp", "x.tif", "x.TIFF", "x.ppm"])
def test_a_picture_of_another_format_is_named(tmp_path, load, name):
    folder = write_numbers(tmp_path / "photos", {"a": 2, "b": 2})
    Image.new("RGB", (8, 8)).save(folder / "a" / name)
    with pytest.warns(SkippedWarning, match=rf"none of GIF, JPEG, PNG, WEBP\): a/{name}"):
        load(folder, val_share=0.5)


@pytest.mark.parametrize(
    ("name", "mode", "colour", "expected"),
    [
        ("x.JPG", "RGB", (90, 90, 90), 90),
        ("x.jfif", "L", 90, 90),
        ("x.png", "LA", (90, 0), 90),
        ("x.png", "RGBA", (90, 90, 90, 10), 90),
        ("x.png", "I;16", 90 * 256 + 7, 90),
        ("x.webp", "RGB", (90, 90, 90), 90),
        ("in/side/x.gif", "L", 90, 90),
    ],
)
def test_pictures_of_any_kind_have_their_colours(tmp_path, load, name, mode, colour, expected):
    for split in ("train", "val"):
        write_numbers(tmp_path / split, {"b": 1, "c": 1})
    path = tmp_path / "train" / "a" / name
    path.parent.mkdir(parents=True)
    format = {"JPG": "JPEG", "jfif": "JPEG"}.get(path.suffix[1:])
    Image.new(mode, (10, 6), colour).save(path, format=format)
    image = load(tmp_path).splits["train"].images[0]
    assert (image.int() - expected).abs().max() <= 1


def write_noise(folder: Path, count: int = 6) -> Path:
    generator = np.random.default_rng(0)
    for name in ("a", "b"):
        (folder / name).mkdir(parents=True)
        for i in range(count):
            pixels = generator.integers(256, size=(16, 16, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{i}.png")
    return folder


def epoch(data: ClassFolder, number: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    batches = data.train_dataloader()
    batches.sampler.set_epoch(number)
    return list(batches)


def shown(batches: Iterable) -> set[bytes]:
    return {image.numpy().tobytes() for images, _ in batches for image in images}


def equal(one: list, other: list) -> bool:
    return all(torch.equal(a, b) for x, y in zip(one, other, strict=True) for a, b in zip(x, y))


def test_training_images_are_crops_that_the_seed_determines(tmp_path, load):
    options = {"folder": write_noise(tmp_path / "photos"), "val_share": 0.5, "image_size": 16}
    data = load(**options)
    first = epoch(data)
    assert equal(first, epoch(load(**options)))
    assert not shown(first) & shown(epoch(data, 1))
    assert not shown(first) & shown(epoch(load(**options, seed=1)))
    whole = {image.numpy().tobytes() for image in data.splits["train"].images}
    assert not whole & shown(first)
    plain = epoch(load(**options, augment=False))
    assert shown(plain) == whole
    assert [labels.tolist() for _, labels in first] == [labels.tolist() for _, labels in plain]
    validated = {image.numpy().tobytes() for image in data.splits["val"].images}
    assert shown(data.val_dataloader()) == shown(data.test_dataloader()) == validated


def test_crops_are_the_same_by_indexing_as_on_a_gpu(tmp_path, load):
    data = load(write_noise(tmp_path / "photos"), val_share=0.5, image_size=16)
    expected = epoch(data)
    batches = data.train_dataloader()
    assert isinstance(batches.data, AugmentedImages)
    batches.data._crops = Crops(16, torch.device("cpu"))
    assert equal(list(batches), expected)


def test_processes_together_show_the_crops_of_one(tmp_path, load):
    options = {"folder": write_noise(tmp_path / "photos"), "val_share": 0.5, "image_size": 16}
    (alone,) = epoch(load(**options, batch_size=6))
    parts = []
    for rank in range(2):
        data = load(**options, batch_size=3)
        data.trainer = SimpleNamespace(
            global_rank=rank,
            world_size=2,
            strategy=SimpleNamespace(root_device=torch.device("cpu")),
        )
        parts += epoch(data)
    for whole, halves in zip(alone, zip(*parts), strict=True):
        assert torch.equal(whole, torch.stack(halves, dim=1).flatten(0, 1))
