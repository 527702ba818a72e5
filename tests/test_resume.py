"""resume=auto: what a run that was killed, stopped or damaged ends with."""

from __future__ import annotations

import csv
import json
import multiprocessing
import os
import random
import shutil
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

import tests.killed
from models.tasks.classifier import Classifier
from tests.offline import read
from training import disk
from training.folder import is_finished, run_folder

RUN = (
    "trainer=cpu", "impl=reference", "logger=csv", "model.network.width=4", "data.batch_size=128",
    "trainer.max_epochs=3", "trainer.log_every_n_steps=3", "trainer.val_check_interval=0.5",
    "step_checkpoints.every_n_steps=4",
)  # fmt: skip


# One process imports PyTorch and Lightning; those that are killed begin as copies of it.
copies = multiprocessing.get_context("forkserver")
copies.set_forkserver_preload(["tests.killed"])


@dataclass(frozen=True)
class Ended:
    exit_code: int | None
    out: str


def killed(folder: Path, calls: int, *overrides: str) -> Ended:
    """Runs train.py in a process of its own, which is killed at so many function calls."""
    output = folder.with_suffix(".out")
    arguments = (calls, (*RUN, *overrides, f"hydra.run.dir={folder}"), output)
    process = copies.Process(target=tests.killed.main, args=arguments)
    process.start()
    process.join()
    return Ended(process.exitcode, output.read_text())


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> tuple[Path, int]:
    """A run that nothing happens to, and how many function calls it took."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    done = killed(folder, 0)
    assert done.exit_code == 0, done.out
    return folder, int(done.out.split()[-1])


def outcome(folder: Path) -> dict[str, Any]:
    """All that a run leaves which does not depend on the time."""
    results = json.loads((folder / "results.json").read_text())
    assert results["status"] == "finished"
    with (folder / "csv" / "metrics.csv").open() as file:
        rows = [
            {name: value for name, value in row.items() if value and "/" in name}
            | {"step": row["step"]}
            for row in csv.DictReader(file)
            if not row.get("time/total")
        ]
    (checkpoint,) = (folder / "checkpoints").iterdir()
    return {
        "losses": (folder / "losses.csv").read_text(),
        "metrics": results["metrics"],
        "rows": rows,
        "weights": torch.load(checkpoint, weights_only=True)["state_dict"],
    }


def assert_same(folder: Path, whole: Path) -> None:
    found, expected = outcome(folder), outcome(whole)
    weights, other = found.pop("weights"), expected.pop("weights")
    assert found == expected
    assert weights.keys() == other.keys()
    assert all(torch.equal(weights[name], other[name]) for name in weights)


@pytest.mark.slow
def test_a_run_that_is_killed_goes_on_bit_for_bit(whole, tmp_path):
    folder, calls = whole
    assert killed(tmp_path / "run", round(0.55 * calls), "resume=auto").exit_code == -9
    checkpoints = (tmp_path / "run" / "resume").glob("*.ckpt")
    assert sorted(path.name for path in checkpoints) == ["step_12.ckpt", "step_16.ckpt"]
    done = killed(tmp_path / "run", 0, "resume=auto")
    assert done.exit_code == 0, done.out
    assert "Going on after step 16" in done.out
    assert_same(tmp_path / "run", folder)
    assert not (tmp_path / "run" / "resume").exists()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(int(os.environ.get("HOCONV_KILLS", "3"))))
def test_a_run_may_be_killed_at_any_moment(whole, tmp_path, seed):
    """And again, while it goes on. HOCONV_KILLS=20 tries more of them, half a minute each."""
    folder, calls = whole
    generator = random.Random(seed)
    killed(tmp_path / "run", generator.randrange(1, calls), "resume=auto")
    killed(tmp_path / "run", generator.randrange(1, calls // 2), "resume=auto")
    done = killed(tmp_path / "run", 0, "resume=auto")
    assert done.exit_code == 0, done.out
    assert_same(tmp_path / "run", folder)


# In this process, where the fixture `run` takes the place of a shell.

SHORT = (
    "trainer=cpu", "impl=reference", "logger=csv", "model.network.width=4", "data.batch_size=128",
    "trainer.max_epochs=2", "trainer.log_every_n_steps=2", "step_checkpoints.every_n_steps=3",
)  # fmt: skip


def at_step(monkeypatch, step: int, action: Callable[[Classifier], Any]) -> None:
    """Does something in a training step, the first time that it comes."""
    training_step = Classifier.training_step
    left = [step]

    def wrapped(self: Classifier, batch: Any, batch_idx: int) -> Any:
        if self.trainer.global_step + 1 in left:
            left.clear()
            action(self)
        return training_step(self, batch, batch_idx)

    monkeypatch.setattr(Classifier, "training_step", wrapped)


def fail(model: Classifier) -> None:
    raise RuntimeError("power cut")


def go_on(run, folder: Path, *overrides: str):
    return run(*SHORT, "resume=auto", *overrides, folder=folder)


@pytest.fixture(scope="module")
def kept(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("kept") / "run"


@pytest.fixture
def expected(run, kept) -> Path:
    """A run that nothing happens to, the same for all tests."""
    if not kept.exists():
        shutil.copytree(run(*SHORT).folder, kept)
    return kept


def test_sigterm_makes_a_checkpoint_first(run, monkeypatch, expected):
    at_step(monkeypatch, 8, lambda model: os.kill(os.getpid(), signal.SIGTERM))
    stopped = run(*SHORT)
    assert stopped.exit_code == 143
    assert stopped.results["status"] == "interrupted"
    assert stopped.results["error"] == "SIGTERM after step 8"
    assert "Traceback" not in stopped.err
    assert (stopped.folder / "resume" / "step_8.ckpt").exists()
    done = go_on(run, stopped.folder)
    assert "Going on after step 8" in done.out
    assert_same(stopped.folder, expected)


def test_slurm_starts_no_second_way_of_going_on(run, monkeypatch):
    for name in ("JOB_ID", "NTASKS", "NTASKS_PER_NODE", "NNODES"):
        monkeypatch.setenv(f"SLURM_{name}", "1")
    for name in ("PROCID", "LOCALID", "NODEID"):
        monkeypatch.setenv(f"SLURM_{name}", "0")
    monkeypatch.setenv("SLURM_JOB_NAME", "training")
    at_step(monkeypatch, 8, lambda model: os.kill(os.getpid(), signal.SIGTERM))
    stopped = run(*SHORT)
    assert stopped.exit_code == 143
    assert stopped.results["error"] == "SIGTERM after step 8"
    assert not list(stopped.folder.glob("hpc_ckpt*"))


@pytest.mark.parametrize(
    "damage",
    [
        "a byte changed",
        pytest.param("truncated", marks=pytest.mark.slow),
        pytest.param("empty", marks=pytest.mark.slow),
    ],
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(
    run, monkeypatch, expected, damage
):
    at_step(monkeypatch, 8, fail)
    failed = run(*SHORT)
    path = failed.folder / "resume" / "step_6.ckpt"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    cut = {"truncated": content[: len(content) // 2], "a byte changed": content, "empty": b""}
    path.write_bytes(cut[damage])
    done = go_on(run, failed.folder)
    (line,) = done.err.splitlines()
    assert line.startswith(f"Warning: {path} is damaged (")
    assert "Going on after step 3" in done.out
    assert_same(failed.folder, expected)


def test_a_run_without_a_checkpoint_begins_again(run, monkeypatch, expected):
    at_step(monkeypatch, 3, fail)
    failed = run(*SHORT)
    done = go_on(run, failed.folder)
    assert "Going on" not in done.out
    assert_same(failed.folder, expected)


@pytest.mark.slow
def test_gradients_are_accumulated_as_if_nothing_had_happened(run, monkeypatch):
    accumulate = ("trainer.accumulate_grad_batches=3", "step_checkpoints.every_n_steps=1")
    whole = run(*SHORT, *accumulate)
    at_step(monkeypatch, 6, fail)
    failed = run(*SHORT, *accumulate)
    go_on(run, failed.folder, *accumulate)
    assert_same(failed.folder, whole.folder)


def test_a_run_that_is_finished_stays_as_it_is(run, expected):
    before = (expected / "results.json").read_text()
    done = go_on(run, expected)
    assert done.exit_code == 0
    assert "is finished" in done.out
    assert (expected / "results.json").read_text() == before


def test_another_configuration_does_not_go_on(run, monkeypatch):
    at_step(monkeypatch, 8, fail)
    failed = run(*SHORT)
    other = go_on(run, failed.folder, "seed=7")
    assert other.exit_code == 1
    (line,) = other.err.splitlines()
    assert "was begun with another configuration" in line


def test_auto_finds_the_newest_run_of_the_same_command(tmp_path):
    def folder(name: str, *overrides: str, status: str = "running", step: int = 5) -> str:
        path = tmp_path / name
        (path / "resume").mkdir(parents=True)
        if step:
            (path / "resume" / f"step_{step}.ckpt").touch()
        record = {"status": status, "overrides": list(overrides)}
        (path / "results.json").write_text(json.dumps(record))
        return str(path)

    def find(resume: str | None, *overrides: str) -> str:
        hydra = {"overrides": {"task": list(overrides)}}
        return run_folder(resume, str(tmp_path), "new", _root_=OmegaConf.create({"hydra": hydra}))

    folder("01", "seed=1")
    wanted = folder("02", "seed=1", "resume=auto")
    folder("03", "seed=1", status="finished")
    folder("04", "seed=1", step=0)
    other = folder("05", "seed=2")
    related = folder("06", "seed=3", "model.network.width=${seed}")
    assert find("auto", "resume=auto", "seed=1") == wanted
    assert find("auto", "seed=2") == other
    assert find("auto", "seed=3", "model.network.width=${seed}") == related
    assert find("auto", "seed=3") == str(tmp_path / "new")
    assert find(None, "seed=1") == str(tmp_path / "new")


@pytest.mark.parametrize(
    "contents", ["", "{", "[]", "{}", '{"status": 1, "overrides": []}', '{"status": "running"}',
                 '{"status": "running", "overrides": [1]}'],
)  # fmt: skip
def test_a_run_whose_results_cannot_be_read_is_named_and_passed_over(tmp_path, capfd, contents):
    folder = tmp_path / "runs" / "run"
    (folder / "resume").mkdir(parents=True)
    (folder / "resume" / "step_5.ckpt").touch()
    (folder / "results.json").write_text(contents)
    hydra = OmegaConf.create({"hydra": {"overrides": {"task": []}}})
    new = str(folder.parent / "new")
    assert run_folder("auto", str(folder.parent), "new", _root_=hydra) == new
    assert not is_finished(OmegaConf.create({"resume": "auto", "mode": "train"}), folder)
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"Warning: resume=auto: {folder}/results.json cannot be read")
    assert line.endswith(f"hydra.run.dir={folder} goes on with it")


@pytest.mark.parametrize("text", ["", "[1, 2]", "{", "trainer: {}"])
def test_a_configuration_that_cannot_be_read_is_one_line(run, tmp_path, text):
    (tmp_path / "resume").mkdir()
    (tmp_path / "resume" / "step_5.ckpt").touch()
    (tmp_path / "config.yaml").write_text(text)
    failed = run(*SHORT, "resume=auto", folder=tmp_path)
    assert failed.exit_code == 1
    (line,) = failed.err.splitlines()
    assert line.startswith("Error: resume: the configuration of the run in ")
    assert line.endswith("; put the file back, or leave resume out")


@pytest.mark.slow
def test_a_run_that_is_going_on_is_left_alone(run, expected, tmp_path):
    folder = tmp_path / "run"
    reached, resumed = copies.Event(), copies.Event()
    command = (*SHORT, f"hydra.run.dir={folder}")
    first = copies.Process(target=tests.killed.held_up, args=(8, command, reached, resumed))
    first.start()
    reached.wait()
    for overrides in ((), ("resume=auto",)):
        second = run(*SHORT, *overrides, folder=folder)
        assert second.exit_code == 1
        (line,) = second.err.splitlines()
        assert line.startswith(f"Error: a run is going on in {folder}, by process ")
        assert f" {first.pid} on {socket.gethostname()} since 20" in line
    resumed.set()
    first.join()
    assert first.exitcode == 0
    steps, whole = (
        [row.partition(",")[0] for row in (each / "losses.csv").read_text().splitlines()]
        for each in (folder, expected)
    )
    assert steps == whole


def test_auto_finds_a_run_without_a_checkpoint_that_still_runs(run, tmp_path):
    folder = tmp_path / "runs" / "run"
    reached, resumed = copies.Event(), copies.Event()
    command = (*SHORT, f"hydra.run.dir={folder}")
    first = copies.Process(target=tests.killed.held_up, args=(1, command, reached, resumed))
    first.start()
    reached.wait()
    hydra = OmegaConf.create({"hydra": {"overrides": {"task": list(SHORT)}}})
    assert run_folder("auto", str(folder.parent), "new", _root_=hydra) == str(folder)
    first.kill()  # and its lock goes with it
    first.join()
    new = str(folder.parent / "new")
    assert run_folder("auto", str(folder.parent), "new", _root_=hydra) == new


@pytest.mark.slow
def test_sigterm_while_a_checkpoint_is_written_does_not_damage_it(run, monkeypatch, expected):
    save, sent = torch.save, []

    def interrupted(contents: Any, file: Any) -> None:
        if "step_6" in file.name and not sent:
            sent.append(os.kill(os.getpid(), signal.SIGTERM))
        save(contents, file)

    monkeypatch.setattr(torch, "save", interrupted)
    stopped = run(*SHORT)
    assert stopped.exit_code == 143
    assert stopped.results["error"] == "SIGTERM after step 7"
    assert not list(stopped.folder.rglob("*.partial"))
    go_on(run, stopped.folder)
    assert_same(stopped.folder, expected)


def test_a_run_survives_the_loss_of_its_folder(run, monkeypatch, expected):
    folders: list[Path] = []

    def remove(model: Classifier) -> None:
        folders.append(Path(model.trainer.default_root_dir))
        shutil.rmtree(folders[0])

    at_step(monkeypatch, 8, remove)
    done = run(*SHORT)
    assert done.exit_code == 0
    lines = done.err.splitlines()
    assert sum("losses.csv cannot be written (No such file" in line for line in lines) == 2
    assert outcome(expected)["metrics"] == done.results["metrics"]
    assert [path.name for path in (done.folder / "checkpoints").iterdir()] == ["epoch_1.ckpt"]
    assert not (done.folder / "losses.csv").exists()  # rather than one that lacks its beginning


def test_a_checkpoint_of_a_run_before_in_the_folder_is_not_tested(run, monkeypatch):
    """Returns where the run's own, of the same name, cannot be written."""
    first = run(*SHORT, "seed=1")
    replaced = disk.replaced

    def full(path: Path) -> Any:
        if path.suffix == ".ckpt":
            raise disk.DiskError(path, "No space left on device")
        return replaced(path)

    expected = run(*SHORT, "seed=2").results["metrics"]
    monkeypatch.setattr(disk, "replaced", full)
    second = run(*SHORT, "seed=2", folder=first.folder)
    assert second.results["metrics"] == expected


