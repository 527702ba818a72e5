"""python train.py -m, and the sweeps of conf/sweep."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import train
from hoconv.dispatch.implementations import ImplementationError
from models.tasks.classifier import Classifier
from training import disk, model

ROOT = Path(train.__file__).parent
SHORT = ("debug=fast", "impl=reference", "trainer=cpu")


def test_a_sweep_goes_on_after_a_job_that_failed(run, monkeypatch):
    def refuse_cpp(operator, impl, device_type):
        if impl == "cpp":
            raise ImplementationError("no compiler")
        return choose(operator, impl, device_type)

    choose = model.choose
    monkeypatch.setattr(model, "choose", refuse_cpp)
    sweep = run("-m", "debug=fast", "trainer=cpu", "impl=cpp,reference", "seed=1,2")
    assert sweep.exit_code == 1
    jobs = [json.loads((sweep.folder / str(i) / "results.json").read_text()) for i in range(4)]
    assert [(job["impl"], job["seed"], job["status"]) for job in jobs] == [
        ("cpp", 1, "failed"),
        ("cpp", 2, "failed"),
        ("reference", 1, "finished"),
        ("reference", 2, "finished"),
    ]


def test_a_job_with_lost_results_is_named_and_its_metrics_printed(run, monkeypatch):
    replaced = disk.replaced

    def full(path: Path) -> Any:
        if path.name == "sweep.json" or path.parts[-2:] == ("1", "results.json"):
            raise disk.DiskError(path, "No space left on device")
        return replaced(path)

    monkeypatch.setattr(disk, "replaced", full)
    sweep = run("-m", *SHORT, "seed=1,2")
    assert sweep.exit_code == 1
    table = sweep.out[sweep.out.rindex("Sweep") :]
    assert "finished" in table
    assert "unknown" in table
    job = sweep.folder / "1"
    assert f"Job 1: {job / 'results.json'}" in sweep.err
    assert sweep.err.count(f"{job / 'results.json'} cannot be written (No space left") == 2
    assert f"{sweep.folder / 'sweep.json'} cannot be written (No space left" in sweep.err


def fail_one(monkeypatch) -> None:
    """The job with seed 2 and the lower learning rate."""
    training_step = Classifier.training_step

    def fail(self: Classifier, batch: Any, batch_idx: int) -> Any:
        if torch.initial_seed() == 2 and self.learning_rate == 0.01:
            raise RuntimeError("this one")
        return training_step(self, batch, batch_idx)

    monkeypatch.setattr(Classifier, "training_step", fail)


FOUR = ("model.learning_rate=0.01,0.02", "seed=1,2")


@pytest.mark.slow
def test_of_four_jobs_three_finish_and_one_says_why_not(run, monkeypatch, wandb_alone, tmp_path):
    fail_one(monkeypatch)
    sweep = run("-m", *SHORT, *FOUR, "logger=wandb", f"logger.wandb.save_dir={tmp_path}")
    assert sweep.exit_code == 1
    rows = json.loads((sweep.folder / "sweep.json").read_text())
    assert [row["status"] for row in rows] == ["finished", "failed"] + 2 * ["finished"]
    assert rows[1]["error"] == "RuntimeError: this one"
    assert all(row["test/accuracy"] > 0 for row in rows if row["status"] == "finished")
    assert "Job 1: RuntimeError: this one" in sweep.err
    runs = list(tmp_path.glob("wandb/offline-run-*"))
    assert len(runs) == 4
    for folder in runs:
        (record,) = folder.glob("run-*.wandb")
        content = record.read_bytes()
        for expected in (b"digits_cnn", b"reference", b"learning_rate", b"train", b"throughput/"):
            assert expected in content


def test_an_unmeasured_objective_is_named_after_the_first_job(run):
    sweep = run("-m", *SHORT, "seed=1,2", "objective=val/acc")
    assert sweep.exit_code == 0
    assert sweep.err.count("objective: 'val/acc' was not measured") == 2
    assert "val/accuracy" in sweep.err
    assert "objective" not in run("-m", *SHORT, "seed=1").err


def test_a_sweep_ends_in_one_table_of_what_was_varied(run):
    sweep = run(
        "-m", *SHORT, "impl=auto", "model=approx_cnn", "model.network.width=2", "seed=1",
        "model.network.multiplier=exact,mbm10", "model.network.gradient=approx,ste",
    )  # fmt: skip
    assert sweep.exit_code == 0
    table = sweep.out[sweep.out.rindex("Sweep") :]
    multiplier, gradient = "model.network.multiplier", "model.network.gradient"
    measured = ("val/accuracy", "test/accuracy", "ms per step", "samples/s", "memory, MB")
    for expected in ("multiplier", "gradient", "mbm10", *measured):
        assert expected in table
    assert "seed" not in table
    rows = json.loads((sweep.folder / "sweep.json").read_text())
    assert [row["overrides"][multiplier] for row in rows] == ["exact"] * 2 + ["mbm10"] * 2
    assert [row["overrides"][gradient] for row in rows] == ["approx", "ste"] * 2
    for i, row in enumerate(rows):
        results = json.loads((sweep.folder / str(i) / "results.json").read_text())
        assert row["test/accuracy"] == results["metrics"]["test/accuracy"]
    assert (sweep.folder / "sweep.png").stat().st_size > 0


@pytest.mark.slow
def test_the_table_of_a_sweep_that_goes_on_has_no_column_for_that(run):
    first = run("-m", *SHORT, "seed=1,2")
    (first.folder / "1" / "results.json").unlink()
    done = run("-m", *SHORT, "seed=1,2", "resume=auto", folder=first.folder)
    assert done.exit_code == 0, done.err
    assert f"{first.folder / '0'} is finished" in done.out
    heading = done.out[done.out.rindex("Sweep") :].splitlines()[2]
    assert [cell.strip() for cell in heading.split("┃")[1:4]] == ["job", "seed", "status"]


@pytest.mark.parametrize(("objective", "best"), [("val/accuracy", max), ("val/loss", min)])
def test_the_best_job_is_marked(run, objective, best):
    rates = "1e-9,0.010123456789012345"
    sweep = run("-m", *SHORT, f"model.learning_rate={rates}", f"objective={objective}")
    assert sweep.exit_code == 0
    rows = json.loads((sweep.folder / "sweep.json").read_text())
    winner = best(rows, key=lambda row: row[objective])["number"]
    table = sweep.out[sweep.out.rindex("Sweep") :]
    assert f"│ {winner}* " in table
    assert f"│ {1 - winner} " in table
    assert f"{rows[0][objective]:.6g}" in table


def test_an_implementation_that_is_not_there_is_skipped_where_asked_for(run, monkeypatch):
    def refuse(operator, impl, device_type):
        if impl != "reference":
            raise ImplementationError(f"{impl} is missing")
        return choose(operator, impl, device_type)

    choose = model.choose
    monkeypatch.setattr(model, "choose", refuse)
    sweep = run(*SHORT[::2], "sweep=impl", "seed=0", "model.network.width=4")
    assert sweep.exit_code == 0
    rows = json.loads((sweep.folder / "sweep.json").read_text())
    assert [row["status"] for row in rows] == ["finished", "skipped", "skipped"]
    assert sweep.err.count("cpp is missing") == sweep.err.count("cuda is missing") == 1
    assert "Job 1 skipped: ImplementationError: cpp is missing" in sweep.err


def test_the_same_error_of_several_jobs_is_printed_once(run, monkeypatch):
    def refuse(*args: Any) -> Any:
        raise ImplementationError("no compiler")

    monkeypatch.setattr(model, "choose", refuse)
    sweep = run("-m", *SHORT, "seed=1,2")
    assert sweep.exit_code == 1
    assert sweep.err.count("no compiler") == 1
    assert "Jobs 0, 1: ImplementationError: no compiler" in sweep.err


@pytest.mark.slow
def test_a_search_continues_from_its_file(tmp_path):
    optuna = pytest.importorskip("optuna", reason="needs hoconv[sweep]")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    storage = f"sqlite:///{tmp_path / '0' / 'search.db'}"
    command = [sys.executable, "train.py", *SHORT, "sweep=search", "hydra.sweeper.n_trials=2"]
    for i, more in enumerate(((), (f"hydra.sweeper.storage={storage}",))):
        done = subprocess.run(
            [*command, f"hydra.sweep.dir={tmp_path / str(i)}", *more],
            cwd=ROOT, env=environment, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert_two_jobs_finished(tmp_path / str(i))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert len(optuna.load_study("search", storage).trials) == 4


@pytest.mark.filterwarnings("ignore")
def test_a_job_that_fails_does_not_end_a_search(run, monkeypatch):
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper", reason="needs hoconv[sweep]")

    training_step, calls = Classifier.training_step, itertools.count()

    def fail_first(*args: Any) -> Any:
        if next(calls) == 0:
            raise RuntimeError("this one")
        return training_step(*args)

    monkeypatch.setattr(Classifier, "training_step", fail_first)
    sweep = run(*SHORT, "sweep=search", "hydra.sweeper.n_trials=2", "hydra.sweeper.storage=null")
    assert sweep.exit_code == 1
    rows = json.loads((sweep.folder / "sweep.json").read_text())
    assert [row["status"] for row in rows] == ["failed", "finished"]


@pytest.mark.parametrize("path", sorted(ROOT.glob("conf/sweep/*.yaml")), ids=lambda path: path.stem)
def test_every_sweep_composes(monkeypatch, capfd, path):
    experiments = {"multiplier": "mnist_mbm", "gradient": "mnist_mbm", "cell": "mnist_lstm"}
    experiment = experiments.get(path.stem, "digits_cnn")
    if path.stem == "search":
        pytest.importorskip("hydra_plugins.hydra_optuna_sweeper", reason="needs hoconv[sweep]")
    arguments = ["train.py", f"experiment={experiment}", f"sweep={path.stem}", "--cfg", "hydra"]
    monkeypatch.setattr(sys, "argv", arguments)
    train.main()
    assert "params:" in capfd.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plugin", "overrides"),
    [
        ("hydra_joblib_launcher", ("hydra/launcher=joblib", "hydra.launcher.n_jobs=2")),
        ("hydra_submitit_launcher", ("hydra/launcher=submitit_local",)),
    ],
)
def test_jobs_may_run_elsewhere(tmp_path, plugin, overrides):
    pytest.importorskip(f"hydra_plugins.{plugin}", reason="needs hoconv[sweep]")
    command = [sys.executable, "train.py", "-m", "seed=1,2", *SHORT, *overrides]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    done = subprocess.run(
        [*command, f"hydra.sweep.dir={tmp_path}"],
        cwd=ROOT, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert_two_jobs_finished(tmp_path)


def assert_two_jobs_finished(sweep: Path) -> None:
    rows = json.loads((sweep / "sweep.json").read_text())
    assert [row["status"] for row in rows] == ["finished", "finished"]
    assert rows[0]["overrides"] != rows[1]["overrides"]
