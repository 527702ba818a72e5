"""python train.py mode=predict."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf
from PIL import Image

from datamodules.coco.folder import ImageFolder
from training.callbacks.pictures import colours

CPU = ("trainer=cpu", "impl=reference")


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture
def train(run, runs, tmp_path):
    """The checkpoint of a short run of an experiment, the same for all tests."""

    def train(experiment: str) -> Path:
        kept = runs / experiment
        if not kept.exists():
            done = run(
                f"experiment={experiment}", "data=coco_tiny", "data.image_size=16", "debug=fast",
                "data.batch_size=4", "model.network.width=4",
                f"data.cache_dir={tmp_path / 'cache'}", *CPU,
            )  # fmt: skip
            shutil.copytree(done.folder, kept)
        return next((kept / "checkpoints").iterdir())

    return train


@pytest.fixture
def trained(train) -> Path:
    return train("coco_segmentation")


@pytest.fixture
def photos(tmp_path) -> Path:
    folder = tmp_path / "photos"
    (folder / "more").mkdir(parents=True)
    generator = np.random.default_rng(0)
    for name, size in (("one.png", (30, 20)), ("two.jpg", (16, 16)), ("more/three.png", (7, 9))):
        pixels = generator.integers(256, size=(*reversed(size), 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / name)
    return folder


def predict(run, checkpoint: Path, folder: Path, *overrides: str):
    return run("mode=predict", f"ckpt={checkpoint}", f"input={folder}", *CPU, *overrides)


def test_masks_of_a_folder_are_written_in_the_size_of_its_images(run, trained, photos):
    done = predict(run, trained, photos)
    assert done.exit_code == 0, done.err
    masks = done.folder / "masks"
    assert {str(p.relative_to(masks)) for p in masks.rglob("*.png")} == {
        "one.png.png", "two.jpg.png", "more/three.png.png",
    }  # fmt: skip
    assert done.results["metrics"] == {"predict/images": 3.0, "predict/skipped": 0.0}
    assert (done.results["model"], done.results["data"]) == ("segmentation", "coco_tiny")
    assert done.results["status"] == "finished"

    saved = OmegaConf.load(trained.parents[1] / "config.yaml")
    model = instantiate(saved.model).eval()
    model.load_state_dict(torch.load(trained, weights_only=False)["state_dict"])
    data = ImageFolder(photos, image_size=16, batch_size=1)
    for batch in data.predict_dataloader():
        with Image.open(masks / f"{batch.names[0]}.png") as mask:
            assert mask.mode == "P"
            assert mask.getpalette() == colours().flatten().tolist()
            with torch.no_grad():
                batch = data.on_after_batch_transfer(batch, 0)
                (expected,) = model.predict_step(batch, 0)
            assert np.array_equal(np.asarray(mask), expected.numpy())


def test_captions_of_a_folder_are_written_as_lines_of_json(run, train, photos):
    """The words are those of the checkpoint: the data that it was trained on is gone."""
    checkpoint = train("coco_captions")
    (photos / "damaged.png").write_bytes(b"\x89PNG")
    with pytest.warns(UserWarning, match="1 skipped, the file cannot be decoded"):
        done = predict(run, checkpoint, photos)
    assert done.exit_code == 0, done.err
    lines = [json.loads(line) for line in (done.folder / "captions.jsonl").read_text().splitlines()]
    assert done.results["metrics"] == {"predict/images": 3.0, "predict/skipped": 1.0}
    assert done.results["model"] == "captions"

    saved = OmegaConf.load(checkpoint.parents[1] / "config.yaml")
    model = instantiate(saved.model).eval()
    model.load_state_dict(torch.load(checkpoint, weights_only=True)["state_dict"])
    data = ImageFolder(photos, image_size=16, batch_size=8)
    (batch,) = data.predict_dataloader()
    with torch.no_grad():
        captions = model.predict_step(data.on_after_batch_transfer(batch, 0), 0)
    assert lines == [
        {"image": name, "caption": caption}
        for name, caption in zip(("more/three.png", "one.png", "two.jpg"), captions, strict=True)
    ]
    assert {word for caption in captions for word in caption.split()} <= set(model.vocabulary.words)


def test_another_implementation_may_predict(run, trained, photos):
    done = predict(run, trained, photos, "impl=auto", "trainer.precision=bf16-mixed")
    assert done.exit_code == 0, done.err
    assert done.results["impl"] == "auto"
    assert len(done.results["environment"]["implementations"]) == 3


def test_damaged_images_are_skipped_and_counted(run, trained, photos):
    for name in ("a.png", "b.png", "c.png", "d.png"):  # a whole batch of them
        (photos / name).write_bytes(b"\x89PNG")
    with pytest.warns(UserWarning, match="4 skipped, the file cannot be decoded"):
        done = predict(run, trained, photos)
    assert done.results["metrics"] == {"predict/images": 3.0, "predict/skipped": 4.0}


@pytest.mark.parametrize("alone", [True, False])
def test_sixteen_bits_are_predicted_as_their_upper_eight(run, trained, photos, tmp_path, alone):
    if alone:
        photos = tmp_path / "deep"
        photos.mkdir()
    grey = np.random.default_rng(1).integers(2**16, size=(20, 30)).astype(np.uint16)
    Image.fromarray(grey).save(photos / "deep.png")
    Image.fromarray((grey >> 8).astype(np.uint8)).save(photos / "shallow.png")
    done = predict(run, trained, photos)
    assert done.exit_code == 0, done.err
    assert done.results["metrics"] == {
        "predict/images": 2.0 if alone else 5.0,
        "predict/skipped": 0,
    }
    deep, shallow = (
        Image.open(done.folder / "masks" / f"{n}.png.png") for n in ("deep", "shallow")
    )
    assert np.array_equal(np.asarray(deep), np.asarray(shallow))


def test_a_checkpoint_with_published_weights_needs_no_download(
    run, trained, photos, monkeypatch, tmp_path
):
    """Only a fit begins with them."""
    from models.networks.backbone import Backbone

    def fail(self):
        raise AssertionError("loaded")

    monkeypatch.setattr(Backbone, "load", fail)
    config = OmegaConf.load(trained.parents[1] / "config.yaml")
    config.model.weights = "ResNet18_Weights.DEFAULT"
    model = instantiate(config.model)
    folder = tmp_path / "other"
    shutil.copytree(trained.parents[1], folder)
    OmegaConf.save(config, folder / "config.yaml")
    contents = torch.load(trained, weights_only=False) | {"state_dict": model.state_dict()}
    torch.save(contents, folder / "checkpoints" / trained.name)
    done = predict(run, folder / "checkpoints" / trained.name, photos)
    assert done.exit_code == 0, done.err


@pytest.mark.parametrize("how", ["channels_last=true", "trainer.precision=bf16-true"])
@pytest.mark.parametrize(
    ("experiment", "written"),
    [("coco_segmentation", "masks/**/*.png"), ("coco_captions", "captions.jsonl")],
)
def test_ways_to_predict(run, train, photos, experiment, written, how):
    done = predict(run, train(experiment), photos, how)
    assert done.exit_code == 0, done.err
    assert list(done.folder.glob(written))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("mode=predict",), "needs ckpt="),
        (("mode=predict", "ckpt=nowhere.ckpt", "input=."), "there is no file"),
        (("mode=predict", "ckpt={stray}", "input=."), "is not in the folder of a run"),
        (("mode=predict", "ckpt={ckpt}", "input={empty}"), "there are no images"),
        (("mode=predict", "ckpt={damaged}", "input=."), "is damaged"),
        (("mode=guess",), "mode: expected train or predict, got 'guess'"),
    ],
)
def test_what_is_missing_is_one_line(run, trained, tmp_path, overrides, message):
    (tmp_path / "empty").mkdir()
    stray = shutil.copy(trained, tmp_path / "stray.ckpt")
    shutil.copytree(trained.parents[1], tmp_path / "damaged")
    damaged = tmp_path / "damaged" / "checkpoints" / trained.name
    damaged.write_bytes(trained.read_bytes()[:-5000])
    names = {"damaged": damaged, "stray": stray, "ckpt": trained, "empty": tmp_path / "empty"}
    failed = run(*CPU, *(override.format(**names) for override in overrides))
    assert failed.exit_code == 1
    (line,) = failed.err.splitlines()
    assert line.startswith("Error: ")
    assert message in line


def test_a_model_that_predicts_nothing_for_a_folder_is_one_line(run, photos):
    done = run("debug=fast", *CPU)
    (checkpoint,) = (done.folder / "checkpoints").iterdir()
    failed = predict(run, checkpoint, photos)
    assert failed.exit_code == 1
    assert "is a Classifier, which predicts nothing" in failed.err
