"""A folder of classes as data for a classifier."""

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

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
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    image = Image.new("RGB", (16, 8))
    image.paste((255, 255, 255), (0, 0, 8, 8))  # white on the left
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned clockwise: the left becomes the top
    for name in ("a", "b"):
        for i in range(2):
            image.save(tmp_path / name / f"{i}.jpg", exif=exif, quality=95)
    image = load(tmp_path, val_share=0.5).splits["train"].images[0]
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
    (tmp_path / "photos" / "bolt").mkdir(parents=True)
    with pytest.raises(DataNotFoundError, match=r"there are no images"):
        load(tmp_path / "photos", val_share=0.2)
    write_classes(tmp_path / "photos", 1)
    with pytest.raises(DataNotFoundError, match=r"data.val_share: 0.2 .* leaves none to validate"):
        load(tmp_path / "photos", val_share=0.2)
