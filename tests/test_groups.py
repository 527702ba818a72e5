"""The groups optimizer, scheduler, callbacks and logger: what a choice of each does to a run."""

from __future__ import annotations

import json
import os
import re
import sqlite3
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

import train
from models.tasks.classifier import Classifier
from training.command import check_command
from training.configuration.errors import MisconfigurationException
from training.results.loggers import make_loggers

CONF = Path(train.__file__).parent / "conf"
SHORT = ("debug=fast", "impl=reference", "trainer=cpu", "model.network.width=4")


@pytest.fixture
def rates(monkeypatch) -> list[float]:
    """The learning rate of every step of the runs of a test."""
    found: list[float] = []
    step = Classifier.training_step

    def watched(self: Classifier, *args: Any) -> Any:
        found.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        return step(self, *args)

    monkeypatch.setattr(Classifier, "training_step", watched)
    return found


@pytest.mark.parametrize("name", [path.stem for path in CONF.glob("optimizer/*.yaml")])
def test_optimizers_train_with_the_learning_rate_of_the_model(run, rates, name):
    done = run(*SHORT, f"optimizer={name}", "scheduler=constant", "model.learning_rate=0.25")
    assert done.exit_code == 0, done.err
    assert rates == [0.25] * 4
    (path,) = done.folder.glob("checkpoints/*")
    (group,) = torch.load(path, weights_only=True)["optimizer_states"][0]["param_groups"]
    assert group["weight_decay"] == 0.01
    assert isinstance(Classifier.load_from_checkpoint(path), Classifier)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("cosine", [0.5, 1.0, 0.75, 0.25]),
        ("one_cycle", [0.04, 0.81, 0.28, 4e-6]),
        ("constant", [1.0] * 4),
        ("plateau", [1.0] * 4),
    ],
)
def test_schedules(run, rates, name, expected):
    done = run(*SHORT, f"scheduler={name}", "model.learning_rate=1")
    assert done.exit_code == 0, done.err
    assert rates == pytest.approx(expected, abs=0.005)


def test_a_plateau_lowers_the_rate(run, rates):
    stuck = ("model.learning_rate=1e-30", "scheduler.patience=0", "trainer.max_epochs=3")
    done = run(*SHORT, "scheduler=plateau", *stuck)
    assert done.exit_code == 0, done.err
    assert [rates[i] for i in (0, 4, 8)] == pytest.approx([1e-30, 1e-30, 1e-31])


@pytest.mark.parametrize(
    "model",
    [
        "classifier",
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("segmentation", "captions")),
    ],
)
def test_labels_are_smoothed_in_training_only(run, tmp_path, model):
    choice = {"classifier": ()}.get(
        model,
        ("data=coco_tiny", f"model={model}", "data.image_size=16", "data.batch_size=4",
         f"data.cache_dir={tmp_path / 'cache'}"),
    )  # fmt: skip
    fixed = (*SHORT, *choice, "model.learning_rate=0", "trainer.limit_train_batches=1")
    plain, smoothed = run(*fixed).results, run(*fixed, "model.label_smoothing=0.5").results
    assert plain["metrics"]["train/loss"] != smoothed["metrics"]["train/loss"]
    assert plain["metrics"]["val/loss"] == smoothed["metrics"]["val/loss"]


def test_several_callbacks_of_the_group(run):
    chosen = ("callbacks=[early_stopping,ema,lr_monitor]", "logger=csv")
    done = run(
        *SHORT, *chosen, "callbacks.early_stopping.stopping_threshold=1000", "trainer.max_epochs=3"
    )
    assert done.exit_code == 0, done.err
    assert len(done.losses) == 4  # of one epoch
    assert "lr-AdamW" in (done.folder / "csv" / "metrics.csv").read_text().splitlines()[0]
    kept = OmegaConf.load(done.folder / "config.yaml").callbacks
    assert list(kept) == ["classes", "early_stopping", "ema", "lr_monitor"]


def test_the_moving_average_is_what_is_validated_tested_and_kept(run, tmp_path):
    steps = ("callbacks=ema", "callbacks.ema.decay=0.5", "trainer.max_epochs=2")
    done = run(*SHORT, *steps, "trainer.limit_val_batches=1.0", "trainer.limit_test_batches=1.0")
    assert done.exit_code == 0, done.err
    (path,) = done.folder.glob("checkpoints/*")
    contents = torch.load(path, weights_only=True)
    average, current = contents["state_dict"], contents["current_model_state"]
    name = next(name for name in average if name.endswith("weight"))
    assert not torch.equal(average[name], current[name])
    tested = run(
        "mode=test", f"ckpt={path}", "trainer=cpu", "impl=reference", folder=tmp_path / "test"
    )
    assert tested.results["metrics"]["test/loss"] == done.results["metrics"]["test/loss"]


