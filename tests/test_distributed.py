"""Training in several processes, on CPUs with gloo or on GPUs: what it computes and leaves."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
# Without batch normalisation, whose statistics are those of one process.
RUN = (
    "experiment=mnist_lstm", "data=digits", "trainer.accelerator=cpu", "impl=reference",
    "logger=csv", "trainer.max_epochs=2", "trainer.log_every_n_steps=2",
    "trainer.limit_train_batches=9",
)  # fmt: skip
TWO = ("trainer=ddp", "trainer.devices=2", "data.batch_size=64")


def start(*command: str) -> subprocess.Popen[str]:
    path = os.pathsep.join([str(ROOT), *sys.path])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=pipe, stderr=pipe, text=True)


def train(folder: Path, *overrides: str, by: tuple[str, ...] = (sys.executable,)) -> str:
    process = start(*by, "train.py", *RUN, *overrides, f"hydra.run.dir={folder}")
    out, err = process.communicate()
    assert process.returncode == 0, err
    return out


def losses(folder: Path) -> list[float]:
    with (folder / "losses.csv").open() as file:
        return [float(row["loss"]) for row in csv.DictReader(file)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Path:
    """One process with batches as large as those of two together."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    train(folder, "trainer=default", "data.batch_size=128")
    return folder


def assert_same(folder: Path, alone: Path) -> None:
    assert losses(folder) == pytest.approx(losses(alone), rel=1e-4)
    results, expected = (json.loads((f / "results.json").read_text()) for f in (folder, alone))
    assert results["status"] == "finished"
    for stage in ("val", "test"):
        for name in ("loss", "accuracy"):
            value = expected["metrics"][f"{stage}/{name}"]
            assert results["metrics"][f"{stage}/{name}"] == pytest.approx(value, rel=1e-4)


