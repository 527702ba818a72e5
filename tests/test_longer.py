"""resume=true: training a checkpoint of a run further, in a new run."""

from __future__ import annotations

import csv
import shutil
from pathlib import Path

import pytest
import torch

RUN = (
    "trainer=cpu", "impl=reference", "logger=csv", "model.network.width=2",
    "model.network.kernel_size=3", "data.batch_size=400", "trainer.log_every_n_steps=2",
    "trainer.limit_test_batches=1",
)  # fmt: skip


LONGER = ("resume=true", "logger=csv")


def checkpoint(folder: Path) -> Path:
    (path,) = (folder / "checkpoints").iterdir()
    return path


def rates(folder: Path) -> dict[int, str]:
    with (folder / "csv" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    return {int(row["step"]): row["train/learning_rate"] for row in rows if row.get("train/loss")}


@pytest.mark.parametrize(
    "how",
    [
        (),
        pytest.param(
            ("trainer.val_check_interval=0.5", "checkpoint.monitor=val/accuracy"),
            marks=pytest.mark.slow,
        ),
        ("optimizer=sgd", "trainer.accumulate_grad_batches=2", "trainer.limit_train_batches=3"),
    ],
)
def test_two_epochs_and_two_more_are_four(run, how):
    command = (*RUN, "scheduler=constant", *how)
    whole = run(*command, "trainer.max_epochs=4")
    half = run(*command, "trainer.max_epochs=2")
    done = run(
        f"ckpt={checkpoint(half.folder)}", "resume=true", "trainer.max_epochs=4", "logger=csv"
    )
    assert done.exit_code == 0, done.err
    assert done.err == ""
    assert done.losses == whole.losses
    expected, found = (
        torch.load(checkpoint(each.folder), weights_only=True) for each in (whole, done)
    )
    assert found["global_step"] == expected["global_step"]
    assert found["epoch"] == expected["epoch"]
    for name, value in expected["state_dict"].items():
        assert torch.equal(found["state_dict"][name], value), name
    assert checkpoint(done.folder).name == checkpoint(whole.folder).name
    assert done.results["metrics"] == whole.results["metrics"]
    assert rates(done.folder).items() <= rates(whole.folder).items()
    assert half.results["status"] == "finished"
    assert checkpoint(half.folder).is_file()
    before = torch.load(checkpoint(half.folder), weights_only=True)["callbacks"]["Throughput"]
    after = found["callbacks"]["Throughput"]
    assert sum(after.values()) >= sum(before.values()) > 0


@pytest.mark.parametrize("scheduler", ["cosine", pytest.param("one_cycle", marks=pytest.mark.slow)])
def test_a_schedule_gets_the_length_of_the_whole(run, scheduler):
    command = (*RUN, f"scheduler={scheduler}", "trainer.log_every_n_steps=1")
    whole = run(*command, "trainer.max_epochs=3")
    half = run(*command, "trainer.max_epochs=1")
    done = run(
        f"ckpt={checkpoint(half.folder)}", "resume=true", "trainer.max_epochs=3", "logger=csv"
    )
    assert done.exit_code == 0, done.err
    found = rates(done.folder)
    assert found
    assert found.items() <= rates(whole.folder).items()


def test_what_else_is_asked_for_is_one_line(run, tmp_path):
    half = run(*RUN, "trainer.max_epochs=1")
    ckpt = f"ckpt={checkpoint(half.folder)}"
    weights = torch.load(checkpoint(half.folder), weights_only=True)
    del weights["optimizer_states"]
    torch.save(weights, tmp_path / "weights.ckpt")
    for overrides, message in (
        (("resume=true",), "resume=true needs ckpt=<a checkpoint of a run>"),
        ((ckpt,), "trainer.max_epochs: "),
        ((ckpt, "trainer.max_epochs=1"), "has trained for 1; expected more, got 1"),
        ((ckpt, "data.batch_size=64"), "data.batch_size: the run of"),
        ((ckpt, "model=lstm"), "model: "),
        ((ckpt, "data=mnist"), "data: "),
        ((ckpt, "optimizer=sgd"), "optimizer."),
        ((ckpt, "seed=3"), "42 there, 3 here; resume=true changes nothing but how long it trains"),
        ((f"ckpt={tmp_path / 'weights.ckpt'}",), "holds no optimizer_states"),
    ):  # fmt: skip
        failed = run("trainer=cpu", *overrides, "resume=true", "logger=none")
        assert failed.exit_code == 1, overrides
        (line,) = failed.err.splitlines()
        assert message in line


def test_auto_with_another_length_says_so(run, tmp_path):
    half = run(*RUN, "trainer.max_epochs=1", folder=tmp_path / "with space" / "1")
    longer = (*RUN, "trainer.max_epochs=2", "resume=auto")
    done = run(*longer, folder=tmp_path / "with space" / "2")
    advice = f"'ckpt={checkpoint(half.folder)}' resume=true trainer.max_epochs="
    (line,) = done.err.splitlines()
    assert f"this is a new run, since that in {half.folder} had another trainer.max_epochs" in line
    assert advice in line

    before = half.results
    failed = run(*longer, folder=half.folder)
    assert failed.exit_code == 1
    (line,) = failed.err.splitlines()
    assert f"trainer.max_epochs: the run in {half.folder} was begun with another" in line
    assert advice in line
    assert half.results == before


@pytest.mark.slow
def test_a_longer_run_that_is_stopped_goes_on_with_the_same_command(run, monkeypatch):
    from tests.test_resume import at_step, fail

    command = (*RUN, "scheduler=constant", "step_checkpoints.every_n_steps=3")
    whole = run(*command, "trainer.max_epochs=2")
    half = run(*command, "trainer.max_epochs=1")
    alone = shutil.copy(checkpoint(half.folder), half.folder.parent / "alone.ckpt")
    longer = (f"ckpt={alone}", "resume=true", "trainer.max_epochs=2", "logger=csv",
              "step_checkpoints.every_n_steps=3")  # fmt: skip
    at_step(monkeypatch, len(whole.losses) - 1, fail)
    failed = run(*longer)
    assert failed.results["status"] == "failed"
    done = run(*longer, folder=failed.folder)
    assert done.exit_code == 0, done.err
    assert "Going on after step" in done.out
    expected, found = (
        torch.load(checkpoint(each.folder), weights_only=True)["state_dict"]
        for each in (whole, done)
    )
    assert all(torch.equal(found[name], value) for name, value in expected.items())