def test_a_new_run_in_a_used_folder_starts_from_scratch(run, monkeypatch, expected):
    at_step(monkeypatch, 8, fail)
    failed = run(*SHORT)
    at_step(monkeypatch, 2, fail)
    run(*SHORT, folder=failed.folder)
    done = go_on(run, failed.folder)
    assert "Going on" not in done.out
    assert_same(failed.folder, expected)


def test_missing_losses_of_a_resumed_run_are_counted(run, monkeypatch):
    at_step(monkeypatch, 8, fail)
    failed = run(*SHORT)
    path = failed.folder / "losses.csv"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:4]))
    done = go_on(run, failed.folder)
    assert done.err.splitlines() == [f"Warning: {path} has 3 of the 6 rows written so far"]


def test_what_the_disk_had_no_room_for_is_written_when_it_has(run, monkeypatch, expected):
    def fill(model: Classifier) -> None:
        folder = Path(model.trainer.default_root_dir)
        (folder / "csv").rename(folder / "kept")
        (folder / "csv").write_text("not a folder")

    def make_room(model: Classifier) -> None:
        folder = Path(model.trainer.default_root_dir)
        (folder / "csv").unlink()
        (folder / "kept").rename(folder / "csv")

    at_step(monkeypatch, 4, fill)
    at_step(monkeypatch, 12, make_room)
    done = run(*SHORT)
    (line,) = done.err.splitlines()
    assert "metrics.csv cannot be written (" in line
    assert_same(done.folder, expected)


