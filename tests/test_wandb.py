"""The record of a run at Weights & Biases, read from an offline run."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from datamodules.coco.shapes import CATEGORIES
from hoconv.dispatch.implementations import ImplementationError
from models.tasks.classifier import Classifier
from tests.offline import Offline, read
from training import model
from training.configuration.errors import MisconfigurationException
from training.results import loggers

SHORT = ("debug=fast", "impl=reference", "trainer=cpu", "model.network.width=4", "logger=wandb")


@pytest.fixture
def recorded(run, wandb_alone, tmp_path) -> Any:
    """Runs train.py; returns the run and the offline runs that it left, in their order."""

    def recorded(*overrides: str) -> tuple[Any, list[Offline]]:
        done = run(*overrides, *SHORT, f"logger.wandb.save_dir={tmp_path / 'kept'}")
        wandb_alone.teardown()  # which waits until all is written
        folders = sorted(Path(tmp_path / "kept").glob("wandb/offline-run-*"))
        return done, [read(folder) for folder in folders]

    return recorded


@pytest.mark.slow
def test_runs_of_a_sweep_have_names_of_their_own_and_one_group(recorded):
    sweep, runs = recorded("-m", "model.learning_rate=0.01,0.001", "seed=7")
    assert sweep.exit_code == 0, sweep.err
    assert {each.name for each in runs} == {
        "reference learning_rate=0.01 width=4 seed 7",
        "reference learning_rate=0.001 width=4 seed 7",
    }
    assert {each.group for each in runs} == {f"digits_cnn {sweep.folder.name}"}


@pytest.mark.slow
def test_wandb_does_not_warn_of_what_nobody_set(recorded, wandb_alone, monkeypatch):
    said = []
    monkeypatch.setattr(wandb_alone, "termwarn", lambda text, **_: said.append(text))
    done, _ = recorded()
    assert done.exit_code == 0, done.err
    assert not [text for text in said if "anonymous" in text]


def test_a_run_logs_what_one_looks_for(recorded):
    done, (kept,) = recorded("trainer.limit_train_batches=14", "trainer.max_epochs=2")
    assert done.exit_code == 0, done.err
    assert kept.exit_code == 0
    assert kept.config["implementations"] == done.results["environment"]["implementations"]
    assert kept.config["parameters"] > 1000
    (rows,) = [[row for row in kept.history if "train/loss" in row]]
    losses = [float(loss) for loss in done.losses]
    assert [row["train/loss"] for row in rows] == losses
    assert all(0 <= row["train/accuracy"] <= 1 for row in rows)
    assert all(row["train/gradient_norm"] > 0 for row in rows)
    rates = [row["train/learning_rate"] for row in rows]
    assert max(rates) == rates[3] == 0.005  # after three steps of warm-up
    validated = [row["val/loss"] for row in kept.history if "val/loss" in row]
    assert kept.summary["best/val/loss"] == min(validated)
    throughput = {k: v for k, v in kept.summary.items() if k.startswith("throughput/")}
    said = {f"throughput/{name}": value for name, value in done.results["throughput"].items()}
    assert throughput == said  # of the whole fit, under one name each


def test_what_is_no_number_and_no_utf_8_harms_no_record(wandb_alone, tmp_path):
    name = os.fsdecode(b"a\xff")
    logger = loggers.wandb_logger(
        project="p", save_dir=str(tmp_path), name=name, tags=[name], table=tmp_path / f"{name}.csv"
    )
    logger.log_hyperparams({"folder": name})
    logger.log_metrics({f"val/{name}": 1.0}, step=0)
    for value in (math.nan, 2.0, math.nan, 3.0):  # of which the best is a number
        logger.log_metrics({"val/loss": value}, step=0)
    assert logger.continuation["best"]["best/val/loss"] == 2.0
    folder = loggers.finish(0, {})
    wandb_alone.teardown()
    assert folder is not None
    kept = read(folder)
    assert kept.name == "a\\udcff"
    assert kept.history[0]["val/a\\udcff"] == 1.0
    with pytest.raises(MisconfigurationException, match="is not UTF-8, and wandb takes no other"):
        loggers.wandb_logger(save_dir=str(tmp_path / name))


def test_a_job_that_cannot_begin_leaves_no_run(recorded, monkeypatch):
    def refuse(*args: Any) -> Any:
        raise ImplementationError("the reason")

    monkeypatch.setattr(model, "choose", refuse)
    done, runs = recorded()
    assert done.exit_code == 1
    assert runs == []


def test_a_job_that_fails_later_is_marked(recorded, monkeypatch):
    def fail(*args: Any) -> Any:
        raise RuntimeError("the reason")

    monkeypatch.setattr(Classifier, "training_step", fail)
    _, (kept,) = recorded()
    assert kept.exit_code == 1


@pytest.mark.slow
def test_masks_boxes_and_captions_are_shown_in_w_and_b_s_way(recorded, tmp_path):
    tiny = ("data=coco_tiny", "data.image_size=16", "data.batch_size=4",
            f"data.cache_dir={tmp_path / 'cache'}", "trainer.limit_train_batches=1")  # fmt: skip
    done, (masks,) = recorded("model=segmentation", *tiny)
    assert done.exit_code == 0, done.err
    (row,) = [row for row in masks.history if "val/masks/count" in row]
    assert row["val/masks/count"] == 4
    assert all(set(each) == {"target", "prediction"} for each in row["val/masks/all_masks"])
    done, runs = recorded("model=captions", *tiny)
    assert done.exit_code == 0, done.err
    tables = [row for kept in runs for row in kept.history if "val/captions/ncols" in row]
    assert [row["val/captions/ncols"] for row in tables] == [3]
    done, runs = recorded("model=detection", "+callbacks.pictures.min_score=0.0", *tiny)
    assert done.exit_code == 0, done.err
    (row,) = [row for kept in runs for row in kept.history if "val/boxes/all_boxes" in row]
    assert len(row["val/boxes/all_boxes"]) == 4
    assert all(set(each) == {"target", "prediction"} for each in row["val/boxes/all_boxes"])
    written = row["val/boxes/all_boxes"][0]["prediction"]["path"]
    (path,) = tmp_path.glob(f"kept/wandb/offline-run-*/files/{written}")
    (first, *_) = json.loads(path.read_text())["box_data"]
    assert set(first["position"]) == {"minX", "minY", "maxX", "maxY"}
    assert first["box_caption"] in CATEGORIES.values()
    assert 0 <= first["scores"]["probability"] <= 1
