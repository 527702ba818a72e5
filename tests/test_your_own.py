"""docs/use/your_own.md, run as it stands: a model and data of no class of this project."""

from __future__ import annotations

import importlib
import os
import re
import shlex
import sys
from pathlib import Path

import pytest
import torch

import train

ROOT = Path(train.__file__).parent
PAGE = (ROOT / "docs" / "use" / "your_own.md").read_text()
FILES = dict(re.findall(r"`(mine/\S+)`:?\n\n```\w+\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL))
LINES = re.findall(r"^python .*", PAGE, re.MULTILINE)
COMMANDS = [shlex.split(line)[2:] for line in LINES]
NEEDS_CHECKPOINT = [command for command in COMMANDS if any("ckpt=" in part for part in command)]
CPU = ("trainer=cpu", "logger=none", "impl=reference")
OWN = ("--config-dir", "mine/conf", "data=stripes", "model=lines")


@pytest.fixture(scope="module", autouse=True)
def mine(tmp_path_factory):
    """The folder of the page, as working directory and on Python's path."""
    folder, before = tmp_path_factory.mktemp("own"), Path.cwd()
    for name, text in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    sys.path.insert(0, str(folder / "mine"))
    os.chdir(folder)
    yield importlib.import_module("stripes")
    os.chdir(before)
    sys.path.remove(str(folder / "mine"))
    del sys.modules["stripes"]


@pytest.fixture
def checkpoint(run) -> Path:
    """A checkpoint that has left the folder of its run."""
    kept = Path("epoch_1.ckpt").absolute()
    if not kept.exists():
        done = run(*OWN, *CPU, "trainer.max_epochs=2")
        (done.folder / "checkpoints" / kept.name).rename(kept)
    return kept


def test_the_page_has_the_files_and_the_commands():
    assert set(FILES) == {
        "mine/stripes.py", "mine/conf/data/stripes.yaml", "mine/conf/model/lines.yaml",
        "mine/conf/callbacks/short.yaml",
    }  # fmt: skip
    assert (len(COMMANDS), len(NEEDS_CHECKPOINT)) == (8, 3)


@pytest.mark.parametrize(
    "command", [c for c in COMMANDS if c not in NEEDS_CHECKPOINT], ids=" ".join
)
def test_commands_that_train(run, command):
    done = run(*command, "trainer.limit_train_batches=4", *CPU, "trainer.max_epochs=1")
    assert done.exit_code == 0, done.err
    folder = done.folder / "0" if "-m" in command else done.folder
    assert (folder / "losses.csv").read_text().count("\n") == 5
    assert "test/loss" in (folder / "results.json").read_text()


@pytest.mark.parametrize("command", NEEDS_CHECKPOINT, ids=" ".join)
def test_commands_with_a_checkpoint(run, checkpoint, command):
    command = [re.sub(r"^ckpt=.*", f"ckpt={checkpoint}", part) for part in command]
    done = run(*command, *CPU, "trainer.max_epochs=1")
    assert done.exit_code == 0, done.err
    if "mode=predict" in command:
        predictions = torch.cat(torch.load(done.folder / "predictions.pt", weights_only=True))
        assert predictions.shape == (64, 2)
    else:
        assert done.results["metrics"]["test/loss"] > 0


@pytest.mark.parametrize(
    ("trainer", "impl"),
    [
        ("cpu", "cpp"),
        pytest.param("gpu", "reference", marks=pytest.mark.gpu),
        pytest.param("gpu", "cuda", marks=pytest.mark.gpu),
    ],
)
@pytest.mark.filterwarnings("ignore:.*your dataloader is not resumable")
def test_every_implementation(run, mine, monkeypatch, trainer, impl):
    """It trains, is interrupted, goes on, is tested, predicts and is swept; captured on a GPU."""
    where = (f"trainer={trainer}", f"impl={impl}", "logger=none")
    fit = (*OWN, *where, "trainer.max_epochs=8", "step_checkpoints.every_n_steps=2")
    folder = Path(f"{trainer}_{impl}").absolute()

    def fail(self, *_):
        if self.trainer.global_step == 7:
            raise RuntimeError("power cut")

    with monkeypatch.context() as patch:
        patch.setattr(mine.Lines, "on_train_batch_end", fail)
        assert "power cut" in run(*fit, folder=folder).err
    done = run(*fit, "resume=auto", folder=folder)
    assert done.exit_code == 0, done.err
    assert "Going on after step 6" in done.out
    assert len(done.losses) == 32
    assert list(done.results["environment"]["implementations"]) == ["network.0"]
    captured = done.results["capture"].get("replays", 0)
    assert captured > 0 if trainer == "gpu" else captured == 0

    checkpoint = folder / "checkpoints" / "epoch_7.ckpt"
    tested = run("mode=test", f"ckpt={checkpoint}", *where)
    assert tested.results["metrics"]["test/loss"] == done.results["metrics"]["test/loss"]
    predicted = run("mode=predict", f"ckpt={checkpoint}", *where)
    predictions = torch.cat(torch.load(predicted.folder / "predictions.pt", weights_only=True))
    assert predictions.shape == (64, 2)
    swept = run("-m", *OWN, *where, "trainer.max_epochs=1", "model.learning_rate=0.01,0.1",
                "objective=val/loss")  # fmt: skip
    assert swept.exit_code == 0, swept.err
    for job in "01":
        assert "test/loss" in (swept.folder / job / "results.json").read_text()


@pytest.mark.filterwarnings("ignore:.*your dataloader is not resumable")
def test_a_run_resumes_without_the_state_of_its_loader(run, mine, monkeypatch):
    steps = (*OWN, *CPU, "trainer.max_epochs=2", "step_checkpoints.every_n_steps=2")
    training_step = mine.Lines.training_step

    def fail(self, batch, batch_idx):
        if self.trainer.training and self.trainer.global_step == 6:
            raise RuntimeError("power cut")
        return training_step(self, batch, batch_idx)

    folder = Path("resumed").absolute()
    with monkeypatch.context() as patch:
        patch.setattr(mine.Lines, "training_step", fail)
        assert "power cut" in run(*steps, folder=folder).err
    done = run(*steps, "resume=auto", folder=folder)
    assert done.exit_code == 0, done.err
    assert "Going on after step 6" in done.out
    assert len(done.losses) == 8
    assert "a DataLoader, has no state_dict" in done.err


@pytest.mark.parametrize(
    ("missing", "of"), [("test_step", "Lines"), ("test_dataloader", "Stripes")]
)
def test_a_run_without_a_test_says_so_and_ends_well(run, mine, monkeypatch, missing, of):
    monkeypatch.delattr(getattr(mine, of), missing)
    done = run(*OWN, *CPU, "trainer.max_epochs=1")
    assert done.exit_code == 0, done.err
    assert f"not tested: {of} has no {missing}; define it" in done.err


@pytest.mark.parametrize(
    ("config", "overrides", "message"),
    [
        ("model:\n  a: 1\n   b: [", (), "wrong.yaml, line 3: no YAML: mapping values are not"),
        ("model: {a: 1}", ("model=liness",), "model: there is no 'liness'; choose lines"),
        ("model: {a: 1}", ("data=stripes,circles",), "data: there is no 'circles'; choose "),
        ("model: {a: 1}", ("callbacks=nope",), "callbacks: there is no 'nope'; choose early_stop"),
    ],
    ids=["no YAML", "no such option", "one of two", "not none"],
)
def test_a_mistake_in_ones_own_folder_is_one_line(run, mine, config, overrides, message):
    wrong = Path("mine/conf/model/wrong.yaml")
    wrong.write_text(config)
    try:
        failed = run(*OWN, *overrides)
    finally:
        wrong.unlink()
    assert failed.exit_code == 1
    (line,) = failed.err.splitlines()
    assert line.startswith("Error: ")
    assert message in line


def test_an_error_of_ones_own_code_keeps_its_place(run, mine, monkeypatch):
    def init(self, learning_rate: float):
        raise TypeError("a mistake of its own")

    monkeypatch.setattr(mine.Lines, "__init__", init)
    failed = run(*OWN, *CPU)
    assert failed.exit_code == 1
    assert 'raise TypeError("a mistake of its own")' in failed.err


def test_hyper_parameters_of_its_own_are_loaded(run, mine, monkeypatch):
    init = mine.Lines.__init__

    def saving(self, learning_rate: float):
        init(self, learning_rate)
        self.save_hyperparameters({"learning_rate": learning_rate})

    monkeypatch.setattr(mine.Lines, "__init__", saving)
    done = run(*OWN, *CPU, "debug=fast", "model.learning_rate=0.25")
    assert done.exit_code == 0, done.err
    (checkpoint,) = (done.folder / "checkpoints").iterdir()
    assert mine.Lines.load_from_checkpoint(checkpoint).hparams["learning_rate"] == 0.25


def test_a_checkpoint_is_tested_on_the_data_of_its_run(run, mine):
    trained = run(*OWN, *CPU, "trainer.max_epochs=1", "seed=7")  # these stripes are random
    (checkpoint,) = (trained.folder / "checkpoints").iterdir()
    done = run("mode=test", f"ckpt={checkpoint}", *CPU)
    assert done.results["metrics"]["test/loss"] == trained.results["metrics"]["test/loss"]
