"""python train.py mode=predict."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf
from PIL import Image
from sklearn.datasets import load_digits

from datamodules.digits import Digits
from datamodules.prediction import ImageFolder
from models.tasks.captioner import Captioner
from models.tasks.classifier import Classifier
from models.tasks.segmenter import Segmenter
from training.callbacks.pictures import colours
from training.configuration.errors import MisconfigurationException
from training.results import saved

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
    data = ImageFolder(photos, image_shape=(3, 16, 16), batch_size=1)
    for batch in data.predict_dataloader():
        with Image.open(masks / f"{batch.names[0]}.png") as mask:
            assert mask.mode == "P"
            assert mask.getpalette() == colours().flatten().tolist()
            with torch.no_grad():
                batch = data.on_after_batch_transfer(batch, 0)
                (expected,) = model.predict_step(batch, 0)
            assert np.array_equal(np.asarray(mask), expected.numpy())


@pytest.mark.filterwarnings("default:.*skipped, the file cannot be decoded")
def test_captions_of_a_folder_are_written_as_lines_of_json(run, train, photos):
    """The words are those of the checkpoint: the data that it was trained on is gone."""
    checkpoint = train("coco_captions")
    (photos / "damaged.png").write_bytes(b"\x89PNG")
    done = predict(run, checkpoint, photos)
    assert done.exit_code == 0, done.err
    assert "1 skipped, the file cannot be decoded" in done.err
    lines = [json.loads(line) for line in (done.folder / "captions.jsonl").read_text().splitlines()]
    assert done.results["metrics"] == {"predict/images": 3.0, "predict/skipped": 1.0}
    assert done.results["model"] == "captions"

    saved = OmegaConf.load(checkpoint.parents[1] / "config.yaml")
    model = instantiate(saved.model).eval()
    model.load_state_dict(torch.load(checkpoint, weights_only=True)["state_dict"])
    data = ImageFolder(photos, image_shape=(3, 16, 16), batch_size=8)
    (batch,) = data.predict_dataloader()
    with torch.no_grad():
        captions = model.predict_step(data.on_after_batch_transfer(batch, 0), 0)
    assert lines == [
        {"image": name, "caption": caption}
        for name, caption in zip(("more/three.png", "one.png", "two.jpg"), captions, strict=True)
    ]
    assert {word for caption in captions for word in caption.split()} <= set(model.vocabulary.words)


def test_one_image_is_predicted_as_in_its_folder(run, trained, photos):
    alone, all_of_them = (predict(run, trained, each) for each in (photos / "one.png", photos))
    assert alone.exit_code == 0, alone.err
    assert alone.results["metrics"] == {"predict/images": 1.0, "predict/skipped": 0.0}
    (mask,) = (alone.folder / "masks").rglob("*.png")
    assert mask.name == "one.png.png"
    assert mask.read_bytes() == (all_of_them.folder / "masks" / mask.name).read_bytes()


def test_another_implementation_may_predict(run, trained, photos):
    done = predict(run, trained, photos, "impl=auto", "trainer.precision=bf16-mixed")
    assert done.exit_code == 0, done.err
    assert done.results["impl"] == "auto"
    assert len(done.results["environment"]["implementations"]) == 3


@pytest.mark.filterwarnings("default:.*skipped, the file cannot be decoded")
def test_damaged_images_are_skipped_and_counted(run, trained, photos):
    for name in ("a.png", "b.png", "c.png", "d.png"):  # a whole batch of them
        (photos / name).write_bytes(b"\x89PNG")
    done = predict(run, trained, photos)
    assert "4 skipped, the file cannot be decoded" in done.err
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
    contents = torch.load(trained, weights_only=True)
    described = contents["run"]["config"]["model"]
    described["weights"] = "ResNet18_Weights.DEFAULT"
    contents["state_dict"] = instantiate(described).state_dict()
    torch.save(contents, tmp_path / "published.ckpt")
    done = predict(run, tmp_path / "published.ckpt", photos)
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
        (("mode=predict", "ckpt={stray}", "input=."), "not of a run of train.py (KeyError); give"),
        (("mode=test",), "mode=test needs ckpt="),
        (("mode=test", "ckpt=nowhere.ckpt"), "there is no file"),
        (("ckpt=nowhere.ckpt", "debug=fast"), "there is no file"),
        (("mode=predict", "ckpt={ckpt}", "data=digits"), "needs input="),
        (("mode=predict", "ckpt={ckpt}", "input={empty}"), "there are no images"),
        (("mode=predict", "ckpt={ckpt}", "input={empty}s"), "emptys; did you mean {empty}?"),
        (("mode=predict", "ckpt={ckpt}", "input=/no/such"), "input: there is no /no/such"),
        (("mode=predict", "ckpt={ckpt}", "input={ckpt}"), "is no image ("),
        (("mode=predict", "ckpt={damaged}", "input=."), "is damaged"),
        (("mode=guess",), "mode: expected train, test, predict, export; got 'guess'"),
    ],
)
def test_what_is_missing_is_one_line(run, trained, tmp_path, overrides, message):
    (tmp_path / "empty").mkdir()
    stray = tmp_path / "stray.ckpt"
    contents = torch.load(trained, weights_only=True)
    del contents["run"]
    torch.save(contents, stray)
    shutil.copytree(trained.parents[1], tmp_path / "damaged")
    damaged = tmp_path / "damaged" / "checkpoints" / trained.name
    damaged.write_bytes(trained.read_bytes()[:-5000])
    names = {"damaged": damaged, "stray": stray, "ckpt": trained, "empty": tmp_path / "empty"}
    message = message.format(**names)
    failed = run(*CPU, *(override.format(**names) for override in overrides))
    assert failed.exit_code == 1
    (line,) = failed.err.splitlines()
    assert line.startswith("Error: ")
    assert message in line


def test_a_checkpoint_that_ends_anywhere_is_damaged(trained, tmp_path):
    whole, cut = trained.read_bytes(), tmp_path / "cut.ckpt"
    for part in range(25):  # what PyTorch raises depends on where that is
        cut.write_bytes(whole[: len(whole) * part // 25])
        with pytest.raises(MisconfigurationException, match="is damaged"):
            saved.read(cut)


@pytest.fixture
def classifier(run, runs) -> Path:
    """A checkpoint of a classifier of digits, alone in its folder, and the results of its test."""
    kept = runs / "alone" / "classifier.ckpt"
    if not kept.exists():
        done = run("debug=fast", "trainer.max_epochs=2", *CPU)
        kept.parent.mkdir()
        shutil.copy(done.folder / "results.json", kept.with_suffix(".json"))
        shutil.copy(next((done.folder / "checkpoints").iterdir()), kept)
    return kept


def test_classes_of_a_folder_are_a_table_with_names_and_probabilities(run, classifier, tmp_path):
    folder, digits = tmp_path / "photos", load_digits(return_X_y=True)[0].reshape(-1, 8, 8)[:3]
    folder.mkdir()
    for number, pixels in enumerate(digits):
        grey = (pixels * (255 / 16)).round().astype(np.uint8)
        Image.fromarray(grey).save(folder / f"{number}.png")
    done = predict(run, classifier, folder)
    assert done.exit_code == 0, done.err
    with (done.folder / "classes.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["image"] for row in rows] == ["0.png", "1.png", "2.png"]
    assert list(rows[0]) == ["image", "class", "probability", *"0123456789"]

    model = Classifier.load_from_checkpoint(classifier).eval()
    images = torch.as_tensor(digits)[:, None]
    inputs = (images - Digits.pixel_mean) / Digits.pixel_std
    with torch.no_grad():
        expected = model(inputs.float()).softmax(-1)
    found = torch.tensor([[float(row[name]) for name in "0123456789"] for row in rows])
    assert torch.allclose(found, expected, atol=0.02)  # a file has 256 grey levels, not 17
    assert [row["class"] for row in rows] == [str(int(label)) for label in found.argmax(1)]
    assert [float(row["probability"]) for row in rows] == found.amax(1).tolist()


def test_a_checkpoint_alone_is_tested_as_after_its_training(run, classifier):
    before = json.loads(classifier.with_suffix(".json").read_text())
    limit = ("trainer.limit_test_batches=2", *CPU)
    done = run("mode=test", f"ckpt={classifier}", "logger=none", *limit)
    assert done.exit_code == 0, done.err
    assert {"test/loss", "test/accuracy"} == set(done.results["metrics"])
    for name, value in done.results["metrics"].items():
        assert value == before["metrics"][name]
    assert (done.results["model"], done.results["data"]) == ("cnn", "digits")
    smaller = run("mode=test", f"ckpt={classifier}", "data.batch_size=8", *limit)
    assert smaller.results["metrics"] != done.results["metrics"]  # other images


@pytest.mark.parametrize(
    ("experiment", "task"), [("coco_segmentation", Segmenter), ("coco_captions", Captioner)]
)
def test_a_checkpoint_alone_loads(train, tmp_path, experiment, task):
    checkpoint = shutil.copy(train(experiment), tmp_path / "alone.ckpt")
    model = task.load_from_checkpoint(checkpoint)
    weights = torch.load(checkpoint, weights_only=True)["state_dict"]
    found = model.state_dict()
    assert found.keys() == weights.keys()
    assert all(
        torch.equal(found[name], value) for name, value in weights.items()
        if isinstance(value, torch.Tensor)
    )  # fmt: skip


def test_training_starts_from_the_weights_of_a_checkpoint(run, classifier):
    still = ("debug=fast", "logger=none", "model.learning_rate=0", *CPU)
    done = run(f"ckpt={classifier}", *still)
    assert done.exit_code == 0, done.err
    assert f"Starting from the weights of {classifier}: " in done.out
    weights = torch.load(classifier, weights_only=True)["state_dict"]
    (checkpoint,) = (done.folder / "checkpoints").iterdir()
    found = torch.load(checkpoint, weights_only=True)["state_dict"]
    for name, value in weights.items():
        if "running_" not in name and "num_batches" not in name:
            assert torch.equal(found[name], value), name


def test_weights_that_do_not_fit_are_named_and_start_anew(run, classifier):
    done = run(f"ckpt={classifier}", "debug=fast", "model.network.num_classes=12",
               "model.num_classes=12", *CPU)  # fmt: skip
    assert done.exit_code == 0, done.err
    named = [line for line in done.err.splitlines() if line.startswith("Warning: ckpt: ")]
    assert len(named) == 2  # weight and bias of the last layer
    assert "(10,) in the checkpoint, (12,) here: starts anew" in done.err


def test_a_checkpoint_of_another_network_is_one_line(run, train):
    failed = run(f"ckpt={train('coco_captions')}", "model=lstm", "debug=fast", *CPU)
    assert failed.exit_code == 1
    assert "ckpt: no weights of" in failed.err.splitlines()[-1]


def test_a_model_that_predicts_nothing_is_one_line(run, classifier, photos, monkeypatch):
    monkeypatch.delattr(Classifier, "predict_step")
    failed = predict(run, classifier, photos)
    assert failed.exit_code == 1
    assert "is a Classifier, which predicts nothing: it has no predict_step" in failed.err
