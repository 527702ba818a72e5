"""Training in processes: they capture the same steps, or none does, and none waits for another."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from tests.training.capture.distributed import STEPS
from training.capture.steps import WARMUP_STEPS_DDP


def run(*arguments: str) -> list[str]:
    module = "tests.training.capture.distributed"
    found = subprocess.run(
        [sys.executable, "-m", module, *arguments], capture_output=True, text=True, timeout=300
    )
    assert not found.returncode, found.stderr
    return found.stdout.split()[-2:]


@pytest.mark.slow
@pytest.mark.parametrize("when", ["always", "late"])
def test_one_process_cannot_capture(when: str, device: str) -> None:
    if device == "cuda":
        pytest.skip("without a GPU only")
    assert run(when, "auto", device, "2") == run(when, "off", device, "2")


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_all_processes_capture(processes: int, device: str) -> None:
    """Also a single one: DistributedDataParallel takes its time there, too."""
    if device == "cuda" and torch.cuda.device_count() < processes:
        pytest.skip(f"there are fewer than {processes} GPUs")
    if device == "cpu" and processes > 1:
        pytest.skip("what stands in for a GPU does not record sums over processes")
    weights, replays = run("never", "auto", device, str(processes))
    assert weights == run("never", "off", device, str(processes))[0]
    assert int(replays) == STEPS - WARMUP_STEPS_DDP - 1  # one step to compare
