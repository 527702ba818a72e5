"""Commands, configurations and checkpoints from before names changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hydra.utils import get_object
from omegaconf import OmegaConf
from PIL import Image

import train
from tests.test_resume import SHORT, assert_same, at_step, fail
from training.configuration import moved
from training.folder import run_folder

CONF = Path(train.__file__).parent / "conf"


def make_old(folder: Path) -> None:
    """Rewrites the config.yaml of a run with the names of before."""
    config: Any = OmegaConf.to_container(OmegaConf.load(folder / "config.yaml"))
    for name in ("callbacks", "optimizer", "scheduler", "print_config", "unavailable"):
        del config[name]
    (config["logger"],) = config["logger"].values() or (None,)
    for name in ("optimizer", "scheduler", "label_smoothing"):
        del config["model"][name]
    model, network = config["model"], config["model"]["network"]
    network["impl"] = config["impl"]
    names = {new: old for old, new in moved.TARGETS.items() if not old.startswith("models.net")}
    names[moved.CLASSIFIER] = "models.classifier.Classifier"
    for node in (model, network, config["logger"] or {}):
        if "_target_" in node:
            node["_target_"] = names.get(node["_target_"])
    if network["_target_"] is None:  # ApproxCNN had no configuration of its own
        del network["_target_"]
        model |= model.pop("network") | {"_target_": "models.approx_cnn.ApproxClassifier"}
    OmegaConf.save(config, folder / "config.yaml")


@pytest.mark.parametrize(
    "model",
    [("model=cnn",), ("model=approx_cnn", "impl=auto"), ("model=lstm", "model.network.cell=gru")],
    ids=lambda overrides: overrides[0],
)
def test_a_run_of_before_goes_on(run, monkeypatch, model):
    overrides = (*SHORT, "model.network.width=2", *model)
    overrides = tuple(o for o in overrides if "model=lstm" not in model or "width" not in o)
    expected = run(*overrides)
    at_step(monkeypatch, 8, fail)
    failed = run(*overrides)
    make_old(failed.folder)
    assert "training." not in (failed.folder / "config.yaml").read_text()
    done = run(*overrides, "resume=auto", folder=failed.folder)
    assert "Going on after step 6" in done.out
    assert_same(done.folder, expected.folder)


@pytest.mark.parametrize(
    ("experiment", "written"),
    [("coco_segmentation", "masks/a.png.png"), ("coco_captions", "captions.jsonl")],
)
def test_a_checkpoint_of_before_predicts(run, tmp_path, experiment, written):
    where = ("trainer=cpu", "impl=reference")
    trained = run(
        f"experiment={experiment}", "data=coco_tiny", "data.image_size=16", "debug=fast",
        "data.batch_size=4", "model.network.width=4", f"data.cache_dir={tmp_path / 'cache'}",
        *where,
    )  # fmt: skip
    make_old(trained.folder)
    photos = tmp_path / "photos"
    photos.mkdir()
    Image.fromarray(np.zeros((9, 7, 3), np.uint8)).save(photos / "a.png")
    (checkpoint,) = (trained.folder / "checkpoints").iterdir()
    done = run("mode=predict", f"ckpt={checkpoint}", f"input={photos}", *where)
    assert done.exit_code == 0, done.err
    assert (done.folder / written).exists()


@pytest.mark.parametrize("text", ["", "model: 7", "[1, 2]", "model: {}", "{", "trainer: {}"])
def test_a_configuration_that_cannot_be_read_is_one_line(run, tmp_path, text):
    folder = tmp_path / "old" / "checkpoints"
    folder.mkdir(parents=True)
    torch.save({"state_dict": {}}, folder / "epoch_0.ckpt")
    (folder.parent / "config.yaml").write_text(text)
    (folder.parent / "results.json").write_text('{"model": "cnn", "data": "digits", "seed": 1}')
    failed = run("mode=predict", f"ckpt={folder / 'epoch_0.ckpt'}", f"input={tmp_path}")
    assert failed.exit_code == 1
    (line,) = failed.err.splitlines()
    assert line.startswith(f"Error: the configuration of the run in {folder.parent} cannot be read")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.multiplier=exact", "model.multiplier: its name is model.network.multiplier now"),
        ("+model.gradient=ste", "model.gradient: its name is model.network.gradient now"),
        ("model.network.impl=cpp", "model.network.impl: its name is impl now"),
        ("logger.save_dir=x", "logger.save_dir: its name is logger.wandb.save_dir now"),
        (
            "model._target_=models.classifier.Classifier",
            "_target_: models.classifier.Classifier is models.tasks.classifier.Classifier now",
        ),
        (
            "+logger.mine._target_=reporting.loggers.CSVMetrics",
            "_target_: reporting.loggers.CSVMetrics is training.results.loggers.CSVMetrics now",
        ),
    ],
)
def test_a_name_of_before_is_one_line_with_that_of_today(run, override, message):
    failed = run(*SHORT, override)
    assert failed.exit_code == 1
    assert failed.err.splitlines() == [f"Error: {message}"]


def test_auto_finds_a_run_that_was_begun_with_names_of_before(tmp_path):
    (tmp_path / "old" / "resume").mkdir(parents=True)
    (tmp_path / "old" / "resume" / "step_5.ckpt").touch()
    record = '{"status": "running", "overrides": ["model.multiplier=exact"]}'
    (tmp_path / "old" / "results.json").write_text(record)
    task = {"hydra": {"overrides": {"task": ["model.network.multiplier=exact"]}}}
    found = run_folder("auto", str(tmp_path), "new", _root_=OmegaConf.create(task))
    assert found == str(tmp_path / "old")


def test_every_name_of_today_exists():
    for target in moved.TARGETS.values():
        get_object(target)


def test_what_was_fixed_before_is_the_default_of_today():
    assert OmegaConf.load(CONF / "optimizer" / "adamw.yaml") == moved.OPTIMIZER
    assert OmegaConf.load(CONF / "scheduler" / "cosine.yaml") == moved.SCHEDULER


def test_the_callbacks_of_before_are_those_of_the_models():
    described = [OmegaConf.load(path) for path in CONF.glob("model/*.yaml")]
    found = {each.model._target_: each.callbacks for each in described if "callbacks" in each}
    assert moved.CALLBACKS.items() <= found.items()
