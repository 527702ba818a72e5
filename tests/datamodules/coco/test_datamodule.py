import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from datamodules.coco import COCO, pixels
from datamodules.images import CacheError, DataNotFoundError
from datamodules.reading import cache
from datamodules.reading.skipped import SkippedWarning
from tests.datamodules.coco.files import Split, rectangle, write_jpeg


def batches(data: COCO) -> list:
    return [tuple(batch) for batch in data.train_dataloader()]


def same(one: list, other: list) -> bool:
    return len(one) == len(other) and all(
        torch.equal(a, b) for x, y in zip(one, other) for a, b in zip(x, y)
    )


def test_images_and_labels_stay_together(both, load):
    """Of their own size nothing is resampled, so that pixels can be compared."""
    for split in both.values():
        split.clear()
        for i in range(3):
            image = split.image(height=8, width=8)
            split.instance(image, rectangle(i, i, 2, 3), category=18)
        split.write()
    data = load()
    (batch,) = data.val_dataloader()
    assert batch.images.dtype == batch.labels.dtype == torch.uint8
    for row, i in enumerate((2, 1, 0)):  # by id, which were given out from the highest
        path = both["val"].folder / both["val"].images[i]["file_name"]
        pixels = torch.from_numpy(np.array(Image.open(path)))
        assert torch.equal(batch.images[row].permute(1, 2, 0), pixels)
        expected = torch.zeros(8, 8, dtype=torch.uint8)
        expected[i : i + 3, i : i + 2] = 2
        assert torch.equal(batch.labels[row], expected)


def test_images_of_any_shape_become_squares_that_show_them_whole(both, load):
    val = both["val"]
    val.clear()
    pixels = torch.zeros(3, 16, 48, dtype=torch.uint8)
    pixels[:, :, 24:] = 200
    image = val.image(pixels)
    val.instance(image, rectangle(24, 0, 24, 16))
    val.write()
    data = load()
    (batch,) = data.val_dataloader()
    expected = torch.zeros(8, 8)
    expected[:, 4:] = 1
    assert torch.equal(batch.labels[0].float(), expected)
    assert ((batch.images[0] > 100).float() == expected).all()


def test_pixels_are_normalised_on_the_device(both, load):
    data = load()
    (batch,) = data.val_dataloader()
    images = data.on_after_batch_transfer(batch, 0).images
    assert images.dtype == torch.float32
    green = (batch.images[:, 1].float() - 116.28) / 57.12
    torch.testing.assert_close(images[:, 1], green)


def test_greyscale_images_have_three_equal_channels(both, load):
    val = both["val"]
    val.clear()
    image = val.image(torch.arange(64, dtype=torch.uint8).view(1, 8, 8))
    val.instance(image, rectangle(1, 1, 2, 2))
    val.write()
    (batch,) = load().val_dataloader()
    assert torch.equal(batch.images[:, 0], batch.images[:, 1])
    assert torch.equal(batch.images[:, 0], batch.images[:, 2])
    assert batch.images.float().std() > 10


def test_an_image_without_annotations_is_background(both, load):
    both["val"].image()
    both["val"].write()
    (batch,) = load().val_dataloader()
    assert len(batch.labels) == 4
    assert [bool(labels.any()) for labels in batch.labels] == [False, True, True, True]


