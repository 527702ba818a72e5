"""The terminal's output of a run, and how Ctrl-C ends one."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from rich.console import Console
from rich.progress import Progress

import train
from models.tasks.classifier import Classifier
from training import console

ROOT = Path(train.__file__).parent
SHORT = ("debug=fast", "impl=reference", "trainer=cpu", "model.network.width=4")


# Runs train.py on each command line; prints after each, on stderr, the code with which it ends and
# what it has imported of what takes long.
COMMANDS = """
import json, runpy, sys

for line in json.loads(sys.argv[1]):
    sys.argv = ["train.py", *line]
    try:
        runpy.run_path("train.py", run_name="__main__")
        code = 0
    except SystemExit as exit:
        code = exit.code
    slow = {"hoconv", "lightning_fabric", "matplotlib", "numpy", "pytorch_lightning", "torch"}
    print("ends", line, code, slow & sys.modules.keys(), file=sys.stderr)
"""


def test_what_runs_no_job_imports_nothing_that_only_a_job_needs():
    answers = {  # a command line -> its exit code, and a word of what it says
        ("--help",): (0, "python train.py -m impl=reference,cpp"),
        ("--hydra-help",): (0, "--hydra-help"),
        ("--cfg", "job"): (0, "max_epochs:"),
        ("--shell-completion", "query=bash"): (0, "model.network.width="),
        ("modle=x",): (1, "Error: modle: there is no such key; use mode"),
        ("-m", "optimizer.lr=1,2"): (1, "Error: optimizer.lr: there is no such key"),
        ("model=cnnn",): (1, "Error: model: there is no 'cnnn'; choose cnn"),
    }
    done = subprocess.run(
        [sys.executable, "-c", COMMANDS, json.dumps([*answers])],
        cwd=ROOT, env=os.environ | {"COMP_LINE": "python train.py model.network.wid"},
        text=True, capture_output=True,
    )  # fmt: skip
    ends = [line for line in done.stderr.splitlines() if line.startswith("ends ")]
    assert ends == [f"ends {[*line]} {code} set()" for line, (code, _) in answers.items()]
    for _, said in answers.values():
        assert said in done.stdout + done.stderr


def test_the_configuration_is_a_line_a_group_unless_asked_for(run):
    short = run(*SHORT, "seed=7", "optimizer=sgd", "model.learning_rate=0.1", "logger=[csv]").out
    lines = [line.split() for line in short.splitlines()]
    assert ["optimizer", "sgd"] in lines
    assert ["logger", "csv"] in lines
    assert ["model", "cnn", "model.network.width=4", "model.learning_rate=0.1"] in lines
    assert ["impl=reference", "seed=7"] in lines
    assert "num_classes" not in short
    assert "num_classes: 10" in run(*SHORT, "print_config=true").out


def test_epochs_have_one_number_everywhere(run):
    done = run(*SHORT, "trainer.max_epochs=2", "logger=csv")
    assert [line.split()[1] for line in done.out.splitlines() if line.startswith("epoch ")] == [
        "0/1", "1/1",
    ]  # fmt: skip
    assert (done.folder / "checkpoints" / "epoch_1.ckpt").exists()


def test_warnings_are_one_line_without_a_place(run, monkeypatch):
    step = Classifier.training_step

    def warning(self: Classifier, *args: Any) -> Any:
        warnings.warn("of two\nlines", UserWarning, stacklevel=1)
        return step(self, *args)

    monkeypatch.setattr(Classifier, "training_step", warning)
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        done = run(*SHORT)
    assert "Warning: of two lines" in done.err.splitlines()
    assert "UserWarning" not in done.err


def test_a_warning_stands_above_a_moving_bar(monkeypatch):
    terminal = io.StringIO()
    monkeypatch.setattr(sys, "stderr", terminal)
    bar = Progress(console=Console(file=terminal, force_terminal=True), auto_refresh=False)
    with bar:
        bar.add_task("Training")
        bar.refresh()
        console.warn("a file is damaged")
    above, below = terminal.getvalue().split("Warning: a file is damaged")
    assert above.endswith("\x1b[2K")  # the line of the bar was emptied before
    assert "Training" in below


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "checkpoint.monitor=val/acc",
            "checkpoint.monitor: no validation logs 'val/acc'; use",
        ),
        (
            "callbacks.early_stopping.monitor=val/x_loss",
            "callbacks.early_stopping.monitor: no validation logs 'val/x_loss'",
        ),
    ],
)
def test_a_metric_that_nobody_logs_stops_before_training(run, override, message):
    failed = run(*SHORT, "callbacks=early_stopping", override)
    assert failed.exit_code == 1
    (line,) = failed.err.splitlines()
    assert line.startswith(f"Error: {message}")
    assert not (failed.folder / "losses.csv").exists()


def test_a_metric_of_the_training_may_be_monitored(run):
    done = run(*SHORT, "checkpoint.monitor=train/loss", "checkpoint.mode=min")
    assert done.exit_code == 0, done.err


def test_ctrl_c_saves_a_checkpoint_and_says_how_to_go_on(run, monkeypatch):
    steps = (*SHORT, "trainer.max_epochs=3")
    whole = run(*steps)
    step = Classifier.training_step

    def interrupt(self: Classifier, *args: Any) -> Any:
        if self.trainer.training and self.trainer.global_step == 6:
            os.kill(os.getpid(), signal.SIGINT)
        return step(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Classifier, "training_step", interrupt)
        stopped = run(*steps)
    assert stopped.exit_code == 130
    assert stopped.results["status"] == "interrupted"
    (path,) = (stopped.folder / "resume").iterdir()
    assert path.name == "step_7.ckpt"
    command = stopped.err.splitlines()[-1]
    assert command.startswith("To go on: after step 7: python train.py debug=fast")
    assert command.endswith(" resume=auto")
    overrides = shlex.split(command.split("train.py ")[1])
    done = run(*overrides, folder=stopped.folder)
    assert done.exit_code == 0, done.err
    assert done.losses == whole.losses


def test_a_second_ctrl_c_stops_at_once(run, monkeypatch):
    def interrupt(self: Classifier, *args: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        pytest.fail("it went on")

    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(Classifier, "training_step", interrupt)
    stopped = run(*SHORT)
    assert stopped.exit_code == 130
    assert not (stopped.folder / "resume").exists()
    assert signal.getsignal(signal.SIGINT) in (before, signal.SIG_IGN)


def test_a_prediction_says_where_its_files_are(run, tmp_path):
    trained = run(*SHORT)
    (tmp_path / "photos").mkdir()
    Image.new("L", (8, 8)).save(tmp_path / "photos" / "a.png")
    (path,) = trained.folder.glob("checkpoints/*")
    done = run(
        "mode=predict", f"ckpt={path}", f"input={tmp_path / 'photos'}", "trainer=cpu",
        "impl=reference",
    )  # fmt: skip
    assert done.exit_code == 0, done.err
    assert f"predictions {done.folder / 'classes.csv'}" in done.out


def test_a_profile_leaves_a_trace_and_counts_operations(run):
    done = run(
        "debug=profile", *SHORT[1:], "callbacks.profile.first=2", "callbacks.profile.steps=2",
        "trainer.max_epochs=1", "trainer.limit_train_batches=5", "data.batch_size=8",
    )  # fmt: skip
    assert done.exit_code == 0, done.err
    assert "traceEvents" in (done.folder / "profile" / "trace.json").read_text()
    assert "Profile of 2 steps" in done.out
    (operations,) = re.findall(r"^operations +(\S+) floating", done.out, re.MULTILINE)
    assert float(operations) > 8 * 3 * 2 * 4 * 9 * 64  # the first convolution, three times


def test_a_fit_that_is_too_short_for_a_profile_says_so(run):
    done = run("debug=profile", *SHORT[1:], "trainer.max_epochs=1", "trainer.limit_train_batches=5")
    assert done.exit_code == 0
    assert "no profile: it takes 30 steps, the fit had 5" in done.err


@pytest.mark.filterwarnings("ignore:Attribute .layer. is an instance of .nn.Module")
def test_a_module_among_the_saved_arguments_is_left_out_and_named(run, monkeypatch):
    init = Classifier.__init__

    def saving(self: Classifier, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.save_hyperparameters({"mine": 7, "layer": torch.nn.Linear(2, 2)})

    monkeypatch.setattr(Classifier, "__init__", saving)
    done = run(*SHORT, "trainer.max_epochs=2", "step_checkpoints.every_n_steps=2")
    assert done.exit_code == 0, done.err
    (path,) = done.folder.glob("checkpoints/*")
    saved = torch.load(path, weights_only=True)["hyper_parameters"]
    assert saved["mine"] == 7
    assert saved["learning_rate"] == 0.005
    assert "layer" not in saved
    assert done.err.count("save_hyperparameters() saves layer, a Linear: checkpoints are") == 1
