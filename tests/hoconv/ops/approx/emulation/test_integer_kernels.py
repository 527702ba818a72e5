"""The CUDA kernels for products of integers: on a CPU, thread by thread, and on a GPU."""

from __future__ import annotations

import pytest

from hoconv.jit import compilers
from tests.hoconv.ops.emulation.compile import compile_kernels, run

_MODULE = "tests.hoconv.ops.approx.emulation.check"


@pytest.mark.skipif(compilers.obstacle("cpu") is not None, reason=str(compilers.obstacle("cpu")))
def test_emulated_kernels_give_the_bits_of_the_definition() -> None:
    run(_MODULE, compile_kernels("approx/cuda", "integers", "depthwise", "table"))


@pytest.mark.gpu
def test_a_gpu_gives_the_bits_of_the_definition() -> None:
    run(_MODULE, "cuda")
