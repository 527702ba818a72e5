"""python train.py on data of people's own: train, test and predict."""

from __future__ import annotations

import contextlib
import csv
import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from tests.datamodules.coco import exporters
from tests.own_data import COLOURS, write_classes, write_coco, write_picture

SHORT = (
    "trainer=cpu", "impl=reference", "debug=fast", "data.batch_size=2", "data.image_size=16",
    "model.network.width=4",
)  # fmt: skip
LOADED = (*SHORT, "data.num_workers=0")  # of COCO's format
NAMES = list(COLOURS)


@pytest.fixture
def cached(tmp_path) -> str:
    return f"data.cache_dir={tmp_path / 'cache'}"


def checkpoint_of(done) -> Path:
    assert done.exit_code == 0, done.err
    return next((done.folder / "checkpoints").iterdir())


def class_names(checkpoint: Path) -> list[str]:
    return torch.load(checkpoint, weights_only=True)["run"]["class_names"]


def rows(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def test_data_as_other_tools_write_it(run, tmp_path, cached):
    exporters.roboflow(tmp_path / "parts")
    folder = f"data.folder={tmp_path / 'parts'}"
    checkpoint = checkpoint_of(run("experiment=coco_segmentation", folder, cached, *LOADED))
    assert class_names(checkpoint) == ["background", *exporters.CLASSES]
    predicted = run("mode=predict", f"ckpt={checkpoint}", "trainer=cpu", "impl=reference")
    assert {row["image"] for row in rows(predicted.folder / "masks.csv")} == {
        path.name for path in (tmp_path / "parts" / "valid").glob("*.png")
    }


def test_segmentation_with_categories_of_one_s_own(run, tmp_path, cached):
    folder = write_coco(write_coco(tmp_path / "parts"), "val", 3)
    done = run("experiment=coco_segmentation", f"data.folder={folder}", cached, *LOADED)
    checkpoint = checkpoint_of(done)
    assert "decoded files, in the process that trains" in done.out
    assert class_names(checkpoint) == ["background", *NAMES]
    weights = torch.load(checkpoint, weights_only=True)["state_dict"]
    assert len(weights["network.classifier.weight"]) == 3

    tested = run("mode=test", f"ckpt={checkpoint}", "trainer=cpu", "impl=reference")
    assert tested.results["metrics"]["test/mean_iou"] == done.results["metrics"]["test/mean_iou"]

    predicted = run("mode=predict", f"ckpt={checkpoint}", f"input={folder / 'val'}", *SHORT[:2])
    found = rows(predicted.folder / "masks.csv")
    assert {row["image"] for row in found} == {f"line 1/part {i}.png" for i in range(3)}
    assert all(row["class"] == ["background", *NAMES][int(row["value"])] for row in found)
    for name in {row["image"] for row in found}:
        shares = [float(row["share"]) for row in found if row["image"] == name]
        assert sum(shares) == pytest.approx(1, abs=1e-5)


def average_precision(annotations: Path, results: Path) -> float:
    """As the official evaluation computes it from two files."""
    with contextlib.redirect_stdout(io.StringIO()):
        truth = COCO(str(annotations))
        evaluation = COCOeval(truth, truth.loadRes(str(results)), "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return float(evaluation.stats[0])


def test_detection_with_categories_of_one_s_own(run, tmp_path, cached):
    folder = write_coco(write_coco(tmp_path / "parts"), "val", 3)
    long = ("trainer.max_epochs=30", "trainer.limit_train_batches=4", "trainer.limit_val_batches=2")
    done = run(
        "experiment=coco_detection", f"data.folder={folder}", cached, *LOADED, *long,
        "trainer.limit_test_batches=2", "trainer.check_val_every_n_epoch=30",
        "data.test_split=val", "model.network.width=8", "data.augment=false",
    )  # fmt: skip
    checkpoint = checkpoint_of(done)
    assert class_names(checkpoint) == NAMES
    score = done.results["metrics"]["test/ap"]
    assert score > 0.05

    predicted = run("mode=predict", f"ckpt={checkpoint}", *SHORT[:2])
    assert predicted.exit_code == 0, predicted.err
    results = predicted.folder / "detections.json"
    annotations = folder / "annotations" / "instances_val.json"
    assert average_precision(annotations, results) == pytest.approx(score)
    assert {row["category_id"] for row in json.loads(results.read_text())} <= {0, 7}
    for i in range(3):
        name = f"line 1/part {i}.png"
        with Image.open(predicted.folder / "boxes" / f"{name}.png") as drawn:
            pixels = np.asarray(drawn)
        original = np.asarray(Image.open(folder / "val" / name))
        assert pixels.shape == original.shape

    others = run("mode=predict", f"ckpt={checkpoint}", f"input={folder / 'val'}", *SHORT[:2])
    found = json.loads((others.folder / "detections.json").read_text())
    same = json.loads(results.read_text())
    assert [row["score"] for row in found] == pytest.approx([row["score"] for row in same])
    assert {row["image_id"] for row in found} == {f"line 1/part {i}.png" for i in range(3)}


def test_captions_of_one_s_own_with_an_empty_list_of_categories(run, tmp_path, cached):
    folder = write_coco(write_coco(tmp_path / "parts"), "val", 3)
    short = (*LOADED, "data.min_count=1", "model.network.hidden_size=8")
    done = run("experiment=coco_captions", f"data.folder={folder}", cached, *short)
    checkpoint = checkpoint_of(done)
    predicted = run("mode=predict", f"ckpt={checkpoint}", f"input={folder / 'val'}", *SHORT[:2])
    text = (predicted.folder / "captions.jsonl").read_text()
    assert {json.loads(line)["image"] for line in text.splitlines()} == {
        f"line 1/part {i}.png" for i in range(3)
    }


def test_a_classifier_of_one_s_own_classes(run, tmp_path, cached):
    for split in ("train", "val"):
        write_classes(tmp_path / "photos" / split, 3)
    done = run("data=folder", "model=cnn", f"data.folder={tmp_path / 'photos'}", cached, *SHORT)
    checkpoint = checkpoint_of(done)
    assert class_names(checkpoint) == NAMES
    tested = run("mode=test", f"ckpt={checkpoint}", "trainer=cpu", "impl=reference")
    assert tested.results["metrics"].keys() == {"test/loss", "test/accuracy"}
    inputs = tmp_path / "photos" / "val" / NAMES[0]
    predicted = run("mode=predict", f"ckpt={checkpoint}", f"input={inputs}", *SHORT[:2])
    for row in rows(predicted.folder / "classes.csv"):
        assert row["class"] == max(NAMES, key=lambda name: float(row[name]))


def test_a_model_is_not_tested_on_other_classes(run, tmp_path, cached):
    write_classes(tmp_path / "photos")
    how = ("data=folder", "model=cnn", cached, "data.val_share=0.5", *SHORT)
    done = run(*how, f"data.folder={tmp_path / 'photos'}")
    (tmp_path / "photos" / NAMES[1]).rename(tmp_path / "photos" / "screw")
    failed = run("mode=test", f"ckpt={checkpoint_of(done)}", *SHORT[:2])
    (line,) = failed.err.splitlines()
    assert f"class 1 of the model is {NAMES[1]!r}, of the data 'screw'" in line


def write_cvat(folder: Path, *splits: str) -> None:
    """As CVAT writes masks of a brush: run lengths, which it says with ``iscrowd: 1``."""
    for split in splits:
        path = folder / "annotations" / f"instances_{split}.json"
        file = json.loads(path.read_text())
        for said in file["annotations"]:
            said["iscrowd"] = 1
        path.write_text(json.dumps(file))


@pytest.mark.filterwarnings("default:.*skipped, the file is missing")
@pytest.mark.parametrize(
    "task", ["segmentation", pytest.param("detection", marks=pytest.mark.slow)]
)
def test_nothing_that_counts_is_one_line_before_training(run, tmp_path, cached, task):
    folder = write_coco(write_coco(tmp_path / "parts"), "val", 3)
    how = (f"experiment=coco_{task}", f"data.folder={folder}", cached, *LOADED)
    write_cvat(folder, "val")
    failed = run(*how)
    assert failed.exit_code == 1
    assert "train: 8 images, 8 objects\nval: 3 images, 0 objects, 3 ignored crowds, " in failed.out
    (line,) = failed.err.splitlines()
    assert "nothing counts in the data of val: 3 images, 0 objects, 3 ignored crowds" in line
    assert "data.crowds=objects" in line
    assert run(*how, "trainer.limit_val_batches=0", "trainer.limit_test_batches=0").exit_code == 0

    write_cvat(folder, "train")
    (line,) = run(*how).err.splitlines()
    assert "nothing counts in the data of train: 8 images, 0 objects, 8 ignored crowds" in line
    done = run(*how, "data.crowds=objects")
    assert done.exit_code == 0, done.err
    assert "val: 3 images, 3 objects\n" in done.out
    score = {"segmentation": "test/mean_iou", "detection": "test/ap"}[task]
    assert 0 <= done.results["metrics"][score] < 1

    path = folder / "annotations" / "instances_val.json"
    file = json.loads(path.read_text())
    path.write_text(json.dumps(file | {"annotations": file["annotations"][:1]}))
    (folder / "val" / file["images"][0]["file_name"]).unlink()
    tested = run("mode=test", f"ckpt={checkpoint_of(done)}", *SHORT[:2])
    _, line = tested.err.splitlines()
    assert "nothing counts in the data of test: 2 images, 0 objects" in line
    assert "train:" not in tested.out


def test_a_folder_of_one_class_is_one_line(run, tmp_path, cached):
    write_classes(tmp_path / "photos")
    (tmp_path / "photos" / NAMES[1]).rename(tmp_path / "photos" / "@eaDir")
    how = ("data=folder", "model=cnn", f"data.folder={tmp_path / 'photos'}", cached, *SHORT)
    (line,) = run(*how, "data.val_share=0.5").err.splitlines()
    assert f"photos has the folder of one class, {NAMES[0]}; a classifier needs two" in line


@pytest.mark.parametrize(
    ("options", "fix"),
    [
        (("experiment=coco_segmentation", "data.folder=nowhere"), "data.train_annotations"),
        (("data=folder", "model=cnn", "data.folder=nowhere"), "data.val_share=0.2"),
        (("data=folder", "model=cnn"), "set data.folder"),
    ],
)
def test_data_that_is_not_there_is_one_line(run, cached, options, fix):
    failed = run(*options, cached, *SHORT)
    assert failed.exit_code == 1
    (line,) = failed.err.splitlines()
    assert fix in line


@pytest.mark.filterwarnings("default:.*skipped, the file cannot be decoded")
def test_pictures_are_left_out_by_name_where_they_cannot_be_read(run, tmp_path, cached):
    write_classes(tmp_path / "photos")
    write_picture(tmp_path / "photos" / NAMES[0] / "grey.png", None, None)
    (tmp_path / "photos" / NAMES[0] / "cut.jpg").write_bytes(b"\xff\xd8\xff")
    done = run(
        "data=folder", "model=cnn", f"data.folder={tmp_path / 'photos'}", cached,
        "data.val_share=0.25", *SHORT,
    )  # fmt: skip
    assert done.exit_code == 0, done.err
    assert "1 skipped, the file cannot be decoded" in done.err
    assert "cut.jpg" in done.err
