"""The CUDA kernels on a CPU, thread by thread: where there is no GPU, they run all the same."""

from __future__ import annotations

import pytest

from hoconv.jit import compilers
from tests.hoconv.ops.emulation.compile import compile_kernels, run


@pytest.mark.slow
@pytest.mark.skipif(compilers.obstacle("cpu") is not None, reason=str(compilers.obstacle("cpu")))
def test_cuda_kernels_compute_the_definition_on_a_cpu() -> None:
    library = compile_kernels(
        "high_order/conv2d/cuda", "bands/banded", "forward", "grad_input", "grad_weight"
    )
    run("tests.hoconv.ops.high_order.emulated", library)
