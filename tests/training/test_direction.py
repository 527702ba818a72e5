"""Which way a metric improves, wherever one is monitored."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from pytorch_lightning.loggers import WandbLogger

from models.tasks.classifier import Classifier
from training.results import sweep as sweeps
from training.results.loggers import WandbRun

SHORT = ("debug=fast", "impl=reference", "trainer=cpu", "model.network.width=2")


def log_also(monkeypatch, **values: float) -> None:
    """Has a validation log more metrics, under val/."""
    step = Classifier.validation_step

    def wrapped(self: Classifier, batch, batch_idx: int) -> None:
        step(self, batch, batch_idx)
        self.log_dict({f"val/{name}": value for name, value in values.items()})

    monkeypatch.setattr(Classifier, "validation_step", wrapped)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_search_minimises_a_loss_and_goes_on_in_its_direction_only(run, tmp_path):
    optuna = pytest.importorskip("optuna", reason="needs hoconv[sweep]")
    storage = f"sqlite:///{tmp_path / 'search.db'}"
    search = (
        *SHORT,
        "sweep=search",
        "hydra.sweeper.n_trials=2",
        f"hydra.sweeper.storage={storage}",
    )
    done = run(*search, "objective=val/loss")
    assert done.exit_code == 0, done.err
    study = optuna.load_study("search", storage)
    assert study.direction == optuna.study.StudyDirection.MINIMIZE
    rows = json.loads((done.folder / "sweep.json").read_text())
    assert study.best_value == min(row["val/loss"] for row in rows)
    table = done.out[done.out.rindex("Sweep") :]
    assert f"│ {min(rows, key=lambda row: row['val/loss'])['number']}* " in table

    for more, message in (
        (("objective=val/accuracy",), "is to minimize, and this one to maximize its objective"),
        (("objective=val/loss", "hydra.sweeper.direction=maximize"),
         "hydra.sweeper.direction: maximize contradicts direction: minimize"),
    ):  # fmt: skip
        failed = run(*search, *more)
        assert failed.exit_code == 1
        (line,) = failed.err.splitlines()
        assert message in line


def test_an_unknown_metric_has_its_direction_said(run, monkeypatch):
    log_also(monkeypatch, regret=1.0)
    command = ("-m", *SHORT, "seed=1,2", "objective=val/regret")
    failed = run(*command)
    assert failed.exit_code == 1
    (line,) = failed.err.splitlines()
    assert line == (
        "Error: direction: the name of val/regret does not say whether it is to rise or to fall; "
        "correct the name, or set this to maximize or minimize"
    )
    assert not list(failed.folder.glob("0"))
    assert run(*command, "direction=minimize").exit_code == 0


def test_the_kept_epoch_is_the_best_of_what_is_monitored(run):
    command = (*SHORT, "trainer.max_epochs=2")
    done = run(*command, "checkpoint.monitor=val/loss")
    states = torch.load(next(done.folder.glob("checkpoints/*")), weights_only=True)["callbacks"]
    (state,) = (each for name, each in states.items() if name.startswith("EpochCheckpoints"))
    assert "'mode': 'min'" in next(name for name in states if name.startswith("EpochCheckpoints"))
    assert float(state["best_model_score"]) == done.results["metrics"]["val/loss"]

    for overrides, message in (
        (("checkpoint.monitor=val/regret",), "checkpoint.mode: the name of val/regret does not"),
        (("callbacks=early_stopping", "callbacks.early_stopping.monitor=val/regret"),
         "callbacks.early_stopping.mode: the name of val/regret does not"),
        (("+callbacks.mine={_target_: pytorch_lightning.callbacks.EarlyStopping, "
          "monitor: val/regret}",), "callbacks.mine.mode: the name of val/regret does not"),
        (("objective=val/loss", "checkpoint.monitor=val/loss", "checkpoint.mode=max"),
         "checkpoint.mode: max contradicts direction: minimize, of the same metric, val/loss"),
        (("scheduler=plateau", "scheduler.mode=max", "checkpoint.monitor=val/loss"),
         "scheduler.mode: max contradicts checkpoint.mode: min, of the same metric, val/loss"),
        (("direction=least",), "direction: expected maximize or minimize, got 'least'"),
    ):  # fmt: skip
        failed = run(*command, *overrides)
        assert failed.exit_code == 1, overrides
        (line,) = failed.err.splitlines()
        assert message in line


@pytest.mark.parametrize("mine", ["", "mode: max"])
def test_a_callback_follows_its_metric(run, monkeypatch, tmp_path: Path, mine: str):
    """One of the user's without a mode as one of this project's."""
    log_also(monkeypatch, recall=0.5)
    own = tmp_path / "conf" / "callbacks"
    own.mkdir(parents=True)
    text = "mine: {_target_: pytorch_lightning.callbacks.EarlyStopping, monitor: val/recall, %s}"
    (own / "mine.yaml").write_text(text % mine)
    done = run(
        f"--config-dir={own.parent}", *SHORT, "callbacks=[mine,early_stopping]",
        "callbacks.early_stopping.monitor=val/accuracy",
    )  # fmt: skip
    assert done.exit_code == 0, done.err
    (checkpoint,) = (done.folder / "checkpoints").iterdir()
    names = torch.load(checkpoint, weights_only=True)["callbacks"]
    modes = [name for name in names if name.startswith("EarlyStopping")]
    assert len(modes) == 2
    assert all("'mode': 'max'" in name for name in modes)


def test_what_is_no_number_is_never_the_best():
    values = {0: 0.5, 1: "nan", 2: None, 3: float("inf"), 4: 0.4, 5: 0.1}
    rows = [{"number": n, "status": "finished", "val/loss": v} for n, v in values.items()]
    rows[5]["status"] = "failed"
    assert sweeps._best(rows, "val/loss", "minimize") == 4
    assert sweeps._best(rows, "val/loss", "maximize") == 0


def test_the_best_at_weights_and_biases_is_of_what_has_a_direction(monkeypatch):
    logged: list[dict[str, float]] = []
    monkeypatch.setattr(WandbLogger, "log_metrics", lambda _, metrics, step: logged.append(metrics))
    logger = WandbRun(name="unused", offline=True)
    for values in ((2.0, 0.1, 5.0), (float("nan"),) * 3, (3.0, 0.2, 6.0)):
        logger.log_metrics(dict(zip(("val/loss_boxes", "val/ap", "val/regret"), values)), 1)
    assert {name: value for name, value in logged[-1].items() if name.startswith("best/")} == {
        "best/val/loss_boxes": 2.0, "best/val/ap": 0.2,
    }  # fmt: skip
