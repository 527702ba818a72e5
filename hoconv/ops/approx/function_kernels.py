"""Products, and sums of products, of integers by functions in C on a GPU.

NVRTC compiles the text of the functions with the loops of csrc/approx/cuda/functions.cuh on the
first call. A later one compiles nothing, so that a CUDA graph can record it.

B batch, M, N rows and columns of a matrix product, K what it sums over.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

import torch
from torch import Tensor

from hoconv.jit import BuildError, driver
from hoconv.jit.generated import compile_cuda
from hoconv.ops.approx.accumulators import Adder, parse
from hoconv.ops.approx.sources.c_functions import has_cache

# As in functions.cuh.
_THREADS, _ROWS, _COLUMNS = 256, 32, 32
_MOST_BLOCKS = 2**31 - 1  # of a launch; beyond these, a block computes several tiles
# What is not marked is for a GPU. Products and quotients of floats are rounded, as on a CPU.
_FLAGS = ("--device-as-default-execution-space", "--fmad=false")
_INCLUDE = re.compile(r"^[ \t]*#[ \t]*include\b.*", re.MULTILINE)
_MACRO = re.compile(r"^[ \t]*#[ \t]*define[ \t]+(\w+)", re.MULTILINE)
_ERROR = re.compile(r"^(.+\.c)\((\d+)\): error: (.*)", re.MULTILINE)
_KERNELS = """\
#include "approx/cuda/functions.cuh"
{functions}
using namespace hoconv::approx;

extern "C" __global__ void __launch_bounds__(kThreads) sum(const Matrices p) {{
  sum_products(p, {multiply}, {add});
}}
"""
_PAIRS = """
extern "C" __global__ void __launch_bounds__(kThreads) multiply(const Pairs p) {{
  multiply_pairs(p, {multiply});
}}
"""


def multiply(a: Tensor, b: Tensor, function: str) -> Tensor:
    """Does what :func:`hoconv.ops.approx.function_products.multiply` does, on a GPU.

    Raises:
        ValueError: the function does not compile for a GPU; says the line.
        hoconv.jit.BuildError: there is no NVRTC, or it failed.
    """
    left, right = (t.to(a.device, torch.int32).contiguous() for t in (a, b))
    out = torch.empty(a.shape, dtype=torch.int64, device=a.device)
    numbers = [*(t.data_ptr() for t in (left, right, out)), out.numel()]
    blocks = -(-out.numel() // _THREADS)
    _launch(source(function), a.device, "multiply", blocks, numbers)
    return out


def matmul(
    a: Tensor, b: Tensor, table: Tensor | None, function: str | None, signed: bool,
    accumulator: str | None = None,
) -> Tensor:  # fmt: skip
    """Does what :func:`hoconv.ops.approx.function_products.matmul` does, on a GPU.

    Raises: as :func:`multiply`.
    """
    (B, M, K), N = a.shape, b.shape[2]
    left, right = (t.to(a.device, torch.int32) for t in (a, b.mT))
    out = torch.empty(B, M, N, dtype=torch.int64, device=a.device)
    entries = None if table is None else table.to(a.device, torch.int32).contiguous()
    numbers = [n for t in (left, right) for n in (t.data_ptr(), *t.stride())]
    numbers += [0 if entries is None else entries.data_ptr(), out.data_ptr(), B, M, N, K]
    tiles = B * -(-M // _ROWS) * -(-N // _COLUMNS)
    _launch(source(function, accumulator, signed), a.device, "sum", tiles, numbers)
    return out


@functools.cache
def source(function: str | None, accumulator: str | None = None, signed: bool = True) -> str:
    """Returns the CUDA source of kernels that sum and, of a function, multiply.

    Args:
        function: the code of the multiplier; None for a table.
        accumulator, signed: as of :func:`matmul`.

    Raises:
        ValueError: a function has a cache.
    """
    functions, multiply, add = "", "Table{p.table}", "Exact{}"
    if function is not None:
        functions, multiply = _define("multiplier", function)
    match accumulate := parse(accumulator, signed):
        case Adder(code):
            text, add = _define("adder", code)
            functions += text
        case None:
            pass
        case _:
            kind = "Saturate" if accumulate.saturates else "Wrap"
            add = f"{kind}{{{accumulate.least}, {accumulate.most}}}"
    kernels = _KERNELS if function is None else _KERNELS + _PAIRS
    return kernels.format(functions=functions, multiply=multiply, add=add)


def _define(name: str, code: str) -> tuple[str, str]:
    """Returns the text of a function, whose names and macros no other text sees, and a call."""
    if has_cache(code):
        raise ValueError(
            "a multiplier or an adder in C fills a cache in its first call, which the threads of a "
            "GPU would not wait for; move the tensors to the CPU"
        )
    end = "".join(f"#undef {macro}\n" for macro in sorted({*_MACRO.findall(code)}))
    text = f"namespace {name} {{\n{_INCLUDE.sub('', code)}}}\n{end}"
    return text, f"[](int64_t a, int64_t b) {{ return {name}::hoconv_result(a, b); }}"


def _launch(text: str, device: torch.device, name: str, blocks: int, numbers: list[int]) -> None:
    """Launches a kernel whose argument consists of these numbers, of 64 bits."""
    with driver.use(device):
        kernels = _load(text, device)
        kernels(name, min(blocks, _MOST_BLOCKS), 1, _THREADS, driver.as_argument(numbers))


@functools.cache
def _load(text: str, device: torch.device) -> driver.Cubin:
    major, minor = torch.cuda.get_device_capability(device)
    return driver.open_cubin(compile_source(text, f"sm_{major}{minor}"))


def compile_source(text: str, architecture: str) -> Path:
    """Compiles a source for a GPU unless the cache has it; returns the path of the cubin.

    Raises: as :func:`multiply`.
    """
    try:
        return compile_cuda("approx", text, architecture, _FLAGS)
    except BuildError as error:
        if not (said := _ERROR.search(str(error))):
            raise
        raise ValueError(
            f"{said[1]}, line {said[2]}: does not compile for a GPU: {said[3]}; change it, or move "
            "the tensors to the CPU"
        ) from error