def test_without_a_checkpoint_the_last_weights_are_tested(run, monkeypatch):
    def fill(model: Classifier) -> None:
        (Path(model.trainer.default_root_dir) / "checkpoints").write_text("not a folder")

    at_step(monkeypatch, 1, fill)
    done = run(*SHORT)
    assert done.exit_code == 0
    assert done.results["metrics"]["test/accuracy"] > 0
    assert "epoch_0.ckpt cannot be written" in done.err
    assert "the weights of the last step are tested: no checkpoint could be written" in done.err
    assert list((done.folder / "resume").iterdir())  # the only weights that there are


# Weights & Biases


@pytest.mark.slow
def test_a_run_goes_on_under_the_same_name_at_weights_and_biases(
    run, monkeypatch, tmp_path, wandb_alone
):
    """And its second record has all numbers of the first, which a kill may cut off anywhere."""
    wandb = ("logger=wandb", f"logger.wandb.save_dir={tmp_path}", "trainer.val_check_interval=3")
    at_step(monkeypatch, 11, fail)
    failed = run(*SHORT, *wandb, "step_checkpoints.every_n_steps=10")
    done = go_on(run, failed.folder, *wandb, "step_checkpoints.every_n_steps=10")
    assert done.exit_code == 0, done.err
    wandb_alone.teardown()  # which waits until all is written
    first, second = sorted(tmp_path.glob("wandb/offline-run-*"))
    assert first.name.split("-")[-1] == second.name.split("-")[-1]
    before, after = ({row["_step"]: row for row in read(each).history} for each in (first, second))
    kept = [step for step in before if before[step]["trainer/global_step"] < 10]
    assert len(kept) > 5
    for step in kept:
        row = {k: v for k, v in before[step].items() if k.startswith(("train", "val", "best"))}
        assert row == {name: after[step][name] for name in row}
    losses = [row["train/loss"] for row in after.values() if "train/loss" in row]
    assert losses == [float(loss) for loss in done.losses][1::2]
    assert list(after) == list(range(len(after)))