def to_nowhere(path: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere")


DAMAGE = {  # what becomes of a file, and what is said of it
    "missing": (lambda path: path.unlink(), "the file is missing"),
    "a link to nowhere": (to_nowhere, "the file is missing"),
    "empty": (lambda path: path.write_bytes(b""), "the file is empty"),
    "cut": (lambda path: path.write_bytes(path.read_bytes()[:-20]), "truncated"),
    "a page": (lambda path: path.write_bytes(b"<html>404</html>"), "cannot be decoded"),
    "another": (
        lambda path: write_jpeg(torch.zeros(3, 4, 5, dtype=torch.uint8), path),
        "the image is 5 x 4, annotated as 10 x 8",
    ),
}


@pytest.mark.parametrize("keep", [False, True], ids=["decoded", "kept"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_image_is_left_out_by_name(both, load, damage, keep):
    name = both["train"].images[2]["file_name"]
    change, reason = DAMAGE[damage]
    change(both["train"].folder / name)
    for _ in range(2):  # the second time from the cache
        with pytest.warns(SkippedWarning, match=f"train2017: 1 skipped, .*{reason}.*: {name}"):
            data = load(cache_images=keep)
        ((found, names),) = data.skipped["train2017"].items()
        assert reason in found
        assert names == [name]
        assert sum(len(images) for images, _ in batches(data)) == 5
        assert sum(len(batch.images) for batch in data.val_dataloader()) == 3


def test_a_damaged_annotation_is_counted_and_training_goes_on(both, load):
    image = both["train"].images[0]["id"]
    both["train"].instance(image, rectangle(0, 0, 9, 7), category=0)
    both["train"].write()
    with pytest.warns(SkippedWarning, match="1 skipped, the category is not one of the file's"):
        data = load()
    labels = torch.cat([labels for _, labels in batches(data)])
    assert set(labels.unique().tolist()) <= {0, 1, 2}


@pytest.mark.parametrize("gone", ["the folder", "its images", "what is in them"])
def test_no_image_at_all_is_an_error(both, load, gone):
    for path in list(both["train"].folder.iterdir()):
        path.write_bytes(b"") if gone == "what is in them" else path.unlink()
    if gone == "the folder":
        both["train"].folder.rmdir()
    with pytest.raises(DataNotFoundError, match="none of the 6 images"):
        load()


@pytest.mark.parametrize("gone", ["annotations", "train2017"])
def test_only_what_is_missing_of_coco_can_be_downloaded(both, load, tmp_path, gone):
    for path in [*(tmp_path / "data" / "coco" / gone).iterdir()]:
        path.write_text("[]")
    with pytest.raises(DataNotFoundError) as caught:
        load()
    assert "`python scripts/prepare_data.py coco` downloads COCO" in str(caught.value)
    with pytest.raises(DataNotFoundError) as caught:
        load(train_images=tmp_path / "data" / "coco" / "train2017")
    assert "download" not in str(caught.value)


def test_other_categories_than_coco_s_are_an_error(both, tmp_path):
    data = COCO(tmp_path / "data", "segmentation", 8, 4, tmp_path / "cache")
    with pytest.raises(DataNotFoundError, match=r"has 2 categories, expected 80"):
        data.prepare_data()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"task": "poses"}, "task: expected one of .*'segmentation'.*got 'poses'"),
        ({"task": None}, "task: .*got None.*model=segmentation"),
        ({"year": 2015}, "year: expected one of .*2014.*got 2015"),
        ({"test_split": "test"}, "test_split: expected one of"),
        ({"image_size": 0}, "image_size: expected at least 1, got 0"),
        ({"batch_size": 0}, "batch_size: expected at least 1, got 0"),
    ],
)
def test_arguments_out_of_range_are_named(load, arguments, message):
    with pytest.raises(ValueError, match=message):
        load(**arguments)


def test_the_files_of_2014_are_found(tmp_path, load):
    for name in ("train2014", "val2014"):
        split = Split(tmp_path / "data", name)
        split.instance(split.image(), rectangle(1, 1, 2, 2))
        split.write()
    data = load(year=2014)
    assert [len(images) for images, _ in batches(data)] == [1]


def test_the_data_folder_is_only_read(both, load, tmp_path):
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "data").rglob("*")}
    load(cache_images=True)
    load("captions")
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "data").rglob("*")} == before


# Order and augmentation


def test_batches_depend_on_the_seed_alone(both, load):
    one = batches(load(seed=3))
    torch.rand(5)  # another state of the global generator
    state = torch.get_rng_state()
    assert same(one, batches(load(seed=3)))
    assert torch.equal(torch.get_rng_state(), state), "nothing is taken from it"
    assert not same(one, batches(load(seed=4)))


@pytest.mark.parametrize("task", ["segmentation", "captions", "denoise"])
def test_workers_give_the_same_batches(both, load, task):
    alone, workers = load(task, seed=5), load(task, seed=5, num_workers=2)
    for batch, batch_w in zip(alone.train_dataloader(), workers.train_dataloader(), strict=True):
        assert torch.equal(batch.images, batch_w.images)
        assert torch.equal(batch[1], batch_w[1])


