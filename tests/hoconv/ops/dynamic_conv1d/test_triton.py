"""The kernels in Triton without a GPU: its interpreter runs them, and its compiler compiles what
would be launched. Tests on a GPU are those of every implementation.

B batch, C channels, H heads, K taps, T time steps.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch

import hoconv
from hoconv.dispatch.implementations import ImplementationError, choose
from hoconv.jit import no_gpu, triton
from hoconv.ops.dynamic_conv1d.operator import OPERATOR

ROOT = Path(__file__).parents[4]
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)

IN_THE_INTERPRETER = """
import sys
import torch
from hoconv.ops.dynamic_conv1d import triton_kernels
from hoconv.ops.dynamic_conv1d.operator import OPERATOR
from hoconv.tools.testing.comparison import relative_error

NAMES = [
    "shared over batch and time, one head", "K=8, centred", "no padding before", "long",
    "x as (B, T, C)", "shared over batch", "shared over time", "shared over time, empty sequence",
    "weight as a Linear gives it", "shared over batch and time, empty batch", "no channels",
    "one step, shared over time", "fewer steps than taps", "as many heads as channels",
    "every other step", "x as (T, B, C)", "expanded", "sliced",
]
left = {(name, torch.float64) for name in NAMES}
left |= {(name, dtype) for name in NAMES[::4] for dtype in OPERATOR.tolerances}
for dtype, tolerance in OPERATOR.tolerances.items():
    for sample in OPERATOR.samples(torch.device("cpu"), dtype):
        if (sample.name, dtype) not in left:
            continue
        left.remove((sample.name, dtype))
        (x, weight), padding = sample.args, sample.kwargs["padding"]
        exact = [t.double().requires_grad_() for t in (x, weight)]
        expected = OPERATOR.implementations["reference"].function(*exact, padding)
        grad = torch.randn_like(x)
        size, stride = list(weight.shape), list(torch.empty_like(weight).stride())
        results = (
            triton_kernels.dynamic_conv1d(x, weight, padding),
            triton_kernels.dynamic_conv1d_grad_input(grad, weight, padding),
            triton_kernels.dynamic_conv1d_grad_weight(grad, x, size, stride, padding),
        )
        gradients = torch.autograd.grad(expected, exact, grad.double())
        for name, result, other in zip("FXW", results, (expected, *gradients), strict=True):
            assert (result.dtype, result.shape) == (dtype, other.shape), (name, sample.name, dtype)
            error = relative_error(result, other.detach())
            assert error <= tolerance, (name, sample.name, dtype, error)
        assert results[2].stride() == tuple(stride), sample.name
assert not left, left

# Zeros outside the sequence are multiplied like any other value, and only those.
for steps in (1, 150):
    for where in range(3):
        tensors = [torch.randn(2, 2, 150), torch.randn(1, 1, 5, steps), torch.randn(2, 2, 150)]
        tensors[where][..., -1] = torch.inf
        x, weight, grad = tensors
        leaves = [t.clone().requires_grad_() for t in (x, weight)]
        out = OPERATOR.implementations["reference"].function(*leaves, 2)
        expected = (out.detach(), *torch.autograd.grad(out, leaves, grad))
        layout = list(weight.shape), list(weight.stride())
        results = (
            triton_kernels.dynamic_conv1d(x, weight, 2),
            triton_kernels.dynamic_conv1d_grad_input(grad, weight, 2),
            triton_kernels.dynamic_conv1d_grad_weight(grad, x, *layout, 2),
        )
        for result, other in zip(results, expected, strict=True):
            torch.testing.assert_close(result, other, equal_nan=True, rtol=1e-4, atol=1e-4)
"""


@pytest.mark.slow
@needs_triton
def test_the_interpreter_computes_what_the_reference_does() -> None:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", IN_THE_INTERPRETER], env=environment, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


class NoDevice:
    """Stands for Triton's access to a GPU."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 80, 32)

    def get_current_device(self) -> int:
        return -1  # no device's, so that what is compiled is never launched

    def get_current_stream(self, device: int) -> int:
        return 0


class Compiled:
    """Stands for a kernel: where it would be launched, it is compiled for these arguments."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.found: list[Any] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def compile_only(*args: Any, **options: Any) -> None:
            self.found.append(self.kernel.warmup(*args, grid=grid, **options))

        return compile_only


@needs_triton
def test_what_is_launched_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime import driver

    from hoconv.ops.dynamic_conv1d import triton_kernels

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(driver, "_active", NoDevice())
    kernels = []
    for name in ("_convolve_kernel", "_grad_weight_kernel"):
        kernels.append(Compiled(getattr(triton_kernels, name)))
        monkeypatch.setattr(triton_kernels, name, kernels[-1])
    names = {
        torch.float64: ("x as (B, T, C)",),
        torch.bfloat16: ("one element", "shared over batch and time, long"),
    }
    for dtype in names:
        for sample in OPERATOR.samples(torch.device("cpu"), dtype):
            if sample.name in names[dtype]:
                (x, weight), padding = sample.args, sample.kwargs["padding"]
                layout = list(weight.shape), list(weight.stride())
                triton_kernels.dynamic_conv1d(x, weight, padding)
                triton_kernels.dynamic_conv1d_grad_input(x, weight, padding)
                triton_kernels.dynamic_conv1d_grad_weight(x, x, *layout, padding)
    assert [len(kernel.found) for kernel in kernels] == [2 * 3, 3]
    code = [each.asm["ptx"] for kernel in kernels for each in kernel.found]
    assert all(".target sm_80" in ptx for ptx in code)
    # Sums without atomics are the same twice; products of tensor cores would round float32.
    assert not any(word in ptx for ptx in code for word in ("atom.", "red.global", "mma."))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_it_is_refused_with_the_reason() -> None:
    assert hoconv.implementations()["triton"] == no_gpu()
    with pytest.raises(ImplementationError, match=re.escape(no_gpu())):
        choose(OPERATOR, "triton", "cuda")


@pytest.mark.parametrize(
    ("module", "name", "missing", "said"),
    [
        (importlib.util, "find_spec", None, "Triton is not installed; pip install triton"),
        (shutil, "which", None, "Triton found no C compiler; install gcc, or set CC"),
        (sysconfig, "get_path", "/nowhere", "Triton needs /nowhere/Python.h; install the headers"),
    ],
)
def test_what_a_machine_with_a_gpu_lacks_is_named(
    monkeypatch: pytest.MonkeyPatch, module: Any, name: str, missing: str | None, said: str
) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for each, of in ((importlib.util, "find_spec"), (shutil, "which")):
        monkeypatch.setattr(each, of, lambda what: what)
    monkeypatch.setattr(module, name, lambda what: missing)
    assert (triton.obstacle() or "").startswith(said)


def test_a_c_compiler_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "/nowhere/gcc")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(importlib.util, "find_spec", lambda what: what)
    assert triton.obstacle() == (
        "the C compiler CC=/nowhere/gcc was not found; set CC to one for Triton"
    )