def test_loggers_write_what_they_have_before_a_checkpoint_counts_it(run, monkeypatch):
    """Lightning's CSVLogger, as others, keeps rows in memory: a kill would lose them."""
    kept: list[str] = []

    def look(model: Classifier) -> None:
        (path,) = Path(model.trainer.default_root_dir).rglob("plain/**/metrics.csv")
        with path.open() as file:
            kept.extend(row["train/loss"] for row in csv.DictReader(file) if row["train/loss"])

    at_step(monkeypatch, 8, look)
    plain = "+logger.plain._target_=pytorch_lightning.loggers.CSVLogger"
    where = ("+logger.plain.save_dir=${hydra:runtime.output_dir}", "+logger.plain.name=plain")
    done = run(*SHORT, "logger=none", plain, *where)
    assert done.exit_code == 0, done.err
    assert kept == done.losses[1:6:2]  # of a checkpoint after six steps


@pytest.mark.slow
def test_a_server_that_cannot_be_reached_costs_no_run(run, monkeypatch, tmp_path, wandb_alone):
    init = wandb_alone.init

    def unreachable(**arguments: Any) -> Any:
        if arguments.get("mode") != "offline":
            raise wandb_alone.errors.CommError("timed out")
        return init(**arguments)

    monkeypatch.setattr(wandb_alone, "init", unreachable)
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    done = run(*SHORT, "logger=wandb", f"logger.wandb.save_dir={tmp_path}")
    assert done.exit_code == 0
    assert "Weights & Biases cannot be reached (timed out)" in done.err
    assert len(list(tmp_path.glob("wandb/offline-run-*"))) == 1
