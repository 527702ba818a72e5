"""The generated data set is read back with pycocotools, as any set in COCO's format."""

import contextlib
import io
from typing import Any

import pytest
import torch
from pycocotools.coco import COCO as AnnotationFile

from datamodules.coco import COCOTiny, shapes
from datamodules.coco.annotations.objects import IGNORE


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def load(cache_dir, task: str = "segmentation", **arguments) -> COCOTiny:
    options = {"image_size": 64, "batch_size": 64} | arguments
    data = COCOTiny(cache_dir, task=task, **options)
    data.prepare_data()
    data.setup("fit")
    return data


def read(data: COCOTiny, kind: str, split: str = "train2017") -> Any:
    with contextlib.redirect_stdout(io.StringIO()):
        return AnnotationFile(str(data.splits.files.root / "annotations" / f"{kind}_{split}.json"))


def test_it_has_polygons_crowds_empty_images_and_five_captions_each(cache_dir):
    data = load(cache_dir)
    assert data.skipped == {}
    instances, captions = read(data, "instances"), read(data, "captions")
    assert len(instances.imgs) == 512
    assert {category["name"] for category in instances.cats.values()} == {
        "circle", "square", "triangle",
    }  # fmt: skip
    crowds = [a for a in instances.anns.values() if a["iscrowd"]]
    assert len(crowds) == 64
    assert all(isinstance(a["segmentation"], dict) for a in crowds)
    empty = [image for image in instances.imgs if not instances.imgToAnns[image]]
    assert len(empty) == 32
    assert {len(captions.imgToAnns[image]) for image in captions.imgs} == {5}
    for annotation in instances.anns.values():
        mask = instances.annToMask(annotation)
        assert mask.sum() == annotation["area"]
        x, y, width, height = annotation["bbox"]
        assert mask[y : y + height, x : x + width].sum() == annotation["area"]


def test_captions_name_what_is_annotated(cache_dir):
    data = load(cache_dir)
    instances, captions = read(data, "instances"), read(data, "captions")
    for image in instances.imgs:
        names = [
            instances.cats[a["category_id"]]["name"]
            for a in instances.imgToAnns[image]
            if not a["iscrowd"]
        ]
        for annotation in captions.imgToAnns[image]:
            text = annotation["caption"].split()
            assert sorted(word for word in text if word in shapes.CATEGORIES.values()) == sorted(
                names
            )


def test_labels_are_where_the_colour_is(cache_dir):
    data = load(cache_dir)
    seen = set()
    for batch in data.val_dataloader():
        images, labels = batch.images.float(), batch.labels
        seen |= set(labels.unique().tolist())
        colourfulness = images.amax(1) - images.amin(1)
        assert colourfulness[(labels > 0) & (labels != IGNORE)].mean() > 100
        assert colourfulness[labels == 0].mean() < 30
    assert seen == {0, 1, 2, 3, IGNORE}


def test_it_is_the_same_every_time_and_made_once(cache_dir, tmp_path):
    one, other = load(cache_dir), load(tmp_path)
    (first, *_), (second, *_) = one.val_dataloader(), other.val_dataloader()
    assert torch.equal(first.images, second.images)
    assert torch.equal(first.labels, second.labels)
    made = (one.splits.files.root / "val2017" / "000000000513.jpg").stat().st_mtime_ns
    again = load(cache_dir)
    assert (again.splits.files.root / "val2017" / "000000000513.jpg").stat().st_mtime_ns == made


def test_training_and_validation_share_no_image(cache_dir):
    data = load(cache_dir, augment=False)
    seen = {
        name: {image.numpy().tobytes() for batch in loader for image in batch.images}
        for name, loader in (("train", data.train_dataloader()), ("val", data.val_dataloader()))
    }
    assert [len(images) for images in seen.values()] == [512, 128]
    assert not seen["train"] & seen["val"]


def test_its_captions_are_read_too(cache_dir):
    data = load(cache_dir, "captions", min_count=1)
    assert data.vocabulary is not None
    assert {"red", "circle", "left"} <= set(data.vocabulary.words)
    (batch, *_) = data.train_dataloader()
    assert batch.lengths.min() >= 4
