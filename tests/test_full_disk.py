"""A run on a disk that is too small for what it writes."""

from __future__ import annotations

import csv
import json
import multiprocessing
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tests.full_disk

RUN = (
    "trainer=cpu", "impl=reference", "logger=csv", "data.batch_size=128",
    "trainer.max_epochs=3", "trainer.log_every_n_steps=3", "step_checkpoints.every_n_steps=4",
)  # fmt: skip
SIZES = np.linspace(50, 2000, int(os.environ.get("HOCONV_FULL_DISKS", "4"))).round().astype(int)

LARGEST_CHECKPOINT = 460_000  # bytes

# One process imports PyTorch and Lightning; those that run begin as copies of it.
copies = multiprocessing.get_context("forkserver")
copies.set_forkserver_preload(["tests.full_disk"])


def train_on_a_disk(kilobytes: int, folder: Path, *overrides: str) -> tuple[int | None, str, Path]:
    """The exit code, what was printed, and what was left in the folder of the run."""
    arguments = (kilobytes, (*RUN, *overrides), folder)
    process = copies.Process(target=tests.full_disk.main, args=arguments)
    process.start()
    process.join()
    if process.exitcode == tests.full_disk.CANNOT_MOUNT:
        pytest.skip("this user may not mount a file system")
    return process.exitcode, (folder / "out").read_text(), folder / "left" / "run"


def losses(run_dir: Path) -> list[tuple[str, str]]:
    with (run_dir / "losses.csv").open() as file:
        return [(row["step"], row["loss"]) for row in csv.DictReader(file)]


@pytest.fixture(scope="module")
def roomy(tmp_path_factory) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """The metrics and losses of a run that has all the room it needs."""
    code, out, left = train_on_a_disk(100_000, tmp_path_factory.mktemp("roomy") / "run")
    assert code == 0, out
    assert "cannot be written" not in out
    return json.loads((left / "results.json").read_text())["metrics"], losses(left)


@pytest.mark.slow
@pytest.mark.parametrize("kilobytes", SIZES.tolist())
def test_a_run_survives_a_full_disk(tmp_path, roomy, kilobytes):
    """HOCONV_FULL_DISKS=40 tries forty sizes, ten seconds each."""
    metrics, every_loss = roomy
    code, out, left = train_on_a_disk(kilobytes, tmp_path / "run")
    assert code == 0, out
    results = json.loads((left / "results.json").read_text())
    assert results["status"] == "finished"
    assert results["metrics"] == metrics
    for name, value in metrics.items():
        (line,) = (line for line in out.splitlines() if f" {name} " in line and "│" in line)
        assert f"{value:.6g}" in line
    assert losses(left) == every_loss
    for path in left.rglob("*.ckpt"):
        torch.load(path, weights_only=True)
    assert not list(left.rglob("*.partial"))
    kept = (left / "checkpoints" / "epoch_2.ckpt").is_file()
    assert ("epoch_2.ckpt cannot be written (No space left on device)" in out) == (not kept)
    assert ("the weights of the last step are tested" in out) == (not kept)
    if 1024 * kilobytes > LARGEST_CHECKPOINT + 50_000:
        assert list(left.rglob("*.ckpt"))
    assert out.count("; the run goes on") <= len({"resume", "checkpoints", "csv", "run"})