@pytest.mark.slow
def test_two_processes_train_as_one_does(alone, tmp_path):
    out = train(tmp_path / "run", *TWO)
    assert_same(tmp_path / "run", alone)
    assert out.count("epoch 0/1") == out.count("Implementations") == 1
    with (tmp_path / "run" / "csv" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert None not in rows[-1]
    (both,) = (row for row in rows if row["step"] == "18" and row["throughput/samples_per_sec"])
    seconds = float(both["throughput/step_ms"]) / 1000
    assert float(both["throughput/samples_per_sec"]) * seconds == pytest.approx(2 * 64)
    logged = {int(row["step"]): row["train/loss"] for row in rows if row["train/loss"]}
    every_second = [repr(loss) for loss in losses(tmp_path / "run")[1::2]]
    assert logged == dict(zip(range(2, 19, 2), every_second, strict=True))


@pytest.mark.slow
def test_no_step_waits_for_the_word_of_another_process(tmp_path):
    counted = tmp_path / "count"
    count = f"+callbacks.count={{_target_: tests.broadcasts.CountBroadcasts, path: {counted}}}"
    train(tmp_path / "run", *TWO, "trainer.max_epochs=1", "trainer.limit_val_batches=0", count)
    assert int(counted.read_text()) == 0


@pytest.mark.slow
def test_validation_has_the_statistics_of_the_first_process(tmp_path):
    found = tmp_path / "found"
    watch = f"+callbacks.watch={{_target_: tests.batch_statistics.WatchStatistics, path: {found}}}"
    train(tmp_path / "run", *TWO, "experiment=digits_cnn", "trainer.max_epochs=1", watch)
    after_a_step, before_validation = json.loads(found.read_text())
    assert len(set(after_a_step)) == 2  # each process has its own
    assert before_validation == 2 * [after_a_step[0]]


def coco_losses(tmp_path: Path, script: str, devices: int, *overrides: str) -> list[float]:
    """Of three steps, of the same global batch; then the scores of validation and test."""
    folder = tmp_path / str(devices)
    process = start(
        sys.executable, script, *overrides, "data=coco_tiny", "data.image_size=16",
        f"data.batch_size={16 // devices}", f"data.cache_dir={tmp_path / 'cache'}",
        "model.network.width=4", "impl=reference", "logger=none", "trainer=ddp",
        f"trainer.devices={devices}", "trainer.max_epochs=1", "trainer.limit_train_batches=3",
        f"hydra.run.dir={folder}",
    )  # fmt: skip
    _, err = process.communicate()
    assert process.returncode == 0, err
    metrics = json.loads((folder / "results.json").read_text())["metrics"]
    scores = [metrics[name] for name in sorted(metrics) if name.startswith(("val/", "test/"))]
    return [*losses(folder), *scores]


@pytest.mark.slow
@pytest.mark.parametrize(
    "experiment",
    [
        ("experiment=coco_segmentation",),
        ("experiment=coco_captions", "model.network.dropout=0"),  # it would differ
    ],
)
def test_losses_are_means_over_the_pixels_and_words_of_all_processes(tmp_path, experiment):
    """Of which every process has a different number."""
    script, overrides = "tests/without_batchnorm.py", ("trainer.accelerator=cpu", *experiment)
    one, two = (coco_losses(tmp_path, script, devices, *overrides) for devices in (1, 2))
    assert two == pytest.approx(one, rel=5e-6)


@pytest.mark.slow
def test_torchrun_starts_the_processes_as_well(alone, tmp_path):
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2")
    train(tmp_path / "run", *TWO, by=(*torchrun, "--master-port=29511"))
    assert_same(tmp_path / "run", alone)


@pytest.mark.slow
def test_two_processes_stop_after_the_same_step_and_go_on(alone, tmp_path):
    folder = tmp_path / "run"
    process = start(
        sys.executable, "train.py", *RUN, *TWO, f"hydra.run.dir={folder}",
        "step_checkpoints.every_n_steps=4",
    )  # fmt: skip
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("epoch 0/1"):
            process.send_signal(signal.SIGTERM)
            break
    _, err = process.communicate()
    assert process.returncode == 143, err
    results = json.loads((folder / "results.json").read_text())
    assert results["status"] == "interrupted"
    assert results["error"].startswith("SIGTERM after step 1")
    out = train(folder, *TWO, "step_checkpoints.every_n_steps=4", "resume=auto")
    assert "Going on after step" in out
    assert_same(folder, alone)


def test_a_sweep_of_several_devices_is_one_line_that_says_what_to_do(run):
    two = ("trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2", "logger=none")
    failed = run("-m", *two, "seed=1,2")
    assert failed.exit_code == 1
    assert "use trainer.devices=1" in failed.err


def test_clipping_by_norm_with_fsdp_is_one_line_that_says_what_to_do(run):
    failed = run("model=lstm", "data=digits", "trainer=fsdp", "logger=none")
    assert failed.exit_code == 1
    message = failed.err.splitlines()[0]
    assert "got 1.0" in message
    assert "add trainer.gradient_clip_val=null" in message


def test_batch_normalisation_over_cpus_is_one_line_that_says_what_to_do(run):
    failed = run(
        "trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=1", "logger=none",
        "trainer.sync_batchnorm=true",
    )  # fmt: skip
    assert failed.exit_code == 1
    assert "use trainer.sync_batchnorm=false" in failed.err.splitlines()[0]


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "devices"), [("ddp", 2), ("ddp", 4), ("fsdp", 2)])
def test_several_gpus_train_as_one_does(tmp_path, strategy, devices):
    if torch.cuda.device_count() < devices:
        pytest.skip(f"there are fewer than {devices} GPUs")
    gpu = ("trainer.accelerator=gpu", "trainer.gradient_clip_val=null")
    several = (
        f"trainer={strategy}", f"trainer.devices={devices}", f"data.batch_size={128 // devices}",
    )  # fmt: skip
    train(tmp_path / "several", *several, *gpu)
    train(tmp_path / "one", "trainer=gpu", "data.batch_size=128", *gpu)
    assert_same(tmp_path / "several", tmp_path / "one")


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("devices", [2, 4])
def test_several_gpus_segment_as_one_does(tmp_path, devices):
    if torch.cuda.device_count() < devices:
        pytest.skip(f"there are fewer than {devices} GPUs")
    overrides = (
        "experiment=coco_segmentation", "trainer.accelerator=gpu", "trainer.sync_batchnorm=true",
    )  # fmt: skip
    one, several = (coco_losses(tmp_path, "train.py", n, *overrides) for n in (1, devices))
    assert several == pytest.approx(one, rel=1e-4)
