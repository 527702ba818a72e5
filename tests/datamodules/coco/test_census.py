"""What counts in data of COCO's format, and how it is said."""

from typing import Any

import pytest

from datamodules.census import describe
from datamodules.coco.annotations.objects import IGNORE
from datamodules.coco.augmentation import CROWD
from datamodules.images import DataNotFoundError
from tests.datamodules.coco.files import Split, rectangle

OBJECTS = ("segmentation", "detection")


def annotate(
    split: Split, image: int, box: tuple[float, ...], crowd: int = 0, **values: Any
) -> None:
    split.instance(image, rectangle(*box), crowd=crowd, **values)
    split.instances[-1] |= {"bbox": list(box), "area": box[2] * box[3]}


def lines(data: Any) -> list[str]:
    return [describe(name, counts) for name, counts in data.census().items()]


@pytest.mark.parametrize("task", OBJECTS)
def test_objects_that_count_are_said_apart_from_those_that_do_not(both, load, task):
    val = both["val"]
    val.clear()
    first, second, _ = (val.image(height=8, width=10) for _ in range(3))
    annotate(val, first, (1, 1, 4, 4))
    annotate(val, first, (1, 1, 4, 4), crowd=1)
    annotate(val, second, (2, 2, 5, 5), crowd=1)
    val.write()
    train, said, tested = lines(load(task, image_size=32))
    assert train == "train: 6 images, 12 objects"
    assert said == (
        "val: 3 images, 1 object, 2 ignored crowds, 2 images without an object; "
        "classes without an object: dog"
    )
    assert tested == said.replace("val", "test")


def test_objects_that_vanish_are_said(both, load):
    val = both["val"]
    val.clear()
    image = val.image(height=40, width=40)
    for box in ((0, 0, 20, 20), (0, 0, 20, 20), (30, 30, 4, 4)):  # of two the later is in front
        annotate(val, image, box)
    val.write()
    assert (
        ", 3 objects, 1 object behind others, 1 object smaller than a pixel at 8 x 8;"
        in lines(load())[1]
    )
    assert (
        ", 3 objects, 1 object less than 4 pixels wide or high at 8 x 8;"
        in lines(load("detection"))[1]
    )


@pytest.mark.parametrize("task", OBJECTS)
def test_only_the_images_of_a_set_are_counted(both, load, task):
    train = both["train"]
    (train.folder / train.images[0]["file_name"]).unlink()
    with pytest.warns(UserWarning, match="the file is missing"):
        counts = load(task, val_share=0.5).census()
    assert sum(counts[name].images for name in ("train", "val")) == 5
    assert [counts[name].counted for name in ("train", "val")] == [
        2 * counts[name].images for name in ("train", "val")
    ]


@pytest.mark.parametrize("task", OBJECTS)
def test_crowds_are_objects_where_the_file_means_them_so(both, load, task):
    for split in both.values():
        for said in split.instances:
            said["iscrowd"] = 1
        split.write()
    assert load(task).census()["train"].counted == 0
    data = load(task, crowds="objects")
    assert data.census()["train"].counted == 12
    (batch,) = data.val_dataloader()
    counted = batch.labels if task == "segmentation" else batch.classes
    assert not (counted == (IGNORE if task == "segmentation" else CROWD)).any()
    if task == "detection":
        assert not any(said.crowds.any() for said in batch.truth.of_images())
    with pytest.raises(ValueError, match=r"crowds: expected one of \('ignore', 'objects'\)"):
        load(task, crowds="count")


@pytest.mark.parametrize("task", OBJECTS)
def test_fractions_of_the_image_are_refused(both, load, task):
    for split in both.values():
        for said in split.instances:
            said |= {"bbox": [0.5, 0.25, 0.5, 0.5], "segmentation": rectangle(0.5, 0.25, 0.5, 0.5)}
        split.write()
    with pytest.raises(DataNotFoundError, match=r"train2017\.json: .*fractions of the image"):
        load(task)
    annotate(both["train"], both["train"].images[0]["id"], (1, 1, 2, 2))  # one is in pixels
    both["train"].write()
    with pytest.raises(DataNotFoundError, match=r"val2017\.json: .*fractions of the image"):
        load(task)


def test_captions_without_a_known_word_count_nothing(both, load):
    for name, image in (("train", both["train"].images[0]), ("val", both["val"].images[0])):
        both[name].caption(image["id"], "Zwei Hunde")
        both[name].write()
    assert lines(load("captions"))[:2] == [
        "train: 6 images, 12 captions, 1 caption of unknown words alone",
        "val: 3 images, 6 captions, 1 caption of unknown words alone",
    ]
    assert load("captions", min_count=100).census()["train"].counted == 0