def test_every_epoch_has_another_order_and_other_changes(both, load):
    loader = load(batch_size=6).train_dataloader()
    (first,) = loader
    loader.batch_sampler.sampler.set_epoch(1)
    (second,) = loader
    assert not torch.equal(first.images, second.images)


def test_labels_are_changed_as_their_image_is(both, load):
    """Where the picture is bright the label is 1, before and after."""
    train = both["train"]
    train.clear()
    pixels = torch.zeros(3, 32, 32, dtype=torch.uint8)
    pixels[:, 5:12, 3:20] = 255
    train.instance(train.image(pixels), rectangle(3, 5, 17, 7))
    train.write()
    data = load(image_size=32)
    loader = data.train_dataloader()
    seen = set()
    for epoch in range(10):
        loader.batch_sampler.sampler.set_epoch(epoch)
        (batch,) = loader
        bright = batch.images[0, 0] > 127
        assert (bright != (batch.labels[0] == 1)).float().mean() < 0.06
        seen.add(tuple(bright.flatten().tolist()))
    assert len(seen) > 5


def test_without_augmentation_training_images_are_as_they_are(both, load):
    data = load(augment=False, batch_size=6, test_split="train")
    (train,), (test,) = data.train_dataloader(), data.test_dataloader()

    def rows(batch) -> set[bytes]:
        return {image.numpy().tobytes() for image in batch.images}

    assert rows(train) == rows(test)
    assert len(rows(train)) == 6


def test_the_validation_images_are_tested_too(both, load):
    data = load()
    (val,), (test,) = data.val_dataloader(), data.test_dataloader()
    assert torch.equal(val.images, test.images)
    assert torch.equal(val.labels, test.labels)


def test_noise_is_another_in_every_epoch_of_training_and_the_same_in_validation(both, load):
    data = load("denoise", batch_size=6)
    loader = data.train_dataloader()
    seeds = []
    for epoch in range(2):
        loader.batch_sampler.sampler.set_epoch(epoch)
        (batch,) = loader
        seeds += batch.seeds.tolist()
    assert len(set(seeds)) == 12
    for batch_size in (1, 3):
        other = load("denoise", batch_size=batch_size, seed=9).val_dataloader()
        assert torch.cat([batch.seeds for batch in other]).tolist() == [0, 1, 2]


def test_images_to_denoise_are_those_to_detect_objects_in(both, load):
    both["val"].image()
    both["val"].write()
    (denoise,), (detect,) = (load(task).val_dataloader() for task in ("denoise", "detection"))
    assert torch.equal(denoise.images, detect.images)
    assert len(denoise.images) == 4, "with objects or without"
    assert load("denoise").census()["val"] == (4, 4, "image", (), {}, "")


# What is kept


@pytest.mark.parametrize("task", ["segmentation", "captions", "denoise"])
def test_kept_images_give_the_same_batches(both, load, task):
    decoded, kept = load(task), load(task, cache_images=True)
    for batch, other in zip(decoded.train_dataloader(), kept.train_dataloader(), strict=True):
        assert torch.equal(batch.images, other.images)
        assert torch.equal(batch[1], other[1])


def test_kept_images_are_not_decoded_again(both, load, monkeypatch):
    expected = batches(load(cache_images=True))

    def fail(*arguments, **options):
        raise AssertionError("decoded again")

    monkeypatch.setattr(pixels, "decode", fail)
    monkeypatch.setattr("datamodules.coco.annotations.file._read_json", fail)
    assert same(batches(load(cache_images=True)), expected)


@pytest.mark.parametrize("keep", [False, True], ids=["decoded", "kept"])
def test_files_that_change_are_read_again(both, load, keep):
    load(cache_images=keep)
    path = both["val"].folder / both["val"].images[0]["file_name"]
    write_jpeg(torch.full((3, 8, 10), 77, dtype=torch.uint8), path)
    both["val"].instances.clear()
    both["val"].instance(both["val"].images[0]["id"], rectangle(0, 0, 10, 8), category=18)
    both["val"].write()
    (batch,) = load(cache_images=keep).val_dataloader()
    assert (batch.images[2].float() - 77).abs().max() <= 2
    assert (batch.labels[2] == 2).all()
    assert not batch.labels[:2].any()