def test_a_run_with_a_moving_average_resumes(run, monkeypatch):
    steps = (*SHORT, "callbacks=ema", "trainer.max_epochs=2", "step_checkpoints.every_n_steps=3")
    whole = run(*steps)
    step = Classifier.training_step

    def fail(self: Classifier, *args: Any) -> Any:
        if self.trainer.training and self.trainer.global_step == 5:
            raise RuntimeError("power cut")
        return step(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Classifier, "training_step", fail)
        failed = run(*steps)
    done = run(*steps, "resume=auto", folder=failed.folder)
    assert done.exit_code == 0, done.err
    assert "Going on after step 3" in done.out
    assert done.losses == whole.losses
    assert done.results["metrics"] == whole.results["metrics"]


def test_a_callback_of_one_s_own_group(run, tmp_path):
    (tmp_path / "conf" / "callbacks").mkdir(parents=True)
    (tmp_path / "conf" / "callbacks" / "timer.yaml").write_text(
        "timer:\n  _target_: pytorch_lightning.callbacks.Timer\n  duration: {hours: 0}\n"
    )
    failed = run("--config-dir", str(tmp_path / "conf"), *SHORT, "callbacks=timer")
    assert failed.exit_code == 1
    assert "nothing was trained: the time is over" in failed.err  # at once
    assert not (failed.folder / "losses.csv").exists()


@pytest.mark.parametrize(
    ("group", "target"),
    [
        ("callbacks", "pytorch_lightning.callbacks.Timer"),
        ("logger", "training.results.loggers.CSVMetrics"),
    ],
)
def test_an_entry_without_a_name_is_shown_one(run, tmp_path, group, target):
    (tmp_path / "conf" / group).mkdir(parents=True)
    (tmp_path / "conf" / group / "mine.yaml").write_text(f"path: metrics.csv\n_target_: {target}\n")
    failed = run("--config-dir", str(tmp_path / "conf"), *SHORT, f"{group}=mine")
    assert failed.exit_code == 1
    (line,) = failed.err.splitlines()
    assert line == (
        f"Error: {group}: expected a name for each entry, such as "
        f"{{mine: {{_target_: {target}}}}}; got a _target_ without one"
    )


def test_several_loggers_get_the_same_metrics(run):
    reader = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="needs hoconv[tensorboard]"
    )
    done = run(*SHORT, "logger=[csv,tensorboard]", "trainer.limit_train_batches=12")
    assert done.exit_code == 0, done.err
    header = (done.folder / "csv" / "metrics.csv").read_text().splitlines()[0].split(",")
    events = reader.EventAccumulator(str(done.folder / "tensorboard")).Reload()
    assert {"train/loss", "val/accuracy", "throughput/step_ms"} <= set(events.Tags()["scalars"])
    assert {"train/loss", "val/accuracy", "throughput/step_ms"} <= set(header)


def test_mlflow_has_a_run_for_each_job(run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    mlflow = pytest.importorskip("mlflow", reason="needs hoconv[mlflow]")
    monkeypatch.chdir(tmp_path)
    done = run("-m", *SHORT, "logger=mlflow", "seed=1,2", "trainer.limit_train_batches=2")
    assert done.exit_code == 0, done.err
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    runs = client.search_runs([client.get_experiment_by_name("hoconv").experiment_id])
    assert {each.info.run_name[-6:] for each in runs} == {"seed 1", "seed 2"}
    for each in runs:
        assert each.info.status == "FINISHED"
        assert {"train/loss", "val/accuracy", "test/accuracy"} <= each.data.metrics.keys()
        assert each.data.tags["impl"] == "reference"


def test_a_logger_that_goes_on_may_take_a_name(tmp_path: Path):
    described = {"_target_": "pytorch_lightning.loggers.CSVLogger", "save_dir": str(tmp_path)}
    (logger,) = make_loggers(OmegaConf.create({"csv": described}), [{"name": "before"}])
    assert logger.name == "before"


def test_trackio_has_a_run_for_each_job(tmp_path: Path):
    pytest.importorskip("trackio", reason="needs hoconv[trackio]")
    command = [train.__file__, "-m", *SHORT, "logger=trackio", "seed=1,2"]
    where = os.environ | {"TRACKIO_DIR": str(tmp_path)}  # read when Trackio is imported
    subprocess.run([sys.executable, *command], check=True, cwd=tmp_path, env=where)
    with sqlite3.connect(tmp_path / "hoconv.db") as file:
        rows = file.execute("SELECT run_name, metrics FROM metrics").fetchall()
        configured = file.execute("SELECT config FROM configs").fetchall()
    names = defaultdict(set)
    for name, metrics in rows:
        names[re.sub(r" [-\d]+ [:\d]+$", "", name)[-6:]] |= json.loads(metrics).keys()
    assert names.keys() == {"seed 1", "seed 2"}
    for found in names.values():
        assert {"train/loss", "val/accuracy", "test/accuracy"} <= found
    assert {json.loads(config)["seed"] for (config,) in configured} == {1, 2}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optimizer.betas=[2,0.9]", "optimizer: Invalid beta parameter at index 0: 2"),
        (
            "scheduler=one_cycle scheduler.pct_start=7.0",
            "scheduler: Expected float between 0",
        ),
    ],
)
def test_what_an_optimizer_or_a_scheduler_refuses_is_one_line(run, override, message):
    failed = run(*SHORT, *override.split())
    assert failed.exit_code == 1
    assert failed.err.splitlines()[-1].startswith(f"Error: {message}")


