"""Processes that do not find the same run on eagerly, and none waits for another."""

from __future__ import annotations

import subprocess
import sys

import pytest


def run(when: str, mode: str) -> list[str]:
    module = "tests.training.capture.counting_in_one_process"
    found = subprocess.run(
        [sys.executable, "-m", module, when, mode],
        capture_output=True, text=True, timeout=300, check=True,
    )  # fmt: skip
    return found.stdout.split()[-3:]


@pytest.mark.parametrize("when", ["always", "late"])
def test_one_process_cannot_capture(when: str, device: str) -> None:
    if device == "cuda":
        pytest.skip("without a GPU only")
    assert run(when, "auto") == run(when, "off")