def test_another_image_size_is_kept_apart(both, load):
    load(cache_images=True)
    (batch,) = load(cache_images=True, image_size=6).val_dataloader()
    assert batch.images.shape[2:] == batch.labels.shape[1:] == (6, 6)


def test_an_interrupted_preparation_is_not_taken_for_a_finished_one(
    both, load, monkeypatch, tmp_path
):
    expected = batches(load(cache_dir=tmp_path / "other"))
    resize = pixels.resize
    count = 0

    def interrupt(*arguments):
        nonlocal count
        count += 1
        if count == 4:
            raise KeyboardInterrupt
        return resize(*arguments)

    monkeypatch.setattr(pixels, "resize", interrupt)
    with pytest.raises(KeyboardInterrupt):
        load(cache_images=True)
    assert not list((tmp_path / "cache").glob("images*[!k]"))
    monkeypatch.setattr(pixels, "resize", resize)
    assert same(batches(load(cache_images=True)), expected)


def test_what_a_killed_process_left_is_removed(tmp_path):
    def make(folder: Path) -> None:
        np.save(folder / "one", np.arange(3))

    def killed(folder: Path) -> None:
        (folder / "half").write_text("")
        os.chmod(folder, 0o700)
        left.append(folder)
        raise KeyboardInterrupt

    left: list[Path] = []
    with pytest.raises(KeyboardInterrupt):
        cache.find_or_make(tmp_path, "kind", {}, killed)
    left[0].mkdir()  # as if there had been no time to clean up
    (left[0] / "half").write_text("")
    entry = cache.find_or_make(tmp_path, "kind", {}, make)
    assert entry["one"].tolist() == [0, 1, 2]
    assert not (entry.folder / "half").exists()
    assert not left[0].exists()


@pytest.mark.parametrize("copy", [lambda e: e, lambda e: pickle.loads(pickle.dumps(e))])
def test_the_arrays_of_an_entry_are_mapped_before_threads_read_them(tmp_path, monkeypatch, copy):
    entry = copy(
        cache.find_or_make(tmp_path, "kind", {}, lambda to: np.save(to / "one", np.arange(3)))
    )
    monkeypatch.delattr(np, "load")
    assert entry["one"].tolist() == [0, 1, 2]


def test_a_cache_that_cannot_be_written_says_what_to_do(both, load, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheError, match=r"cannot write the cache .*file.*data\.cache_dir"):
        load(cache_dir=tmp_path / "file" / "cache")


def test_a_full_disk_is_found_before_anything_is_written(both, load, monkeypatch, tmp_path):
    load()
    usage = type("usage", (), {"free": cache.SPARE_BYTES + 100})
    monkeypatch.setattr(cache.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(CacheError, match=r"GiB free; set data\.cache_dir"):
        load(cache_images=True)
    assert not list((tmp_path / "cache").glob("images-*/*"))


# The published files


@pytest.mark.data
@pytest.mark.skipif("HOCONV_DATA_DIR" not in os.environ, reason="HOCONV_DATA_DIR is not set")
def test_real_images_and_annotations(tmp_path):
    data = COCO(os.environ["HOCONV_DATA_DIR"], "segmentation", 64, 8, tmp_path)
    data.prepare_data()
    data.setup("fit")
    assert data.skipped == {}
    found = {
        name: torch.cat([batch.labels for batch in loader])
        for name, loader in (("train", data.train_dataloader()), ("val", data.val_dataloader()))
    }
    for labels in found.values():
        assert 70 <= len(labels) <= 80
        classes = set(labels.unique().tolist()) - {255}
        assert 60 < len(classes) <= 81
        assert max(classes) <= 80
    assert data.splits.instances("val").categories[:2] == ["person", "bicycle"]


@pytest.mark.data
@pytest.mark.skipif("HOCONV_DATA_DIR" not in os.environ, reason="HOCONV_DATA_DIR is not set")
def test_real_captions(tmp_path):
    data = COCO(os.environ["HOCONV_DATA_DIR"], "captions", 64, 8, tmp_path)
    data.prepare_data()
    data.setup("fit")
    assert data.skipped == {}
    assert data.vocabulary is not None
    assert {"man", "on", "with"} <= set(data.vocabulary.words)
    references = [r for batch in data.val_dataloader() for r in batch.references]
    assert len(references) == 79
    assert all(len(r) == 5 for r in references)