@pytest.mark.parametrize(
    ("override", "fix"),
    [
        ("logger=null", "null is none of its options; write logger=none"),
        ("callbacks=", "null is none of its options; write callbacks=none"),
        ("data=null", "null is none of its options; leave it out, or choose one of coco, "),
        ("~model", "every run needs one; model=... chooses another"),
        ("~trainer=cpu", "every run needs one; trainer=... chooses another"),
    ],
)
def test_a_group_cannot_be_null_nor_one_that_is_needed_be_left_out(run, override, fix):
    failed = run(*SHORT, override)
    assert failed.exit_code == 1
    (line,) = failed.err.splitlines()
    assert line.startswith(f"Error: {override.partition('=')[0]}: {fix}")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["modle=cnn"], "modle: there is no such key; use mode or model, or +modle=... to add it"),
        (
            ["trainer.max_epoch=3"],
            "trainer.max_epoch: there is no such key; use trainer.max_e",
        ),
        (
            ["-m", "model.network.widht=2,3"],
            "model.network.widht: there is no such key; use",
        ),
        (["data.val_share=0.2"], "data.val_share: there is no such key; use data.batch_size or"),
        (["model=[cnn,lstm]"], "model: expected one of its options, got [cnn,lstm]; -m model=cnn,"),
        (["ckpt=a/epoch=3.ckpt"], "ckpt: a/epoch=3.ckpt is no value in Hydra's grammar; if it is"),
    ],
)
def test_a_name_that_there_is_not_is_one_line(run, overrides, message):
    failed = run(*SHORT, *overrides)
    assert failed.exit_code == 1
    (line,) = failed.err.splitlines()
    assert line.startswith(f"Error: {message}")
    assert not failed.folder.exists()


def test_names_of_a_sweep_and_of_a_folder_of_one_s_own_are_known(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text("_target_: mine.Model\nsize: 3\n")
    own = ("--config-dir", str(tmp_path), "model=mine")
    for arguments in (
        ["-m", "experiment=glob(*)", "model.network.width=range(1,3)"],
        ["sweep=search", "model.learning_rate=interval(1e-4, 1e-1)"],
        [*own, "-m", "model.size=1,2"],
        [*own, f"hydra.searchpath=[file://{tmp_path}]", "model.size=1"],
        ["--shell-completion", "install=bash"],
    ):
        check_command(arguments, CONF)
    with pytest.raises(MisconfigurationException, match=r"model\.siez: .* use model\.size, or"):
        check_command([*own, "model.siez=1"], CONF)


def test_a_logger_whose_package_is_missing_is_one_line(run, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "lost_logger.py").write_text(
        "def make():\n    raise ModuleNotFoundError('No module named lost; pip install it')\n"
    )
    failed = run(*SHORT, "+logger.mine._target_=lost_logger.make")
    assert failed.exit_code == 1
    (line,) = failed.err.splitlines()
    assert line == "Error: logger.mine: No module named lost; pip install it"


def test_what_is_no_logger_is_one_line(run):
    failed = run(*SHORT, "+logger.mine._target_=builtins.dict")
    assert failed.exit_code == 1
    (line,) = failed.err.splitlines()
    assert line.startswith("Error: logger.mine: expected the _target_ of a Lightning logger, or")


def test_a_key_of_an_empty_mapping_is_added(run):
    short = [override for override in SHORT if "width" not in override]  # of the default network
    failed = run(*short, "model=lstm", "model.network.options.heads=2")
    assert failed.err.splitlines() == [
        "Error: model.network.options.heads: there is no such key; use "
        "+model.network.options.heads=... to add it"
    ]
