"""The CUDA kernels for products of integers: on a CPU, thread by thread, and on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hoconv.jit import compilers
from tests.hoconv.ops.high_order.emulation.compile import compile_kernels

_ROOT = Path(__file__).parents[5]
_SOURCES = [f"approx/cuda/{name}.cu" for name in ("integers", "depthwise", "table")]


def check(kernels: str) -> None:
    command = [sys.executable, "-m", "tests.hoconv.ops.approx.emulation.check"]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(_ROOT), *sys.path)),
        "MALLOC_PERTURB_": "85",  # what is freed is no number that a kernel may read
    }
    done = subprocess.run(
        [*command, kernels], env=environment, cwd=_ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(compilers.obstacle("cpu") is not None, reason=str(compilers.obstacle("cpu")))
def test_emulated_kernels_give_the_bits_of_the_definition() -> None:
    check(str(compile_kernels(_SOURCES)))


@pytest.mark.gpu
def test_a_gpu_gives_the_bits_of_the_definition() -> None:
    check("cuda")
